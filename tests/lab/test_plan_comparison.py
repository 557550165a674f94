"""The check in front of a model's figures: the reference holds against itself, and each error planted in it is found.

The plan under test is the reference with one phase replaced by a wrong one, so what is planted is the only difference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte import gates
from halfbyte.lab import plan_comparison
from halfbyte.lab.levels.verdict import Verdict, choice_gap
from halfbyte.lab.measure.device_timing import decode_step, prefill_step, random_tokens
from halfbyte.lab.plan_comparison import admissible, compare, compare_regimes, compare_step, random_caches
from halfbyte.model import checkpoint, synthetic
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import GptOss
from halfbyte.plan import reference
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import KernelImage, launched
from halfbyte.plan.phase import OPERATIONS, Binding, Launch, Phase
from halfbyte.plan.select import PlanChoice
from halfbyte.plan.step import REGIMES, Step
from tests.reference import REFERENCE

CONFIG = ModelConfig(
    layers=2, hidden=128, intermediate=128, experts=16, top_k=4, heads=8, kv_heads=2, head_dim=32, vocab=512,
    window=32, eos_tokens=(1,), pad_token=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> GptOss:
    return GptOss(synthetic.make(CONFIG, 0), REFERENCE)


def planted(model: GptOss, *wrong: Phase) -> GptOss:
    """The model with these phases in place of the reference's that cover the same."""
    phases = [next((w for w in wrong if w.covers == p.covers), p) for p in reference.PHASES]
    if wrong[0].covers == OPERATIONS:
        phases = list(wrong)
    selection = replace(model.plan.selection, chosen=dict.fromkeys(REGIMES, tuple(p.name for p in phases)))
    return GptOss(model.weights, model.gates, choice=PlanChoice(model.spec, dict.fromkeys(REGIMES, phases), selection))


def changed(phase: Phase, change: Launch) -> Phase:
    """The phase, and then `change`."""

    class Changed(type(phase)):  # type: ignore[misc]
        name = f"test.{phase.name}"

        def bind(self, b: Binding) -> Launch:
            run = phase.bind(b)

            def launch(step: Step, acts: Activations) -> None:
                run(step, acts)
                change.layer = b.layer  # type: ignore[attr-defined]
                change(step, acts)

            return launch

    out: Phase = Changed()
    return out


def named(operation: str) -> Phase:
    return next(p for p in reference.PHASES if p.covers == (operation,))


def prompt(plan: GptOss, rows: int = 70, seed: int = 0) -> Verdict:
    other = plan_comparison.reference_of(plan)
    cache = random_caches((plan, other), 1, rows)
    return compare_step("prompt", plan, other, prefill_step(plan, cache, random_tokens(plan, rows, seed), 0))


def test_the_reference_holds_against_itself() -> None:
    model = GptOss(synthetic.make(CONFIG.with_(layers=5, layer_kinds=()), 0), REFERENCE)
    verdicts = list(compare_regimes(model, prompts={70: 2, 161: 1}, batches=(8,), contexts=(40, 130)))
    assert [v.case.partition(",")[0].partition(" (")[0] for v in verdicts] == [
        "prompt of 70 rows", "prompt of 70 rows", "prompt of 161 rows", "batch of 8 at 128", "decode at 40",
        "decode at 130",
    ]  # fmt: skip
    for verdict in verdicts:
        assert verdict.ok, verdict.wrong
        assert len(verdict.checks) >= 13
    comparison = compare(model, (70,), (8,), (40,))
    assert len(comparison.checks) == 3
    assert comparison.ok
    assert model.plan.record.launches() == {}  # cut short, so nothing of this ran in the model itself


def test_a_build_that_was_timed_and_not_compared_is_named(model: GptOss) -> None:
    comparison = compare(model, (70,), (), ())
    assert comparison.covers(model.plan.record.as_dict()).ok
    image = KernelImage("grouped", "feedbeef" * 8)
    wrong = planted(model, changed(named("moe"), lambda step, acts: launched(image)))
    cache = random_caches((wrong,), 1, 70)
    wrong.forward(prefill_step(wrong, cache, random_tokens(wrong, 70, 0), 0))
    check = comparison.covers(wrong.plan.record.as_dict())
    assert not check.ok
    assert "grouped feedbeef" in check.note


