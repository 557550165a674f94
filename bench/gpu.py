"""The GPU path end to end on any CUDA machine: correctness first, then pp and tg beside their ceilings.

    python bench/gpu.py --check --models 120b,20b --presets exact,balanced,fast

Correctness: the embedded model through the GPU plan against the reference on the CPU (teacher-forced logits), graphs
against eager (tokens), and its held-out problems. Speed: random weights of the true shapes, other random tokens each
run, routing spread over experts (printed). Medians with spread; the last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from halfbyte import gates as gates_
from halfbyte.engine.graphs import DecodeGraph
from halfbyte.lab import environment
from halfbyte.lab.bench import device_roof
from halfbyte.model import ready
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.solo import Solo, generate
from halfbyte.plan.step import Step
from halfbyte.roofline import decode_ceiling, prefill_ceiling, unique_experts

CUDA = torch.device("cuda")


def tokens(model: GptOss, n: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab, (n,), generator=g, dtype=torch.int32)


# ---- correctness ----------------------------------------------------------------------------------------------------


def check(result: dict[str, Any], preset: str, per_task: int) -> None:
    gates = gates_.PRESETS[preset].gates
    name = ready.resolve(None)
    cpu, gpu = ready.load(name, gates), ready.load(name, gates, device=CUDA)
    tok = ready.tokenizer_of(name)
    text = tok.encode("The quick count of apples is 12. Then 7 more come, and 3 are eaten. How many are left? " * 12)[
        :300
    ]
    rows = []
    for chunks in ([300], [100, 50, 30, 8, 4, 1, 1, 1], [1] * 20):
        a, b = Solo(cpu, 512), Solo(gpu, 512)
        at, ours, theirs = 0, [], []
        for n in chunks:
            ours.append(b.feed(text[at : at + n], all_logits=True).float().cpu())
            theirs.append(a.feed(text[at : at + n], all_logits=True))
            at += n
        x, y = torch.cat(ours), torch.cat(theirs)
        error = float((x - y).norm() / y.norm())
        top2 = y.topk(2).values
        margin = top2[:, 0] - top2[:, 1]
        noise = float((x - y).abs().max())
        agree = x.argmax(-1) == y.argmax(-1)
        clear = margin > 2 * noise
        rows.append(
            {
                "chunks": chunks[:4],
                "error": error,
                "top1": float(agree.float().mean()),
                "clear": float(clear.float().mean()),
            }
        )
        print(
            f"check {preset} chunks {chunks[:4]}: error {error:.1e}, top-1 {float(agree.float().mean()):.3f}",
            flush=True,
        )
        assert bool(agree[clear].all()), "a clear token differs"
        assert error < 0.05, error
    eager = list(generate(gpu, text[:100], 32, stop=()))
    graph = DecodeGraph(gpu, 1, 8, feed_back=True)
    solo = Solo(gpu, 512)
    first = int(solo.feed(text[:100])[0].argmax())
    graph.capture()
    for kind in ("sliding", "full"):
        graph.step.block_tables[kind].copy_(solo.tables[kind])
    graph.step.tokens.fill_(first)
    graph.step.positions.fill_(100)
    graph.step.kv_lens.fill_(101)
    replayed = [first]
    for _ in range(31):
        graph.replay()
        replayed.append(int(graph.step.tokens[0]))
    assert replayed == eager, (replayed, eager)
    print(f"check {preset}: graph and eager tokens equal", flush=True)
    phases = {r: sorted(gpu.plan.record.phases(r)) for r in gpu.plan.selection.chosen}
    result["check"][preset] = {"logits": rows, "graph_equals_eager": True, "phases": phases}
    del gpu, cpu
    if per_task:
        from halfbyte.engine.api import Engine
        from halfbyte.engine.request import SamplingParams
        from halfbyte.evals.suite import Suite

        with Engine(gates=gates, device="cuda") as engine:
            report = Suite("tiny", 0, per_task).run(
                engine.tokenizer,
                lambda p, n: [c.tokens for c in engine.generate(p, SamplingParams(temperature=0.0, max_tokens=n))],
            )
        print(report.table(), flush=True)
        result["check"][preset]["eval"] = {k: v for k, v in report.to_json().items() if k != "wrong"}


# ---- speed ----------------------------------------------------------------------------------------------------------


def fill(model: GptOss, rows: int, context: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool for `rows` sequences of up to `most` tokens with random keys and values in it; both block tables."""
    page = model.spec.page_size
    blocks = -(-most // page)
    pool = model.allocate_kv(1 + 2 * rows * blocks)
    g = torch.Generator(device=CUDA).manual_seed(0)
    for part in torch.split(pool, 64):
        noise = torch.randn(part.shape, generator=g, device=CUDA) * 0.5
        part.copy_(noise.to(part.dtype))
    pages = torch.arange(1, 1 + 2 * rows * blocks, dtype=torch.int32, device=CUDA).view(2, rows, blocks)
    return pages[0].contiguous(), pages[1].contiguous()


def decode(model: GptOss, rows: int, context: int, count: int = 96) -> dict[str, Any]:
    sliding, full = fill(model, rows, context, context + count + 64)
    graph = DecodeGraph(model, rows, sliding.shape[1], feed_back=True)
    graph.capture()
    graph.step.block_tables["sliding"].copy_(sliding)
    graph.step.block_tables["full"].copy_(full)
    times, seen = [], []
    for run in range(4):
        graph.step.tokens.copy_(tokens(model, rows, run))
        graph.step.positions.fill_(context)
        graph.step.kv_lens.fill_(context + 1)
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        for _ in range(count - 1):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / (count - 1))
        seen.append(len(set(graph.step.tokens.tolist())))
    assert bool(torch.isfinite(graph.logits).all()), "the logits are not numbers"
    ms = statistics.median(times[1:])
    ceiling = decode_ceiling(device_roof(CUDA), model.config, model.spec.formats, context, rows, model.spec.kv_dtype)
    rate = rows * 1e3 / ms
    return {
        "test": f"tg @ {context}, c={rows}", "tokens_per_s": rate, "us_per_step": ms * 1e3,
        "spread_us": (max(times[1:]) - min(times[1:])) * 1e3, "ceiling": ceiling.tokens_per_second,
        "share": rate / ceiling.tokens_per_second, "distinct_tokens": min(seen),
        "valid": rate < ceiling.tokens_per_second, "expected_experts": unique_experts(model.config, rows),
    }  # fmt: skip


