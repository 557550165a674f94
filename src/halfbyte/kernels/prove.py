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

from halfbyte.errors import HalfbyteError, PlanError, UsageError
from halfbyte.gates import Gates
from halfbyte.kernels.cuda.mixed_phase import MixedPhase
from halfbyte.kernels.cuda.phase import CudaPhase
from halfbyte.kernels.launch import Build, Program, build_program, compile_program, nvrtc_version, target_of
from halfbyte.kernels.machine_code import (
    INSTRUCTION,
    count_instructions,
    disassemble,
    matrix_instructions,
    report_of,
    resources,
)
from halfbyte.kernels.triton.call import Call, triton_version
from halfbyte.kernels.triton.compile import compile_call
from halfbyte.kernels.triton.phase import TritonPhase
from halfbyte.kernels.triton.tiles import OPERAND
from halfbyte.plan.phase import ARCHES, Arch, Phase, Spec


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
        raise UsageError(f"there is nothing to compile for {arch!r}; use one of {', '.join(gpus())}.")
    phase = phase_named(phase_name)
    spec = spec or default_spec(phase)
    reason = phase.refuse(spec, target, gates or Gates())
    if reason is not None:
        raise PlanError(f"{phase_name} does not run on {target.name}: {reason}.")
    builds = phase.builds(spec, target) if isinstance(phase, CudaPhase) else []
    calls = phase.calls(spec, target) if isinstance(phase, MixedPhase) else []
    calls += phase.proofs(spec, target) if isinstance(phase, TritonPhase) else []
    evidence = [prove_build(phase.name, build, target) for build in builds]
    return evidence + [prove_call(phase.name, call, target) for call in {identity(c): c for c in calls}.values()]


# GPUs that differ in size, not in instructions: what is shown on one counts for the other if the machine code is equal.
SIBLINGS = {"sm120": "sm121", "sm121": "sm120"}


@dataclass(frozen=True)
class Sibling:
    """One kernel compiled for an architecture and for its sibling. `difference` is empty where every instruction is
    equal."""

    kernel: str
    difference: str


def compare_siblings(phase_name: str, arch: str, spec: Spec, gates: Gates | None = None) -> list[Sibling]:
    """Every kernel of a phase, for this architecture and its sibling; nothing where it has none."""
    if arch not in SIBLINGS:
        return []
    targets = ARCHES[arch], ARCHES[SIBLINGS[arch]]
    phase = phase_named(phase_name)
    builds = phase.builds(spec, targets[0]) if isinstance(phase, CudaPhase) else []
    calls = phase.calls(spec, targets[0]) if isinstance(phase, MixedPhase) else []
    calls += phase.proofs(spec, targets[0]) if isinstance(phase, TritonPhase) else []
    found = [Sibling(b.name, _difference_of_builds(replace(b.program, entry=""), *targets)) for b in builds]
    for call in {identity(c): c for c in calls}.values():
        one, other = (disassemble(compile_call(call, target).asm["cubin"]) for target in targets)
        found.append(Sibling(call.name, difference(one, other)))
    return found


@functools.lru_cache(64)
def _difference_of_builds(program: Program, arch: Arch, sibling: Arch) -> str:
    return difference(*(disassemble(compile_program(program, target_of(target))) for target in (arch, sibling)))


def difference(one: str, other: str) -> str:
    """How two disassemblies differ in what is executed: nothing, or how many instructions and the first of them."""
    lines = [[line.strip() for line in sass.splitlines() if INSTRUCTION.match(line)] for sass in (one, other)]
    if lines[0] == lines[1]:
        return ""
    unequal = [(a, b) for a, b in itertools.zip_longest(*lines, fillvalue="nothing") if a != b]
    return f"{len(unequal)} of {max(map(len, lines))} instructions, the first {unequal[0][0]} and {unequal[0][1]}"


def identity(call: Call) -> tuple[Any, ...]:
    """Equal for calls that compile to the same kernel."""
    return (call.function, *call.types.items(), *call.constants.items(), call.warps, call.stages)


def gpus() -> list[str]:
    return [name for name, arch in ARCHES.items() if arch.is_gpu]


def provable() -> list[str]:
    """Names of the phases whose kernels Triton compiles, and could let fall back."""
    return [p.name for p in _phases() if isinstance(p, TritonPhase)]