@pytest.mark.parametrize("activation", ["bf16", "int8", "fp8", "mxfp8", "mxfp4"])
def test_bounds_are_what_a_format_does_to_itself(activation: str) -> None:
    """The reference beside itself, what enters the first layer off by a thousandth, as rounding to bf16 makes it: few
    codes in front of the first product change, most of those behind it. A layer that adds a half too much is found."""
    kernels = dict.fromkeys(("moe_kernel", "linear_kernel", "attention"), "reference")
    g = gates.parse({"activation": activation, "kv_dtype": "bf16", "layers": "all", **kernels}, env={})
    model = GptOss(synthetic.make(CONFIG, 0, layer_formats=g.layer_formats), g)
    assert model.spec.at("prefill").activation == activation

    def off(step: Step, acts: Activations) -> None:
        noise = torch.randn(acts.x.shape, generator=torch.Generator().manual_seed(0))
        acts.x = acts.x * (1 + 1e-3 * noise)

    def more(step: Step, acts: Activations) -> None:
        acts.x = acts.x + 0.5 * (acts.x - kept.pop()) if more.layer == 1 else acts.x  # type: ignore[attr-defined]

    kept: list[torch.Tensor] = []
    verdict = prompt(planted(model, changed(named("embed"), off)))
    assert verdict.ok, verdict.wrong
    errors = {c.what: (c.value or 0.0) / (c.bound or 1.0) for c in verdict.checks}
    assert all(errors[f"layer {i}, all rows"] > 0.4 for i in (1, 2)), errors
    keep = changed(named("mlp_norm"), lambda step, acts: kept.append(acts.x))
    verdict = prompt(planted(model, keep, changed(named("moe"), more)))
    assert any("layer 2, all rows" in w for w in verdict.wrong), verdict


def test_a_layer_that_is_off_is_found(model: GptOss) -> None:
    def second_layer(step: Step, acts: Activations) -> None:
        if second_layer.layer == 1:  # type: ignore[attr-defined]
            acts.x = acts.x * 1.002

    verdict = prompt(planted(model, changed(named("moe"), second_layer)))
    assert [w.partition(":")[0] for w in verdict.wrong][:2] == ["layer 2, all rows", "layer 2, worst row"]


