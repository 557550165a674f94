"""The self-test: passes over right kernels, names what is wrong with others, and is remembered for what it is true of.

Kernels run in the emulator, whose sources are changed where something is to be wrong; on a GPU as they are.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte import gates
from halfbyte.errors import PlanError, UsageError
from halfbyte.kernels import self_test as kernels
from halfbyte.kernels.cuda.attention import prompt
from halfbyte.kernels.cuda.attention.flash_sync import SyncAttention
from halfbyte.kernels.cuda.decode import phase
from halfbyte.kernels.launch import INCLUDES, Build, Program
from halfbyte.lab import receipts
from halfbyte.model import load, self_test, twin
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.gpt_oss import choose
from halfbyte.plan import reference, select
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, Binding, Launch
from halfbyte.plan.select import PlanChoice
from halfbyte.plan.step import REGIMES, Step
from tests.kernels.cuda.emulator import HEADER, Emulator

CPU = torch.device("cpu")
SMALL = ModelConfig(
    layers=2, hidden=128, intermediate=128, experts=32, top_k=4, heads=8, kv_heads=1, head_dim=64, vocab=256,
    window=128, max_context=1024, yarn=Yarn(factor=8.0, original_context=128), eos_tokens=(1,), pad_token=0,
    name="small",
)  # fmt: skip
needs_emulator = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
PROBES = ["lm_head", "gate", "up", "down", "o", "values of qkv"]


class Changed(Emulator):
    """The emulator over a copy of the sources in which something is written otherwise."""

    root: Path | None = None

    def program(self, build: Build) -> Program:
        p = build.program
        return p if self.root is None else replace(p, source=self.root / p.include_name(p.source), root=self.root)


def change(folder: Path, name: str, was: str, now: str) -> Path:
    root = folder / "cuda"
    shutil.copytree(INCLUDES, root)
    shutil.copy(HEADER, root)
    text = (root / name).read_text(encoding="utf-8")
    assert was in text, f"{name} has changed: plant the fault elsewhere"
    (root / name).write_text(text.replace(was, now), encoding="utf-8")
    return root


def choice_of(preset: str, arch: str = "sm121") -> tuple[PlanChoice, gates.Gates]:
    """Decode by the CUDA kernel, everything else by the reference."""
    g = gates.PRESETS[preset].gates
    choice = choose(SMALL, g, ARCHES[arch])
    assert choice.selection.chosen["decode"] == ("cuda.decode_step",)
    plain, _ = select.select(choice.spec, ARCHES["cpu"], gates.Gates(), reference.PHASES)
    return replace(choice, chosen=plain | {"decode": choice.chosen["decode"]}), g


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> type[Changed]:
    monkeypatch.setattr(phase, "gpu", lambda: Changed(2))
    monkeypatch.setattr(phase, "current_arch", lambda: ARCHES["sm121"])
    # A model on the CPU has the CPU's regimes, which give the decode step more rows than it has on SM12x.
    monkeypatch.setitem(ARCHES, "cpu", replace(ARCHES["cpu"], limits=ARCHES["sm121"].limits))
    monkeypatch.setattr(Changed, "root", None)
    return Changed


def first_probe(preset: str = "fast", columns: int = 3) -> twin.Probe:
    choice, _ = choice_of(preset)
    return next(iter(twin.probes(SMALL, choice.spec.formats, CPU, columns)))


@needs_emulator
@pytest.mark.slow
@pytest.mark.usefixtures("machine")
def test_a_right_kernel_passes() -> None:
    choice, g = choice_of("fast")
    choice = replace(choice, spec=replace(choice.spec, max_context=self_test.CONTEXT))
    assert self_test.ask(first_probe(), SMALL, choice, g, ["decode"]) == []


FAULTS = {
    "subnormals are flushed": (
        "fast", "emulator.h", "  emu::Mma m{{a0, a1, a2, a3}, {b0, b1}, {}};",
        "  auto f = [](u32 v) { return v & (v & 0x7f80u ? ~0u : ~0x7fu) & (v & 0x7f800000u ? ~0u : ~0x7f0000u); };\n"
        "  emu::Mma m{{f(a0), f(a1), f(a2), f(a3)}, {b0, b1}, {}};",
        r"lm_head row \d+, column \d+, code .001 \(-?0.5\) x 2\^-?\d+, gave -?0 instead of .* "
        r"all of code 0001 \(0.5\) or code 1001 \(-0.5\)",
    ),
    "subnormal scales of q8 are flushed": (
        "balanced", "emulator.h", "HB_DEV float half_value(u32 bits) {",
        "HB_DEV float half_value(u32 bits) { if (!(bits & 0x7c00u)) return 0.f;",
        r"lm_head row \d+, column \d+, -?\d+ x \S+e-0[5-8], gave -?0 instead of ",
    ),
    "a code is another one": (
        "fast", "device/widen.cuh", "  if (R == 0) return word & E2M1_AS_BF16;",
        "  if (R == 0) { u32 r = word & E2M1_AS_BF16; if ((r & 0x1c0) == 0x140) r ^= 0x40; return r; }",
        r"code .101 \(-?3\) x .* gave .* all of code",
    ),
    "rows g and g + 8 are exchanged": (
        "fast", "emulator.h", "  emu::Mma m{{a0, a1, a2, a3}, {b0, b1}, {}};",
        "  emu::Mma m{{a1, a0, a3, a2}, {b0, b1}, {}};", r"lm_head row \d+, column \d+, code \d{4} .* differ",
    ),
}  # fmt: skip


@needs_emulator
@pytest.mark.slow  # most of it is g++
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, tmp_path: Path, machine: type[Changed]) -> None:
    preset, name, was, now, says = FAULTS[fault]
    machine.root = change(tmp_path, name, was, now)
    choice, g = choice_of(preset)
    choice = replace(choice, spec=replace(choice.spec, max_context=self_test.CONTEXT))
    (said,) = self_test.ask(first_probe(preset), SMALL, choice, g, ["decode"])
    assert said.startswith("decode (cuda.decode_step), step of 1: ")
    report = self_test.Report(("lm_head",), (said,), 1.0)
    text = self_test.refusal(ARCHES["sm121"], report)
    assert "nothing is served" in text
    assert re.search(says, text), text


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["fast", "balanced", "exact"])
@pytest.mark.usefixtures("machine")
def test_everything_in_decode(preset: str) -> None:
    choice, g = choice_of(preset)
    report = self_test.run(SMALL, choice, g, CPU, regimes=["decode"], columns=4)
    assert report.problems == ()
    assert list(report.checks) == [*PROBES, "two layers", "late hand-overs"]


class RoundedAttention(SyncAttention):
    """Between the reference's phases, whose queries are not rounded."""

    def bind(self, b: Binding) -> Launch:
        launch = super().bind(b)

        def run(step: Step, acts: Activations) -> None:
            acts.q = acts.q.bfloat16().contiguous()
            launch(step, acts)

        return run


