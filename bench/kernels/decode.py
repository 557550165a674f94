"""Decode on a real GPU: the CUDA step at true shapes, checked against torch in the same run, then timed.

    python -m bench.kernels.decode --models 120b,20b --formats mxfp4,checkpoint,q8 --contexts 512,2048,8192

Weights are random bytes of the full size (61 GB of experts for 120b), so nothing sits in the L2 cache; routing is
spread and the distinct experts are printed. Every model is first compared with a float32 torch twin on the same bytes,
by layer and whole; a model that fails the comparison is not timed. The last line of output is JSON; a receipt goes to
bench/results/ with the hash of the kernel sources.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.cuda.decode import oracle
from halfbyte.kernels.cuda.decode.step import KV_DTYPES, DecodeStep, StepShape, StepWeights
from halfbyte.kernels.launch import compile_program
from halfbyte.lab import environment, receipts
from halfbyte.lab.levels import decode_case
from halfbyte.lab.levels.decode_case import DecodeCase, place, random_weights, with_dense_formats
from halfbyte.lab.measure import decode_trace

BANDWIDTH = 4.5e12  # bytes/s this kind of GPU reads in the best case
BOUND = 2e-3  # on a phase's relative error against float32
NEAR = 1e-3  # experts whose logits are nearer may change places by rounding: then the next step is checked


SETTINGS: dict[str, Any] = {}  # of every kernel: --set, --kv and --layers


def shape_of(model: str, formats: str, rows: int = 1, **changes: Any) -> StepShape:
    return decode_case.shape_of(model, formats, rows, **{**SETTINGS, **changes})


def relative(a: Tensor, b: Tensor) -> float:
    """By pieces: a cache of many sequences in double precision is larger than what the weights leave free."""
    off = own = 0.0
    for x, y in zip(a.split(64), b.split(64)):
        off += float((x.double() - y.double()).square().sum())
        own += float(y.double().square().sum())
    return (off / own) ** 0.5


def check(b: DecodeCase, d: DecodeStep, context: int, row_seq: list[int] | None = None) -> dict[str, Any]:
    """One step against the twin. The kernel runs twice: equal bits prove that nothing depends on timing."""
    place(d, context, row_seq)
    before = (d.tokens.clone(), d.positions.clone())
    saved = b.pool.clone()
    for box in (*d.boxes.values(), d.logits):
        if not any(box is d.boxes[name] for name in ("x", "mid", "logits", "best")):
            box.fill_(-1)  # poison; sums and the argmax must be found clean
    d.run()
    torch.cuda.synchronize()
    first = d.logits.clone()
    token = d.next_tokens.clone()
    d.tokens.copy_(before[0])
    d.positions.copy_(before[1])
    d.run()
    torch.cuda.synchronize()
    got = {k: v.clone() for k, v in oracle.boxes(d).items()}
    again = bool(first.equal(d.logits))
    ours = b.pool.clone()
    b.pool.copy_(saved)
    ref = oracle.step(d.shape, b.weights, b.pool, b.tables, b.rope, *before, d.row_seq)
    errors = {k: relative(got[k], ref[k]) for k in got}
    unique = [int(e.unique().numel()) for e in ref["experts"]]
    top = ref["logits"].topk(2).values
    margin = float((top[:, 0] - top[:, 1]).min() / ref["logits"].std())
    spread = torch.bincount(ref["experts"].flatten(), minlength=d.shape.experts)
    return {
        "errors": errors,
        "cache_error": relative(ours, b.pool),
        "deterministic": again,
        "argmax_equal": bool((token == ref["logits"].argmax(-1)).all()),
        "top2_margin_over_std": margin,
        "router_gap": float(ref["gap"]),
        "experts_per_layer": statistics.mean(unique),
        "experts_touched": int((spread > 0).sum()),
        "logit_std": float(ref["logits"].std()),
        "x_rms": float(ref["x"].pow(2).mean().sqrt()),
        "ok": again and max(errors.values()) < BOUND and bool(torch.isfinite(got["logits"]).all()),
    }


def settle(b: DecodeCase, d: DecodeStep, context: int, row_seq: list[int] | None = None) -> dict[str, Any]:
    """`check`; where it differs and a router's choice was a rounding apart, of the next step."""
    for later in range(4):
        try:
            verdict = check(b, d, context + later, row_seq)
        except Exception:
            print("given up:", d.given_up(), flush=True)
            raise
        if verdict["ok"] or not verdict["deterministic"] or verdict["router_gap"] > NEAR:
            break
        print(f"rows {d.shape.rows} at {context + later}: a near tie ({verdict['router_gap']:.1e}): next", flush=True)
    return verdict