def test_one_row_of_many_is_found(model: GptOss) -> None:
    def one_row(step: Step, acts: Activations) -> None:
        acts.x[step.rows // 2, :40] += 0.01

    verdict = prompt(planted(model, changed(named("o"), one_row)))
    assert any("worst row" in w for w in verdict.wrong)


def test_a_wrong_key_is_found(model: GptOss) -> None:
    """Of the last row in the second layer, which nobody reads in this step."""
    other = plan_comparison.reference_of(model)
    cache = random_caches((model, other), 1, 70)
    step = prefill_step(model, cache, random_tokens(model, 70, 0), 0)
    plan_comparison.trace_reference(other, step, plan_comparison.trace(model, step).experts)
    model.kv_pool()[int(cache.full[0, 69 // 64]), 0, 0, 1, 69 % 64] *= 1.05
    verdict = Verdict("key")
    plan_comparison.judge_cache(verdict, model, other, step, 1e-4)
    assert [w.partition(":")[0] for w in verdict.wrong] == ["cached keys of layer 2"]


def test_a_stray_write_is_found(model: GptOss) -> None:
    other = plan_comparison.reference_of(model)
    cache = random_caches((model, other), 2, 200)
    step = decode_step(model, cache, 130, 0)
    plan_comparison.trace(model, step)
    plan_comparison.trace_reference(other, step, [])
    model.kv_pool()[int(cache.sliding[1, 0]), 0, 1, 0, 3] += 1.0
    verdict = Verdict("stray")
    plan_comparison.judge_cache(verdict, model, other, step, 1e-4)
    assert verdict.wrong == ["the rest of the cache is as it was"]


def test_a_wrong_token_is_found(model: GptOss) -> None:
    def other_token(step: Step, acts: Activations) -> None:
        acts.logits[:, 7] = acts.logits.max() + 1e-3

    verdict = prompt(planted(model, changed(named("lm_head"), other_token)))
    assert any("token below" in w for w in verdict.wrong)


def test_wrong_experts_are_found(model: GptOss) -> None:
    """The fifth best instead of the fourth: everything after it is replayed with that, so only the choice is wrong."""

    def fifth(step: Step, acts: Activations) -> None:
        row = step.rows // 2
        taken = acts.topk_ids[row].tolist()
        acts.topk_ids = acts.topk_ids.clone()
        acts.topk_ids[row, 3] = next(e for e in range(CONFIG.experts) if e not in taken)

    verdict = prompt(planted(model, changed(named("router"), fifth)))
    assert any("choice of experts" in w for w in verdict.wrong)


def test_a_case_that_raises_has_failed(model: GptOss) -> None:
    def broken(step: Step, acts: Activations) -> None:
        raise RuntimeError("a launch failed")

    plan = planted(model, changed(named("o"), broken))
    other = plan_comparison.reference_of(plan)
    cache = random_caches((plan, other), 1, 70)
    step = prefill_step(plan, cache, random_tokens(plan, 70, 0), 0)
    verdict = plan_comparison.compare_or_fail("prompt", plan, other, step)
    assert not verdict.ok
    assert verdict.wrong == ["RuntimeError: a launch failed"]


def test_one_seed_of_many_fails_alone(model: GptOss, monkeypatch: pytest.MonkeyPatch) -> None:
    """No median: an error in one seed is an error."""
    seen: list[int] = []

    def only_third(step: Step, acts: Activations) -> None:
        if only_third.layer == 0:  # type: ignore[attr-defined]
            seen.append(step.rows)
        if len(seen) == 3:
            acts.x = acts.x * 1.01

    plan = planted(model, changed(named("moe"), only_third))
    verdicts = [prompt(plan, seed=seed) for seed in range(9)]
    assert [v.ok for v in verdicts] == [True, True, False] + [True] * 6


class WholeStep(Phase):
    """The reference as one phase, which shows its logits only; with an error in them if `scale` is not one."""

    name, covers, reference = "test.whole_step", OPERATIONS, True

    def __init__(self, inner: GptOss, scale: float = 1.0) -> None:
        self.inner, self.scale = inner, scale

    def refuse(self, *_: object) -> None:
        return None

    def bind(self, b: Binding) -> Launch:
        def launch(step: Step, acts: Activations) -> None:
            self.inner._pool = b.kv_pool()
            experts = [plan_comparison.trace_reference(self.inner, step, []).experts[0]]
            acts.logits = plan_comparison.trace_reference(self.inner, step, experts).logits
            acts.logits[:, : CONFIG.vocab // 2] *= self.scale

        return launch


@pytest.mark.parametrize(("scale", "right"), [(1.0, True), (1.01, False)])
def test_a_whole_step_is_replayed(model: GptOss, scale: float, right: bool) -> None:
    plan = planted(model, WholeStep(plan_comparison.reference_of(model), scale))
    other = plan_comparison.reference_of(model)
    cache = random_caches((plan, other), 1, 200)
    verdict = compare_step("decode", plan, other, decode_step(plan, cache, 130, 3))
    assert verdict.ok is right, verdict.wrong


def test_near_ties_are_all_the_choices_there_are() -> None:
    logits = torch.tensor([5.0, 1.0, 4.0, 3.0, 2.995, 0.0])
    assert admissible(logits, 3, 0.0) == [[0, 2, 3]]
    assert sorted(map(sorted, admissible(logits, 3, 0.01))) == [[0, 2, 3], [0, 2, 4]]
    assert len(admissible(logits, 3, 1.1)) == 3  # two of the three behind the best
    assert choice_gap(logits[None], torch.tensor([[0, 0, 2]])) == float("inf")


def test_the_reference_reads_weights_as_kernels_hold_them(model: GptOss) -> None:
    layouts = {"embed": "plain"} | dict.fromkeys(("qkv", "o", "gate_up", "down", "lm_head"), "tile16")
    tiled = checkpoint.assemble(checkpoint.MemorySource(model.weights), layouts=layouts)
    chosen = {regime: list(reference.PHASES) for regime in REGIMES}
    other = GptOss(tiled, model.gates, choice=PlanChoice(model.spec, chosen, model.plan.selection))
    cache = random_caches((model, other), 1, 70)
    verdict = compare_step("tile16", model, other, prefill_step(model, cache, random_tokens(model, 70, 0), 0))
    assert verdict.ok, verdict.wrong
