"""The engine on a GPU: does it mean the same as on a CPU, and what does it cost beside the bare graph?

    python bench/engine_gpu.py --answers answers.json --per-task 4                 # on any machine: the CPU's answers
    python bench/engine_gpu.py --eval --answers answers.json --jobs 6              # on a GPU: compared with them
    python bench/engine_gpu.py --speed random:120b --preset fast --batches 1,32    # on a GPU

`--eval`: the embedded model's held-out problems through `EngineCore` and the plan of this GPU, for every preset and
activation format, with graphs and without. A case named `padded` has idle heads and experts added (the same function),
which is the shape the CUDA decode kernel wants, and answers four problems at a time, so that this kernel decodes all of
them. Answers are compared with those of the reference on a CPU at the same gates; where one differs, the margin between
the two tokens at the first difference is computed on the CPU. Then some are asked again with torch's synchronisation
checks as errors around `launch`.

`--speed`: tokens per second of the engine beside a graph that feeds itself, the host's time in a step, and steps with
those checks. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

from halfbyte import gates as gates_  # noqa: E402
from halfbyte.engine.build import core_for  # noqa: E402
from halfbyte.engine.device_runner import DeviceRunner  # noqa: E402
from halfbyte.engine.engine import EngineCore  # noqa: E402
from halfbyte.engine.graphs import USUAL_SIZES, DecodeGraph  # noqa: E402
from halfbyte.engine.options import EngineOptions  # noqa: E402
from halfbyte.engine.request import Request, SamplingParams  # noqa: E402
from halfbyte.evals.suite import MAX_TOKENS, Suite  # noqa: E402
from halfbyte.lab import environment, receipts  # noqa: E402
from halfbyte.lab.padded_model import PaddedSource  # noqa: E402
from halfbyte.model import checkpoint, load  # noqa: E402
from halfbyte.model.gpt_oss import GptOss, arch_of, choose  # noqa: E402
from halfbyte.model.single_sequence import SingleSequence  # noqa: E402

# (preset, activation): what the embedded model is asked as.
POINTS = [
    ("exact", "auto"), ("balanced", "auto"), ("fast", "auto"), ("balanced", "int8"), ("fast", "int8"), ("fast", "fp8"),
    ("fast", "mxfp8"), ("fast", "mxfp4"),
]  # fmt: skip
PADDED = [
    ("exact", "auto"), ("balanced", "auto"), ("fast", "auto"),
    ("fast", "prefill=fp8"),  # prompts through the fp8 tensor cores; an idle head's columns of o are groups of zeros
]  # fmt: skip
AT_ONCE = 4  # problems of a padded case that are answered together


def gates_of(preset: str, activation: str, eager: bool = False) -> gates_.Gates:
    flags = {"activation": activation} | ({"graphs": "off"} if eager else {})
    return gates_.parse(flags, env={}, preset=preset)


def embedded(gates: gates_.Gates, device: torch.device, padded: bool) -> GptOss:
    if not padded:
        return load.load_model(load.resolve_model(None), gates, device=device)
    source = checkpoint.open_model(load.EMBEDDED)
    try:
        wide = PaddedSource(source)
        choice = choose(wide.config, gates, arch_of(device))
        weights = checkpoint.assemble(wide, layer_formats=gates.layer_formats)
    finally:
        source.close()
    weights = checkpoint.assemble(checkpoint.MemorySource(_moved(weights, device)), layouts=choice[2].layouts)
    return GptOss(weights, gates, choice=choice)


def _moved(weights: Any, device: torch.device) -> Any:
    for layer, role, tensor in list(weights.items()):
        setattr(weights if layer is None else weights.layers[layer], role, tensor.to(device))
    return weights


def core_of(model: GptOss, gates: gates_.Gates, **options: Any) -> EngineCore:
    name = load.resolve_model(None) if model.config.vocab < 100_000 else load.resolve_model("random:120b")
    return core_for(model, load.tokenizer_of(name), EngineOptions(gates=gates, **options))[0]


def complete(core: EngineCore, prompts: list[list[int]], most: int) -> list[list[int]]:
    out: dict[str, list[int]] = {}
    for p in prompts:
        request = Request(p, SamplingParams(temperature=0.0, max_tokens=most))
        out[request.id] = []
        core.submit(request)
    while core.has_work:
        for id, delta in core.step():
            if delta.finish == "error":
                raise SystemExit(f"a request failed: {delta.error}")
            out[id] += delta.tokens
    return list(out.values())


# ---- meaning --------------------------------------------------------------------------------------------------------


def ask(model: GptOss, preset: str, activation: str, per_task: int, padded: bool, eager: bool) -> dict[str, Any]:
    gates, device = gates_of(preset, activation, eager), model.device.type
    start = time.perf_counter()
    suite = Suite("tiny", 0, per_task)
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    prompts = [item.prompt for item in suite.items(tokenizer)]
    room = {"kv_gib": 2.0} if device == "cuda" else {}
    together = AT_ONCE if padded else 64
    core = core_of(model, gates, max_context=max(map(len, prompts)) + MAX_TOKENS, max_seqs=together, **room)
    loaded = time.perf_counter()
    answers = complete(core, prompts, MAX_TOKENS)
    told = iter(answers)
    report = suite.run(tokenizer, lambda ps, n: [next(told) for _ in ps])
    done = time.perf_counter()
    clean = None if device != "cuda" else undisturbed(core, prompts[:AT_ONCE])
    core.close()
    phases = {regime: sorted(model.plan.record.phases(regime)) for regime in model.plan.selection.chosen}
    return {
        "preset": preset, "activation": activation, "padded": padded, "eager": eager, "device": device,
        "right": {t: s.right for t, s in report.tasks.items()}, "accuracy": report.accuracy,
        "well_formed": report.well_formed, "phases": phases, "ready_s": loaded - start, "run_s": done - loaded,
        "tokens": sum(map(len, answers)), "answers": answers, "no_hidden_synchronisation": clean,
    }  # fmt: skip


def undisturbed(core: EngineCore, prompts: list[list[int]]) -> bool | str:
    """The same problems again and again give the same answers, the last time with every hidden wait an error."""
    first = [complete(core, prompts, MAX_TOKENS) for _ in range(2)][-1]  # everything is compiled and captured
    core.runner.launch = checked(core.runner.launch)  # type: ignore[method-assign]
    try:
        return complete(core, prompts, MAX_TOKENS) == first
    except SystemExit as e:
        return str(e)


def compare(mine: dict[str, Any], theirs: dict[str, Any], per_task: int) -> dict[str, Any]:
    """Equal answers, and of the others the margin on the CPU at the first difference."""
    suite = Suite("tiny", 0, per_task)
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    items = suite.items(tokenizer)
    differ = []
    model: GptOss | None = None
    for item, a, b in zip(items, mine["answers"], theirs["answers"], strict=True):
        if a == b:
            continue
        at = next(i for i, (x, y) in enumerate(zip([*a, -1], [*b, -1], strict=False)) if x != y)
        model = model or embedded(gates_of(mine["preset"], mine["activation"]), torch.device("cpu"), False)
        prefix = item.prompt + b[:at]
        logits = SingleSequence(model, len(prefix) + 1).feed(prefix)[0].float()
        margin = float(logits[b[at]] - logits[a[at]]) if at < min(len(a), len(b)) else None
        differ.append({"task": item.problem.task, "token": at, "margin": margin, "spread": float(logits.std())})
    same = len(items) - len(differ)
    return {"problems": len(items), "equal": same, "share": same / len(items), "differ": differ[:40]}


def evaluate(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Every case in a process of its own (compilers run beside each other), `jobs` at a time."""
    known = json.loads(args.answers.read_text(encoding="utf-8"))
    if known["asked"] != asked():
        raise SystemExit(f"{args.answers} holds answers of another model or to other problems; make it again.")
    cases = [(p, a, False) for p, a in POINTS] + [(p, a, True) for p, a in PADDED]
    if args.only:
        wanted = args.only.split(",")
        cases = [c for c in cases if c[0] in wanted or c[1] in wanted or ("padded" in wanted and c[2])]
    running: list[tuple[tuple[Any, ...], subprocess.Popen[bytes], Path]] = []
    found: list[dict[str, Any]] = []
    result["eval"] = []
    folder = Path(tempfile.mkdtemp())
    waiting = list(cases)
    until = time.monotonic() + args.seconds
    while waiting or running:
        while waiting and len(running) < args.jobs:
            case = waiting.pop(0)
            out = folder / f"{len(waiting)}.json"
            command = [
                sys.executable, __file__, "--one", json.dumps(case), "--out", str(out), "--per-task",
                str(known["per_task"]), "--answers", str(args.answers),
            ]  # fmt: skip
            running.append((case, subprocess.Popen(command, stdout=subprocess.DEVNULL), out))
        time.sleep(0.2)
        if time.monotonic() > until:
            found += [{"case": case, "failed": "not begun, no time was left"} for case in waiting]
            waiting.clear()
            for _, process, _ in running:
                process.kill()
                process.wait()
        for entry in [r for r in running if r[1].poll() is not None]:
            running.remove(entry)
            case, process, out = entry
            if out.exists():  # what it had found before it failed, too
                found += json.loads(out.read_text(encoding="utf-8"))
            if process.returncode:
                found.append({"case": case, "failed": f"exit code {process.returncode}"})
            for c in found[len(result["eval"]) :]:
                print(summary(c), flush=True)
            result["eval"] = list(found)
            save(args, result)
    result["asked"] = asked()
    ran = {name for c in found for names in c.get("phases", {}).values() for name in names}
    result["measured"] |= receipts.measured(ran)


