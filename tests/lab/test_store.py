"""A folder of results: what goes in is found again by name, the index is never believed against the files."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from halfbyte.errors import UsageError
from halfbyte.lab.result import Cell, Check, Result, ResultFile, figure
from halfbyte.lab.store import INDEX, Store


def file(time: str, speed: float = 10.0, tool: str = "halfbyte bench") -> ResultFile:
    cell = Cell("decode", "120b", "fast", shape={"tg": 32})
    bad = Result(Cell("prompt", "20b", engine="vllm 0.26.0"), checks=(Check("path", False),))
    return ResultFile(
        tool, ("--tg", "32"), {"time": time, "cpu": "Xeon", "commit": "abc"}, {},
        (Result(cell, (figure("speed", "tok/s", speed),)), bad, Result(cell, refused="no such kernel")),
    )  # fmt: skip


def test_what_is_added_is_found_by_name_and_age(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep")
    first, second = store.add(file("2026-01-02T03:04:05+00:00")), store.add(file("2026-01-03T00:00:00+00:00", 11.0))
    assert first.name.startswith("20260102030405-halfbyte-bench-")
    assert store.find("latest") == second
    assert store.find("latest~1") == first
    assert store.find(first.stem) == store.find("20260102") == store.find(str(first)) == first
    assert store.read("latest").results[0].figure("speed").value == 11.0
    for name in ("nobody", "latest~2", "2026"):
        with pytest.raises(UsageError):
            store.find(name)


def test_the_index_counts_what_was_measured_refused_and_invalid(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(file("2026-01-02"))
    (line,) = (tmp_path / INDEX).read_text().splitlines()
    entry = json.loads(line)
    assert (entry["measured"], entry["refused"], entry["invalid"]) == (1, 1, 1)
    assert (entry["machine"], entry["models"], entry["engines"]) == ("Xeon", ["120b", "20b"], ["vllm 0.26.0"])


def test_a_file_that_changed_is_read_again_and_a_damaged_one_is_listed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.add(file("2026-01-02"))
    file("2026-05-05").write(path)
    assert [e.time for e in store.index()] == ["2026-05-05"]
    (tmp_path / INDEX).write_text("not json\n")
    assert [e.time for e in store.index()] == ["2026-05-05"]
    (tmp_path / "broken.json").write_text("{")
    assert [bool(e.unreadable) for e in store.index()] == [True, False]
    assert store.find("latest") == path
    assert len(store.all()) == 1


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    threads = [threading.Thread(target=lambda i=i: Store(tmp_path).add(file(f"2026-01-{i + 1:02}"))) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len((tmp_path / INDEX).read_text().splitlines()) == 8
