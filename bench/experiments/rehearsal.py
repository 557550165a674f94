"""A GPU that is not here, rehearsed on one that is: the decode step with its blocks, its ring and its memory's pace.

    python -m bench run rehearsal --set gpu=gb10 --out bench/results/rehearsal.json

As many blocks as that GPU has multiprocessors, the ring that fits in its shared memory, and copies that queue for one
memory of that GPU's read bandwidth, times each of `shares`, and for an L2 of its size and speed (pace.cuh).
Two paces and more tell what of a step is bytes and what does not depend on the memory. A GPU with more multiprocessors
than are here is rehearsed as a slice of it: as many blocks as are here, with their part of the bandwidth.

What is rehearsed: how much of the waits between blocks hides behind slow memory, and how unevenly the work is shared
out. What is not: that memory itself, and the other chip's clock and latencies. Vectors that do not come by bulk copies
are not held up; the pace is lowered by their part. Every kernel is compared with its oracle before it is timed, as in
`decode-kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.checks import decode_case
from bench.checks.decode_case import DecodeCase
from bench.checks.decode_check import DEPTH, at_depth, check_decode, same_as_timed
from bench.kernels import decode, timing
from bench.measurement import Run, measurement, option
from halfbyte.kernels import launch
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.decode.step import StepWeights
from halfbyte.kernels.cuda.device import host
from halfbyte.kernels.launch import Program, compile_program
from halfbyte.lab import receipts
from halfbyte.lab.measure import decode_trace
from halfbyte.lab.predict import KERNEL, REHEARSAL, STEP, formats_of
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model.config import NAMED, ModelConfig
from halfbyte.plan.phase import ARCHES
from halfbyte.roofline import Gpu, decode_traffic, gpu_named

FOLDER = Path(__file__).resolve().parent
UNIT = 1024  # of the queue's clock, in a nanosecond


@dataclass(frozen=True)
class RehearsalCase:
    name: str
    formats: str
    share: float  # of the read bandwidth; 0: as fast as it goes
    traced: bool = False
    variant: str = ""

    @property
    def gpu(self) -> Gpu:
        return gpu_named(self.name)


def pace(gpu: Gpu, blocks: int, config: ModelConfig, formats: str, context: int, share: float) -> tuple[str, ...]:
    """What pace.cuh is to be compiled with: the memory and L2 of `blocks` of that GPU's multiprocessors."""
    traffic = decode_traffic(config, formats_of(formats), context)
    router = config.layers * config.experts * config.hidden * 2.0
    streamed = (traffic.total - traffic.rest + router) / traffic.total
    read, part = gpu.read * share * blocks / gpu.multiprocessors, blocks / gpu.multiprocessors
    values = {
        "PACE": 2**20 / (read * streamed) * 1e9 * UNIT,
        "L2": 2**20 / (gpu.cache_read / gpu.multiprocessors) * 1e9,
        "KEPT": gpu.cache * part / 2 / read * 1e9,  # half of it: not everything in L2 is the newest
    }
    return tuple(f"-DHB_{name}={round(value)}" for name, value in values.items())


def with_pace(program: Program, paced: tuple[str, ...]) -> Program:
    if not paced:
        return program
    source = (
        f"-DHB_PACE_SOURCE=0x{receipts.file_hash(FOLDER / 'pace.cuh')}"  # pre-included files are not in a cubin's key
    )
    extra = (*paced, source, f"--include-path={FOLDER}", "--pre-include=pace.cuh")
    return replace(program, options=(*program.options, *extra))


class PacedGpu(host.CudaMachine):
    """The kernel with so many blocks on the current device, and copies at another memory's pace."""

    def __init__(self, paced: tuple[str, ...], blocks: int) -> None:
        super().__init__()
        self.paced, self.blocks = paced, blocks

    def program(self, build: launch.Build) -> Program:
        return with_pace(build.program, self.paced)


@dataclass(frozen=True)
class RehearsedBuild:
    """A case as it is compiled here."""

    case: RehearsalCase
    shape: StepShape
    paced: tuple[str, ...]
    blocks: int

    def machine(self) -> PacedGpu:
        return PacedGpu(self.paced, self.blocks)

    def programs(self) -> list[Program]:
        """The programs of the step that is timed, and of the shorter ones that are compared before it."""
        shapes = [self.shape]
        if not self.case.traced:
            shapes += [at_depth(self.shape, depth) for depth in range(1, DEPTH + 1)]
        return [with_pace(s.program(), self.paced) for s in shapes]


