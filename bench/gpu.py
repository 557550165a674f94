"""The GPU path end to end on any CUDA machine: correctness first, then pp and tg beside their ceilings.

    python bench/gpu.py --full                          # everything below, for 120b at preset fast
    python bench/gpu.py --check --models 120b,20b --presets exact,balanced,fast
    python bench/gpu.py --phases --models 120b --depths "" --concurrency "" --pp ""

Correctness: the embedded model through the GPU plan against the reference on the CPU (teacher-forced logits), graphs
against eager (tokens), and its held-out problems. Speed: random weights of the true shapes, regimes first compared
with one another on two of their layers (one that differs is not timed), other random tokens each run, pages of its
own for every stream, distinct experts per layer counted from the router's choices. `--sustain` decodes for seconds and
says what the card draws meanwhile: speed that is bound by power falls. `--serve` runs the engine itself:
time to first token (p50, p99) and total speed with distinct prompts. `--phases` times every phase alone over M rows;
`--require-native` fails where the plan is not the native path. Medians with spread; the last line is JSON, which
carries the phases that ran and the hash of every source behind them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

from halfbyte import gates as gates_  # noqa: E402
from halfbyte.engine.graphs import USUAL_SIZES, DecodeGraph  # noqa: E402
from halfbyte.errors import UsageError  # noqa: E402
from halfbyte.lab import environment, receipts  # noqa: E402
from halfbyte.lab.measure import device_timing, engine_timing, phase_timing  # noqa: E402
from halfbyte.model import load  # noqa: E402
from halfbyte.model.gpt_oss import GptOss  # noqa: E402
from halfbyte.model.single_sequence import SingleSequence, generate  # noqa: E402

CUDA = torch.device("cuda")
AGREE = {
    "bf16": 0.05,
    "f32": 1e-4,
}  # relative, between regimes on two layers; 0.2 where activations are rounded further
FULL = {
    "depths": [512, 2048, 8192, 32768], "tg": [32, 128], "concurrency": list(USUAL_SIZES), "pp": [512, 2048, 8192],
    "pp_at": [2048, 8192, 32768], "serve": list(USUAL_SIZES), "check": True,
}  # fmt: skip


# ---- correctness ----------------------------------------------------------------------------------------------------


def check(result: dict[str, Any], preset: str, activation: str | None, per_task: int) -> None:
    gates = gates_.parse({"activation": activation}, env={}, preset=preset)
    name = load.resolve_model(None)
    cpu, gpu = load.load_model(name, gates), load.load_model(name, gates, device=CUDA)
    tok = load.tokenizer_of(name)
    text = tok.encode("The quick count of apples is 12. Then 7 more come, and 3 are eaten. How many are left? " * 12)[
        :300
    ]
    rows = []
    for chunks in ([300], [100, 50, 30, 8, 4, 1, 1, 1], [1] * 20):
        a, b = SingleSequence(cpu, 512), SingleSequence(gpu, 512)
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
    solo = SingleSequence(gpu, 512)
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
    remember(result, gpu)
    del gpu, cpu
    if per_task:
        from halfbyte.engine.python_api import Engine
        from halfbyte.engine.request import SamplingParams
        from halfbyte.evals.suite import Suite

        with Engine(gates=gates, device="cuda") as engine:
            report = Suite("tiny", 0, per_task).run(
                engine.tokenizer,
                lambda p, n: [c.tokens for c in engine.generate(p, SamplingParams(temperature=0.0, max_tokens=n))],
            )
        print(report.table(), flush=True)
        result["check"][preset]["eval"] = {k: v for k, v in report.to_json().items() if k != "wrong"}


def remember(result: dict[str, Any], model: GptOss) -> None:
    """The receipt's hashes: of every file behind every phase of this plan."""
    result["measured"] |= receipts.measured({b.phase for bound in model.plan.bound.values() for b in bound})


# ---- speed ----------------------------------------------------------------------------------------------------------


