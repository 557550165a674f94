"""The mechanism: a fused phase beside the reference, layouts that must agree, explicit choices, refusals, records."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from halfbyte import formats, gates
from halfbyte.errors import FormatError, GateError, PlanError
from halfbyte.gates import Gates, PerRegime
from halfbyte.kernels.cuda.decode import phase as decode_phase
from halfbyte.model import synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import GptOss, choose, spec_of
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.plan import reference, select
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, LAYER, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.step import REGIMES, RegimeLimits, Step
from tests.reference import REFERENCE

SMALL = NAMED["small"]
CHECKPOINT = {"qkv": "bf16", "o": "bf16", "gate_up": "mxfp4", "down": "mxfp4", "lm_head": "bf16", "embed": "bf16"}


class FusedFront(Phase):
    """norm + qkv + rope + kv_write in one, for few rows: the shape real decode kernels have."""

    name, covers = "test.fused_front", LAYER[:4]
    backends: Mapping[str, str] = {"linear": "gemv"}
    regimes = frozenset({"decode", "batch"})
    knows = frozenset({"bias", "yarn"})
    rank = 10

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return "needs hidden in whole groups of 32" if spec.hidden % 32 else None

    def bind(self, b: Binding) -> Launch:
        parts = [p.bind(b) for p in reference.PHASES if p.covers[0] in self.covers]

        def launch(step: Step, acts: Activations) -> None:
            for part in parts:
                part(step, acts)

        return launch


class TiledMoe(Phase):
    """A mixture kernel that wants its own physical layout."""

    name, covers = "test.tiled_moe", ("moe",)
    backends: Mapping[str, str] = {"moe": "gemv"}
    regimes = frozenset({"decode"})
    knows = frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"})
    rank = 5

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return None

    def layouts(self, spec: Spec) -> dict[str, str]:
        return {"gate_up": "tile16", "down": "tile16"}

    def bind(self, b: Binding) -> Launch:
        raise AssertionError("never bound here")


def pick(phases: list[Phase], g: Gates = Gates(), arch: str = "cpu") -> tuple[select.Chosen, select.Selection]:
    spec = spec_of(SMALL, g, ARCHES[arch], CHECKPOINT)
    return select.select(spec, ARCHES[arch], g, phases)


def reasons(selection: select.Selection, phase: str) -> dict[str, str]:
    return {r.regime: r.reason for r in selection.refusals if r.phase == phase}


def test_reference_plan_covers_every_operation_in_order() -> None:
    chosen, selection = pick(list(reference.PHASES))
    for phases in chosen.values():
        assert tuple(op for p in phases for op in p.covers) == ("embed", *LAYER, "final_norm", "lm_head")
    assert selection.layouts == dict.fromkeys(("embed", "qkv", "o", "gate_up", "down", "lm_head"), "plain")
    assert selection.refusals == ()


def test_auto_prefers_rank_and_says_why_the_other_lost() -> None:
    _, selection = pick([*reference.PHASES, FusedFront()])
    assert "test.fused_front" in selection.chosen["decode"]
    assert "reference.qkv" not in selection.chosen["decode"]
    assert "reference.qkv" in selection.chosen["prefill"]
    assert reasons(selection, "test.fused_front") == dict.fromkeys(("prefill", "long"), "serves decode, batch only")
    assert "test.fused_front is preferred" in reasons(selection, "reference.qkv")["decode"]


def test_layers_of_a_group_with_different_formats_are_planned_for_or_refused_by_name() -> None:
    mixed = gates.parse({}, env={}, preset="mixed")
    choice = choose(NAMED["120b"], mixed, ARCHES["sm90"])
    each = choice.spec.matrices.per_layer("qkv")
    assert each == ("mxfp4", "q8") * 18
    assert choice.selection.chosen["decode"] == ("cuda.decode_step",)
    several = gates.parse({"layers": "qkv=mxfp4,qkv.full=q8,qkv.0=checkpoint"}, env={})
    choice = choose(NAMED["120b"], several, ARCHES["sm90"])
    assert "two formats at most" in reasons(choice.selection, "cuda.decode_step")["decode"]
    experts = gates.parse({"layers": "moe.3=q8", "moe_kernel": "gemv"}, env={})
    with pytest.raises(PlanError, match="q8 in layers 3") as refused:
        choose(NAMED["120b"], experts, ARCHES["sm90"])
    flags = str(refused.value).splitlines()[-1]
    assert flags.startswith("Use --")
    with pytest.raises(GateError, match=r"qkv\.36, but the model has 36 layers"):
        choose(NAMED["120b"], gates.parse({"layers": "qkv.36=q8"}, env={}), ARCHES["sm90"])


def test_a_phase_over_all_layers_that_takes_one_format_refuses_several() -> None:
    class OneFormat(decode_phase.WholeStep):
        name, mixes = "test.one_format", False

    mixed = gates.parse({}, env={}, preset="mixed")
    spec = choose(NAMED["120b"], mixed, ARCHES["sm90"]).spec
    phases = [*select.all_phases(), OneFormat()]
    _, selection = select.select(spec, ARCHES["sm90"], mixed, phases)
    assert "reads qkv in one format in all layers" in reasons(selection, "test.one_format")["decode"]


@pytest.mark.exact
def test_fused_phase_runs_to_the_same_logits_and_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = synthetic.make(SMALL, seed=0)
    tokens = list(range(ARCHES["cpu"].limits.decode))
    expected = SingleSequence(GptOss(weights, REFERENCE), 64).feed(tokens)
    monkeypatch.setattr(select, "all_phases", lambda: [*reference.PHASES, FusedFront()])
    with pytest.raises(PlanError, match="can run o, lm_head in the decode regime"):
        GptOss(weights, Gates(linear_kernel=PerRegime("gemv")))  # explicit, and nothing of that name covers o
    model = GptOss(weights)
    assert torch.equal(SingleSequence(model, 64).feed(tokens), expected)
    runs = [r for r in model.plan.record.runs() if r.phase == "test.fused_front"]
    assert len(runs) == 1
    assert runs[0].covers == LAYER[:4]
    assert runs[0].formats == {"qkv": "bf16"}
    assert runs[0].regime == "decode"
    assert (runs[0].dtype, runs[0].activation) == ("f32", "f32")
    assert model.plan.record.phases() == set(model.plan.selection.chosen["decode"])
    moe = next(r for r in model.plan.record.runs() if r.phase == "reference.moe")
    assert moe.formats == {"gate_up": "mxfp4", "down": "mxfp4"}
    assert (moe.fewest_rows, moe.most_rows) == (len(tokens), len(tokens))
    assert moe.runs == SMALL.layers


class WholeStep(Phase):
    """A persistent kernel: every operation of every layer in one launch."""

    name, covers = "test.whole_step", ("embed", *LAYER, "final_norm", "lm_head")
    backends: Mapping[str, str] = {"moe": "gemv", "linear": "gemv", "attention": "cuda"}
    regimes = frozenset({"decode"})
    knows = frozenset({"bias", "yarn", "sinks", "window", "gqa", "clamped_swiglu", "interleaved_gate_up"})
    rank = 50

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return None

    def bind(self, b: Binding) -> Launch:
        inner = GptOss(b.weights)

        def launch(step: Step, acts: Activations) -> None:
            inner._pool = b.kv_pool()
            acts.logits = inner.forward(step)

        return launch


@pytest.mark.exact
def test_a_whole_step_phase_is_bound_once_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = synthetic.make(SMALL, seed=0)
    expected = SingleSequence(GptOss(weights, REFERENCE), 128).feed(list(range(3)))
    reference_model = GptOss(weights, REFERENCE)
    real = list(reference.PHASES)
    phase = WholeStep()
    inner = phase.bind

    def bind(b: Binding) -> Launch:
        with monkeypatch.context() as m:
            m.setattr(select, "all_phases", lambda: real)
            return inner(b)

    monkeypatch.setattr(phase, "bind", bind)
    monkeypatch.setattr(select, "all_phases", lambda: [*real, phase])
    model = GptOss(weights)
    assert model.plan.selection.chosen["decode"] == ("test.whole_step",)
    assert model.plan.selection.chosen["prefill"] == reference_model.plan.selection.chosen["prefill"]
    assert len(model.plan.bound["decode"]) == 1
    assert torch.equal(SingleSequence(model, 128).feed(list(range(3))), expected)
    (run,) = model.plan.record.runs()
    assert run.formats == {"embed": "bf16", **{k: v for k, v in CHECKPOINT.items() if k != "embed"}}


def test_two_layouts_for_one_weight_are_refused_naming_both_phases() -> None:
    _, selection = pick([*reference.PHASES, TiledMoe()])
    # Decode alone could use it, but prefill needs the same bytes in another order: the reference serves all.
    assert "test.tiled_moe" not in selection.chosen["decode"]
    reason = reasons(selection, "test.tiled_moe")["decode"]
    assert reason == "needs gate_up in layout tile16, but reference.moe (decode) in plain"


def test_explicit_choice_never_falls_back() -> None:
    with pytest.raises(PlanError) as e:
        pick([*reference.PHASES, TiledMoe()], Gates(moe_kernel=PerRegime("gemv", "reference", "reference")))
    assert "reference.moe (batch): needs gate_up in layout plain, but test.tiled_moe holds it in tile16" in str(e.value)
    with pytest.raises(PlanError, match="serves decode only"):
        pick([*reference.PHASES, TiledMoe()], Gates(moe_kernel=PerRegime("gemv", "gemv", "gemv")))


def test_reference_is_never_auto_on_a_gpu_but_may_be_asked_for() -> None:
    with pytest.raises(PlanError, match="never chosen by auto on a GPU"):
        pick(list(reference.PHASES), arch="sm90")
    _, selection = pick(list(reference.PHASES), REFERENCE, arch="sm90")
    assert "reference.moe" in selection.chosen["decode"]


def test_a_feature_the_phase_does_not_know_is_a_refusal() -> None:
    class Sinkless(reference.Attention):
        name, knows, rank = "test.sinkless", frozenset({"window", "gqa"}), 99

    _, selection = pick([*reference.PHASES, Sinkless()])
    assert "reference.attention" in selection.chosen["decode"]
    assert reasons(selection, "test.sinkless")["decode"] == "does not know sinks"


def test_sinks_off_needs_the_word_off() -> None:
    for value in ("auto", "on"):
        spec = spec_of(SMALL, Gates(sinks=value), ARCHES["cpu"], CHECKPOINT)
        assert "sinks" in spec.features["attention"]
    assert "sinks" not in spec_of(SMALL, Gates(sinks="off"), ARCHES["cpu"], CHECKPOINT).features["attention"]
    for preset in gates.PRESETS.values():
        assert preset.gates.sinks != "off"


def test_a_layer_in_another_format_is_refused() -> None:
    weights = synthetic.make(SMALL, seed=0)
    weights.layers[0].qkv = formats.quantize(torch.randn(SMALL.qkv_dim, SMALL.hidden), "mxfp8")
    with pytest.raises(FormatError, match="mxfp8"):
        GptOss(weights)


@pytest.mark.parametrize(
    ("rows", "regime"),
    [(1, "decode"), (3, "decode"), (4, "batch"), (64, "batch"), (65, "prefill"), (3071, "prefill"), (3072, "long")],
)
def test_regimes_of_an_h200(rows: int, regime: str) -> None:
    assert ARCHES["sm90"].limits.regime(rows) == regime


def test_an_architecture_has_limits_of_its_own_and_says_whose_they_are() -> None:
    assert "measured on an H200" in ARCHES["sm90"].limits.source
    for arch in ARCHES.values():
        assert arch.name in ("cpu", "sm90") or "not measured" in arch.limits.source
    assert "any number of rows" in ARCHES["cpu"].limits.source
    other = RegimeLimits(decode=8, batch=16, long=20, source="of a test")
    ends = {8: "decode", 9: "batch", 16: "batch", 17: "prefill", 19: "prefill", 20: "long"}
    assert {rows: other.regime(rows) for rows in ends} == ends
    assert [other.range(r) for r in REGIMES] == ["1–8 rows", "9–16 rows", "17–19 rows", "20 rows and more"]
    model = GptOss(synthetic.make(SMALL, seed=0))
    model.plan.limits = other
    SingleSequence(model, 64).feed(list(range(8)))
    assert {r.regime for r in model.plan.record.runs()} == {"decode"}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("axis", ["moe_kernel", "linear_kernel", "attention"])
def test_every_kernel_gate_is_reached_or_refused_with_a_reason(axis: str, arch: str) -> None:
    values = next(a.values for a in gates.AXES if a.field == axis)
    for value in values:
        g = gates.parse({axis: value}, env={})
        try:
            chosen = choose(NAMED["20b"], g, ARCHES[arch]).chosen
        except PlanError as e:
            assert len(str(e).splitlines()) >= 2, f"{axis}={value} on {arch} is refused without a reason"
            continue
        if value != "auto":
            name = {"moe_kernel": "moe", "linear_kernel": "linear"}.get(axis, axis)
            for phases in chosen.values():
                used = [p for p in phases if name in p.backends]
                assert used
                other = [p.name for p in used if value not in p.answers(name)]
                assert not other, f"{axis}={value} on {arch} fell back to {other}"


def test_layers_that_do_not_alternate_are_a_feature_of_their_own() -> None:
    g, odd = gates.PRESETS["fast"].gates, NAMED["20b"].with_(layer_kinds=("full",) * 24)
    even = choose(NAMED["20b"], g, ARCHES["sm90"]).selection
    assert even.chosen["decode"] == ("cuda.decode_step",)
    selection = choose(odd, g, ARCHES["sm90"]).selection
    assert reasons(selection, "cuda.decode_step")["decode"] == "does not know uneven_layers"
    assert "cuda.batch_layer_fused" in selection.chosen["decode"]


@pytest.mark.parametrize("preset", ["exact", "balanced", "fast"])
def test_sm90_runs_every_preset_through_the_cuda_kernels(preset: str) -> None:
    """One physical layout for the weights of all three formats, so that the same kernels serve them."""
    base = gates.PRESETS[preset].gates
    for flags in ({}, {"moe_kernel": "cuda", "linear_kernel": "cuda"}):
        choice = choose(NAMED["120b"], gates.parse(flags, env={}, preset=preset), ARCHES["sm90"])
        chosen, selection = choice.chosen, choice.selection
        assert selection.chosen["decode"] == ("cuda.decode_step",)
        for phases in chosen.values():
            for operation in ("qkv", "o", "moe", "lm_head"):
                (phase,) = [p for p in phases if operation in p.covers]
                assert phase.name.startswith("cuda."), (operation, phase.name)
        assert {selection.layouts[r] for r in ("qkv", "o", "gate_up", "down", "lm_head")} == {"tile16"}
    # gemv is the decode step alone; cuda without its attention is the batch's layers.
    for flags, decode in (
        ({"moe_kernel": "decode=gemv"}, True),
        ({"moe_kernel": "cuda", "attention": "triton"}, False),
    ):
        selection = choose(NAMED["120b"], gates.parse(flags, env={}, preset=preset), ARCHES["sm90"]).selection
        assert (selection.chosen["decode"] == ("cuda.decode_step",)) == decode
        assert decode or "cuda.batch_layer" in selection.chosen["decode"]
    with pytest.raises(PlanError, match="written for sm90"):
        choose(NAMED["120b"], gates.parse({"moe_kernel": "cuda"}, env={}, preset=preset), ARCHES["sm100"])
    assert base.moe_kernel == PerRegime()


@pytest.mark.parametrize("arch", ["sm120", "sm121"])
@pytest.mark.parametrize("preset", ["exact", "balanced", "fast"])
def test_cuda_serves_every_regime_on_sm12x(preset: str, arch: str) -> None:
    choice = choose(NAMED["120b"], gates.parse({}, env={}, preset=preset), ARCHES[arch])
    chosen, selection = choice.chosen, choice.selection
    assert selection.chosen["decode"] == ("cuda.decode_step",)
    for phases in chosen.values():
        for operation in ("qkv", "o", "moe", "lm_head"):
            (phase,) = [p for p in phases if operation in p.covers]
            assert phase.name.startswith("cuda."), (operation, phase.name)
    assert {selection.layouts[r] for r in ("qkv", "o", "gate_up", "down", "lm_head")} == {"tile16"}
    said = {r.phase: r.reason for r in selection.refusals if r.regime == "batch"}
    if preset == "exact":  # a tile of bf16 is too large for the ring
        assert "a tile of qkv in bf16" in said["cuda.batch_layer"]
        assert said["cuda.batch_layer_fused"] == said["cuda.batch_layer"]
    else:
        assert "cuda.batch_layer_fused" in selection.chosen["batch"]
    assert "wgmma" in {r.phase: r.reason for r in selection.refusals if r.regime == "prefill"}["cuda.attention_flash"]
    # block-scaled activations in prompts alone: decode and batches stay exact
    flags = {"activation": "prefill=mxfp8"}
    selection = choose(NAMED["120b"], gates.parse(flags, env={}, preset="fast"), ARCHES[arch]).selection
    assert selection.chosen["decode"] == ("cuda.decode_step",)
    assert {"cuda.grouped_mxfp8_moe", "cuda.grouped_mxfp8_o"} <= set(selection.chosen["prefill"])


@pytest.mark.parametrize("model", ["20b", "120b"])
@pytest.mark.parametrize("arch", [a.name for a in ARCHES.values() if a.family == "sm8x"])
@pytest.mark.parametrize("preset", ["exact", "balanced", "mixed", "fast"])
def test_cuda_serves_every_regime_on_sm8x(preset: str, arch: str, model: str) -> None:
    """A100, RTX 30 and RTX 40: products, attention of prompts and the decode step are ours, in one layout."""
    choice = choose(NAMED[model], gates.parse({}, env={}, preset=preset), ARCHES[arch])
    selection = choice.selection
    assert selection.chosen["decode"] == ("cuda.decode_step",)
    for phases in choice.chosen.values():
        for operation in ("qkv", "o", "moe", "lm_head"):
            (phase,) = [p for p in phases if operation in p.covers]
            assert phase.name.startswith("cuda."), (operation, phase.name)
    assert "cuda.attention_flash_sync" in selection.chosen["prefill"]
    assert {selection.layouts[r] for r in ("qkv", "o", "gate_up", "down", "lm_head")} == {"tile16"}
    fused = "cuda.batch_layer_fused" in selection.chosen["batch"]
    assert fused == (preset != "exact" or ARCHES[arch].shared_memory > 120_000)  # a tile of bf16 needs so much


@pytest.mark.parametrize("arch", [a.name for a in ARCHES.values() if a.family == "sm8x"])
def test_an_fp8_cache_and_triton_alone_have_plans_on_sm8x(arch: str) -> None:
    """Where the GPU cannot convert E4M3, kernels make it of integers."""
    selection = choose(NAMED["20b"], gates.parse({"kv_dtype": "fp8"}, env={}), ARCHES[arch]).selection
    assert "triton.attention_flash" in selection.chosen["prefill"]
    asked = gates.parse({"kv_dtype": "fp8", "moe_kernel": "decode=gemv"}, env={})
    assert choose(NAMED["20b"], asked, ARCHES[arch]).selection.chosen["decode"] == ("cuda.decode_step",)
    flags = {"moe_kernel": "triton", "linear_kernel": "triton", "attention": "triton"}
    chosen = choose(NAMED["20b"], gates.parse(flags, env={}), ARCHES[arch]).selection.chosen
    assert all(name.startswith("triton.") for names in chosen.values() for name in names)


ACTIVATIONS = ("bf16", "int8", "fp8", "mxfp8", "mxfp4")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("preset", ["exact", "balanced", "fast"])
def test_every_activation_format_is_reached_or_refused(preset: str, arch: str) -> None:
    """The table of docs/numerics.md: all formats on all machines, but for q8 matrices on GPUs, and what SM8x cannot
    multiply."""
    older = ARCHES[arch].family == "sm8x"
    for activation in ACTIVATIONS:
        g = gates.parse({"activation": activation}, env={}, preset=preset)
        if older and activation in ("fp8", "mxfp8", "mxfp4"):
            with pytest.raises(PlanError, match="would only round what is multiplied"):
                choose(NAMED["120b"], g, ARCHES[arch])
            continue
        if preset == "balanced" and arch != "cpu" and activation in ("fp8", "mxfp8", "mxfp4"):
            with pytest.raises(PlanError, match="takes bf16 or int8 activations"):
                choose(NAMED["120b"], g, ARCHES[arch])
            continue
        choice = choose(NAMED["120b"], g, ARCHES[arch])
        spec, chosen, selection = choice.spec, choice.chosen, choice.selection
        assert spec.activation == activation
        if arch == "cpu":
            continue
        for phases in chosen.values():
            (moe,) = [p for p in phases if "moe" in p.covers]
            small = arch in ("sm120", "sm121")
            assert (moe.name == "triton.moe_split") == (small and activation == "fp8")
            cuda = {"bf16", "mxfp8", "mxfp4"} if small else {"bf16"} if arch == "sm90" or older else set()
            assert moe.name.startswith("cuda.") == (activation in cuda)
        if arch == "sm90" and preset == "exact":  # a dense matrix takes bf16 whatever the gate says
            assert (
                selection.chosen["prefill"][1] == "cuda.prefill_layer"
                or "cuda.grouped_o" in selection.chosen["prefill"]
            )


def test_a_tile_that_nothing_cuts_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"--tile 64x128 would have no effect on cpu: cpu\.step cuts no such tiles; leave it out"
    ):
        choose(SMALL, Gates(tile="64x128"), ARCHES["cpu"])
    sm90 = choose(NAMED["120b"], Gates(tile="64x128"), ARCHES["sm90"]).chosen
    assert any("64x128" in phase.tiles for phase in sm90["prefill"])
