"""Ceilings of what somebody else's engine did, from the cell alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from halfbyte.gates import PRESETS, Gates, parse
from halfbyte.lab.ceilings import Ceilings, beside, ceilings_for
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model import load
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS
from halfbyte.roofline import GPUS, decode_ceiling, unique_experts

RANDOM = load.resolve_model("random:120b")
H200 = "NVIDIA H200"
LOOP = {"workload": "synthetic", "pp": 1100, "tg": 256, "concurrency": 64, "seed": 0}


def known(gates: Gates | None = None, model: load.ModelName = RANDOM) -> Ceilings:
    found = ceilings_for(model, gates or Gates(), H200)
    assert found is not None
    return found


def speed(kind: str, shape: dict[str, object], value: float) -> Result:
    return Result(Cell(kind, "120b", path="http", shape=shape), (figure("speed", "tok/s", value),))


def test_formats_of_the_gates_set_the_ceiling_of_a_stream() -> None:
    expected = decode_ceiling(GPUS["h200"], NAMED["120b"], CHECKPOINT_FORMATS, 2048 + 64).tokens_per_second
    assert known(PRESETS["exact"].gates).decode(128, 2048, 1).value == pytest.approx(expected)
    assert known().decode(128, 2048, 1).value == known(PRESETS["balanced"].gates).decode(128, 2048, 1).value > expected
    assert known(PRESETS["fast"].gates).decode(128, 2048, 1).value > 1.5 * expected
    assert "H200" in known().decode(128, 2048, 1).source


def test_experts_are_the_expected_ones_of_random_weights_and_the_fewest_of_others() -> None:
    even = known()
    uneven = replace(even, even=False)
    config = even.config
    assert even.step_seconds(128, 8) == even.step_seconds(128, 8, unique_experts(config, 8))
    assert uneven.step_seconds(128, 8) == even.step_seconds(128, 8, config.top_k)
    assert uneven.step_seconds(128, 8) < even.step_seconds(128, 8)
    assert not known(model=load.resolve_model(None)).even


def test_a_closed_loop_overlaps_streams_but_no_stream_with_itself() -> None:
    c = known(PRESETS["fast"].gates)
    alone = c.prompt_seconds(1100) + 255 * c.step_seconds(1100 + 128, 1)
    assert c.closed_loop(1100, 256, 1).value == pytest.approx(256 / alone)
    # Many streams: prompts hide behind the steps that read weights, so that nothing but these is left.
    assert c.closed_loop(1100, 256, 64).value == pytest.approx(64 * 256 / (255 * c.step_seconds(1228, 64)))
    # Long prompts with short answers: arithmetic is left.
    assert c.closed_loop(8192, 2, 64).value == pytest.approx(2 / c.prompt_seconds(8192))


def test_a_figure_above_its_ceiling_is_invalid_whoever_measured_it() -> None:
    c = known()
    top = c.closed_loop(1100, 256, 64).value
    fine = beside(speed("serving", LOOP, 0.9 * top), c)
    assert fine.figure("speed").share == pytest.approx(0.9)
    above = beside(speed("serving", LOOP, 1.01 * top), c)
    assert above.invalid
    assert not above.figures
    assert "passes its ceiling" in above.refused
    assert above.detail["not_believed"][0]["name"] == "speed"
    decode = beside(speed("decode", {"tg": 128, "depth": 2048, "concurrency": 1}, 1e4), c)
    assert decode.invalid


def test_a_prompt_has_the_least_time_to_its_first_token_as_well() -> None:
    cell = Cell("prompt", "120b", path="http", shape={"pp": 2048, "depth": 2048, "concurrency": 1})
    result = beside(Result(cell, (figure("speed", "tok/s", 34e3), figure("ttft", "ms", 60.0))), known())
    assert 0 < (result.figure("speed").share or 0) < 1
    assert 0 < (result.figure("ttft").share or 0) < 1
    quick = beside(Result(cell, (figure("ttft", "ms", 1.0),)), known())
    assert quick.invalid


@pytest.mark.parametrize(
    "shape",
    [LOOP | {"workload": "chat"}, LOOP | {"rate": 2.0}, {"workload": "replay", "turns": 4, "tg": 900}],
    ids=["chat", "poisson", "replay"],
)
def test_work_without_one_length_has_no_ceiling(shape: dict[str, object]) -> None:
    assert beside(speed("serving", shape, 1e9), known()).figure("speed").ceiling is None


def test_what_is_refused_stays_so() -> None:
    refused = Result(Cell("serving", "120b", path="http", shape=LOOP), refused="no time was left for it")
    assert beside(refused, known()) == refused


def test_nobody_knows_the_ceiling_of_a_stranger_or_of_drafts() -> None:
    assert ceilings_for(RANDOM, Gates(), "NVIDIA GeForce RTX 4060 Laptop GPU") is None
    assert ceilings_for(RANDOM, parse({"speculate": "ngram"}, env={}), H200) is None
    assert math.isfinite(known().first_token(512, 0).value)