def time_steps(d: DecodeStep, context: int, groups: int = 9, steps: int = 24) -> dict[str, float]:
    """Microseconds per step: `steps` graph replays between two events, tokens fed back; median and spread of groups."""
    place(d, context)
    d.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d.run()
    samples = []
    for i in range(groups + 2):
        place(d, context)
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(steps):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            samples.append(start.elapsed_time(end) * 1000 / steps)
    return {"us": statistics.median(samples), "least": min(samples), "most": max(samples)}


def bytes_read(s: StepShape, context: int, experts: float = 4.0) -> float:
    """What one step must read, by the same count as the ceiling in PEERS."""
    per = {"mxfp4": 34 / 64, "q8": 34 / 32, "bf16": 2.0}
    dense = s.qkv_dim * s.hidden * per[s.qkv] + s.hidden * s.q_dim * per[s.o]
    moe = experts * 3 * s.intermediate * s.hidden * per["mxfp4"] + s.experts * s.hidden * 2
    kv = 2 * s.kv_heads * 64 * KV_DTYPES[s.kv].itemsize * (min(context, s.window) + context) / 2
    return s.layers * (dense + moe + kv) + s.vocab * s.hidden * per[s.lm_head]


def phases(b: DecodeCase, s: StepShape, context: int) -> dict[str, Any]:
    """Where a step's time goes, by clocks read inside the kernel: see `halfbyte.lab.measure.decode_trace`."""
    d = b.step(replace(s, trace=True))
    place(d, context)
    return decode_trace.trace(d)


def name_of(model: str) -> str:
    """In a receipt: a model cut short is not that model."""
    return f"{model}, {SETTINGS['layers']} layers" if "layers" in SETTINGS else model


