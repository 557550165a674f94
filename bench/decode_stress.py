"""The decode step, many times over: does it ever hang, and does it always say the same?

    python bench/decode_stress.py --steps 10000
    compute-sanitizer --tool memcheck python bench/decode_stress.py --small --steps 4

Sequences of many lengths are decoded step after step, greedily, each token fed back; then everything once more. Both
passes must agree in every token, and in the last logits of every sequence to the last bit. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.decode.step import DecodeStep
from halfbyte.lab import environment
from halfbyte.lab.levels.decode_case import DecodeCase, place, random_weights, shape_of

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


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=10000)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--rows", type=int, default=1)
    p.add_argument("--small", action="store_true", help="a model of a few megabytes, for the sanitizer")
    a = p.parse_args()
    environment.need_gpu()
    shape = replace(shape_of("120b", "mxfp4", a.rows), layers=a.layers)
    if a.small:
        shape = StepShape(192, 128, 3, 32, 16, 2, 512, rows=a.rows)
    torch.manual_seed(0)
    b = DecodeCase.make(shape, random_weights(shape), max(CONTEXTS) + a.steps // len(CONTEXTS) + 64, a.rows)
    d = b.step(shape)
    fresh = b.pool.clone()
    clock = time.time()
    try:
        first, last = decode(d, b.pool, fresh, a.steps, 1)
        again, last_again = decode(d, b.pool, fresh, a.steps, 1)
    except Exception:
        print("given up:", d.given_up(), flush=True)
        raise
    result = {
        "steps": 2 * int(first.numel()), "rows": a.rows, "seconds": round(time.time() - clock, 1),
        "sources": shape.program().hash(),
        "tokens_equal": bool(first.equal(again)), "logits_equal": all(x.equal(y) for x, y in zip(last, last_again)),
        "distinct_tokens": int(first.unique().numel()),
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if result["tokens_equal"] and result["logits_equal"] and int(first.min()) >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