def prefill(model: GptOss, n: int, chunk: int) -> dict[str, Any]:
    sliding, full = fill(model, 1, 0, n)
    times = []
    experts: list[int] = []
    for run in range(4):
        ids = tokens(model, n, run).to(CUDA)
        steps = []
        for at in range(0, n, chunk):
            m = min(chunk, n - at)
            steps.append(
                Step(
                    tokens=ids[at : at + m],
                    positions=torch.arange(at, at + m, dtype=torch.int32, device=CUDA),
                    query_start=torch.tensor([0, m], dtype=torch.int32, device=CUDA),
                    kv_lens=torch.tensor([at + m], dtype=torch.int32, device=CUDA),
                    row_sequence=torch.zeros(m, dtype=torch.int32, device=CUDA),
                    block_tables={"sliding": sliding, "full": full},
                    logit_rows=torch.tensor([m - 1], dtype=torch.int32, device=CUDA),
                    max_kv_len=at + m,
                )
            )
        torch.cuda.synchronize()
        start = time.perf_counter()
        for step in steps:
            logits = model.forward(step)
        token = int(logits[0].argmax())
        times.append(time.perf_counter() - start)
        experts.append(token)
    seconds = statistics.median(times[1:])
    roof = prefill_ceiling(device_roof(CUDA), model.config, model.spec.formats, n)
    rate = n / seconds
    return {
        "test": f"pp{n}", "chunk": chunk, "tokens_per_s": rate, "ttft_ms": seconds * 1e3,
        "spread_ms": (max(times[1:]) - min(times[1:])) * 1e3, "ceiling": roof.tokens_per_second, "bound": roof.bound,
        "share": rate / roof.tokens_per_second, "valid": rate < roof.tokens_per_second,
    }  # fmt: skip


