"""The measurement of a prompt's path asks a real server and has a figure for each length."""

from __future__ import annotations

from bench.engine.prompt_path import build, measure
from halfbyte.engine.request import Request, SamplingParams


def test_the_engine_answers_without_a_model() -> None:
    core, _ = build(None, lambda doing: None)
    core.submit(Request([5] * 300, SamplingParams(temperature=0.0, max_tokens=2), id="a"))
    tokens: list[int] = []
    while core.has_work:
        tokens += [t for _, delta in core.step() for t in delta.tokens]
    assert tokens == [1000, 1000]


def test_every_length_has_its_figures() -> None:
    results = measure((3, 700), 2)
    assert [r.cell.shape["pp"] for r in results] == [3, 700]
    for result in results:
        assert not result.refused
        assert result.figure("first_token").value > 0
        assert result.figure("front_end_cpu").value >= 0
