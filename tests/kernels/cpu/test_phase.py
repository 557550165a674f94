"""The phase `cpu.step`: where it is taken and refused, what it computes beside the reference, what the record says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.engine.speculative.eagle3 import HiddenTap
from halfbyte.errors import EngineError, PlanError
from halfbyte.gates import PRESETS, Gates, PerRegime
from halfbyte.kernels.cpu import build, library
from halfbyte.kernels.cpu.phase import ROWS, remark
from halfbyte.model import synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import GptOss, choose
from halfbyte.model.single_sequence import SingleSequence, generate
from halfbyte.plan.phase import ARCHES
from halfbyte.plan.step import REGIMES, Step
from tests.reference import EXACT_FORM, REFERENCE

SMALL, CPU = NAMED["small"], ARCHES["cpu"]
OURS = dict.fromkeys(REGIMES, ("cpu.step",))
TOKENS = torch.randint(2, SMALL.vocab, (90,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def weights():
    return synthetic.make(SMALL, seed=0)


def step_of(model: GptOss, tokens: list[int]) -> Step:
    steps: list[Step] = []
    solo = SingleSequence(model, 256)
    forward = model.forward
    model.forward = lambda step: (steps.append(step), forward(step))[1]  # type: ignore[method-assign, func-returns-value]
    solo.feed(tokens, all_logits=True)
    del model.forward  # type: ignore[method-assign]
    return steps[0]


# ---- where it is taken -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["int8", "balanced", "fast"])
def test_auto_takes_it_on_a_cpu_and_rounds_as_llama_cpp_does(preset: str) -> None:
    choice = choose(NAMED["20b"], PRESETS[preset].gates, CPU)
    spec, selection = choice.spec, choice.selection
    assert selection.chosen == OURS
    assert (spec.activation, spec.activations, spec.kv_dtype, spec.dtype) == ("int8", {}, "bf16", "f32")
    matrices = ("qkv", "o", "gate_up", "down", "lm_head")
    assert selection.layouts == {"embed": "plain"} | dict.fromkeys(matrices, "rows16")


def test_the_exact_form_is_asked_for_by_name() -> None:
    choice = choose(SMALL, EXACT_FORM, CPU)
    spec, selection = choice.spec, choice.selection
    assert selection.chosen == OURS
    assert (spec.activation, spec.kv_dtype) == ("f32", "f32")
    choice = choose(SMALL, Gates(activation="decode=f32", kv_dtype="fp8"), CPU)
    spec, selection = choice.spec, choice.selection
    assert selection.chosen == OURS
    assert [spec.at(r).activation for r in REGIMES] == ["f32", "int8", "int8", "int8"]


def test_the_reference_rounds_nothing_by_itself() -> None:
    for gates in (REFERENCE, Gates(attention="reference"), Gates(moe_kernel=REFERENCE.moe_kernel)):
        choice = choose(SMALL, gates, CPU)
        spec, chosen = choice.spec, choice.chosen
        assert all(phase.reference for phases in chosen.values() for phase in phases)
        assert (spec.activation, spec.kv_dtype) == ("f32", "f32")


def test_the_value_cpu_asks_for_it_on_any_axis() -> None:
    every = PerRegime("cpu", "cpu", "cpu")
    for gates in (Gates(moe_kernel=every), Gates(linear_kernel=every), Gates(attention="cpu")):
        assert choose(SMALL, gates, CPU).selection.chosen == OURS


def test_a_part_of_it_cannot_be_had() -> None:
    every = PerRegime("cpu", "cpu", "cpu")
    with pytest.raises(PlanError, match="--attention asks for reference"):
        choose(SMALL, Gates(moe_kernel=every, attention="reference"), CPU)
    with pytest.raises(PlanError, match="run a step in one piece: --moe-kernel, --linear-kernel and --attention"):
        choose(SMALL, Gates(attention="cpu", moe_kernel=REFERENCE.moe_kernel), CPU)
    with pytest.raises(PlanError, match="multiplies int8 or f32 activations, not fp8"):
        choose(SMALL, Gates(attention="cpu", activation="fp8"), CPU)
    with pytest.raises(PlanError, match=r"cpu\.step: runs on a CPU"):
        choose(SMALL, Gates(attention="cpu"), ARCHES["sm90"])
    with pytest.raises(PlanError, match="cannot share one copy"):
        choose(SMALL, Gates(moe_kernel=PerRegime("cpu", "reference", "auto")), CPU)


def test_other_activation_formats_run_through_the_reference() -> None:
    choice = choose(SMALL, Gates(activation="mxfp8"), CPU)
    spec, chosen, selection = choice.spec, choice.chosen, choice.selection
    assert all(phase.reference for phases in chosen.values() for phase in phases)
    assert (spec.activation, spec.kv_dtype) == ("mxfp8", "f32")
    reasons = {r.reason for r in selection.refusals if r.phase == "cpu.step"}
    assert reasons == {"multiplies int8 or f32 activations, not mxfp8"}


# ---- what it computes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["exact", "balanced", "mixed", "fast"])
def test_the_exact_form_is_the_reference(weights, preset: str) -> None:
    layers = PRESETS[preset].gates.layers
    plain = synthetic.make(SMALL, 0, layer_formats=PRESETS[preset].gates.layer_formats)
    ours = SingleSequence(GptOss(plain, replace(EXACT_FORM, layers=layers)), 128).feed(TOKENS, all_logits=True)
    theirs = SingleSequence(GptOss(plain, replace(REFERENCE, layers=layers)), 128).feed(TOKENS, all_logits=True)
    assert (ours - theirs).norm() / theirs.norm() < 1e-6


def test_the_preset_exact_rounds_nothing(weights) -> None:
    presets = PRESETS["exact"].gates, PRESETS["int8"].gates, Gates(), REFERENCE
    exact, int8, auto, theirs = (SingleSequence(GptOss(weights, g), 128).feed(TOKENS, all_logits=True) for g in presets)
    assert (exact - theirs).norm() / theirs.norm() < 1e-6
    assert torch.equal(auto, int8)
    assert not torch.equal(int8, exact)


def test_rounding_is_the_references_rounding(weights) -> None:
    """With the same points both differ from no rounding by about as much, and from each other by less than twice that
    (bounds of one layer are in test_step.py)."""
    gates = Gates(), replace(REFERENCE, activation="int8", kv_dtype="bf16"), REFERENCE
    ours, theirs, exact = (SingleSequence(GptOss(weights, g), 128).feed(TOKENS, all_logits=True) for g in gates)
    noise = (theirs - exact).norm()
    assert 0 < noise < 0.05 * exact.norm()
    assert (ours - exact).norm() < 1.5 * noise
    assert (ours - theirs).norm() < 2 * noise


def test_the_best_token_is_that_of_the_logits(weights) -> None:
    model = GptOss(weights)
    step = step_of(model, TOKENS[:20])
    logits = model.forward(step)
    best, logit = model.best(step)
    assert torch.equal(best.long(), logits.argmax(-1))
    assert torch.equal(logit, logits.amax(-1))
    theirs = GptOss(weights, REFERENCE)
    step = step_of(theirs, TOKENS[:20])
    assert torch.equal(theirs.best(step)[0].long(), theirs.forward(step).argmax(-1))


def test_a_step_may_have_more_rows_than_any_before(weights) -> None:
    few, many = SingleSequence(GptOss(weights), 256), SingleSequence(GptOss(weights), 256)
    tokens = [t % SMALL.vocab for t in range(3, 3 + ROWS + 20)]
    at_once = many.feed(tokens, all_logits=True)
    assert torch.equal(torch.cat([few.feed([t], all_logits=True) for t in tokens]), at_once)


def test_hidden_states_between_layers_are_the_references(weights) -> None:
    boundaries = (0, 1, SMALL.layers)
    taps = []
    for gates in (EXACT_FORM, REFERENCE):
        model = GptOss(weights, gates)
        logits, hidden = HiddenTap(model, boundaries)(step_of(model, TOKENS[:10]))
        assert logits.shape == (10, SMALL.vocab)
        taps.append(hidden)
    assert taps[0].shape == (10, len(boundaries) * SMALL.hidden)
    assert (taps[0] - taps[1]).norm() / taps[1].norm() < 1e-6


def test_two_models_share_the_threads(weights) -> None:
    first, second = GptOss(weights), GptOss(synthetic.make(SMALL, seed=1))
    alone = list(generate(first, TOKENS[:9], 6, stop=()))
    side_by_side = [generate(m, TOKENS[:9], 6, stop=()) for m in (first, second)]
    assert [list(tokens) for tokens in zip(*side_by_side)] == [
        list(t) for t in zip(alone, generate(second, TOKENS[:9], 6, stop=()))
    ]


def test_a_step_that_cannot_be_is_refused_in_a_sentence(weights) -> None:
    model = GptOss(weights)
    with pytest.raises(EngineError, match=f"token {SMALL.vocab}, but the vocabulary has {SMALL.vocab}"):
        SingleSequence(model, 64).feed([SMALL.vocab])


# ---- what the record says ----------------------------------------------------------------------------------


def test_the_record_names_the_library_by_its_bytes(weights) -> None:
    model = GptOss(weights)
    SingleSequence(model, 64).feed([5])
    opened = library.open_library("auto")
    (run,) = model.plan.record.runs()
    ((image, _),) = run.kernels
    assert image.name == f"halfbyte_cpu.{opened.instructions}: hb_run"
    assert image.module == library.file_hash(opened.path)
    assert model.plan.differences() == []


def test_another_library_than_the_declared_one_is_noticed(weights, monkeypatch: pytest.MonkeyPatch) -> None:
    model = GptOss(weights)
    SingleSequence(model, 64).feed([5])
    monkeypatch.setattr(library, "file_hash", lambda path: "0123456789abcdef")
    (difference,) = model.plan.differences()
    assert "launched another build of halfbyte_cpu." in str(difference)


def test_what_a_person_reads() -> None:
    kernels = f"CPU kernels with {library.open_library('auto').instructions}, 1 thread"
    assert remark(Gates(threads="1")) == kernels
    assert remark(Gates(threads="1"), verbose=True).startswith(f"{kernels}; activations int8")
    assert "activations" not in remark(EXACT_FORM, verbose=True)
    assert remark(REFERENCE) == ""


# ---- where it cannot run -----------------------------------------------------------------------------------


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A source tree on a machine that never compiled anything."""
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path))
    library._library_or_reason.cache_clear()
    yield
    library._library_or_reason.cache_clear()


