"""The decode step, many times over: does it ever hang, and does it always say the same?

    python -m halfbyte.lab.levels.stress --steps 10000
    compute-sanitizer --tool memcheck python -m halfbyte.lab.levels.stress --small --steps 4

Sequences of many lengths are decoded step after step, greedily, each token fed back; then everything once more. Both
passes must agree in every token, and in the last logits of every sequence to the last bit. The last line is
the receipt.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.decode.step import DecodeStep
from halfbyte.lab import environment, receipts
from halfbyte.lab.entry import finish, line_of
from halfbyte.lab.levels.decode_case import DecodeCase, place, random_weights, shape_of
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.plan.stopped import stop_reason

CONTEXTS = (0, 1, 60, 127, 128, 500, 513, 2000, 2047, 4000, 8000)


def decode(d: DecodeStep, pool: Tensor, fresh: Tensor, steps: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Tokens of all sequences, and the last logits of each."""
    torch.manual_seed(seed)
    pool.copy_(fresh)
    each = -(-steps // len(CONTEXTS))
    tokens = torch.full((len(CONTEXTS), each, d.shape.rows), -1, dtype=torch.int32, device="cuda")
    logits = []
    for i, context in enumerate(CONTEXTS):
        place(d, context)
        for j in range(each):
            d.run()
            tokens[i, j].copy_(d.next_tokens)
        logits.append(d.logits.clone())
    torch.cuda.synchronize()
    return tokens.cpu(), logits


def check_stress(shape: StepShape, steps: int) -> Result:
    torch.manual_seed(0)
    case = DecodeCase.make(shape, random_weights(shape), max(CONTEXTS) + steps // len(CONTEXTS) + 64, shape.rows)
    d = case.step(shape)
    fresh = case.pool.clone()
    cell = Cell("stress", path="cuda.decode_step", shape={"rows": shape.rows, "layers": shape.layers})
    start = time.perf_counter()
    try:
        first, last = decode(d, case.pool, fresh, steps, 1)
        again, last_again = decode(d, case.pool, fresh, steps, 1)
    except Exception as e:
        return Result(cell, refused=f"{type(e).__name__}: {e}; given up: {stop_reason()}"[:400])
    checks = (
        Check("tokens of both passes are equal", bool(first.equal(again))),
        Check("last logits of both passes are equal", all(x.equal(y) for x, y in zip(last, last_again))),
        Check("every step gave a token", int(first.min()) >= 0),
    )
    if not all(c.ok for c in checks):
        return Result(cell, checks=checks)
    detail = {"distinct_tokens": len(set(first.flatten().tolist())), "seconds": time.perf_counter() - start}
    return Result(cell, (figure("steps", "steps", 2 * int(first.numel())),), checks, detail=detail)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=10000)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--rows", type=int, default=1)
    p.add_argument("--small", action="store_true", help="a model of a few megabytes, for the sanitizer")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    environment.need_gpu()
    shape = replace(shape_of("120b", "mxfp4", a.rows), layers=a.layers)
    if a.small:
        shape = StepShape(192, 128, 3, 32, 16, 2, 512, rows=a.rows)
    result = check_stress(shape, a.steps)
    print(line_of(result), flush=True)
    return finish("python -m halfbyte.lab.levels.stress", [result], receipts.measured(["cuda.decode_step"]), a.out)


if __name__ == "__main__":
    sys.exit(main())