def save(args: argparse.Namespace, result: dict[str, Any]) -> str:
    """So far: what was measured is not lost if the rest fails."""
    text = json.dumps(result, default=str)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    return text


def summary(c: dict[str, Any]) -> str:
    if "failed" in c:
        return f"{c['case']}: {c['failed']}"
    margins = ", ".join(
        f"{d['task']} {d['margin']:.3f}" for d in c["compared"]["differ"][:6] if d["margin"] is not None
    )
    return (
        f"{c['preset']:8} {c['activation']:5} {'padded' if c['padded'] else 'plain ':6} "
        f"{'eager' if c['eager'] else 'graph'}: equal {c['compared']['equal']}/{c['compared']['problems']}, accuracy "
        f"{100 * c['accuracy']:.1f} % (CPU {100 * c['cpu_accuracy']:.1f}), tasks with another score: "
        f"{c['tasks_that_differ'] or 'none'}, no waits: {c['no_hidden_synchronisation']}"
        f"{', tokens of graphs: ' + str(c['equals_graphs']) if c['eager'] else ''}, {c['run_s']:.1f} s"
        f"{'; margins ' + margins if margins else ''}"
    )


def one(args: argparse.Namespace) -> None:
    """One process's part: a model through graphs, and where presets are compared, eagerly too."""
    torch.set_num_threads(1)
    preset, activation, padded = json.loads(args.one)
    known = json.loads(args.answers.read_text(encoding="utf-8"))
    theirs = known["cases"][f"{preset} {activation}"]
    model = embedded(gates_of(preset, activation), torch.device("cuda"), padded)
    made: list[dict[str, Any]] = []
    graphs: list[list[int]] = []
    for eager in (False, True)[: 1 + ((preset, activation) in PADDED)]:
        mine = ask(model, preset, activation, args.per_task, padded, eager)
        mine["compared"] = compare(mine, theirs, args.per_task)
        mine["cpu_accuracy"] = theirs["accuracy"]
        mine["tasks_that_differ"] = {
            task: [right, theirs["right"][task]]
            for task, right in mine["right"].items()
            if right != theirs["right"][task]
        }
        answers = mine.pop("answers")
        if eager:
            mine["equals_graphs"] = answers == graphs
        graphs = answers
        made.append(mine)
        unfinished = args.out.with_suffix(".part")  # a process that is stopped leaves a whole file or none
        unfinished.write_text(json.dumps(made), encoding="utf-8")
        unfinished.replace(args.out)


