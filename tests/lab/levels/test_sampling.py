"""Level 2's judgement of sampling: what a filter, a bias and a penalty leave."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from scripted_peer import ScriptedPeer

from halfbyte.errors import AskError
from halfbyte.gates import parse
from halfbyte.lab.levels.conversations import misfit
from halfbyte.lab.levels.sampling import (
    DRAWS,
    FREQUENCY,
    PENALTIES,
    biased,
    distribution_check,
    filtered,
    penalty_check,
    refusal,
    sampling_checks,
    several_check,
    stop_check,
)
from halfbyte.lab.levels.scores import bound_of
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.peers.asker import Asker, Question, Reply
from halfbyte.lab.peers.halfbyte import HalfbytePeer
from halfbyte.lab.peers.launch import Setup

TOP = {"a": math.log(0.6), "b": math.log(0.3), "c": math.log(0.1)}


@pytest.mark.parametrize(
    ("setting", "pieces"),
    [
        ({"top_p": 0.5}, {"a"}),
        ({"top_k": 2}, {"a", "b"}),
        ({"min_p": 0.4}, {"a", "b"}),
        ({"temperature": 0.5, "top_k": 20}, {"a", "b", "c"}),
    ],
)
def test_filters_leave_what_they_should(setting: dict[str, float], pieces: set[str]) -> None:
    shares = filtered(TOP, setting)
    assert set(shares) == pieces
    assert sum(shares.values()) == pytest.approx(1.0)
    if "b" in shares:
        assert shares["a"] / shares["b"] == pytest.approx(2.0 ** (1 / setting.get("temperature", 1.0)))


def test_a_bias_moves_one_logit() -> None:
    shares = {p: math.exp(v) for p, v in biased(TOP, "a", -1.5).items()}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["b"] / shares["c"] == pytest.approx(3.0)
    assert shares["a"] / shares["b"] == pytest.approx(2 * math.exp(-1.5))


def test_counts_off_their_shares_fail() -> None:
    right = Counter({"a": round(0.6 * DRAWS), "b": round(0.3 * DRAWS), "c": DRAWS - round(0.9 * DRAWS)})
    assert distribution_check("x", TOP, right, closed=False).ok
    assert not distribution_check("x", TOP, Counter({"a": DRAWS // 3, "b": DRAWS - DRAWS // 3}), closed=False).ok
    outside = Counter({"a": DRAWS - 1, "c": 1})
    assert not distribution_check("x", filtered(TOP, {"top_p": 0.5}), outside, closed=True).ok


class Scripted(Asker):
    """Two tokens, of which the first is better by one nat, again and again."""

    def __init__(self, *, penalties: bool = True, stops: bool = True, refuses: str = "") -> None:
        self.penalties, self.stops, self.refuses = penalties, stops, refuses
        self.answers, self._native, self._model = 3, False, "scripted"

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        count = min(self.answers, body["n"])
        usage = {"completion_tokens": count * body["max_tokens"]}
        return {"choices": [{"text": f"answer {k}"} for k in range(count)], "usage": usage}

    def ask(self, question: Question) -> Reply:
        s: dict[str, Any] = dict(question.settings)
        if self.refuses in s:
            raise AskError("HTTP 400: no such setting")
        pieces: list[str] = []
        for _ in range(question.tokens):
            lost = {p: s.get("presence_penalty", 0) * (p in pieces) + s.get("frequency_penalty", 0) * pieces.count(p)
                    for p in ("xy ", "uv ")}  # fmt: skip
            logits = {p: v - (lost[p] if self.penalties else 0) for p, v in (("xy ", -0.3), ("uv ", -1.3))}
            pieces.append(max(logits, key=lambda p: logits[p]))
        text, finish = "".join(pieces), "length"
        for stop in s.get("stop", ()) if self.stops else ():
            if stop in text:
                text, finish = text[: text.index(stop)], "stop"
        values = tuple({"xy ": -0.3, "uv ": -1.3}[p] for p in pieces)
        top = ({"xy ": -0.3, "uv ": -1.3},) * len(pieces)
        ids = tuple({"xy ": 1, "uv ": 2}[p] for p in pieces)
        return Reply(text, finish, 1, len(pieces), ids, tuple(pieces), values, top)


def test_penalties_and_stops_are_followed() -> None:
    good, bad = Scripted(), Scripted(penalties=False, stops=False)
    for asker, ok in ((good, True), (bad, False)):
        kinds = [penalty_check(penalties, asker, [[1]], lambda _: "?") for penalties in (PENALTIES, FREQUENCY)]
        for check in (*kinds, stop_check(asker, [[1]])):
            assert check is not None
            assert check.ok is ok, check


def test_several_answers_are_counted() -> None:
    asker = Scripted()
    assert several_check(asker, [[1]]).ok
    asker.answers = 1
    check = several_check(asker, [[1]])
    assert not check.ok
    assert "1 answers" in check.note


def test_a_refused_setting_is_a_gap_and_no_failure() -> None:
    gaps: list[str] = []
    sampling_checks(Scripted(refuses="min_p"), [[1]], gaps, lambda _: "?")
    assert len(gaps) == 1
    assert "min_p" in gaps[0]
    with pytest.raises(AskError):
        refusal("min_p", AskError("no answer within 3 s"))


@pytest.mark.parametrize(
    ("value", "fits"),
    [('{"city": "Oslo"}', True), ({"city": "Rome"}, True), ('{"city": "Berlin"}', False), ("Oslo", False), ({}, False)],
)
def test_values_against_the_schema(value: Any, fits: bool) -> None:
    assert (misfit(value) == "") is fits


@pytest.mark.parametrize(
    ("flags", "bound"),
    [
        ({"activation": "float"}, 0.01),
        ({}, 0.2),
        ({"activation": "float", "kv_dtype": "bf16"}, 0.12),
        ({"kv_dtype": "fp8"}, 0.825),
        ({"activation": "prefill=mxfp8"}, 0.5),
        ({"layers": "qkv=mxfp4"}, 1.612),
        ({"layers": "qkv=q8"}, 0.32),
        ({"layers": "q8", "activation": "float"}, 0.25),
    ],
)
def test_the_bound_is_of_all_formats_together(flags: dict[str, str], bound: float, tmp_path: Path) -> None:
    setup = Setup(None, parse(flags, env={}), device="cpu")
    assert bound_of(Subject(HalfbytePeer(), setup, tmp_path)) == bound


def test_another_engine_may_keep_everything_in_bf16(tmp_path: Path) -> None:
    assert bound_of(Subject(ScriptedPeer(), Setup(None, device="cpu"), tmp_path)) == 0.35