def agree(model: GptOss) -> dict[str, Any]:
    """The same positions through the three regimes, whose kernels share no product: each is checked against the others.

    Two layers of the model and its head: in 36 random layers one rounding that falls the other way chooses other
    experts, and the logits of two right kernels differ by a third.
    """
    w = model.weights
    short = replace(w, config=w.config.with_(layers=2, layer_kinds=w.config.layer_kinds[:2]), layers=w.layers[:2])
    two = GptOss(short, model.gates)
    errors: dict[str, list[float]] = {}
    for seed in range(9):
        ids = device_timing.random_tokens(model, 161, seed).tolist()
        found: dict[str, torch.Tensor] = {}
        for name, parts in (("prefill", [161]), ("batch", [129, 32]), ("decode", [160, 1]), ("verify", [159, 2])):
            solo, at = SingleSequence(two, 192), 0
            for n in parts:
                logits = solo.feed(ids[at : at + n])
                at += n
            found[name] = logits[0].float()
        base = found["prefill"]
        for name in ("batch", "decode", "verify"):
            errors.setdefault(name, []).append(float((found[name] - base).norm() / base.norm()))
    middle = {name: statistics.median(e) for name, e in errors.items()}
    used = {two.spec.activation, *two.spec.activations.values()}
    bound = max(AGREE.get(a, 0.2) for a in used)
    return {"test": "agree", "layers": 2, "errors": middle, "bound": bound, "right": max(middle.values()) < bound}


def measure(result: dict[str, Any], shape: str, preset: str, args: argparse.Namespace) -> None:
    """Every activation asked for, on the same weights."""
    asked = [gates_.parse({"activation": a}, env={}, preset=preset) for a in args.activation or [None]]
    start = time.perf_counter()
    model = load.load_model(load.resolve_model(f"random:{shape}"), asked[0], device=CUDA)
    torch.cuda.synchronize()
    loaded = time.perf_counter() - start
    print(f"{shape} {preset}: {model.weights.nbytes / 1e9:.1f} GB in {loaded:.1f} s", flush=True)
    figures(result, model, shape, preset, args, loaded)
    for gates in asked[1:]:
        other = GptOss(model.weights, gates)
        if other.plan.selection.layouts != model.plan.selection.layouts:
            raise SystemExit(f"--activation {gates.activation} wants weights in other layouts: measure it by itself.")
        print(f"{shape} {preset}: the same weights with --activation {gates.activation}", flush=True)
        figures(result, other, shape, preset, args, loaded)


