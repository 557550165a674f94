"""Level 5: a planted slowdown of 6 % is flagged and one of 1 % is not, by a server of known speed; pairs; rounds.

The server speaks HTTP and has a time of its own (`virtual_server.py`), so that no machine decides. Its speed wavers
from request to request as a real one's does, by 1.5 %.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_peer import LIMITS, ScriptedPeer

from halfbyte.errors import UsageError
from halfbyte.gates import PRESETS, Gates, parse
from halfbyte.lab.levels.protocol import run_levels
from halfbyte.lab.levels.regression import (
    Pair,
    Rounds,
    compare_clients,
    compare_pair,
    compare_stored,
    pairs_of,
    sentences,
)
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.measure.engine_timing import TimedWork
from halfbyte.lab.measure.event_stream import StreamReading
from halfbyte.lab.options import CheckOptions, Works
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.result import Cell, Result, ResultFile, figure
from tests.lab.measure.virtual_server import KnownServer

NOISE = 0.015
REPETITIONS = 20
WORKS = (TimedWork(tokens=32), TimedWork(prompt=64))


class WaveringClient:
    """Answers as if from a server whose pace and prefill waver around their mean; no time passes."""

    def __init__(self, slower: float, seed: int) -> None:
        self.slower, self._draw = slower, random.Random(seed)

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> list[StreamReading]:
        factor = self.slower * self._draw.gauss(1.0, NOISE)
        arrivals = [(factor * (0.050 + 0.004 * i), 1) for i in range(tokens)]
        return [StreamReading(list(arrivals), [7] * tokens) for _ in prompts]


class WaveringServer(WaveringClient):
    """The same over HTTP."""

    def __init__(self, slower: float, seed: int) -> None:
        super().__init__(slower, seed)
        self.server = KnownServer(0.0, 0.0)
        self.client = self.server.client()

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> list[StreamReading]:
        factor = self.slower * self._draw.gauss(1.0, NOISE)
        self.server.prefill, self.server.pace = 0.050 * factor, 0.004 * factor
        answers: list[StreamReading] = self.server.run(self.client.complete_all(prompts, tokens))
        return answers


def said_of(slowdown: float, seed: int, client: type[WaveringClient]) -> list[str]:
    """The verdict on each work."""
    before, after = client(1.0, 2 * seed), client(1.0 + slowdown, 2 * seed + 1)
    samples = compare_clients(before, after, Rounds(WORKS), 100, seed)
    for side in (before, after):
        if isinstance(side, WaveringServer):
            side.server.close()
    return [samples.verdict(work).change for work in WORKS]


@pytest.mark.parametrize("client", [WaveringClient, pytest.param(WaveringServer, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("slowdown", "expected"), [(0.06 / 0.94, True), (0.01 / 0.99, False)], ids=["6 %", "1 %"])
def test_a_planted_slowdown(slowdown: float, expected: bool, client: type[WaveringClient]) -> None:
    """Time per token is planted, so that the speed falls by 6 % or 1 %."""
    found = [said_of(slowdown, seed, client) for seed in range(REPETITIONS)]
    for i, work in enumerate(WORKS):
        right = sum((changes[i] == "regression") == expected for changes in found)
        assert right >= 19, f"{work}: {right} of {REPETITIONS}"
    assert not any(change == "improvement" for changes in found for change in changes)


@pytest.mark.parametrize(
    ("noise", "least", "most"), [(NOISE, 0.95, 0.0), (2 * NOISE, 0.8, 0.0), (4 * NOISE, 0.0, 0.05)]
)
def test_identical_engines_are_equal(monkeypatch: pytest.MonkeyPatch, noise: float, least: float, most: float) -> None:
    """In 95 of 100 comparisons. Where runs vary more, the others are not decided, and at most one in twenty is called a
    change, which is what a 95 % interval says of itself."""
    monkeypatch.setitem(globals(), "NOISE", noise)
    changes = [change for seed in range(50) for change in said_of(0.0, seed, WaveringClient)]
    assert changes.count("no difference") >= least * len(changes)
    assert sum(change not in ("no difference", "inconclusive") for change in changes) <= most * len(changes)


def test_rounds_end_when_nothing_is_left_to_decide() -> None:
    clear = compare_clients(WaveringClient(1.0, 1), WaveringClient(1.5, 2), Rounds(WORKS), 100)
    assert {len(clear.timed(work)[0]) for work in WORKS} == {Rounds().least}
    with pytest.raises(UsageError, match="between"):
        Rounds(least=3)


def test_pairs() -> None:
    feature = parse({"attention": "reference"}, env={})
    assert pairs_of(Gates(), Gates(), ()) == [Pair("itself", Gates(), Gates())]
    first, prior = pairs_of(feature, Gates(), ["fast"])
    assert first == Pair("baseline", Gates(), feature)
    assert prior.before == PRESETS["fast"].gates
    assert prior.after.changes(prior.before) == {"attention": "reference"}
    with pytest.raises(UsageError, match="no preset"):
        pairs_of(feature, Gates(), ["quick"])


def file_of(*speeds: float) -> ResultFile:
    cell = Cell("decode", "tiny", path="http", shape={"tg": 32})
    result = Result(cell, (figure("speed", "tok/s", speeds),))
    return ResultFile("halfbyte check", (), {"time": "2026-11-15T00:00:00"}, {}, (result,))


def test_an_earlier_run() -> None:
    old = file_of(*[100.0 + i % 3 for i in range(12)])
    same, slow = file_of(*[100.0 + i % 3 for i in range(12)]), file_of(*[90.0 + i % 3 for i in range(12)])
    (judged,) = compare_stored(same.results, old)
    assert judged.targets[0].ok
    (judged,) = compare_stored(slow.results, old)
    assert not judged.targets[0].ok
    assert "regression: -9." in sentences([judged], "regression")[0]
    other = Result(Cell("decode", "120b"), (figure("speed", "tok/s", [1.0, 2.0]),))
    assert compare_stored([other], old) == []
    (few,) = compare_stored(file_of(80.0, 80.1, 80.2).results, old)
    assert sentences([few], "inconclusive")
    wide = file_of(*[70.0 + 12 * (i % 6) for i in range(12)])
    assert sentences(compare_stored(wide.results, old), "inconclusive")


def test_an_address_is_no_part_of_a_cell() -> None:
    def at(engine: str) -> ResultFile:
        old = file_of(*[100.0 + i % 3 for i in range(12)])
        return replace(old, results=tuple(replace(r, cell=replace(r.cell, engine=engine)) for r in old.results))

    assert compare_stored(at("127.0.0.1:8000").results, at("127.0.0.1:41873"))
    assert compare_stored(at("server at spark:8000").results, at("server at localhost:9"))
    assert not compare_stored(at("vllm").results, at("127.0.0.1:8000"))


def test_two_real_processes_are_compared(tmp_path: Path) -> None:
    """Real HTTP, real processes, side by side; how fast they are is not for this test to say."""
    subject = Subject(ScriptedPeer(pace=0.005), Setup(None, parse({"graphs": "off"}, env={})), tmp_path, limits=LIMITS)
    pair = Pair("baseline", Gates(), subject.gates)
    (result,) = compare_pair(subject, pair, Rounds((TimedWork(tokens=8),), least=6, most=6))
    assert not result.refused
    assert result.figure("speed").samples == result.figure("before").samples >= 6
    assert result.cell.shape["against"] == "baseline"
    assert "interval" in result.targets[0].note
    assert len(list(tmp_path.glob("*/server.log"))) == 2


def test_an_earlier_run_without_a_cell_in_common_fails(tmp_path: Path) -> None:
    other = Result(Cell("decode", "120b", path="http", shape={"tg": 32}), (figure("speed", "tok/s", [1.0] * 8),))
    replace(file_of(1.0), results=(other,)).write(tmp_path / "earlier.json")
    subject = Subject(ScriptedPeer(pace=0.005), Setup(None), tmp_path / "run", limits=LIMITS)
    options = CheckOptions(works=Works((8,), (8,), repeats=6), against=tmp_path / "earlier.json")
    outcome = run_levels(subject, ["4", "5"], options, rounds=Rounds((TimedWork(tokens=8),), least=6, most=6)).outcomes[
        1
    ]
    assert outcome.verdict == "FAIL"
    assert "nothing was compared" in outcome.reasons[0]


def test_named_lengths_are_compared() -> None:
    default = Rounds()
    assert Rounds.of(Works()) == default
    assert Rounds.of(Works(tokens=(64, 256))).works == (default.works[0], TimedWork(tokens=256))
    assert Rounds.of(Works(prompts=(4096, 1024))).works == (TimedWork(prompt=1024), default.works[1])