def agree(model: GptOss) -> dict[str, Any]:
    """The same position through the three regimes: the kernels of each are checked against one another."""
    ids = tokens(model, 161, 7).tolist()
    found: dict[str, torch.Tensor] = {}
    for name, parts in (("prefill", [161]), ("batch", [129, 32]), ("decode", [160, 1]), ("verify", [157, 4])):
        solo, at = Solo(model, 192), 0
        for n in parts:
            logits = solo.feed(ids[at : at + n])
            at += n
        found[name] = logits[0].float()
    base = found["prefill"]
    return {
        "test": "agree", "std": float(base.std()),
        "errors": {k: float((v - base).norm() / base.norm()) for k, v in found.items()},
        "argmax": {k: int(v.argmax()) for k, v in found.items()},
    }  # fmt: skip


def speed(result: dict[str, Any], shape: str, preset: str, args: argparse.Namespace) -> None:
    gates = gates_.PRESETS[preset].gates
    start = time.perf_counter()
    model = ready.load(ready.resolve(f"random:{shape}"), gates, device=CUDA)
    torch.cuda.synchronize()
    loaded = time.perf_counter() - start
    print(f"{shape} {preset}: {model.weights.nbytes / 1e9:.1f} GB in {loaded:.1f} s", flush=True)
    rows: list[dict[str, Any]] = [attempt(agree, model)]
    print(rows[0], flush=True)
    for depth in args.depths:
        rows.append(attempt(decode, model, 1, depth))
    for c in args.concurrency:
        rows.append(attempt(decode, model, c, 128))
    for n in args.pp:
        rows.append(attempt(prefill, model, n, args.chunk))
    for row in rows:
        print(f"{shape} {preset} {row}", flush=True)
    result["speed"].append(
        {
            "model": shape, "preset": preset, "rows": rows, "load_s": loaded,
            "phases": {r: list(p) for r, p in model.plan.selection.chosen.items()},
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9, "weights_gb": model.weights.nbytes / 1e9,
        }
    )  # fmt: skip


def attempt(work: Any, model: GptOss, *args: int) -> dict[str, Any]:
    """A figure, or why there is none: one failing case must not cost the others."""
    try:
        return dict(work(model, *args))
    except Exception as e:
        return {"test": f"{work.__name__}{args}", "failed": f"{type(e).__name__}: {e}"[:400]}
    finally:
        model._pool = None
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",") if n]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="correctness on the embedded model first")
    parser.add_argument("--per-task", type=int, default=0, help="with --check: held-out problems of each task")
    parser.add_argument("--models", default="120b")
    parser.add_argument("--presets", default="fast")
    parser.add_argument("--depths", type=numbers, default=[512, 2048, 8192])
    parser.add_argument("--concurrency", type=numbers, default=[8, 32, 64])
    parser.add_argument("--pp", type=numbers, default=[512, 2048, 8192])
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    result: dict[str, Any] = {"environment": environment.collect(), "check": {}, "speed": []}
    presets = args.presets.split(",")
    try:
        if args.check:
            for preset in presets:
                check(result, preset, args.per_task)
        for shape in filter(None, args.models.split(",")):
            for preset in presets:
                speed(result, shape, preset, args)
                gc.collect()
                torch.cuda.empty_cache()
    finally:
        text = json.dumps(result, default=str)
        if args.out:
            args.out.write_text(text, encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()