def compilable(*, lent: bool = False) -> list[str]:
    """Those, and the phases in CUDA C++: they have one body each, and registers and shared memory to keep within.

    `lent`: also those that only another engine takes, whose kernels are the same ones."""
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
    phase: Phase | None = None, *, activation: str | None = None, dense: str | None = None, kv: str = "bf16",
    tile: str = "auto",
) -> Spec:  # fmt: skip
    """gpt-oss-120b; a phase that exists for fp8 activations is asked with MXFP4 weights and mxfp8."""
    split = bool(getattr(phase, "split", False))
    kind = dense or ("mxfp4" if split else "bf16")
    return Spec(
        layers=36, hidden=2880, intermediate=2880, experts=128, top_k=4, heads=64, kv_heads=8, head_dim=64,
        vocab=201088, window=128, norm_eps=1e-5, swiglu_limit=7.0, swiglu_alpha=1.702,
        formats={"qkv": kind, "o": kind, "gate_up": "mxfp4", "down": "mxfp4", "lm_head": kind, "embed": "bf16"},
        features={"attention": frozenset({"sinks", "window", "gqa"})},
        dtype="bf16", activation=activation or ("mxfp8" if split else "bf16"), kv_dtype=kv, page_size=64,
        tile=tile,
    )  # fmt: skip


# One kernel ---------------------------------------------------------------------------------------------------------


def prove_call(phase: str, call: Call, arch: Arch) -> Evidence:
    assert arch.capability is not None
    compiled = compile_call(call, arch)
    ptx: str = compiled.asm["ptx"]
    named = re.search(r"\.target\s+(\S+)", ptx)
    target = named[1].rstrip(",") if named else "?"
    sass = disassemble(compiled.asm["cubin"])
    registers, spilled = resources(ptx, target)
    shared = int(compiled.metadata.shared)
    problems = []
    wanted = "sm_" + arch.name.removeprefix("sm")
    if not target.startswith(wanted):
        problems.append(f"the target is {target}, not {wanted}")
    if call.need and not re.search(call.need, sass):
        problems.append(f"no instruction matches {call.need}")
    problems += _problems(sass, call.ban, spilled, shared, arch)
    return Evidence(
        phase=phase, kernel=call.name, arch=arch.name, target=target,
        compiler="triton " + ".".join(map(str, triton_version())),
        instructions=matrix_instructions(sass), total_instructions=count_instructions(sass),
        registers=registers, spilled_bytes=spilled, known_spills="", shared_bytes=shared,
        shared_limit=arch.shared_memory, needed=call.need, banned=call.ban, problems=tuple(problems),
    )  # fmt: skip


def prove_build(phase: str, build: Build, arch: Arch) -> Evidence:
    """A kernel in CUDA C++: built by NVRTC for the architecture's own instructions."""
    target = "sm_" + arch.name.removeprefix("sm") + "a"
    sass, log = _built(replace(build.program, entry=""), target)  # a source's entries are in one binary
    registers, spilled = report_of(log)
    unknown = report_of(log, build.known_spills)[1]
    problems = [f"no instruction matches {p}" for p in build.need if not re.search(p, sass)]
    problems += _problems(sass, build.ban, unknown, build.shared, arch)
    if spilled - unknown > build.spill_limit:
        problems.append(f"{spilled - unknown} bytes of registers are spilled where {build.spill_limit} are known")
    if arch.capability is not None and arch.capability[0] == 12 and "CALL.ABS" in sass:
        problems.append("copies go through a routine of the driver")
    if "serialized" in log:  # ptxas' word for products that wait for each other
        problems.append("ptxas serialises the asynchronous products")
    return Evidence(
        phase=phase, kernel=build.name, arch=arch.name, target=target, compiler=f"NVRTC {nvrtc_version()}",
        instructions=matrix_instructions(sass), total_instructions=count_instructions(sass), registers=registers,
        spilled_bytes=spilled, known_spills=build.known_spills if spilled > unknown else "", shared_bytes=build.shared,
        shared_limit=arch.shared_memory, needed=" and ".join(build.need), banned=build.ban, problems=tuple(problems),
    )  # fmt: skip


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
    parser.add_argument("arch", choices=gpus())
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
    known = f" (known, in {e.known_spills.replace('|', ' and ')})" if e.known_spills else ""
    return f"{e.spilled_bytes} bytes{known}"


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