def asked() -> str:
    """What the answers are answers to: the model's bytes and the prompts."""
    digest = hashlib.sha256()
    for path in sorted(load.EMBEDDED.glob("*.safetensors")):
        digest.update(path.read_bytes())
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    digest.update(json.dumps([i.prompt for i in Suite("tiny", 0, 2).items(tokenizer)]).encode())
    return digest.hexdigest()[:16]


def cpu_answers(args: argparse.Namespace) -> None:
    """Added to what the file holds, where that is of the same model and problems."""
    question = asked()
    whole: dict[str, Any] = {"asked": question, "per_task": args.per_task, "cases": {}}
    if args.answers.exists():
        before = json.loads(args.answers.read_text(encoding="utf-8"))
        if (before["asked"], before["per_task"]) == (question, args.per_task):
            whole = before
    found = whole["cases"]
    for preset, activation in dict.fromkeys(POINTS + PADDED):
        if args.only and not {preset, activation} & set(args.only.split(",")):
            continue
        model = embedded(gates_of(preset, activation), torch.device("cpu"), False)
        case = ask(model, preset, activation, args.per_task, False, True)
        found[f"{preset} {activation}"] = {k: case[k] for k in ("answers", "accuracy", "right")}
        print(f"{preset} {activation}: {100 * case['accuracy']:.1f} %, {case['run_s']:.0f} s", flush=True)
        args.answers.write_text(json.dumps(whole), encoding="utf-8")


