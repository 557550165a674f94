"""--deterministic in a plan: one set of kernels for answers and one for prompts, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch

from halfbyte.errors import PlanError
from halfbyte.gates import Gates, parse
from halfbyte.kernels.triton.linear import linear_call
from halfbyte.kernels.triton.router import router_call
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import choose
from halfbyte.plan.phase import ARCHES
from halfbyte.plan.select import PlanChoice
from halfbyte.vllm_plugin.launch import vllm_command


def plan(arch: str, preset: str = "exact", **flags: str) -> PlanChoice:
    return choose(NAMED["120b"], parse(flags, env={}, preset=preset), ARCHES[arch])


@pytest.mark.parametrize("preset", ["exact", "balanced", "fast"])
@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm90", "sm100", "sm121"])
def test_few_rows_and_many_take_the_same_kernels(arch: str, preset: str) -> None:
    choice = plan(arch, preset, deterministic="on")
    chosen = choice.selection.chosen
    assert chosen["decode"] == chosen["batch"]
    assert chosen["long"] == chosen["prefill"]
    assert all(phase.row_invariant for phases in choice.chosen.values() for phase in phases)
    assert plan(arch, preset).selection.chosen["prefill"] == chosen["prefill"]


def test_the_decode_step_is_left_out_with_a_reason() -> None:
    assert plan("sm90").selection.chosen["decode"] == ("cuda.decode_step",)
    refusals = {(r.phase, r.regime): r.reason for r in plan("sm90", deterministic="on").selection.refusals}
    assert "--deterministic" in refusals["cuda.decode_step", "decode"]


def test_a_cpu_has_the_plan_that_it_has_without() -> None:
    assert plan("cpu", deterministic="on").selection.chosen == plan("cpu").selection.chosen


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"activation": "long=fp8"}, ("--activation", "long", "prefill")),
        ({"moe_kernel": "decode=gemv"}, ("--moe-kernel", "decode", "batch")),
        ({"moe_kernel": "marlin"}, ("borrowed.marlin_moe", "--deterministic", "Use ")),
    ],
)
def test_what_cannot_be_fixed_is_refused_with_what_works(flags: dict[str, str], names: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        plan("sm90", "fast", deterministic="on", **flags)
    assert all(name in str(caught.value) for name in names)
    if flags != {"moe_kernel": "marlin"}:  # whose kernel this machine need not have
        plan("sm90", "fast", **flags)


def test_prompts_may_have_a_format_of_their_own() -> None:
    chosen = plan("sm90", "fast", deterministic="on", activation="prefill=fp8").selection.chosen
    assert "cuda.prefill_layer_fp8" in chosen["prefill"] == chosen["long"]


def test_tiles_of_a_fixed_regime_do_not_follow_the_rows() -> None:
    arch, kind = ARCHES["sm100"], torch.bfloat16

    def tiles(rows: int, tile_rows: int | None) -> list[dict[str, object]]:
        product = linear_call(
            arch, rows, 2880, "mxfp4", "bf16", x="*bf16", scale=False, row_scale=False, bias=None, residual=None,
            strides=(2880, 0, 1440, 24), n=5120, tile_rows=tile_rows,
        )  # fmt: skip
        router = router_call(torch.float32, kind, kind, rows, 2880, 128, arch, tile_rows)
        return [dict(product.constants), dict(router.constants)]

    assert tiles(1, 2048) == tiles(70, 2048) == tiles(2048, None)
    assert tiles(1, None) != tiles(2048, None)


def test_the_gate_is_a_switch_and_no_preset() -> None:
    assert parse({"deterministic": "on"}, env={}).changes() == {"deterministic": "on"}
    assert parse(env={"HALFBYTE_DETERMINISTIC": "1"}) == Gates(deterministic="on")


def test_vllm_is_refused_it() -> None:
    launch = vllm_command("openai/gpt-oss-20b", Gates(deterministic="on"))
    assert any("--deterministic" in reason for reason in launch.refusals)
    assert not vllm_command("openai/gpt-oss-20b", Gates()).refusals
