"""Machine code without the hardware: what each phase promises, compiled for the table's architectures and read back.

`make test` compiles the kernels that carry the promises; `make test-full` compiles every kernel of every phase with
every activation format, and again under the oldest Triton that halfbyte supports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.architectures import GPU_ARCHES
from halfbyte.errors import PlanError, UsageError
from halfbyte.gates import Gates
from halfbyte.kernels import prove
from halfbyte.kernels.cuda.phase import CudaPhase
from halfbyte.kernels.cuda.prefill.builds import rows_build
from halfbyte.kernels.launch import Build, nvrtc_available
from halfbyte.kernels.machine_code import report_of
from halfbyte.kernels.triton.call import TritonCall
from halfbyte.kernels.triton.linear import linear_call
from halfbyte.plan.phase import ARCHES

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="under the interpreter nothing is compiled"
)

OLDEST = "3.6.0"
# Bytes, of one kernel of a phase, by that Triton alone: `exact` on sm100, mxfp4 activations on sm90.
OLDEST_SPILLS = {
    ("sm100", 0): {"triton.moe": 8},
    ("sm90", 4): {"triton.moe": 56, "triton.qkv": 44, "triton.lm_head": 12},
}
SOURCE = Path(prove.__file__).parents[2]


def calls(phase: str, arch: str, function: str = "", **spec: str) -> Iterator[TritonCall]:
    owner = prove.phase_named(phase)
    for call in owner.proofs(prove.default_spec(owner, **spec), ARCHES[arch]):  # type: ignore[attr-defined]
        if call.function.startswith(function):
            yield call


def hold(phase: str, call: TritonCall, arch: str) -> prove.Evidence:
    evidence = prove.prove_call(phase, call, ARCHES[arch])
    assert evidence.ok, prove.show(evidence)
    return evidence


# (phase, kernel, rows in a tile, spec, architectures): the promises of the README and of docs/numerics.md.
PROMISES = [
    ("triton.moe", "gate_up_kernel", 16, {"activation": "mxfp4"}, ("sm120", "sm121", "sm100", "sm103")),
    ("triton.moe", "down_kernel", 128, {"activation": "mxfp4"}, ("sm121",)),
    ("triton.moe_split", "gate_up_kernel", 128, {}, ("sm120", "sm121")),
    ("triton.moe_split", "down_kernel", 16, {}, ("sm121",)),
    ("triton.moe", "gate_up_kernel", 128, {"activation": "mxfp8"}, ("sm100", "sm103")),
    ("triton.moe", "gate_up_kernel", 16, {}, ("sm86", "sm90", "sm100", "sm121")),
    ("triton.moe", "gate_up_kernel", 64, {}, ("sm90",)),
    ("triton.moe", "gate_up_kernel", 128, {"tile": "128x128"}, ("sm90",)),
    ("triton.moe", "gate_up_kernel", 16, {"activation": "int8"}, ("sm90", "sm121")),
    ("triton.attention_flash", "prefill_kernel", 64, {}, ("sm90",)),
    ("triton.attention_flash", "prefill_kernel", 128, {}, ("sm89", "sm100", "sm121")),
    ("triton.attention_split", "decode_kernel", 16, {"kv": "fp8"}, ("sm80", "sm90", "sm121")),
    ("triton.qkv", "linear_kernel", 16, {"dense": "q8"}, ("sm90",)),
    ("triton.o", "linear_kernel", 128, {}, ("sm90", "sm121")),
]


@pytest.mark.parametrize(
    ("phase", "kernel", "rows", "spec", "arch"),
    [(p, k, r, s, a) for p, k, r, s, arches in PROMISES for a in arches],
)
def test_promise(phase: str, kernel: str, rows: int, spec: dict[str, str], arch: str) -> None:
    call = next(c for c in calls(phase, arch, kernel, **spec) if c.constants["BM"] == rows)
    evidence = hold(phase, call, arch)
    assert evidence.instructions, "a matrix kernel without a matrix instruction"


def test_small_kernels_on_gb10() -> None:
    assert all(e.ok for e in prove.prove("triton.mlp_norm_router", "sm121"))


@pytest.mark.parametrize("arch", ["sm90", "sm121"])
def test_what_fine_tunes_need(arch: str) -> None:
    """A float32 router, and experts in bf16 and q8."""
    router, moe = prove.phase_named("triton.mlp_norm_router"), prove.phase_named("triton.moe")
    wide = replace(prove.default_spec(router), wide=frozenset({"router"}))
    calls = [c for c in router.proofs(wide, ARCHES[arch]) if c.function == "router_kernel"]  # type: ignore[attr-defined]
    for kind in ("bf16", "q8"):
        spec = prove.default_spec(moe)
        spec = replace(spec, formats={**spec.formats, "gate_up": kind, "down": kind})
        calls += [c for c in moe.proofs(spec, ARCHES[arch]) if c.constants.get("BM") == 64]  # type: ignore[attr-defined]
    assert {c.function for c in calls} >= {"router_kernel", "gate_up_kernel", "down_kernel"}
    for call in calls:
        hold("triton", call, arch)


def test_a_fallback_is_called_one() -> None:
    """E4M3 x E2M1 from the plain layout compiles on SM120, to bf16 arithmetic: the proof must say so."""
    call = linear_call(
        ARCHES["sm120"], 64, 2880, "mxfp4", "e4m3", x="*u8", scale=True, row_scale=False, bias=None, residual=None,
        strides=(2880, 90, 1440, 90), n=5120,
    )  # fmt: skip
    native = next(c for c in calls("triton.qkv_split", "sm120", "linear_kernel"))
    evidence = prove.prove_call("test", replace(call, need=native.need, ban=native.ban), ARCHES["sm120"])
    assert len(evidence.problems) == 2
    assert "betrays a fallback" in evidence.problems[1]


def test_shared_memory_past_the_limit_is_a_problem() -> None:
    call = next(c for c in calls("triton.qkv", "sm120", "linear_kernel") if c.constants["BM"] == 64)
    evidence = prove.prove_call("test", replace(call, stages=6), ARCHES["sm120"])
    assert any("shared memory" in p for p in evidence.problems)
    assert evidence.shared_bytes > ARCHES["sm120"].shared_memory


@pytest.mark.parametrize(
    ("phase", "arch", "kind", "text"),
    [
        ("triton.moe", "cpu", UsageError, "not a GPU architecture"),
        ("triton.nothing", "sm90", UsageError, "no phase"),
        ("triton.moe_split", "sm90", PlanError, "is for SM12x"),
    ],
)
def test_what_cannot_be_proved_says_why(phase: str, arch: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        prove.prove(phase, arch)


# Everything, in the long run ----------------------------------------------------------------------------------------

SPECS = [
    {}, {"kv": "fp8"}, {"dense": "q8"}, {"dense": "mxfp4"}, {"dense": "mxfp4", "activation": "fp8"},
    {"dense": "mxfp4", "activation": "mxfp8"}, {"dense": "mxfp4", "activation": "mxfp4"},
    {"dense": "mxfp4", "activation": "int8"}, {"dense": "q8", "activation": "int8"}, {"tile": "64x128"},
    {"tile": "128x128"}, {"tile": "128x128", "activation": "mxfp8"}, {"tile": "128x128", "activation": "mxfp4"},
]  # fmt: skip


PROVED: set[tuple[object, ...]] = set()  # by an earlier spec


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(GPU_ARCHES))
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: " ".join(s.values()) or "exact")
def test_everything(spec: dict[str, str], arch: str) -> None:
    target, kernels, bad = ARCHES[arch], 0, []
    for name in prove.provable():
        phase = prove.phase_named(name)
        full_spec = prove.default_spec(phase, **spec)  # type: ignore[arg-type]
        if phase.refuse(full_spec, target, Gates()) is not None:
            continue
        for call in phase.proofs(full_spec, target):  # type: ignore[attr-defined]
            kernels += 1
            if (arch, *prove.identity(call)) not in PROVED:
                PROVED.add((arch, *prove.identity(call)))
                evidence = prove.prove_call(name, call, target)
                bad += [] if evidence.ok else [prove.show(evidence)]
    assert not bad, "\n".join(bad)
    assert kernels > 10


@pytest.mark.skipif(nvrtc_available() is not None, reason="needs NVRTC")
def test_a_cuda_phase_is_proved_like_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    evidence = prove.prove("cuda.attention_flash", "sm90")
    assert [e.ok for e in evidence] == [True, True], [prove.show(e) for e in evidence]
    assert all(e.instructions["HGMMA"] > 8 for e in evidence)
    assert {e.target for e in evidence} == {"sm_90a"}
    assert prove.main(["cuda.attention_flash", "sm121"]) == 2
    assert "does not run on sm121" in capsys.readouterr().err


@pytest.mark.skipif(nvrtc_available() is not None, reason="needs NVRTC")
@pytest.mark.parametrize(
    ("name", "spec", "instruction"),
    [
        ("cuda.grouped_sync_o", {"dense": "mxfp4"}, "HMMA.16816.F32.BF16"),
        ("cuda.grouped_mxfp8_o", {"dense": "mxfp4", "activation": "mxfp8"}, "QMMA.SF.16832.F32.E2M1.E4M3.E8"),
        ("cuda.grouped_mxfp4_o", {"dense": "mxfp4", "activation": "mxfp4"}, "OMMA.SF.16864.F32.E2M1.E2M1.E8"),
        ("cuda.decode_step", {"dense": "mxfp4"}, "HMMA.16816.F32.BF16"),
        ("cuda.batch_sync_norm_lm_head", {"dense": "mxfp4"}, "HMMA.16816.F32.BF16"),
        ("cuda.batch_layer", {"dense": "mxfp4"}, "HMMA.16816.F32.BF16"),
        ("cuda.batch_layer_fused", {"dense": "mxfp4"}, "HMMA.16816.F32.BF16"),
    ],
)
def test_cuda_on_gb10(name: str, spec: dict[str, str], instruction: str) -> None:
    """Native instructions, no spills, within 101,376 bytes: of one product each, `make test-full` has all of them."""
    full_spec = prove.default_spec(**spec)  # type: ignore[arg-type]
    phase = prove.phase_named(name)
    assert phase.refuse(full_spec, ARCHES["sm121"], Gates()) is None
    build = next(b for b in phase.builds(full_spec, ARCHES["sm121"]) if b.need)  # type: ignore[attr-defined]
    evidence = prove.prove_build(name, build, ARCHES["sm121"])
    assert evidence.ok, prove.show(evidence)
    assert evidence.instructions[instruction] > 8
    assert evidence.spilled_bytes == 0
    assert evidence.target == "sm_121a"


def test_spills_are_counted_by_function() -> None:
    """Those of named functions are known and reported; one anywhere else is a problem."""
    lines = [
        "ptxas info    : Function properties for {}",
        "    8 bytes stack frame, {} bytes spill stores, {} bytes spill loads",
    ]
    log = "\n".join(
        line.format(*x) for f in (("entry", 4, 8), ("_Z6phasei", 16, 20)) for line, x in zip(lines, (f[:1], f[1:]))
    )
    assert report_of(log + "\nptxas info    : Used 80 registers") == (80, 48)
    assert report_of(log, "entry") == (0, 36)
    assert report_of(log, "entry|phase") == (0, 0)


def test_known_spills_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "properties for grouped\n    8 bytes stack frame, 40 bytes spill stores, 60 bytes spill loads"
    monkeypatch.setattr(prove, "_built", lambda program, target: ("", log))
    known = Build("one", rows_build("pack_rows").program, 32, 0, known_spills="grouped", spill_limit=100)
    assert prove.prove_build("phase", known, ARCHES["sm90"]).ok
    for build in (replace(known, spill_limit=99), replace(known, known_spills="other")):
        assert any("spilled" in p for p in prove.prove_build("phase", build, ARCHES["sm90"]).problems)


@pytest.mark.slow
@pytest.mark.skipif(nvrtc_available() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("arch", [arch.name for arch in GPU_ARCHES.values() if arch.family in CudaPhase.families])
@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"dense": "q8"},
        {"dense": "mxfp4"},
        *({"dense": "mxfp4", "activation": a} for a in ("fp8", "mxfp8", "mxfp4")),
    ],
    ids=lambda s: " ".join(s.values()) or "exact",
)
def test_every_cuda_phase(spec: dict[str, str], arch: str) -> None:
    kernels, bad = 0, []
    for name in sorted(set(prove.compilable()) - set(prove.provable())):
        phase = prove.phase_named(name)
        full_spec = prove.default_spec(phase, **spec)  # type: ignore[arg-type]
        if phase.refuse(full_spec, ARCHES[arch], Gates(attention="cuda")) is not None:
            continue
        builds = phase.builds(full_spec, ARCHES[arch])  # type: ignore[attr-defined]
        assert builds, f"{name} says nothing about its kernels"
        for build in builds:
            kernels += phase.covers != ("embed",)  # which serves whatever the activations are
            evidence = prove.prove_build(name, build, ARCHES[arch])
            bad += [] if evidence.ok else [prove.show(evidence)]
    assert not bad, "\n".join(bad)
    triton_alone = {("sm90", "mxfp8"), ("sm90", "mxfp4"), ("sm120", "fp8"), ("sm121", "fp8")}
    triton_alone |= {(a.name, x) for a in GPU_ARCHES.values() if a.family == "sm8x" for x in ("fp8", "mxfp8", "mxfp4")}
    assert (kernels == 0) == ((arch, spec.get("activation")) in triton_alone), kernels


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(GPU_ARCHES))
@pytest.mark.parametrize("options", [[], ["--activation", "mxfp4", "--dense", "mxfp4"]], ids=["exact", "mxfp4"])
def test_oldest_triton(arch: str, options: list[str], oldest_triton: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "halfbyte.kernels.prove", "all", arch, "--json", *options],
        env=os.environ | {"PYTHONPATH": f"{oldest_triton}:{SOURCE}", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr[-2000:]
    evidence = json.loads(done.stdout)
    assert {e["compiler"] for e in evidence if e["phase"].startswith("triton.")} == {"triton 3.6"}
    spills = OLDEST_SPILLS.get((arch, len(options)), {})
    known = [e for e in evidence if e["problems"] == [f"{spills.get(e['phase'])} bytes of registers are spilled"]]
    bad = [e for e in evidence if e["problems"] and e not in known]
    assert not bad, bad
    assert len(known) == len({e["phase"] for e in known}), known


@pytest.fixture(scope="session")
def oldest_triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton36")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"triton=={OLDEST}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"Triton {OLDEST} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return folder


# ---- one machine code for GB10 and for RTX cards --------------------------------------------------------------------


def test_a_difference_is_counted_and_shown() -> None:
    one = "\t.target\tsm_120a\n        /*0000*/ LDC R1, c[0x0][0x37c] ;\n        /*0010*/ EXIT ;\n"
    assert prove.difference(one, one.replace("sm_120a", "sm_121a")) == ""
    other = one.replace("EXIT", "BRA 0x0")
    assert prove.difference(one, other) == "1 of 2 instructions, the first /*0010*/ EXIT ; and /*0010*/ BRA 0x0 ;"
    assert prove.difference(one, one + "        /*0020*/ NOP ;\n").startswith("1 of 3 instructions, the first nothing")


def test_architectures_without_a_sibling() -> None:
    spec = prove.default_spec(prove.phase_named("cuda.embed"))
    assert prove.compare_siblings("cuda.embed", "sm90", spec) == []


@pytest.mark.skipif(nvrtc_available() is not None, reason="no NVRTC")
def test_a_kernel_is_the_same_on_both() -> None:
    phase = prove.phase_named("cuda.embed")
    (found,) = prove.compare_siblings("cuda.embed", "sm121", prove.default_spec(phase))
    assert found.difference == ""


@pytest.mark.slow
@pytest.mark.skipif(nvrtc_available() is not None, reason="no NVRTC")
@pytest.mark.parametrize("preset", ["fast", "balanced", "exact", "mxfp8", "mxfp4"])
def test_sm120_and_sm121_run_the_same_machine_code(preset: str) -> None:
    """Every kernel of the plan, CUDA and Triton: what a card of one kind shows then holds for the other."""
    from halfbyte.gates import PRESETS
    from halfbyte.model.config import NAMED
    from halfbyte.model.gpt_oss import choose

    gates = PRESETS[preset].gates if preset in PRESETS else Gates(layers="mxfp4", activation=f"prefill={preset}")  # type: ignore[arg-type]
    choice = choose(NAMED["120b"], gates, ARCHES["sm121"])
    spec, chosen = choice.spec, choice.chosen
    runs = {(p.name, spec.at(r).activation): spec.at(r) for r, phases in chosen.items() for p in phases}
    found = [s for (name, _), at in runs.items() for s in prove.compare_siblings(name, "sm121", at, gates)]
    assert len(found) > 10
    assert [f"{s.kernel}: {s.difference}" for s in found if s.difference] == []
