"""A GPU that is not here, rehearsed on one that is: the decode step with its blocks, its ring and its memory's pace.

    python -m bench.experiments.rehearsal --gpu gb10 --out bench/results/rehearsal.json

As many blocks as that GPU has multiprocessors, the ring that fits in its shared memory, and copies that queue for one
memory of that GPU's read bandwidth, times each of --shares, and for an L2 of its size and speed (pace.cuh).
Two paces and more tell what of a step is bytes and what does not depend on the memory. A GPU with more multiprocessors
than are here is rehearsed as a slice of it: as many blocks as are here, with their part of the bandwidth.

What is rehearsed: how much of the waits between blocks hides behind slow memory, and how unevenly the work is shared
out. What is not: that memory itself, and the other chip's clock and latencies. Vectors that do not come by bulk copies
are not held up; the pace is lowered by their part. Every kernel is compared with its oracle before it is timed, as in
bench.kernels.decode.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.kernels import decode, runner
from halfbyte.kernels import launch
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.decode.step import StepWeights
from halfbyte.kernels.cuda.device import host
from halfbyte.kernels.launch import Program, compile_program
from halfbyte.lab import receipts
from halfbyte.lab.levels import decode_case
from halfbyte.lab.levels.decode_case import DecodeCase
from halfbyte.lab.levels.decode_check import DEPTH, at_depth, check_decode, same_as_timed
from halfbyte.lab.measure import decode_trace
from halfbyte.lab.predict import KERNEL, REHEARSAL, STEP, formats_of
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model.config import NAMED, ModelConfig
from halfbyte.plan.phase import ARCHES
from halfbyte.roofline import Gpu, decode_traffic, gpu_named

FOLDER = Path(__file__).resolve().parent
UNIT = 1024  # of the queue's clock, in a nanosecond


@dataclass(frozen=True)
class Case:
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


class PacedGpu(host.Gpu):
    """The kernel with so many blocks on the current device, and copies at another memory's pace."""

    def __init__(self, paced: tuple[str, ...], blocks: int) -> None:
        super().__init__()
        self.paced, self.blocks = paced, blocks

    def program(self, build: launch.Build) -> Program:
        return with_pace(build.program, self.paced)


@dataclass(frozen=True)
class Build:
    """A case as it is compiled here."""

    case: Case
    shape: StepShape
    paced: tuple[str, ...]
    blocks: int

    def machine(self) -> PacedGpu:
        return PacedGpu(self.paced, self.blocks)

    def programs(self) -> list[Program]:
        """Of the step that is timed, and of the shorter ones that are compared in front of it."""
        shapes = [self.shape]
        if not self.case.traced:
            shapes += [at_depth(self.shape, depth) for depth in range(1, DEPTH + 1)]
        return [with_pace(s.program(), self.paced) for s in shapes]


def cases_of(gpus: list[str], formats: list[str], shares: list[float], variants: list[str]) -> list[Case]:
    """Every share for the first formats of every GPU, the outer two for its other formats; once at full speed, once
    with a trace."""
    cases: list[Case] = []
    for label in formats:
        first = label == formats[0]
        for gpu in gpus if first else gpus[:1]:
            cases += [Case(gpu, label, share) for share in (shares if first else (shares[0], shares[-1]))]
            if first and gpu == gpus[0]:
                cases += [Case(gpu, label, 0.0), Case(gpu, label, shares[0], traced=True)]
                cases += [Case(gpu, label, shares[0], variant=v) for v in variants]
    return cases


def rehearse(cell: Cell, build: Build, case: DecodeCase, context: int, repeats: int) -> Result:
    facts = {"warps": build.shape.warps, "paced": list(build.paced), "bytes": cell_bytes(cell)}
    step = case.step(build.shape, build.machine())
    if build.case.traced:
        decode_case.place(step, context)
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


def main() -> int:
    parser = runner.arguments(__doc__, formats="mxfp4,q8,checkpoint", repeats=5)
    parser.add_argument("--gpu", type=runner.words, default=["gb10"], help="names with commas between")
    parser.add_argument("--model", default="120b", help="one shape: 120b or 20b")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--shares", default="1,0.939,0.85", help="of the read bandwidth, two at least")
    parser.add_argument("--variants", default="", help="'workers=9;slot=8192+ring=6': at the first share")
    parser.add_argument("--layers", type=int, default=0, help="fewer, for a trial")
    args = runner.begin(parser)
    changes = {str(v): v for v in decode.parse_changes(args.variants)}
    cases = cases_of(args.gpu, args.formats, [float(s) for s in args.shares.split(",")], list(changes))
    builds = [build_of(case, args, changes.get(case.variant, {})) for case in cases]
    with ThreadPoolExecutor(16) as pool:
        programs = [p for build in builds for p in build.programs()]
        list(pool.map(lambda p: compile_program(p, runner.device_arch()), programs))
    measured = receipts.measured([KERNEL]) | receipts.hashes([FOLDER / "pace.cuh"])
    receipt = runner.Receipt("bench/experiments/rehearsal.py", args.out, measured)
    weights: StepWeights | None = None
    case, formats = None, ""
    for build in builds:
        c, s = build.case, build.shape
        if c.formats != formats:
            weights = decode_case.random_weights(s) if weights is None else decode_case.with_dense_formats(weights, s)
            case, formats = DecodeCase.make(s, weights, args.context, 1), c.formats
        assert case is not None
        shape: dict[str, Any] = {
            "gpu": c.name, "formats": c.formats, "context": args.context, "share": c.share, "variant": c.variant,
            "read": c.gpu.read, "blocks": build.blocks, "slots": s.slots, "blocks_of": c.gpu.multiprocessors,
        }  # fmt: skip
        name = f"{args.model}, {args.layers} layers" if args.layers else args.model
        cell = Cell(REHEARSAL, name, path=KERNEL, shape=shape)
        receipt.measure(cell, partial(rehearse, cell, build, case, args.context, args.repeats))
    return receipt.end()


def build_of(case: Case, args: argparse.Namespace, changes: dict[str, Any]) -> Build:
    config, gpu = NAMED[args.model], case.gpu
    layers = {"layers": args.layers} if args.layers else {}
    shape = decode_case.shape_of(args.model, case.formats, shared=ARCHES[gpu.arch].shared_memory, **layers)
    shape = replace(shape, trace=case.traced, **changes)
    blocks = min(gpu.multiprocessors, torch.cuda.get_device_properties().multi_processor_count)
    paced = pace(gpu, blocks, config, case.formats, args.context, case.share) if case.share else ()
    return Build(case, shape, paced, blocks)


if __name__ == "__main__":
    sys.exit(main())
