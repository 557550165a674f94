"""Proof without the hardware: compile a phase's kernels for an architecture, disassemble them, and say what is there.

Every kernel a phase can launch there is built for that target, by Triton or by NVRTC: a phase in Triton lists its calls
(`proofs`), one in CUDA C++ its builds (`builds`). The machine code is searched for the instruction the phase promises
and for those that would betray a fallback, ptxas reports spills, and shared memory is held against the architecture's
(Triton does not check it when it only compiles). Needs Triton and the PyPI package `nvidia-cuda-nvdisasm`, no GPU and
no CUDA toolkit. Refuses Triton's interpreter, which compiles nothing.

    python -m halfbyte.kernels.prove triton.moe sm121 [--activation mxfp4] [--json]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from halfbyte.architectures import ARCHES, GPU_ARCHES
from halfbyte.errors import HalfbyteError, PlanError, UsageError
from halfbyte.gates import Gates
from halfbyte.kernels.cuda.mixed_phase import MixedPhase
from halfbyte.kernels.cuda.phase import CudaPhase, promises
from halfbyte.kernels.launch import Build, Program, build_program, compile_program, nvrtc_version
from halfbyte.kernels.machine_code import (
    INSTRUCTION,
    count_instructions,
    disassemble,
    matrix_instructions,
    report_of,
    resources,
)
from halfbyte.kernels.triton.call import TritonCall, triton_version
from halfbyte.kernels.triton.compile import compile_call
from halfbyte.kernels.triton.phase import TritonPhase
from halfbyte.kernels.triton.tiles import OPERAND
from halfbyte.plan.phase import Arch, Phase, Spec


@dataclass(frozen=True)
class Evidence:
    """One kernel, compiled: what was promised, what the machine code shows. `problems` is empty where they agree."""

    phase: str
    kernel: str
    arch: str
    target: str  # as the PTX says
    compiler: str
    instructions: dict[str, int]  # matrix instructions found, by name
    total_instructions: int
    registers: int
    spilled_bytes: int
    known_spills: str  # functions whose spills are known and no problem
    shared_bytes: int
    shared_limit: int
    needed: str
    banned: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def prove(phase_name: str, arch: str, spec: Spec | None = None, gates: Gates | None = None) -> list[Evidence]:
    """Evidence for every kernel of a phase; `spec` defaults to gpt-oss-120b as the phase would first meet it."""
    target = ARCHES.get(arch.lower())
    if target is None or not target.is_gpu:
        raise UsageError(f"{arch!r} is not a GPU architecture; use one of {', '.join(GPU_ARCHES)}.")
    phase = phase_named(phase_name)
    spec = spec or default_spec(phase)
    views = spec.views(phase.covers)
    reason = next((r for view in views if (r := phase.refuse(view, target, gates or Gates()))), None)
    if reason is not None:
        raise PlanError(f"{phase_name} does not run on {target.name}: {reason}.")
    builds, calls = _kernels_of(phase, views, target)
    evidence = [prove_build(phase.name, build, target) for build in builds]
    return evidence + [prove_call(phase.name, call, target) for call in {identity(c): c for c in calls}.values()]


@dataclass(frozen=True)
class Sibling:
    """One kernel compiled for an architecture and for its sibling. `difference` is empty where every instruction is
    equal."""

    kernel: str
    difference: str


def _kernels_of(phase: Phase, views: Iterable[Spec], target: Arch) -> tuple[list[Build], list[TritonCall]]:
    """Every kernel of a phase over all formats of its layers."""
    builds: list[Build] = []
    calls: list[TritonCall] = []
    for view in views:
        if isinstance(phase, CudaPhase):
            builds += [build for build in phase.builds(view, target) if build not in builds]
        calls += phase.calls(view, target) if isinstance(phase, MixedPhase) else []
        calls += phase.proofs(view, target) if isinstance(phase, TritonPhase) else []
    return builds, calls


def compare_siblings(phase_name: str, arch: str, spec: Spec, gates: Gates | None = None) -> list[Sibling]:
    """Every kernel of a phase, for this architecture and its sibling; nothing where it has none."""
    if not ARCHES[arch].sibling:
        return []
    targets = ARCHES[arch], ARCHES[ARCHES[arch].sibling]
    phase = phase_named(phase_name)
    builds, calls = _kernels_of(phase, spec.views(phase.covers), targets[0])
    siblings = [Sibling(b.name, _difference_of_builds(replace(b.program, entry=""), *targets)) for b in builds]
    for call in {identity(c): c for c in calls}.values():
        one, other = (disassemble(compile_call(call, target).asm["cubin"]) for target in targets)
        siblings.append(Sibling(call.name, difference(one, other)))
    return siblings


@functools.lru_cache(64)
def _difference_of_builds(program: Program, arch: Arch, sibling: Arch) -> str:
    return difference(*(disassemble(compile_program(program, target.target)) for target in (arch, sibling)))


def difference(one: str, other: str) -> str:
    """How two disassemblies differ in what is executed: nothing, or how many instructions and the first of them."""
    lines = [[line.strip() for line in sass.splitlines() if INSTRUCTION.match(line)] for sass in (one, other)]
    if lines[0] == lines[1]:
        return ""
    unequal = [(a, b) for a, b in itertools.zip_longest(*lines, fillvalue="nothing") if a != b]
    return f"{len(unequal)} of {max(map(len, lines))} instructions, the first {unequal[0][0]} and {unequal[0][1]}"


def identity(call: TritonCall) -> tuple[Any, ...]:
    """Equal for calls that compile to the same kernel."""
    return (call.function, *call.types.items(), *call.constants.items(), call.warps, call.stages)


def provable() -> list[str]:
    """Names of the phases whose kernels Triton compiles, and could let fall back."""
    return [p.name for p in _phases() if isinstance(p, TritonPhase)]


def compilable(*, lent: bool = False) -> list[str]:
    """Names of all phases whose kernels can be compiled: those in Triton and those in CUDA C++.

    `lent`: also the phases that only another engine runs, which share their kernels."""
    return [p.name for p in _phases(lent)]


def _phases(lent: bool = False) -> Iterable[Phase]:
    from halfbyte.kernels.catalog import PHASES

    if not lent:
        return PHASES
    from halfbyte.kernels.lent import BARE

    return (*PHASES, *BARE)


def phase_named(name: str) -> Phase:
    for phase in _phases(lent=True):
        if phase.name == name:
            return phase
    raise UsageError(f"there is no phase {name!r} to prove; use one of {', '.join(compilable())}.")


def default_spec(
    phase: Phase | None = None,
    *,
    activation: str | None = None,
    dense: str | None = None,
    kv: str = "bf16",
    tile: str = "auto",
) -> Spec:
    """gpt-oss-120b; for a phase that exists for fp8 activations, with MXFP4 weights and mxfp8."""
    split = bool(getattr(phase, "split", False))
    kind = dense or ("mxfp4" if split else "bf16")
    return Spec(
        layers=36,
        hidden=2880,
        intermediate=2880,
        experts=128,
        top_k=4,
        heads=64,
        kv_heads=8,
        head_dim=64,
        vocab=201088,
        window=128,
        norm_eps=1e-5,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        formats={"qkv": kind, "o": kind, "gate_up": "mxfp4", "down": "mxfp4", "lm_head": kind, "embed": "bf16"},
        features={"attention": frozenset({"sinks", "window", "gqa"})},
        dtype="bf16",
        activation=activation or ("mxfp8" if split else "bf16"),
        kv_dtype=kv,
        page_size=64,
        tile=tile,
    )


# One kernel ---------------------------------------------------------------------------------------------------------


def prove_call(phase: str, call: TritonCall, arch: Arch) -> Evidence:
    assert arch.capability is not None
    compiled = compile_call(call, arch)
    ptx: str = compiled.asm["ptx"]
    match = re.search(r"\.target\s+(\S+)", ptx)
    target = match[1].rstrip(",") if match else "?"
    sass = disassemble(compiled.asm["cubin"])
    registers, spilled = resources(ptx, target)
    shared = int(compiled.metadata.shared)
    problems = []
    if target != arch.target:
        problems.append(f"the target is {target}, not {arch.target}")
    if call.need and not re.search(call.need, sass):
        problems.append(f"no instruction matches {call.need}")
    problems += _problems(sass, call.ban, spilled, shared, arch)
    return Evidence(
        phase=phase,
        kernel=call.name,
        arch=arch.name,
        target=target,
        compiler="triton " + ".".join(map(str, triton_version())),
        instructions=matrix_instructions(sass),
        total_instructions=count_instructions(sass),
        registers=registers,
        spilled_bytes=spilled,
        known_spills="",
        shared_bytes=shared,
        shared_limit=arch.shared_memory,
        needed=call.need,
        banned=call.ban,
        problems=tuple(problems),
    )


def prove_build(phase: str, build: Build, arch: Arch) -> Evidence:
    """A kernel in CUDA C++: built by NVRTC for the architecture's own instructions."""
    target = arch.target
    sass, log = _built(replace(build.program, entry=""), target)  # a source's entries are in one binary
    registers, spilled = report_of(log)
    functions, limit = build.known_spills, build.spill_limit
    if "bulk_copies" not in arch.features and build.spills_on_sm80:
        functions, limit = ".", build.spills_on_sm80  # any
    unknown = report_of(log, functions)[1]
    need, ban = promises(build, arch)
    problems = [f"no instruction matches {p}" for p in need if not re.search(p, sass)]
    problems += _problems(sass, ban, unknown, build.shared, arch)
    if spilled - unknown > limit:
        problems.append(f"{spilled - unknown} bytes of registers are spilled where {limit} are known")
    if "shared_cta_copies" in arch.features and "CALL.ABS" in sass:
        problems.append("copies go through a routine of the driver")
    if "serialized" in log:  # ptxas' word for products that wait for each other
        problems.append("ptxas serialises the asynchronous products")
    return Evidence(
        phase=phase,
        kernel=build.name,
        arch=arch.name,
        target=target,
        compiler=f"NVRTC {nvrtc_version()}",
        instructions=matrix_instructions(sass),
        total_instructions=count_instructions(sass),
        registers=registers,
        spilled_bytes=spilled,
        known_spills=(build.known_spills or build.program.entry) if spilled > unknown else "",
        shared_bytes=build.shared,
        shared_limit=arch.shared_memory,
        needed=" and ".join(need),
        banned=ban,
        problems=tuple(problems),
    )


