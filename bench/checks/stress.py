"""The decode step, many times over: does it ever hang, and does it always say the same?

    python -m bench run stress --set steps=10000
    compute-sanitizer --tool memcheck python -m bench run stress --set small=yes --set steps=4

Sequences of many lengths are decoded step after step, greedily, each token fed back; then everything once more. Both
passes must agree in every token, and in the last logits of every sequence to the last bit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.checks.decode_case import DecodeCase, place_rows, random_weights, shape_of
from bench.measurement import Row, Run, measurement, option
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.decode.step import DecodeStep
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.plan.stopped import stop_reason

CONTEXTS = (0, 1, 60, 127, 128, 500, 513, 2000, 2047, 4000, 8000)


def decode(d: DecodeStep, pool: Tensor, fresh: Tensor, steps: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Tokens of all sequences, and the last logits of each."""
    torch.manual_seed(seed)
    pool.copy_(fresh)
    share = -(-steps // len(CONTEXTS))
    tokens = torch.full((len(CONTEXTS), share, d.shape.rows), -1, dtype=torch.int32, device="cuda")
    logits = []
    for i, context in enumerate(CONTEXTS):
        place_rows(d, context)
        for j in range(share):
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


@dataclass(frozen=True)
class Options:
    steps: int = 10000
    layers: int = 12
    rows: int = 1
    small: bool = option(False, "a model of a few megabytes, for the sanitizer")


@measurement(
    "stress", needs=("gpu",), seconds=60,
    rows=(Row("decode steps, two passes equal to the last bit", "stress", "steps", path="cuda.decode_step"),),
)  # fmt: skip
def stress(run: Run, options: Options) -> None:
    run.sources |= receipts.measured(["cuda.decode_step"])
    shape = replace(shape_of("120b", "mxfp4", options.rows), layers=options.layers)
    if options.small:
        shape = StepShape(192, 128, 3, 32, 16, 2, 512, rows=options.rows)
    run.add(check_stress(shape, options.steps))