@needs_emulator
@pytest.mark.parametrize("wrong", [False, True])
def test_attention_of_prompts_over_more_pages_than_are_in_flight(
    wrong: bool, tmp_path: Path, machine: type[Changed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SM12x has it, the rest by the reference: a kernel that is wrong from its fourth page on is found."""
    monkeypatch.setattr(prompt, "gpu", lambda: Changed(2))
    if wrong:
        was, now = "next = pages.find(j + STAGES);", "next = pages.find(j + STAGES - 1);"
        machine.root = change(tmp_path, "attention/flash_sync.cu", was, now)
    cuda, g = choice_of("exact")
    spec = cuda.spec
    plain, selection = select.select(spec, ARCHES["cpu"], gates.Gates(), reference.PHASES)
    phases = [RoundedAttention() if p.covers == ("attention",) else p for p in plain["prefill"]]
    assert any(isinstance(p, SyncAttention) for p in phases)
    choice = PlanChoice(replace(spec, max_context=self_test.CONTEXT), plain | {"prefill": phases}, selection)
    found = self_test.compare_twin(SMALL, choice, g, CPU, ["prefill"], late=False)
    assert len(found) == wrong
    if wrong:
        assert "two layers, step of 300: logits are" in found[0]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["fast", "balanced", "exact"])
def test_the_reference_passes_in_every_regime(preset: str) -> None:
    """So what is asked for is what the operations mean."""
    cuda, g = choice_of(preset)
    spec = cuda.spec
    plain = select.select(spec, ARCHES["cpu"], gates.Gates(), reference.PHASES)
    report = self_test.run(SMALL, PlanChoice(spec, *plain), g, CPU, columns=4)
    assert report.problems == ()
    assert report.checks[:6] == tuple(PROBES)


@pytest.mark.parametrize("wrong", ["gate_up", "down", "o", "qkv"])
def test_a_wrong_matrix_is_found_by_its_probe(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference over weights of which one row of sixteen has moved, as a wrong lane would move it."""
    cuda, g = choice_of("fast")
    spec = cuda.spec
    plain = select.select(spec, ARCHES["cpu"], gates.Gates(), reference.PHASES)
    choice = PlanChoice(replace(spec, max_context=self_test.CONTEXT), *plain)
    whole = twin.enlarge

    def moved(*args: Any) -> Any:
        weights = whole(*args)
        m = getattr(weights.layers[0], wrong)
        data = m.data.clone()
        data[..., 1::16, :], data[..., 9::16, :] = m.data[..., 9::16, :], m.data[..., 1::16, :]
        weights.layers[0] = replace(weights.layers[0], **{wrong: replace(m, data=data)})
        return weights

    monkeypatch.setattr(self_test, "enlarge", moved)
    name = {"gate_up": "up", "qkv": "values of qkv"}.get(wrong, wrong)
    probe = next(p for p in twin.probes(SMALL, spec.formats, CPU, 3) if p.name == name)
    (said,) = self_test.ask(probe, SMALL, choice, g, ["decode"])
    row = int(said.partition(f"{name} row ")[2].partition(",")[0])
    assert row % 16 in (1, 9) if wrong != "gate_up" else row % 8 in (0, 4)
    report = self_test.run(SMALL, PlanChoice(spec, *plain), g, CPU, columns=4)
    assert f"{name} row" in self_test.refusal(ARCHES["sm121"], report), "whichever probe differs first"


def test_values_of_every_kv_head_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the stream is narrower than all query heads: two rows of the last head have changed places."""
    config = SMALL.with_(kv_heads=2)
    assert config.hidden < config.q_dim // 2
    g = gates.PRESETS["fast"].gates
    spec = choose(config, g, ARCHES["sm121"]).spec
    choice = PlanChoice(
        replace(spec, max_context=self_test.CONTEXT),
        *select.select(spec, ARCHES["cpu"], gates.Gates(), reference.PHASES),
    )
    whole = twin.enlarge

    def moved(*args: Any) -> Any:
        weights = whole(*args)
        m = weights.layers[0].qkv
        data = m.data.clone()
        data[-1], data[-2] = m.data[-2], m.data[-1]
        weights.layers[0] = replace(weights.layers[0], qkv=replace(m, data=data))
        return weights

    probe = list(twin.probes(config, spec.matrices.in_layer(0), CPU, 3))[-1]
    assert self_test.ask(probe, config, choice, g, ["decode"]) == []
    monkeypatch.setattr(self_test, "enlarge", moved)
    (problem,) = self_test.ask(probe, config, choice, g, ["decode"])
    assert "values of qkv row" in problem
    assert int(problem.partition("row ")[2].partition(",")[0]) >= config.qkv_dim - 2


def test_a_wrong_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference over weights in which one code has become another."""
    cuda, g = choice_of("fast")
    spec = cuda.spec
    plain = select.select(spec, ARCHES["cpu"], gates.Gates(), reference.PHASES)
    choice = PlanChoice(replace(spec, max_context=self_test.CONTEXT), *plain)
    whole = twin.enlarge

    def changed(*args: Any) -> Any:
        weights = whole(*args)
        low, high = weights.lm_head.data & 15, weights.lm_head.data >> 4
        low[low == 5], high[high == 5] = 4, 4
        return replace(weights, lm_head=replace(weights.lm_head, data=low | high << 4))

    monkeypatch.setattr(self_test, "enlarge", changed)
    (said,) = self_test.ask(first_probe(), SMALL, choice, g, ["decode"])
    assert re.search(r"code 0101 \(3\) x 2\^-?\d+, gave .* of 256 differ, all of code 0101 \(3\)$", said), said


# ---- whether it runs, and what is remembered ------------------------------------------------------------------------


@pytest.fixture
def on_another_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    known = {"gpu": "NVIDIA GB10", "capability": "12.1", "driver": "590.1", "kernels": "aa"}
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "identity", lambda: dict(known))
    monkeypatch.setattr(kernels, "compilations", lambda *args: [])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: known["gpu"])
    return known


