"""A GPU that is not here, rehearsed on one that is: the decode step with its blocks, its ring and its memory's pace.

    python -m bench.experiments.rehearsal --gpu gb10 --save bench/results/rehearse-gpu.json

As many blocks as that GPU has multiprocessors, the ring that fits in its shared memory, and copies that queue for one
memory of that GPU's read bandwidth, times each of --shares, and for an L2 of its size and speed (experiments/pace.cuh).
Two paces and more tell what of a step is bytes and what does not depend on the memory. A GPU with more multiprocessors
than are here is rehearsed as a slice of it: as many blocks as are here, with their part of the bandwidth.

What is rehearsed: how much of the waits between blocks hides behind slow memory, and how unevenly the work is shared
out. What is not: that memory itself, and the other chip's clock and latencies. Vectors that do not come by bulk copies
are not held up; the pace is lowered by their part. Every kernel is checked against float32 torch before it is timed.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.kernels import decode
from halfbyte.kernels.cuda.decode.step import DecodeStep, StepArgs, StepShape
from halfbyte.kernels.launch import Kernel, Program, compile_program
from halfbyte.lab import environment
from halfbyte.lab.levels import decode_case
from halfbyte.lab.measure import decode_trace
from halfbyte.lab.predict import formats_of
from halfbyte.lab.receipts import file_hash, measured
from halfbyte.model.config import NAMED, ModelConfig
from halfbyte.plan.phase import ARCHES
from halfbyte.roofline import Gpu, decode_traffic, gpu_named

FOLDER = Path(__file__).resolve().parent
CACHE = Path(tempfile.mkdtemp())  # pre-included files are not part of a cubin's key
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
    read, part = gpu.read * share * blocks / gpu.blocks, blocks / gpu.blocks
    values = {
        "PACE": 2**20 / (read * streamed) * 1e9 * UNIT,
        "L2": 2**20 / (gpu.cache_read / gpu.blocks) * 1e9,
        "KEPT": gpu.cache * part / 2 / read * 1e9,  # half of it: not everything in L2 is the newest
    }
    return tuple(f"-DHB_{name}={round(value)}" for name, value in values.items())


def program(s: StepShape, paced: tuple[str, ...]) -> Program:
    plain = s.program()
    if not paced:
        return plain
    extra = (*paced, f"--include-path={FOLDER}", "--pre-include=pace.cuh")
    return replace(plain, options=(*plain.options, *extra))


class Paced:
    """The kernel with so many blocks on the current device."""

    def __init__(self, s: StepShape, paced: tuple[str, ...], blocks: int, arch: str) -> None:
        self.blocks, self._threads = blocks, 32 * (s.warps + 1)
        self._kernel = Kernel(compile_program(program(s, paced), arch, cache=CACHE), "decode_step", s.shared_bytes)

    def run(self, args: StepArgs) -> None:
        self._kernel.launch(self.blocks, self._threads, args, cooperative=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="gb10", help="names with commas between")
    parser.add_argument("--model", default="120b")
    parser.add_argument("--formats", default="mxfp4,q8,checkpoint", help="of the first GPU; of the others the first")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--shares", default="1,0.939,0.85", help="of the read bandwidth, two at least")
    parser.add_argument("--variants", default="", help="'workers=9;slot=8192+ring=6': at the first share")
    parser.add_argument("--layers", type=int, default=0, help="fewer, for a trial")
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    environment.need_gpu()
    gpus = a.gpu.split(",")
    config, kinds, shares = NAMED[a.model], a.formats.split(","), [float(s) for s in a.shares.split(",")]
    decode.SETTINGS.update({"layers": a.layers} if a.layers else {})
    here = torch.cuda.get_device_properties().multi_processor_count
    variants = {v: {k: int(n) for k, n in (x.split("=") for x in v.split("+"))} for v in a.variants.split(";") if v}
    cases: list[Case] = []
    for f in kinds:
        for gpu in gpus if f == kinds[0] else gpus[:1]:
            cases += [Case(gpu, f, s) for s in (shares if f == kinds[0] else (shares[0], shares[-1]))]
            if (gpu, f) == (gpus[0], kinds[0]):
                cases += [Case(gpu, f, 0.0), Case(gpu, f, shares[0], traced=True)]
                cases += [Case(gpu, f, shares[0], variant=v) for v in variants]

    def build(c: Case) -> tuple[StepShape, tuple[str, ...], int]:
        s = decode.shape_of(a.model, c.formats, shared=ARCHES[c.gpu.arch].shared_memory)
        s = replace(s, trace=c.traced, **variants.get(c.variant, {}))
        blocks = min(c.gpu.blocks, here)
        return s, pace(c.gpu, blocks, config, c.formats, a.context, c.share) if c.share else (), blocks

    began = time.time()
    arch = "sm_{}{}a".format(*torch.cuda.get_device_capability())

    def compiled(c: Case) -> None:
        s, paced, _ = build(c)
        compile_program(program(s, paced), arch, cache=CACHE)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compiled, cases))
    print(f"{len(cases)} kernels after {time.time() - began:.1f} s", flush=True)
    report: dict[str, Any] = {
        "bench": "rehearse_gpu", "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"),
        "measured": measured(["cuda.decode_step"]), "pace": file_hash(FOLDER / "pace.cuh"), "rehearsed": [],
    }  # fmt: skip
    weights, held, bad = None, "", 0
    for c in cases:
        s, paced, blocks = build(c)
        torch.manual_seed(0)
        if c.formats != held:
            weights = decode_case.random_weights(s) if weights is None else decode_case.with_dense_formats(weights, s)
            bench, held = decode_case.DecodeCase.make(s, weights, a.context, 1), c.formats
        d = DecodeStep(
            s, weights, Paced(s, paced, blocks, arch), pool=bench.pool, tables=bench.tables, rope=bench.rope,
            advance=True,
        )  # fmt: skip
        traffic = decode_traffic(config, formats_of(c.formats), a.context)
        row: dict[str, Any] = {
            "gpu": c.name, "model": decode.name_of(a.model), "formats": c.formats, "context": a.context,
            "share": c.share, "variant": c.variant, "read": c.gpu.read, "of": c.gpu.blocks, "blocks": blocks,
            "slots": s.slots, "warps": s.warps, "bytes": traffic.total, "paced": list(paced),
        }  # fmt: skip
        if c.traced:
            decode_case.place(d, a.context)
            row["phases"] = decode_trace.trace(d)
            print(*decode_trace.lines(row["phases"]), sep="\n", flush=True)
        else:
            verdict = decode.check(bench, d, a.context - 48)
            bad += not verdict["ok"]
            row |= decode.time_steps(d, a.context, groups=5, steps=8)
            row |= {"ok": verdict["ok"], "error": max(verdict["errors"].values())}
            print(
                f"{c.name} {c.formats} {c.variant} at {c.share or 'full speed'}: {row['us']:.0f} us "
                f"({row['least']:.0f}-{row['most']:.0f}), {1e6 / row['us']:.1f} tokens/s of {blocks} blocks, error "
                f"{row['error']:.1e}, {time.time() - began:.1f} s", flush=True,
            )  # fmt: skip
        report["rehearsed"].append(row)
        if a.save:
            a.save.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"rehearsed": len(report["rehearsed"]), "wrong": bad}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