def figures(
    result: dict[str, Any], model: GptOss, shape: str, preset: str, args: argparse.Namespace, loaded: float
) -> None:
    gates, name = model.gates, load.resolve_model(f"random:{shape}")
    if args.require_native and (reasons := phase_timing.not_native(model)):
        raise SystemExit(f"{shape} {preset} is not the native path: {'; '.join(reasons)}")
    part: dict[str, Any] = {
        "model": shape, "preset": preset, "gates": gates.changes(), "rows": [], "load_s": loaded,
        "phases": {r: list(p) for r, p in model.plan.selection.chosen.items()},
        "native": "required and found" if args.require_native else "not asked",
    }  # fmt: skip
    result["speed"].append(part)
    remember(result, model)

    def row(work: Callable[..., dict[str, Any]], *given: Any) -> None:
        found = attempt(work, model, *given)
        part["rows"].append(found)
        print(f"{shape} {preset} {found}", flush=True)

    if not args.no_agree:
        row(agree)
        if not part["rows"][-1].get("right", False):
            print(f"REFUSED: regimes of {shape} {preset} differ; not timed", flush=True)
            result["wrong"] = True
            return
    for depth in args.depths:
        for count in args.tg:
            row(device_timing.decode, 1, depth, count)
    for c in args.concurrency:
        row(device_timing.decode, c, 128, args.tg[-1])
    for n in args.pp:
        row(device_timing.prefill, n, args.chunk)
    for depth in args.pp_at:
        row(device_timing.prefill, 2048, args.chunk, depth)
    for c in args.serve:
        prompt, count = (2048, 32) if c == 1 else (128, 128)
        row(engine_timing.serve, load.tokenizer_of(name), c, prompt, count, max(3, 20 // c))
    for c in args.concurrency if args.sustain else []:
        row(device_timing.sustained, c, 2048 if c == 1 else 128, args.sustain)
    if args.phases:
        part["isolated"] = []
        for m in args.rows:
            for found in attempts(phase_timing.phases, model, m, args.phase_context):
                part["isolated"].append(found)
                print(f"{shape} {preset} {found}", flush=True)
    part |= {"peak_gb": torch.cuda.max_memory_allocated() / 1e9, "weights_gb": model.weights.nbytes / 1e9}


def attempt(work: Callable[..., dict[str, Any]], model: GptOss, *args: Any) -> dict[str, Any]:
    """A figure, or why there is none: one failing case must not cost the others."""
    return attempts(lambda *given: [work(*given)], model, *args, name=f"{work.__name__}")[0]


def attempts(
    work: Callable[..., list[dict[str, Any]]], model: GptOss, *args: Any, name: str = "phases"
) -> list[dict[str, Any]]:
    try:
        return work(model, *args)
    except Exception as e:
        shown = tuple(a for a in args if isinstance(a, int))
        reason = f"{type(e).__name__}: {e}"[:400]
        return [{"test": f"{name}{shown}", "phase": name, "rows": args[0] if args else 0, "failed": reason}]
    finally:
        model.release_kv()
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",") if n]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every figure of the protocol, correctness included")
    parser.add_argument("--check", action="store_true", help="correctness on the embedded model first")
    parser.add_argument("--per-task", type=int, default=0, help="with --check: held-out problems of each task")
    parser.add_argument("--models", default="120b")
    parser.add_argument("--presets", default="fast")
    parser.add_argument(
        "--activation", action="append", help="as the flag of the same name (prefill=fp8); again for another run"
    )
    parser.add_argument("--depths", type=numbers, default=[512, 2048, 8192])
    parser.add_argument("--tg", type=numbers, default=[128], help="tokens generated in each decode figure")
    parser.add_argument("--concurrency", type=numbers, default=[8, 32, 64])
    parser.add_argument("--pp", type=numbers, default=[512, 2048, 8192])
    parser.add_argument("--pp-at", type=numbers, default=[], help="pp2048 with so many tokens in the cache")
    parser.add_argument("--serve", type=numbers, default=[], help="streams through the engine: TTFT and total speed")
    parser.add_argument(
        "--sustain", type=float, default=0.0, help="so many seconds of decode of each --concurrency, with watts and MHz"
    )
    parser.add_argument("--no-agree", action="store_true", help="leave out the same position through all regimes")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--phases", action="store_true", help="every phase alone, over --rows")
    parser.add_argument("--rows", type=numbers, default=list(phase_timing.ROWS))
    parser.add_argument("--phase-context", type=int, default=2048, help="context of up to 64 rows in --phases")
    parser.add_argument("--require-native", action="store_true", help="fail where the plan is not the native path")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    if args.full:
        for name, value in FULL.items():
            if getattr(args, name) == parser.get_default(name):
                setattr(args, name, value)
    torch.set_grad_enabled(False)
    result: dict[str, Any] = {
        "bench": "gpu", "schema": 2, "environment": environment.collect(), "argv": sys.argv[1:], "measured": {},
        "check": {}, "speed": [],
    }  # fmt: skip
    presets = args.presets.split(",")
    try:
        if args.check:
            for preset in presets:
                check(result, preset, (args.activation or [None])[0], args.per_task)
        for shape in filter(None, args.models.split(",")):
            for preset in presets:
                measure(result, shape, preset, args)
                gc.collect()
                torch.cuda.empty_cache()
    except UsageError as error:
        raise SystemExit(f"gpu.py: {error}") from None
    finally:
        text = json.dumps(result, default=str)
        if args.out:
            args.out.write_text(text, encoding="utf-8")
        print(text)
    if result.get("wrong"):
        sys.exit(1)


if __name__ == "__main__":
    main()