CUDA = torch.device("cuda")


def test_a_pass_is_remembered_for_what_it_is_true_of(
    on_another_gpu: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, g = choice_of("fast")
    runs: list[str] = []

    def run(*args: Any) -> self_test.Report:
        runs.append("run")
        return self_test.Report(("lm_head",), (), 1.25)

    monkeypatch.setattr(self_test, "run", run)
    monkeypatch.setattr(self_test, "Compilation", lambda *args: type("C", (), {"wait": lambda self: None})())

    def load_again(way: str = "auto", chosen: self_test.Choice = choice) -> int:
        self_test.ensure(SMALL, chosen, ARCHES["sm121"], g, CUDA, way)
        return len(runs)

    assert load_again("off") == 0
    assert load_again() == 1
    assert load_again() == 1, "remembered"
    assert load_again("always") == 2
    assert "passed at" in self_test.describe(choice, ARCHES["sm121"], True)
    for name, value in (("driver", "591"), ("kernels", "bb"), ("gpu", "NVIDIA GeForce RTX 5090")):
        on_another_gpu[name] = value
        before = len(runs)
        assert "not passed" in self_test.describe(choice, ARCHES["sm121"], True)
        assert load_again() == before + 1, f"another {name}"
        assert load_again() == before + 1
    assert load_again(chosen=choice_of("balanced")[0]) == 6, "another plan"
    on_another_gpu["gpu"] = self_test.MEASURED[0]
    own, restricted = (choice_of("fast", arch)[0] for arch in ("sm90", "sm80"))
    assert load_again(chosen=own) == 6, "its receipts are here"
    assert "none needed" in self_test.describe(own, ARCHES["sm90"], True)
    assert "not passed" in self_test.describe(restricted, ARCHES["sm80"], True)
    assert load_again(chosen=restricted) == 7, "the kernels of an older architecture, which have never run"
    assert load_again(chosen=restricted) == 7


def test_a_failure_refuses_and_is_not_remembered(
    on_another_gpu: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, g = choice_of("fast")
    report = self_test.Report(("lm_head",), ("decode: lm_head row 3, column 7, code 0101 (3) x 2^-4, gave 0",), 1.0)
    monkeypatch.setattr(self_test, "run", lambda *args: report)
    monkeypatch.setattr(self_test, "Compilation", lambda *args: type("C", (), {"wait": lambda self: None})())
    for _ in range(2):
        with pytest.raises(PlanError, match=r"self-test failed on this sm121 GPU.*code 0101 \(3\) x 2\^-4"):
            self_test.ensure(SMALL, choice, ARCHES["sm121"], g, CUDA, "auto")
    assert self_test.passed(choice) is None


def test_a_broken_memory_is_no_pass(on_another_gpu: dict[str, str]) -> None:
    choice, _ = choice_of("fast")
    self_test.remember(choice, self_test.Report(("lm_head",), (), 1.0))
    assert self_test.passed(choice)
    path, _ = self_test._path(choice)
    for text in ("{", json.dumps([1])):
        path.write_text(text, encoding="utf-8")
        assert self_test.passed(choice) is None


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(UsageError, match="--self-test is 'never'; use one of auto, always, off"):
        load.load_model(load.resolve_model(None), self_test="never")


def test_gpus_that_need_none_are_those_with_receipts() -> None:
    seen = {
        gpu["name"]
        for path in receipts.RESULTS.glob("*.json")
        for gpu in json.loads(path.read_text(encoding="utf-8")).get("environment", {}).get("gpus", [])
    }
    assert set(self_test.MEASURED) <= seen


def test_late_builds_are_those_whose_blocks_wait() -> None:
    g = gates.PRESETS["fast"].gates
    choice = choose(load.NAMED["120b"], g, ARCHES["sm121"])
    programs = kernels.late_programs(choice.spec, choice.chosen, ARCHES["sm121"])
    assert {p.entry for p in programs} == {"decode_step", "batch_experts"}
    assert all(f"-DHB_DELAYS={kernels.LATE}" in p.options for p in programs)


def test_the_hash_follows_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = kernels.source_hash()
    shutil.copytree(kernels.KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("prebuilt", "__pycache__"))
    monkeypatch.setattr(kernels, "KERNELS", tmp_path / "kernels")
    kernels.source_hash.cache_clear()
    same = kernels.source_hash()
    with (tmp_path / "kernels" / "cuda" / "device" / "widen.cuh").open("a", encoding="utf-8") as f:
        f.write("// changed\n")
    kernels.source_hash.cache_clear()
    other = kernels.source_hash()
    kernels.source_hash.cache_clear()
    assert same == first != other


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["fast", "balanced", "exact", "triton"])
def test_on_this_gpu(preset: str) -> None:
    """The true shape of 20b through every regime, as a load would ask."""
    from halfbyte.model.gpt_oss import arch_of
    from halfbyte.plan.plan import Compilation

    flags = {"moe_kernel": "triton", "linear_kernel": "triton", "attention": "triton"} if preset == "triton" else {}
    g = gates.parse(flags, env={}, preset="fast" if preset == "triton" else preset)
    config, arch = load.NAMED["20b"], arch_of("cuda")
    choice = choose(config, g, arch)
    Compilation(choice.spec, choice.chosen, arch, kernels.compilations(choice.spec, choice.chosen, arch)).wait()
    first = self_test.run(config, choice, g, CUDA)
    report = self_test.run(config, choice, g, CUDA)
    print(f"{preset}: {first.seconds:.2f} s, then {report.seconds:.2f} s: {', '.join(report.checks)}")
    assert report.problems == ()
    assert list(report.checks) == [*PROBES, "two layers", "late hand-overs"]
    assert set(choice.selection.chosen) == set(REGIMES)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", ["lm_head", "gate_up", "down", "o", "qkv"])
def test_a_wrong_lane_on_this_gpu(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles exchanged in one matrix: refused, and the matrix is named."""
    from halfbyte.model.gpt_oss import arch_of

    g = gates.PRESETS["fast"].gates
    config = load.NAMED["20b"]
    choice = choose(config, g, arch_of("cuda"))
    whole = twin.enlarge

    def moved(*args: Any) -> Any:
        weights = whole(*args)
        owner = weights if wrong == "lm_head" else weights.layers[0]
        m = getattr(owner, wrong)
        data = m.data.clone()
        data[..., 3, :, :], data[..., 5, :, :] = m.data[..., 5, :, :], m.data[..., 3, :, :]
        if wrong == "qkv":  # tiles of values
            data[-3], data[-5] = m.data[-5], m.data[-3]
        changed = replace(m, data=data)
        if wrong == "lm_head":
            return replace(weights, lm_head=changed)
        weights.layers[0] = replace(weights.layers[0], **{wrong: changed})
        return weights

    monkeypatch.setattr(self_test, "enlarge", moved)
    report = self_test.run(config, choice, g, CUDA)
    assert report.problems
    name = {"gate_up": "gate", "qkv": "values of qkv"}.get(wrong, wrong)
    assert any(f"{name} row" in said for said in report.problems), report.problems


@pytest.mark.parametrize(
    ("host_layers", "host_activation", "formats"),
    [(0, "int8", ("bf16",)), (1, "int8", ("bf16", "int8")), (1, "f32", ("bf16", "f32"))],
)
def test_rows_in_front_of_experts_in_host_memory_are_allowed_their_rounding(
    host_layers: int, host_activation: str, formats: tuple[str, ...]
) -> None:
    choice, _ = choice_of("balanced")
    spec = replace(choice.spec, activation="bf16", host_layers=host_layers, host_activation=host_activation)
    assert {self_test.activations(spec, regime) for regime in self_test.REGIMES} == {formats}
    assert {self_test.activations(spec, "decode", probe) for probe in ("gate", "up", "down")} == {formats}
    assert {self_test.activations(spec, "decode", probe) for probe in ("lm_head", "o", "values of qkv")} == {("bf16",)}


@pytest.mark.parametrize("preset", ["fast", "balanced"])
@pytest.mark.parametrize("wrong", ["", "down", "o"])
def test_int8_rows_of_the_cpu_kernels_pass_and_wrong_weights_do_not(
    preset: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of int8 is as large as an element beside a large one; a neighbour's row is further off."""
    g = gates.PRESETS[preset].gates
    choice = choose(SMALL, g, ARCHES["cpu"])
    assert choice.spec.activation == "int8"
    enlarge = self_test.enlarged

    def moved(*args: Any) -> Any:
        weights = enlarge(*args)
        m = getattr(weights.layers[0], wrong)
        setattr(weights.layers[0], wrong, replace(m, data=m.data.roll(1, -2)))
        return weights

    if wrong:
        monkeypatch.setattr(self_test, "enlarged", moved)
    report = self_test.run(SMALL, choice, g, CPU)
    assert bool(report.problems) == bool(wrong), report.problems
