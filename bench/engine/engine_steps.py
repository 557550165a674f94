"""The engine's step on a GPU taken apart: launch, wait and the rest of the host, beside a graph that feeds itself.

    python -m bench run engine-steps --set batches=1,32

What the engine adds to bare replays, with several ways to sample. Around `launch` every hidden synchronisation is an
error. What a user gets in all is measured by `halfbyte bench`.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench.measurement import Run, engine_sources, measurement, option
from halfbyte import gates as gates_
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.observer import Stage, StepObserver
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
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


class SyncErrors(StepObserver):
    """Makes every hidden synchronisation of torch during a launch an error."""

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        if name != "launch":
            yield
            return
        with warnings.catch_warnings():  # torch warns that this mode does not see everything
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class StageTimes(StepObserver):
    """Microseconds of every stage of every step."""

    def __init__(self) -> None:
        self.us: dict[Stage, list[float]] = {"schedule": [], "build": [], "launch": [], "wait": []}

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.us[name].append(1e6 * (time.perf_counter() - start))


def time_steps(core: EngineCore, model: GptOss, rows: int, depth: int, count: int, sampling: dict[str, Any]) -> Any:
    """(microseconds of the steps, of their launches, of their waits; tokens a second)."""
    params = SamplingParams(max_tokens=count + WARM_UP + 2 * CHECKED, ignore_eos=True, **sampling)
    for prompt in random_prompts(model.config.vocab, rows, depth, rows):
        core.submit(Request(prompt, params))
    while any(len(s.tokens) < depth + WARM_UP for g in core.groups.values() for s in g.seqs):
        core.step()  # prompts, capture, first tokens
    core.observer = stages = StageTimes()
    torch.cuda.synchronize()
    times, tokens = [], 0
    began = time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        tokens += sum(len(d.tokens) for _, d in core.step())
        times.append(1e6 * (time.perf_counter() - start))
    rate = tokens / (time.perf_counter() - began)
    core.observer = SyncErrors()
    for _ in range(CHECKED):
        core.step()
    core.observer = None
    for id in list(core.groups):
        core.cancel(id)
    while core.has_work:
        core.step()
    return times, stages.us["launch"], stages.us["wait"], rate


def measure_steps(
    model: GptOss, name: load.ModelName, preset: str, rows: int, depth: int, count: int, samplings: list[str]
) -> list[Result]:
    shape = {"tg": count, "depth": depth, "concurrency": rows}
    label = name.random or name.label
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


@dataclass(frozen=True)
class Options:
    model: str = "random:120b"
    preset: str = "fast"
    batches: tuple[int, ...] = (1, 32)
    depth: int = 2048
    count: int = option(160, "timed steps")
    sampled: bool = option(True, "every way to sample, not only the greedy one")


@measurement("engine-steps", needs=("gpu",), seconds=120)
def engine_steps(run: Run, options: Options) -> None:
    torch.set_grad_enabled(False)
    name = load.resolve_model(options.model)
    model = load.load_model(name, gates_.PRESETS[options.preset].gates, device="cuda")
    samplings = list(SAMPLINGS) if options.sampled else ["greedy"]
    for rows in options.batches:
        run.add(*measure_steps(model, name, options.preset, rows, options.depth, options.count, samplings))
    run.sources |= engine_sources(model.plan.record.phases())
