"""The engine's step on a GPU taken apart: launch, wait and the rest of the host, beside a graph that feeds itself.

    python -m halfbyte.lab.measure.engine_steps random:120b --preset fast --batches 1,32 --sampled

What the engine adds to bare replays, with several ways to sample. Around `launch` every hidden synchronisation is an
error. What a user gets in all is measured by `halfbyte bench`. The last line is the receipt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from halfbyte import gates as gates_
from halfbyte.engine.batch import Batch
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.runner import StepHandle
from halfbyte.lab import environment, receipts
from halfbyte.lab.entry import finish, line_of, numbers
from halfbyte.lab.measure.device_timing import time_graph
from halfbyte.lab.measure.engine_timing import random_prompts
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss

WARM_UP, CHECKED = 8, 16  # tokens in front of the timed steps, and steps behind them
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "temperature 1": {"temperature": 1.0},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9}, "top-k 40": {"temperature": 1.0, "top_k": 40},
}  # fmt: skip

Launch = Callable[[Batch], StepHandle]


def with_sync_errors(launch: Launch) -> Launch:
    """`launch` with every hidden synchronisation of torch an error."""

    def run(batch: Batch) -> StepHandle:
        with warnings.catch_warnings():  # torch warns that this mode does not see everything
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


def time_steps(core: EngineCore, model: GptOss, rows: int, depth: int, count: int, sampling: dict[str, Any]) -> Any:
    """(microseconds of the steps, of their launches, of their waits; tokens a second)."""
    params = SamplingParams(max_tokens=count + WARM_UP + 2 * CHECKED, ignore_eos=True, **sampling)
    for prompt in random_prompts(model.config.vocab, rows, depth, rows):
        core.submit(Request(prompt, params))
    while any(len(s.tokens) < depth + WARM_UP for g in core.groups.values() for s in g.seqs):
        core.step()  # prompts, capture, first tokens
    launch = core.runner.launch
    launches: list[float] = []
    waits: list[float] = []

    def timed(batch: Batch) -> StepHandle:
        start = time.perf_counter()
        handle = launch(batch)
        launches.append(1e6 * (time.perf_counter() - start))
        result = handle.result

        def waited() -> Any:
            began = time.perf_counter()
            outcome = result()
            waits.append(1e6 * (time.perf_counter() - began))
            return outcome

        handle.result = waited  # type: ignore[method-assign]
        return handle

    core.runner.launch = timed  # type: ignore[method-assign]
    torch.cuda.synchronize()
    times, tokens = [], 0
    began = time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        tokens += sum(len(d.tokens) for _, d in core.step())
        times.append(1e6 * (time.perf_counter() - start))
    rate = tokens / (time.perf_counter() - began)
    core.runner.launch = with_sync_errors(launch)  # type: ignore[method-assign, assignment]
    for _ in range(CHECKED):
        core.step()
    core.runner.launch = launch  # type: ignore[method-assign]
    for id in list(core.groups):
        core.cancel(id)
    while core.has_work:
        core.step()
    return times, launches, waits, rate


def measure_steps(
    model: GptOss, name: load.ModelName, preset: str, rows: int, depth: int, count: int, samplings: list[str]
) -> list[Result]:
    shape = {"tg": count, "depth": depth, "concurrency": rows}
    label = name.label.removeprefix("random:")
    bare = time_graph(model, Cell("decode", label, preset, path="graph", shape=shape), rows, depth, count, 3)
    options = EngineOptions(gates=model.gates, max_seqs=64, max_context=depth + count + 512, kv_gib=8.0)
    core, _, _ = core_for(model, load.tokenizer_of(name), options)
    results = [bare]
    for sampling in samplings:  # the prompts are in the prefix cache after the first
        cell = Cell("decode", label, preset, path="engine", shape=shape | {"sampling": sampling})
        times, launches, waits, rate = time_steps(core, model, rows, depth, count, SAMPLINGS[sampling])
        rest = statistics.median(times) - statistics.median(launches) - statistics.median(waits)
        figures = [
            figure("speed", "tok/s", rate), figure("step", "us", times), figure("launch", "us", launches),
            figure("wait", "us", waits),
        ]  # fmt: skip
        if not bare.refused:
            figures.append(figure("of_graph", "ratio", rate / bare.figure("speed").value))
        quiet = Check("no hidden synchronisation", True)  # otherwise a step would have failed
        results.append(Result(cell, tuple(figures), (quiet,), detail={"other_host_us": rest}))
    core.close()
    model.release_kv()
    torch.cuda.empty_cache()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:120b")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--batches", type=numbers, default=[1, 32])
    parser.add_argument("--depth", type=int, default=2048)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--sampled", action="store_true", help="not only greedily")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    torch.set_grad_enabled(False)
    name = load.resolve_model(args.model)
    model = load.load_model(name, gates_.PRESETS[args.preset].gates, device="cuda")
    samplings = list(SAMPLINGS) if args.sampled else ["greedy"]
    results: list[Result] = []
    for rows in args.batches:
        rows_results = measure_steps(model, name, args.preset, rows, args.depth, args.count, samplings)
        print(*map(line_of, rows_results), sep="\n", flush=True)
        results += rows_results
    engine = receipts.sources_of([receipts.PACKAGE / "engine" / "build.py"], ("kernels", "engine"))
    measured = receipts.hashes(engine) | receipts.measured(model.plan.record.phases())
    return finish("python -m halfbyte.lab.measure.engine_steps", results, measured, args.out)


if __name__ == "__main__":
    sys.exit(main())
