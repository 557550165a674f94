"""A GPU that is not here, rehearsed on one that is: the decode step with its blocks, its ring and its memory's pace.

    python bench/rehearse_gpu.py --gpu gb10 --save bench/results/rehearse-gpu.json

As many blocks as that GPU has multiprocessors, the ring that fits in its shared memory, and every block's copies held
to its part of that GPU's read bandwidth (experiments/pace.cuh), times each of --shares. What is rehearsed: how much of
the waits between blocks hides behind slow memory, and how unevenly the work is shared out. What is not: that memory
itself, the other chip's clock and latencies. A block that is done early leaves its part of the bandwidth unused, which
real memory would give to the others. Router weights and vectors do not come by bulk copies; the pace is lowered by
their part. Every kernel is checked against float32 torch before it is timed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import decode_gpu  # noqa: E402
import torch  # noqa: E402

from halfbyte.kernels.cuda.step import DecodeStep, StepArgs, StepShape  # noqa: E402
from halfbyte.kernels.launch import Kernel, Program, compile_program  # noqa: E402
from halfbyte.lab import steptrace  # noqa: E402
from halfbyte.lab.predict import formats_of  # noqa: E402
from halfbyte.lab.receipts import measured  # noqa: E402
from halfbyte.model.config import NAMED  # noqa: E402
from halfbyte.plan.phase import ARCHES  # noqa: E402
from halfbyte.roofline import Traffic, decode_traffic, gpu_named  # noqa: E402

HERE = ROOT / "bench" / "experiments"
CACHE = Path(tempfile.mkdtemp())  # pre-included files are not part of a cubin's key


def program(s: StepShape, pace: int) -> Program:
    plain = s.program()
    if not pace:
        return plain
    extra = (f"-DHB_PACE={pace}", f"--include-path={HERE}", "--pre-include=pace.cuh")
    return replace(plain, options=(*plain.options, *extra))


class Paced:
    """The kernel with so many blocks on the current device."""

    def __init__(self, s: StepShape, pace: int, blocks: int, arch: str) -> None:
        self.blocks, self._threads = blocks, 32 * (s.warps + 1)
        self._kernel = Kernel(compile_program(program(s, pace), arch, cache=CACHE), "decode_step", s.shared_bytes)

    def run(self, args: StepArgs) -> None:
        self._kernel.launch(self.blocks, self._threads, args, cooperative=True)


def pace_of(traffic: Traffic, read: float, blocks: int) -> int:
    """Nanoseconds per megabyte (2^20 bytes) of one block."""
    streamed = traffic.total - traffic.rest
    return round(2**20 / (read / blocks * streamed / traffic.total) * 1e9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="gb10")
    parser.add_argument("--model", default="120b")
    parser.add_argument("--formats", default="mxfp4,q8,checkpoint", help="the first in all shares")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--shares", default="0.939,1", help="of the read bandwidth; the first for every format")
    parser.add_argument("--layers", type=int, default=0, help="fewer, for a trial")
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    gpu = gpu_named(a.gpu)
    config, kinds, shares = NAMED[a.model], a.formats.split(","), [float(s) for s in a.shares.split(",")]
    decode_gpu.SETTINGS.update({"layers": a.layers} if a.layers else {})
    shape = {f: decode_gpu.shape_of(a.model, f, shared=ARCHES[gpu.arch].shared_memory) for f in kinds}
    traffic = {f: decode_traffic(config, formats_of(f), a.context) for f in kinds}
    cases = [(kinds[0], 0.0, False)] + [(f, s, False) for f in kinds for s in (shares if f == kinds[0] else shares[:1])]
    cases += [(f, shares[0], True) for f in kinds]  # a trace says what pace was kept

    def build(f: str, share: float, traced: bool) -> tuple[StepShape, int]:
        pace = pace_of(traffic[f], gpu.read * share, gpu.blocks) if share else 0
        return replace(shape[f], trace=traced), pace

    began = time.time()
    arch = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda c: compile_program(program(*build(*c)), arch, cache=CACHE), cases))
    print(f"{len(cases)} kernels after {time.time() - began:.1f} s", flush=True)
    report: dict[str, Any] = {
        "bench": "rehearse_gpu", "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"),
        "measured": measured(["cuda.decode_step"]), "rehearsed": [],
    }  # fmt: skip
    weights, held, bad = None, "", 0
    for f, share, traced in sorted(cases, key=lambda c: kinds.index(c[0])):
        s, pace = build(f, share, traced)
        torch.manual_seed(0)
        if f != held:
            weights = decode_gpu.random_weights(s) if weights is None else decode_gpu.redress(weights, s)
            bench, held = decode_gpu.Bench(s, weights, a.context, 1), f
        machine = Paced(s, pace, gpu.blocks, arch)
        d = DecodeStep(
            s, weights, machine, pool=bench.pool, tables=bench.tables, rope=bench.rope, advance=True
        )  # fmt: skip
        row: dict[str, Any] = {
            "gpu": a.gpu, "model": decode_gpu.name_of(a.model), "formats": f, "context": a.context, "share": share,
            "read": gpu.read, "blocks": gpu.blocks, "slots": s.slots, "bytes": traffic[f].total,
        }  # fmt: skip
        if traced:
            decode_gpu.place(d, a.context)
            row["phases"] = steptrace.trace(d)
            print(*steptrace.lines(row["phases"]), sep="\n", flush=True)
        else:
            verdict = decode_gpu.check(bench, d, a.context - 48)
            bad += not verdict["ok"]
            row |= decode_gpu.time_steps(d, a.context, groups=5, steps=8)
            row |= {"ok": verdict["ok"], "error": max(verdict["errors"].values())}
            print(
                f"{a.gpu} {f} at {share or 'full speed'}: {row['us']:.0f} us ({row['least']:.0f}-{row['most']:.0f}), "
                f"{1e6 / row['us']:.1f} tokens/s, error {row['error']:.1e}, {time.time() - began:.1f} s", flush=True,
            )  # fmt: skip
        report["rehearsed"].append(row)
        if a.save:
            a.save.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"rehearsed": len(report["rehearsed"]), "wrong": bad}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