@functools.lru_cache(64)  # phases share kernels
def _built(program: Program, target: str) -> tuple[str, str]:
    """(machine code, ptxas' report)."""
    cubin, log = build_program(program, target, "--ptxas-options=-v")
    return disassemble(cubin), log


def _problems(sass: str, ban: str, spilled: int, shared: int, arch: Arch) -> list[str]:
    problems = []
    if ban and (hit := re.search(ban + r"\S*", sass)):
        problems.append(f"{hit[0]} is there, which betrays a fallback")
    if spilled:
        problems.append(f"{spilled} bytes of registers are spilled")
    if shared > arch.shared_memory:
        problems.append(f"{shared} bytes of shared memory, {arch.name} has {arch.shared_memory}")
    return problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m halfbyte.kernels.prove", description=__doc__.splitlines()[0])
    parser.add_argument("phase", help=f"{', '.join(compilable())}, or all")
    parser.add_argument("arch", choices=tuple(GPU_ARCHES))
    parser.add_argument("--activation", choices=tuple(OPERAND))
    parser.add_argument("--dense", choices=("bf16", "q8", "mxfp4"), help="format of qkv, o and lm_head")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--tile", choices=("auto", "128x128", "64x128"), default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    evidence: list[Evidence] = []
    for name in compilable() if options.phase == "all" else [options.phase]:
        try:
            spec = default_spec(
                phase_named(name), activation=options.activation, dense=options.dense, kv=options.kv, tile=options.tile
            )
            evidence += prove(name, options.arch, spec)
        except HalfbyteError as refusal:
            print(refusal, file=sys.stderr)
            if options.phase != "all":
                return refusal.exit_code
    if options.json:
        print(json.dumps([asdict(e) for e in evidence]))
    else:
        for e in evidence:
            print(show(e))
    return 0 if all(e.ok for e in evidence) else 1


def spilled(e: Evidence) -> str:
    remark = f" (known, in {e.known_spills.replace('|', ' and ')})" if e.known_spills else ""
    return f"{e.spilled_bytes} bytes{remark}"


def show(e: Evidence) -> str:
    """One line a person can read."""
    products = ", ".join(f"{n} {name}" for name, n in list(e.instructions.items())[:3]) or "no MMA"
    return (
        f"{'ok ' if e.ok else 'BAD'} {e.phase} {e.kernel} [{e.target}]: {products}; {e.total_instructions} "
        f"instructions, {e.registers} registers, {spilled(e)} spilled, {e.shared_bytes} B shared"
        + "".join(f"\n    {p}" for p in e.problems)
    )


if __name__ == "__main__":
    raise SystemExit(main())
