"""Drawing a token on a GPU: microseconds of each launch of `cuda.draw` beside the sampler in torch, tokens compared.

    python -m bench.kernels.sampling --rows 1,8,32,64

Logits of gpt-oss's vocabulary, steep (a trained model's: few tokens hold most of the mass) and flat (random weights': a
top-p of 0.9 keeps half of the vocabulary). Every figure is the median of replays of a graph of `--launches` launches,
over logits that lie in L2, as they do behind the output layer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.engine.sampling.race import sample_rows
from halfbyte.kernels.cuda.sampling import sampler
from halfbyte.lab import environment, receipts

VOCAB = 201_088
SETTINGS = {
    "temperature 1": (1.0, 0, 1.0, 0.0), "top-p 0.9": (1.0, 0, 0.9, 0.0), "top-k 40": (1.0, 40, 1.0, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05), "top-k 50, top-p 0.8": (0.8, 50, 0.8, 0.0),
}  # fmt: skip
SPREAD = {"steep": 3.0, "flat": 0.5}


def graph_us(run: Callable[[], Any], launches: int) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[1:])


def note_in_torch(logits: Tensor, results: Tensor) -> None:
    value, token = logits.max(-1)
    results[:, 0].copy_(token)
    results.view(torch.float32)[:, 1].copy_(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8, 32, 64])
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    result: dict[str, Any] = {
        "bench": "draw", "schema": 1, "environment": environment.collect(),
        "measured": receipts.hashes(receipts.sources_of([Path(sampler.__file__)])), "vocab": VOCAB, "rows": [],
    }  # fmt: skip
    device = torch.device("cuda")
    g = torch.Generator(device).manual_seed(0)
    wrong = 0
    for rows in args.rows:
        sampler_ = sampler.make(rows, VOCAB, device)
        results = torch.zeros((rows, 2), dtype=torch.int32, device=device)
        keys = torch.randint(-(2**62), 2**62, (rows,), generator=g, device=device)
        for kind, spread in SPREAD.items():
            logits = torch.randn((rows, VOCAB), generator=g, device=device) * spread
            row: dict[str, Any] = {"rows": rows, "logits": kind}
            row["note"] = graph_us(partial(sampler_.argmax, logits, results), args.launches)
            sampler_.argmax(logits, results)
            wrong += int((results[:, 0] != logits.argmax(-1)).sum())
            for name, values in SETTINGS.items():
                filtered = values[1:] != (0, 1.0, 0.0)
                settings = torch.tensor(values, device=device).expand(rows, 4).contiguous()

                run = partial(sampler_.sample, logits, settings, keys, results, filtered=filtered)
                row[name] = graph_us(run, args.launches)
                expected = sample_rows(logits, settings, keys, filtered=filtered)
                wrong += int((results[:, 0] != expected).sum())
            result["rows"].append(row)
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            result["tokens_unlike_torch"] = wrong
            if args.out:
                args.out.write_text(json.dumps(result, default=str), encoding="utf-8")
    for rows in args.rows:  # last, so that nothing above is lost where torch cannot be captured
        logits = torch.randn((rows, VOCAB), generator=g, device=device) * SPREAD["steep"]
        keys = torch.randint(-(2**62), 2**62, (rows,), generator=g, device=device)
        results = torch.zeros((rows, 2), dtype=torch.int32, device=device)
        row = {
            "rows": rows,
            "sampler": "torch",
            "note": graph_us(partial(note_in_torch, logits, results), args.launches),
        }
        for name in ("temperature 1", "top-p 0.9"):
            settings = torch.tensor(SETTINGS[name], device=device).expand(rows, 4).contiguous()
            cut = name != "temperature 1"
            row[name] = graph_us(partial(sample_rows, logits, settings, keys, filtered=cut), 2)
        result["rows"].append(row)
        print({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, default=str), encoding="utf-8")
    print(json.dumps(result, default=str))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
