"""The check in front of decode figures: it holds for a right step, and fails for each error planted in one.

The oracle itself stands in for the kernel, so that what is planted is the only difference.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bench.checks import decode_case, decode_check
from bench.checks import decode_oracle as oracle
from bench.checks.decode_case import DecodeCase
from bench.checks.decode_check import Inputs, Observation, at_depth, cells_of, error_beyond_rounding, judge
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.lab.levels.verdict import Verdict

SHAPE = StepShape(192, 128, 5, 32, 16, 2, 512, rows=2, qkv="q8", o="bf16", lm_head="mxfp4")
CONTEXT = 130


@pytest.fixture(scope="module")
def case() -> DecodeCase:
    torch.manual_seed(0)
    two = at_depth(SHAPE, 2)
    return DecodeCase.make(two, decode_case.random_weights(two, "cpu"), CONTEXT, 2)


@pytest.fixture(scope="module")
def inputs(case: DecodeCase) -> Inputs:
    return Inputs(
        torch.tensor([3, 500], dtype=torch.int32), torch.tensor([CONTEXT, 7], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32), case.pool.clone(),
    )  # fmt: skip


@pytest.fixture
def observations(case: DecodeCase, inputs: Inputs) -> list[Observation]:
    """What a kernel without an error would leave behind."""
    found = []
    for depth in (1, 2):
        shape, pool = at_depth(SHAPE, depth), inputs.pool.clone()
        cut = case.first_layers(depth)
        values = oracle.step(
            shape, cut.weights, pool, case.tables, case.rope, inputs.tokens, inputs.positions, inputs.row_seq
        )
        layer = {name: getattr(values.layers[-1], name).clone() for name in oracle.COMPARED}
        found.append(Observation(shape, layer, values.logits, values.logits.argmax(-1).int(), pool, True))
    return found


def names(verdict: Verdict) -> str:
    return "; ".join(verdict.wrong)


def test_a_right_step_holds(case: DecodeCase, inputs: Inputs, observations: list[Observation]) -> None:
    verdict = judge("right", observations, case, inputs)
    assert verdict.ok, names(verdict)
    assert len(verdict.checks) == 30
    assert max(c.value or 0.0 for c in verdict.checks) < 1e-6
    assert verdict.as_check().ok


def test_a_verdict_of_nothing_does_not_hold(case: DecodeCase, inputs: Inputs) -> None:
    assert not Verdict("empty").ok
    with pytest.raises(ZeroDivisionError):
        judge("empty", [], case, inputs)


def plant_key(o: list[Observation], case: DecodeCase, inputs: Inputs) -> None:
    """One head's key of one row, as it was before the step."""
    page, slot = cells_of(case.tables[1], inputs)[1]
    o[1].pool[page, 0, 0, 1, slot] = inputs.pool[page, 0, 0, 1, slot]


def plant_stray_write(o: list[Observation], case: DecodeCase, inputs: Inputs) -> None:
    page, slot = cells_of(case.tables[0], inputs)[0]
    o[0].pool[page, 0, 0, 0, slot - 1] += 1.0


def plant_token(o: list[Observation], case: DecodeCase, inputs: Inputs) -> None:
    o[1].tokens[0] = o[1].logits[0].argsort(descending=True)[7]


def plant_no_token(o: list[Observation], case: DecodeCase, inputs: Inputs) -> None:
    o[1].tokens[1] = -1


def plant_first_layer(o: list[Observation], case: DecodeCase, inputs: Inputs) -> None:
    o[0].layer["h"][1, 2] *= 1.01


def plant_second_layer(o: list[Observation], case: DecodeCase, inputs: Inputs) -> None:
    o[1].layer["mid"][0, ::50] += 0.05


def plant_router(o: list[Observation], case: DecodeCase, inputs: Inputs) -> None:
    """The best expert's logit falls below all others: another four are taken, and nothing else says so."""
    best = o[1].layer["router"][0].argmax()
    o[1].layer["router"][0, best] = -9.0


def plant_other_experts(o: list[Observation], case: DecodeCase, inputs: Inputs) -> None:
    """Logits are right and the experts that ran are others."""
    o[0].layer["h"][0] = o[0].layer["h"][0].roll(1, 0)


def plant_logit(o: list[Observation], case: DecodeCase, inputs: Inputs) -> None:
    row = o[1].logits[0]
    row[row.argmin()] += 0.1 * row.std()


def plant_nan(o: list[Observation], case: DecodeCase, inputs: Inputs) -> None:
    o[1].logits[1, 5] = float("nan")


def plant_chance(o: list[Observation], case: DecodeCase, inputs: Inputs) -> None:
    o[0].repeats = False