# ---- speed ----------------------------------------------------------------------------------------------------------


def prompts_of(model: GptOss, count: int, length: int, seed: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab, (count, length), generator=g).tolist()


def engine_speed(core: EngineCore, model: GptOss, rows: int, depth: int, count: int, sampling: dict[str, Any]) -> Any:
    """`rows` requests of `depth` prompt tokens, decoded for `count` steps; times are of the steps in the middle."""
    params = SamplingParams(max_tokens=count, ignore_eos=True, **({"temperature": 0.0} | sampling))
    for p in prompts_of(model, rows, depth, rows):
        core.submit(Request(p, params))
    while any(len(s.tokens) < depth + 8 for g in core.groups.values() for s in g.seqs):
        core.step()  # prompts, capture, first tokens
    launch = core.runner.launch
    host: list[float] = []
    waits: list[float] = []

    def timed(batch: Any) -> Any:
        start = time.perf_counter()
        handle = launch(batch)
        host.append(time.perf_counter() - start)
        result = handle.result

        def waited() -> Any:
            began = time.perf_counter()
            found = result()
            waits.append(time.perf_counter() - began)
            return found

        handle.result = waited  # type: ignore[method-assign]
        return handle

    core.runner.launch = timed  # type: ignore[method-assign]
    torch.cuda.synchronize()
    times, done = [], 0
    steps = count - 40
    began = time.perf_counter()
    for _ in range(steps):
        start = time.perf_counter()
        done += sum(len(d.tokens) for _, d in core.step())
        times.append(time.perf_counter() - start)
    seconds = time.perf_counter() - began
    # The same steps once more with every hidden synchronisation an error, around the launch alone.
    core.runner.launch = checked(launch)  # type: ignore[method-assign]
    for _ in range(16):
        core.step()
    core.runner.launch = launch  # type: ignore[method-assign]
    runner = core.runner
    assert isinstance(runner, DeviceRunner)
    graphs = sorted(runner.graphs.captured) if runner.graphs is not None else []
    for id in list(core.groups):
        core.cancel(id)
    while core.has_work:
        core.step()
    return {
        "test": f"engine tg @ {depth}, c={rows}", "sampling": sampling, "sampler": runner.sampler.name,
        "tokens_per_s": done / seconds, "us_per_step": seconds / steps * 1e6,
        "median_us": statistics.median(times) * 1e6, "launch_host_us": statistics.median(host) * 1e6,
        "wait_us": statistics.median(waits) * 1e6,
        "other_host_us": (statistics.median(times) - statistics.median(host) - statistics.median(waits)) * 1e6,
        "graphs": graphs, "no_hidden_synchronisation": True,
    }  # fmt: skip