def test_without_a_compiler_the_reference_runs_and_says_so(
    weights, nothing_built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    model = GptOss(weights)
    assert model.spec.activation == "f32"
    reasons = {r.reason for r in model.plan.selection.refusals if r.phase == "cpu.step"}
    assert reasons == {"there is no C++ compiler to build it (install g++ or clang++)"}
    assert SingleSequence(model, 64).feed([5]).shape == (1, SMALL.vocab)
    assert "far slower: there is no C++ compiler" in remark(Gates())
    with pytest.raises(PlanError, match=r"no C\+\+ compiler"):
        GptOss(weights, Gates(attention="cpu"))


def test_a_compiler_that_fails_is_a_reason(nothing_built, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    program = tmp_path / "cxx"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo oldcc 1.0; exit; }\necho "x.cpp:1: error: no C++17" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("HALFBYTE_CXX", str(program))
    selection = choose(SMALL, Gates(), CPU).selection
    (reason,) = {r.reason for r in selection.refusals if r.phase == "cpu.step"}
    assert reason.startswith("oldcc 1.0 cannot compile ")
    assert "error: no C++17" in reason
    monkeypatch.setenv("HALFBYTE_CXX", "no-such-compiler")
    library._library_or_reason.cache_clear()
    selection = choose(SMALL, Gates(), CPU).selection
    assert {"HALFBYTE_CXX is no-such-compiler, which is not an installed program"} == {
        r.reason for r in selection.refusals if r.phase == "cpu.step"
    }