Plant = Callable[[list[Observation], DecodeCase, Inputs], None]


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (plant_key, "cached keys of layer 2"),
        (plant_stray_write, "leaves the rest of the cache"),
        (plant_token, "token is the argmax"),
        (plant_no_token, "token is the argmax"),
        (plant_first_layer, "layer 1 h"),
        (plant_second_layer, "layer 2 mid"),
        (plant_router, "layer 2 choice of experts"),
        (plant_other_experts, "layer 1 h"),
        (plant_logit, "worst logit"),
        (plant_nan, "depth 2 logits"),
        (plant_chance, "repeats"),
    ],
)
def test_a_planted_error_is_found(
    plant: Plant, named: str, case: DecodeCase, inputs: Inputs, observations: list[Observation]
) -> None:
    plant(observations, case, inputs)
    verdict = judge("planted", observations, case, inputs)
    assert not verdict.ok
    assert not verdict.as_check().ok
    assert named in names(verdict)


def test_a_near_tie_is_replayed_and_not_excused(
    case: DecodeCase, inputs: Inputs, observations: list[Observation]
) -> None:
    """The kernel's order of two experts a rounding apart is taken over; a wider gap is a wrong choice."""
    order = observations[1].layer["router"][0].argsort(descending=True)
    fourth, fifth = int(order[3]), int(order[4])
    weights = case.weights.layers[1]
    gap = float(observations[1].layer["router"][0, fourth] - observations[1].layer["router"][0, fifth])
    for closer, right in ((gap - 1e-4, True), (0.0, False)):
        layers = list(case.weights.layers)
        bias = weights.router_bias.float().clone()
        bias[fourth] -= closer
        layers[1] = replace(weights, router_bias=bias)  # float32: bf16 cannot come this near
        tied = replace(case, weights=replace(case.weights, layers=layers))
        shape, pool = at_depth(SHAPE, 2), inputs.pool.clone()
        arguments = (shape, tied.weights, pool, case.tables, case.rope, inputs.tokens, inputs.positions, inputs.row_seq)
        own = oracle.step(*arguments)
        experts = [v.experts.clone() for v in own.layers]
        experts[1][0, 3] = fifth
        values = oracle.step(*arguments, experts=experts)
        router = values.layers[1].router.clone()
        router[0, fourth], router[0, fifth] = router[0, fifth].clone() - 1e-5, router[0, fifth].clone()
        layer = {name: getattr(values.layers[1], name) for name in oracle.COMPARED} | {"router": router}
        seen = Observation(shape, layer, values.logits, values.logits.argmax(-1).int(), pool, True)
        verdict = judge("tie", [observations[0], seen], tied, inputs)
        assert verdict.ok is right, names(verdict)


@pytest.mark.parametrize(("model", "formats"), [("120b", "mxfp4"), ("120b", "checkpoint"), ("20b", "q8")])
@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_compared_is_what_is_timed(model: str, formats: str, rows: int) -> None:
    timed = decode_case.shape_of(model, formats, rows)
    for depth in (1, 2):
        compared = at_depth(timed, depth)
        differ = set(timed.options()) ^ set(compared.options())
        assert all(o.startswith("-DHB_LAYERS=") for o in differ), differ
        assert compared.layers == depth


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
def test_the_kernel_holds_on_the_emulator(case: DecodeCase) -> None:
    from tests.kernels.cuda.emulator import Emulator

    verdict = decode_check.check_decode(at_depth(SHAPE, 2), case, CONTEXT, machine=Emulator(4))
    assert verdict.ok, names(verdict)
    timed = case.step(at_depth(SHAPE, 2), Emulator(4))
    verdict = decode_check.same_as_timed(timed, case, CONTEXT, Emulator(4))
    assert verdict.ok, names(verdict)
    assert 4 <= decode_check.experts_of_last_step(timed) <= 8


def test_rounding_is_forgiven_and_nothing_else() -> None:
    exact = torch.randn(64, 32)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        assert error_beyond_rounding(exact.to(dtype), exact) == 0.0
        nudged = exact * (1 + 1e-4)
        assert error_beyond_rounding(nudged.to(dtype), exact) < 1.1e-4  # some fell to another code
        assert error_beyond_rounding((exact * 1.1).to(dtype), exact) > 2e-2
    assert error_beyond_rounding(torch.full((3,), 448.0).to(torch.float8_e4m3fn), torch.full((3,), 1e5)) == 0.0
    assert error_beyond_rounding(torch.tensor([float("nan")]).bfloat16(), torch.ones(1)) == float("inf")