def cases_of(
    gpus: Sequence[str], formats: Sequence[str], shares: Sequence[float], variants: Sequence[str]
) -> list[RehearsalCase]:
    """Every share for the first formats of every GPU, the outer two for its other formats; once at full speed, once
    with a trace."""
    cases: list[RehearsalCase] = []
    for label in formats:
        first = label == formats[0]
        for gpu in gpus if first else gpus[:1]:
            cases += [RehearsalCase(gpu, label, share) for share in (shares if first else (shares[0], shares[-1]))]
            if first and gpu == gpus[0]:
                cases += [RehearsalCase(gpu, label, 0.0), RehearsalCase(gpu, label, shares[0], traced=True)]
                cases += [RehearsalCase(gpu, label, shares[0], variant=v) for v in variants]
    return cases


def rehearse(cell: Cell, build: RehearsedBuild, case: DecodeCase, context: int, repeats: int) -> Result:
    facts = {"warps": build.shape.warps, "paced": list(build.paced), "bytes": cell_bytes(cell)}
    step = case.step(build.shape, build.machine())
    if build.case.traced:
        decode_case.place_rows(step, context)
        phases = decode_trace.trace(step)
        print(*decode_trace.lines(phases), sep="\n", flush=True)
        return Result(cell, detail=facts | {"trace": phases})
    short = decode.short_case(build.shape, case.weights, context)
    verdicts = [
        check_decode(build.shape, short, context, machine=build.machine()),
        same_as_timed(step, case, context, machine=build.machine()),
    ]
    checks = tuple(v.as_check() for v in verdicts)
    if not all(c.ok for c in checks):
        return Result(cell, checks=checks, detail=facts)
    samples, _ = decode.time_steps(step, context, repeats, steps=8)
    return Result(cell, (figure(STEP, "us", samples),), checks, detail=facts)


def cell_bytes(cell: Cell) -> float:
    """That a step of the whole model must read."""
    config = NAMED[cell.model.partition(",")[0]]
    return decode_traffic(config, formats_of(str(cell.shape["formats"])), int(cell.shape["context"])).total


def build_of(case: RehearsalCase, options: Options, changes: dict[str, Any]) -> RehearsedBuild:
    config, gpu = NAMED[options.model], case.gpu
    layers = {"layers": options.layers} if options.layers else {}
    shape = decode_case.shape_of(options.model, case.formats, shared=ARCHES[gpu.arch].shared_memory, **layers)
    shape = replace(shape, trace=case.traced, **changes)
    blocks = min(gpu.multiprocessors, torch.cuda.get_device_properties().multi_processor_count)
    paced = pace(gpu, blocks, config, case.formats, options.context, case.share) if case.share else ()
    return RehearsedBuild(case, shape, paced, blocks)


@dataclass(frozen=True)
class Options:
    gpu: tuple[str, ...] = option(("gb10", "pro6000"), "names of GPUs")
    model: str = option("120b", "one shape: 120b or 20b")
    formats: tuple[str, ...] = option(("mxfp4", "q8", "checkpoint"), "of qkv, o and lm_head")
    context: int = 2048
    shares: tuple[float, ...] = option((1.0, 0.939, 0.85), "of the read bandwidth, at least two")
    variants: str = option("", "'workers=9;slot=8192+ring=6': at the first share")
    layers: int = option(0, "fewer, for a trial; 0: all")
    repeats: int = 5


@measurement("rehearsal-20b", needs=("gpu",), seconds=60, gpu=("rtx5090",), model="20b")
@measurement("rehearsal", needs=("gpu",), seconds=60)
def rehearsal(run: Run, options: Options) -> None:
    timing.begin()
    changes = {str(v): v for v in decode.parse_changes(options.variants)}
    cases = cases_of(options.gpu, options.formats, options.shares, list(changes))
    builds = [build_of(case, options, changes.get(case.variant, {})) for case in cases]
    with ThreadPoolExecutor(16) as pool:
        programs = [p for build in builds for p in build.programs()]
        list(pool.map(lambda p: compile_program(p, timing.device_arch()), programs))
    run.sources |= receipts.measured([KERNEL]) | receipts.hashes([FOLDER / "pace.cuh"])
    weights: StepWeights | None = None
    case, formats = None, ""
    for build in builds:
        c, s = build.case, build.shape
        if c.formats != formats:
            weights = decode_case.random_weights(s) if weights is None else decode_case.with_dense_formats(weights, s)
            case, formats = DecodeCase.make(s, weights, options.context, 1), c.formats
        assert case is not None
        shape: dict[str, Any] = {
            "gpu": c.name, "formats": c.formats, "context": options.context, "share": c.share, "variant": c.variant,
            "read": c.gpu.read, "blocks": build.blocks, "slots": s.slots, "blocks_of": c.gpu.multiprocessors,
        }  # fmt: skip
        name = f"{options.model}, {options.layers} layers" if options.layers else options.model
        cell = Cell(REHEARSAL, name, path=KERNEL, shape=shape)
        run.measure(cell, partial(rehearse, cell, build, case, options.context, options.repeats))