def checked(launch: Any) -> Any:
    def run(batch: Any) -> Any:
        with warnings.catch_warnings():  # torch warns that this mode does not see everything
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


def graph_speed(model: GptOss, rows: int, depth: int, count: int = 96) -> dict[str, Any]:
    """A graph that feeds itself: what the device can do without a host."""
    blocks = -(-(depth + count + 256) // model.spec.page_size)
    model.allocate_kv(1 + 2 * rows * blocks)
    graph = DecodeGraph(model, rows, blocks, feed_back=True)
    graph.capture()
    pages = torch.arange(1, 1 + 2 * rows * blocks, dtype=torch.int32, device="cuda").view(2, rows, blocks)
    graph.set_tables(pages[0], pages[1])
    times = []
    for run in range(3):
        graph.step.tokens.copy_(torch.tensor([p[0] for p in prompts_of(model, rows, 1, run)], dtype=torch.int32))
        graph.step.positions.fill_(depth)
        graph.step.kv_lens.fill_(depth + 1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / count)
    ms = statistics.median(times)
    model.release_kv()
    torch.cuda.empty_cache()
    return {"test": f"graph tg @ {depth}, c={rows}", "tokens_per_s": rows * 1e3 / ms, "us_per_step": ms * 1e3}


def speed(args: argparse.Namespace, result: dict[str, Any]) -> None:
    gates = gates_.PRESETS[args.preset].gates
    start = time.perf_counter()
    model = load.load_model(load.resolve_model(args.speed), gates, device="cuda")
    torch.cuda.synchronize()
    print(f"loaded in {time.perf_counter() - start:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    result["speed"] = {"model": args.speed, "preset": args.preset, "rows": rows}
    samplings: list[dict[str, Any]] = [{}]
    if args.sampled:
        samplings += [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 40}]
    for batch in args.batches:
        found = [graph_speed(model, batch, args.depth)]
        core = core_of(model, gates, max_seqs=64, max_context=args.depth + args.count + 256, kv_gib=8.0)
        for sampling in samplings:  # the prompts are in the prefix cache after the first
            found.append(engine_speed(core, model, batch, args.depth, args.count, sampling))
        core.close()
        model.release_kv()
        del core
        torch.cuda.empty_cache()
        for row in found[1:]:
            row["share_of_graph"] = row["tokens_per_s"] / found[0]["tokens_per_s"]
        for row in found:
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        rows += found
        result["measured"] |= receipts.measured(model.plan.record.phases())
        save(args, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, help="the CPU's answers: written, or read with --eval")
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--only", help="presets, activation formats or padded, comma-separated")
    parser.add_argument("--eval", action="store_true")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop what has not ended by then, keep the rest")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--speed", help="a model, for example random:120b")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--batches", type=lambda t: [int(n) for n in t.split(",")], default=[1, 32])
    parser.add_argument("--depth", type=int, default=2048)
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--sampled", action="store_true", help="also with temperature 1")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    assert all(b <= USUAL_SIZES[-1] for b in args.batches)
    if args.one:
        one(args)
        return
    if args.answers and not args.eval and not args.speed:
        torch.set_num_threads(1)
        cpu_answers(args)
        return
    if not args.eval and not args.speed:
        parser.error("say what to do: --answers FILE, --eval --answers FILE, or --speed MODEL")
    environment.need_gpu()
    mine = [receipts.PACKAGE / "engine" / "runner.py", receipts.PACKAGE / "plan" / "draw.py"]
    result: dict[str, Any] = {
        "bench": "engine", "schema": 1, "environment": environment.collect(),
        "measured": receipts.hashes(receipts.sources_of(mine, ("kernels", "engine"))),
    }  # fmt: skip
    if args.eval:
        evaluate(args, result)
    if args.speed:
        speed(args, result)
    print(save(args, result))


if __name__ == "__main__":
    main()
