"""Workloads are the same for the same seed, and a recording that does not fit is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.errors import UsageError
from halfbyte.lab.workloads.arrivals import ClosedLoop, Poisson, saturation
from halfbyte.lab.workloads.recording import FORMAT, SHIPPED, read_recording, replay
from halfbyte.lab.workloads.workload import chat, synthetic

HEAD = {"format": FORMAT, "about": "a test", "composed": "all of it"}
GOOD = [
    {"message": {"role": "user", "content": "2 + 2?"}, "think_s": 0},
    {"message": {"role": "assistant", "content": "4"}, "tokens": 3},
    {"message": {"role": "user", "content": "and 3?"}, "think_s": 1.5},
    {"message": {"role": "assistant", "content": "5"}, "tokens": 4},
]


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "session.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_the_same_seed_is_the_same_session() -> None:
    for make in (lambda seed: synthetic(16, 8, 1000, seed), lambda seed: chat(3, 8, 1.0, seed)):
        assert make(1).session(5) == make(1).session(5)
        assert make(1).session(5) != make(1).session(6)
        assert make(1).session(5) != make(2).session(5)


def test_the_shipped_recording_is_a_long_session_with_tools_and_says_what_is_composed() -> None:
    recording = read_recording(SHIPPED)
    turns = recording.session.turns
    assert len(turns) >= 12
    assert recording.composed
    assert any("tool_calls" in m for m in turns[-1].body["messages"])
    sizes = [len(json.dumps(t.body)) for t in turns]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 5 * sizes[0]
    assert sum(t.think_s for t in turns) > 1


def test_a_recording_is_read_turn_by_turn(tmp_path: Path) -> None:
    recording = read_recording(written(tmp_path, HEAD, *GOOD))
    first, second = recording.session.turns
    assert (first.tokens, second.tokens, first.think_s, second.think_s) == (3, 4, 0.0, 1.5)
    assert [m["content"] for m in second.body["messages"]] == ["2 + 2?", "4", "and 3?"]
    assert replay(written(tmp_path, HEAD, *GOOD), speed=3.0).session(0).turns[1].think_s == 0.5
    other = replay(written(tmp_path, HEAD, *GOOD)).session(1).turns[1].body["messages"]
    assert other[0]["content"] == "[1] 2 + 2?"
    assert len(replay(written(tmp_path, HEAD, *GOOD), longest=1).session(0).turns) == 1


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "line 1 is no JSON"),
        ([{"format": "other"}], "first line"),
        ([HEAD], "no answer"),
        ([HEAD, "{"], "line 2 is no JSON"),
        ([HEAD, {"message": {"content": "x"}}], "line 2: there is no message"),
        ([HEAD, GOOD[0], {"message": {"role": "assistant", "content": "4"}}], "line 3: .*number of tokens"),
        ([HEAD, {"message": {"role": "user", "content": "x"}, "think_s": "long"}], "line 2: think_s"),
    ],
)
def test_what_is_no_recording(tmp_path: Path, lines: list[Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_recording(written(tmp_path, *lines))
    with pytest.raises(UsageError, match="cannot be read"):
        read_recording(tmp_path / "nothing")


def test_what_is_no_workload() -> None:
    for make in (
        lambda: synthetic(0, 1, 10), lambda: chat(0), lambda: ClosedLoop(0, 1), lambda: Poisson(0.0, 1),
        lambda: Poisson(float("nan"), 1), lambda: replay(speed=0.0),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            make()


def test_a_queue_that_grows_and_one_that_does_not() -> None:
    begins = [0.1 * i for i in range(40)]
    assert not saturation(begins, [b + 0.3 for b in begins])
    assert "over-saturated" in saturation(begins, [b * 3 + 0.3 for b in begins])
    assert not saturation(begins[:4], [b * 9 + 1 for b in begins[:4]])