def build(shape: StepShape) -> float:
    start = time.time()
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    compile_program(shape.program(), f"sm_{major}{minor}a")
    return time.time() - start


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", default="120b")
    p.add_argument("--formats", default="mxfp4")
    p.add_argument("--contexts", default="512,2048,8192")
    p.add_argument("--rows", default="1")
    p.add_argument("--row-contexts", default="", help="contexts of more than one row; without it those of one row")
    p.add_argument("--variants", default="", help="experiments: 'nap=0;workers=15+ahead=9;define=X=1', timed at 2048")
    p.add_argument("--set", default="", help="of every kernel: 'workers=15,ahead=9'")
    p.add_argument("--kv", default="bf16", choices=("bf16", "fp8"))
    p.add_argument("--layers", type=int, default=0, help="so many layers only: a twelfth of the time, for experiments")
    p.add_argument("--no-trace", action="store_true")
    p.add_argument("--out", type=Path, default=receipts.RESULTS)
    p.add_argument("--name", default=time.strftime("decode-gpu-%Y%m%d-%H%M%S"))
    a = p.parse_args()
    environment.need_gpu()
    SETTINGS.update({k: int(v) for k, v in (x.split("=") for x in filter(None, a.set.split(",")))})
    SETTINGS.update({"layers": a.layers} if a.layers else {}, kv=a.kv)
    contexts = [int(c) for c in a.contexts.split(",")]
    row_contexts = [int(c) for c in (a.row_contexts or a.contexts).split(",")]
    rows = [int(r) for r in a.rows.split(",")]
    variants: list[dict[str, Any]] = []
    for text in filter(None, a.variants.split(";")):
        pairs = dict(x.split("=", 1) for x in text.split("+"))
        variants.append({"defines": (v,)} if (v := pairs.get("define")) else {k: int(n) for k, n in pairs.items()})
    wanted = [shape_of(m, f, r) for m in a.models.split(",") for f in a.formats.split(",") for r in rows]
    extra = [] if a.no_trace else [replace(s, trace=True) for s in wanted if s.rows == 1]
    for s in wanted:
        extra += [replace(s, **v) for v in variants]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    clock = time.time()
    with concurrent.futures.ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        times = list(pool.map(build, wanted + extra))
    print(f"compiled {len(times)} kernels in {time.time() - clock:.1f} s", flush=True)
    result: dict[str, Any] = {
        "schema": 1, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "sources": wanted[0].program().hash(), "date": time.strftime("%Y-%m-%d"), "bandwidth": BANDWIDTH, "rows": [],
        "compile_s": max(times), "argv": sys.argv[1:],
    }  # fmt: skip
    good = True
    for model in a.models.split(","):
        weights: StepWeights | None = None
        for formats in a.formats.split(","):
            clock = time.time()
            torch.manual_seed(0)
            s = shape_of(model, formats)
            weights = random_weights(s) if weights is None else with_dense_formats(weights, s)
            b = DecodeCase.make(s, weights, max(contexts), max(rows))
            torch.cuda.synchronize()
            print(f"{model} {formats}: weights in {time.time() - clock:.1f} s", flush=True)
            for r in rows:
                s = shape_of(model, formats, r)
                d = b.step(s)
                verdict = {}
                for context, row_seq in [(2000, None)] + ([(600, [0] * r)] if r > 1 else []):
                    clock = time.time()
                    verdict = settle(b, d, context, row_seq)
                    shown = {k: f"{v:.1e}" for k, v in verdict["errors"].items()}
                    took = time.time() - clock
                    print(f"{model} {formats} rows {r} at {context}: {shown} {verdict} {took:.1f} s", flush=True)
                    good &= verdict["ok"]
                    if not verdict["ok"]:
                        print(f"REFUSED: {model} {formats} rows {r} is wrong; not timed", flush=True)
                        break
                if not verdict["ok"]:
                    continue
                for context in contexts if r == 1 else row_contexts:
                    try:
                        t = time_steps(d, context)
                    except Exception:
                        print("given up:", d.given_up(), flush=True)
                        raise
                    experts = verdict["experts_per_layer"]
                    ceiling = r * BANDWIDTH / bytes_read(s, context, experts)
                    row = {
                        "model": name_of(model), "formats": formats, "kv": a.kv, "rows": r, "context": context, **t,
                        "tokens_per_s": r * 1e6 / t["us"], "ceiling": ceiling,
                        "share": r * 1e6 / t["us"] / ceiling, "check": verdict,
                    }  # fmt: skip
                    result["rows"].append(row)
                    print(
                        f"{model} {formats:10} rows {r} @ {context:5}: {t['us']:7.1f} us "
                        f"({t['least']:.1f}-{t['most']:.1f}) "
                        f"{row['tokens_per_s']:7.1f} tok/s, ceiling {ceiling:.0f} ({100 * row['share']:.0f} %)",
                        flush=True,
                    )
                if r == 1 and not a.no_trace:
                    row = {"model": name_of(model), "formats": formats, "context": 2048, "phases": phases(b, s, 2048)}
                    result["rows"].append(row)
                    print("\n".join(decode_trace.lines(row["phases"])), flush=True)
            if 1 in rows:
                for v in variants:
                    d = b.step(replace(shape_of(model, formats), **v))
                    verdict = settle(b, d, 2000)
                    if not verdict["ok"]:
                        print(f"REFUSED: variant {v} is wrong: {verdict}", flush=True)
                        good = False
                        continue
                    t = time_steps(d, 2048)
                    print(f"variant {formats} {v}: {t} ok {verdict['ok']}", flush=True)
                    result["rows"].append(
                        {
                            "model": name_of(model),
                            "formats": formats,
                            "variant": str(v),
                            "context": 2048,
                            **t,
                            "ok": verdict["ok"],
                        }
                    )
            del b
        del weights
        torch.cuda.empty_cache()
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / f"{a.name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(
        json.dumps(
            {**result, "rows": [{k: v for k, v in r.items() if k not in ("check", "phases")} for r in result["rows"]]}
        )
    )
    return 0 if good else 1


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    sys.exit(main())
