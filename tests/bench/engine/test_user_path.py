"""From the plan to a client: what is compared with what, and that the busy neighbour is gone afterwards."""

from __future__ import annotations

import psutil
import pytest

from bench.engine import user_path
from bench.engine.user_path import PATHS, busy_loop, results_of, speed_of
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Result, ResultFile, figure


def test_ratios_between_paths() -> None:
    speeds = {
        "plan": [2000.0, 2200.0, 1800.0],
        "engine": [1500.0],
        "http": [900.0],
        "http, 8 streams": [1700.0],
        "plan beside a busy loop": [900.0],
        "engine beside a busy loop": [500.0],
    }
    results = {r.cell.path: r for r in results_of(speeds, {}, "tiny", 64)}
    assert results["plan"].figure("speed").value == 2000.0
    assert not results["plan"].targets
    assert results["engine"].figure("ratio").value == pytest.approx(0.75)
    assert [t.ok for t in results["http, 8 streams"].targets] == [False]  # 1.9 times one stream
    assert [t.ok for t in results["plan beside a busy loop"].targets] == [True]
    assert [t.ok for t in results["engine beside a busy loop"].targets] == [False]  # a third of the quiet engine


def test_every_path_is_compared_with_one_that_is_measured() -> None:
    names = {path.name for path in PATHS}
    assert all(path.beside in names for path in PATHS if path.beside)


def test_the_busy_loop_ends() -> None:
    before = {p.pid for p in psutil.Process().children()}
    with busy_loop(True):
        (started,) = [p for p in psutil.Process().children() if p.pid not in before]
    assert not psutil.pid_exists(started.pid)


def test_a_path_without_a_figure_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(words: list[str]) -> ResultFile:
        results = [
            Result(Cell("decode", "m", path="engine", shape={"tg": 64}), (figure("speed", "tok/s", 5.0),)),
            Result(Cell("decode", "m", path="http", shape={"tg": 64}), refused="the server did not start"),
        ]
        return receipts.result_file("halfbyte bench", results, {}, [])

    monkeypatch.setattr(user_path, "bench_results", bench)
    by_name = {path.name: path for path in PATHS}
    assert speed_of(by_name["engine"], None, 64) == 5.0
    assert speed_of(by_name["http"], None, 64) == "the server did not start"


def test_a_path_without_a_figure_leaves_the_others_theirs() -> None:
    speeds = {path.name: [1000.0] for path in PATHS} | {"http": []}
    results = {r.cell.path: r for r in results_of(speeds, {"http": "passes its ceiling"}, "tiny", 64)}
    assert results["http"].refused == "passes its ceiling"
    assert results["http, 8 streams"].refused == "http has no figure"
    assert results["engine beside a busy loop"].figure("ratio").value == 1.0
