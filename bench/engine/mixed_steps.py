"""Steps in which a prompt is read while others decode: what the host and the device spend on them.

    python -m bench run mixed-steps --set rows=576,1163 --set streams=64 --set rounds=3

A step of `rows` rows (so many of them decode, the rest is one prompt's) is timed as it is queued eagerly and as a
captured graph, which is what the device needs alone, and taken apart kernel by kernel. Then the engine serves `streams`
requests that are asked again as soon as they end, without HTTP: for every step how long the host scheduled, built,
launched and waited, how long the device worked on it and how long it had stood idle before. Compares nothing: that is
done by `halfbyte bench`. What clients get is measured by `python -m bench run serving`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.measurement import Run, engine_sources, measurement, option
from halfbyte import gates as gates_
from halfbyte.engine.batch import Batch
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.observer import Stage, StepObserver
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.scheduled_step import ScheduledStep
from halfbyte.engine.warm_up import warm_up
from halfbyte.errors import StepError
from halfbyte.lab import timeline
from halfbyte.lab.measure.device_timing import Cache, device_us, fill, random_tokens
from halfbyte.lab.measure.engine_timing import random_prompts
from halfbyte.lab.profile import Span
from halfbyte.lab.result import Cell, Figure, Result, figure
from halfbyte.lab.trace import own_times
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss
from halfbyte.plan.step import Step

REPEATS = 12
PRODUCTS = ("qkv", "o", "gate_up", "down")  # of a layer, in order
SIZES = (64, 640, 1280, 2112)  # rows up to which steps are put together


def mixed_step(model: GptOss, cache: Cache, rows: int, decoding: int, context: int, seed: int) -> Step:
    """One row of each of the cache's first `decoding` sequences at `context`, and a prompt of the rest."""
    prompt, device = rows - decoding, model.device

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lengths = [context + 1] * decoding + [prompt]
    counts = [1] * decoding + [prompt]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    sequence = [i for i, n in enumerate(counts) for _ in range(n)]
    return Step(
        tokens=random_tokens(model, rows, seed).to(device),
        positions=ints([context] * decoding + list(range(prompt))), query_start=ints(starts), kv_lens=ints(lengths),
        row_sequence=ints(sequence), block_tables={k: t[: decoding + 1] for k, t in cache.tables.items()},
        logit_rows=ints([end - 1 for end in starts[1:]]), max_kv_len=max(lengths),
        singles=decoding,
    )  # fmt: skip


def time_alone(model: GptOss, cell: Cell, rows: int, decoding: int, context: int) -> Result:
    """Times of the device in a graph and eagerly, of the host that queues the step, and of every kernel."""
    cache = fill(model, decoding + 1, max(context + 64, rows))
    steps = [mixed_step(model, cache, rows, decoding, context, i) for i in range(3)]

    def run(i: int) -> Tensor:
        return model.forward(steps[i % 3])

    logits = run(0)
    if not bool(torch.isfinite(logits).all()):
        return Result(cell, refused="the logits are not numbers")
    queued, eager = [], []
    for i in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run(i)
        queued.append(1e3 * (time.perf_counter() - began))
        torch.cuda.synchronize()
        eager.append(1e3 * (time.perf_counter() - began))
    order = timeline.launch_order(lambda: run(0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(0)
    alone = [device_us(graph.replay, 2) / 1e3 for _ in range(REPEATS)]
    spans = timeline.match(order, timeline.device_kernels(lambda _: graph.replay(), 3), 3)
    kernels: dict[str, float] = {}
    for name, ms in _by_kernel(spans, model.config.layers):
        kernels[name] = kernels.get(name, 0.0) + ms / 3
    kernels = dict(sorted(kernels.items(), key=lambda item: -item[1])[:16])
    print(*(f"  {ms:8.3f} ms  {name}" for name, ms in kernels.items()), sep="\n", flush=True)
    figures = (figure("device", "ms", alone), figure("eager", "ms", eager), figure("queued", "ms", queued))
    return Result(cell, figures, detail={"kernels_ms": kernels})


def _by_kernel(spans: list[Span], layers: int) -> Iterator[tuple[str, float]]:
    """Every kernel's name and milliseconds; a layer's grouped products by what they multiply."""
    products = 0
    for span, us in own_times(spans)[0]:
        name = span.name[:48]
        if name == "grouped":
            position = products % (len(PRODUCTS) * layers + 1)
            name = "lm_head" if position == len(PRODUCTS) * layers else PRODUCTS[position % len(PRODUCTS)]
            products += 1
        yield name, us / 1e3


@dataclass
class TimedStep:
    """Milliseconds of one call of the engine's step, and of the step that it launched."""

    rows: int = 0
    sampled: int = 0
    ahead: bool = False  # launched while another was under way
    host: dict[str, float] = field(default_factory=dict)  # by part
    total: float = 0.0
    ended: float = 0.0  # by the clock
    events: tuple[Any, Any] | None = None  # around what it put on the device's queue
    busy: float = 0.0
    idle: float = 0.0  # of the device, in front of it

    @property
    def kind(self) -> str:
        if self.rows == self.sampled:
            return "decode"
        return f"mixed to {next((s for s in SIZES if self.rows <= s), self.rows)}"


class StepClock(StepObserver):
    """Times the stages of an engine's steps: on the host, and of a launch also on the device."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.steps, self.now = core, list[TimedStep](), TimedStep()
        core.observer = self

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        now, events = self.now, None
        if name == "launch":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        if events is not None:
            events[0].record()
        yield
        if events is not None:
            events[1].record()
            now.events = (events[0], events[1])
        now.host[name] = now.host.get(name, 0.0) + 1e3 * (time.perf_counter() - began)

    def launched(self, step: ScheduledStep, batch: Batch) -> None:
        self.now.rows, self.now.sampled = batch.rows, len(batch.samplers)
        self.now.ahead = batch.token_from is not None

    def step(self) -> list[Any]:
        self.now = TimedStep()
        began = time.perf_counter()
        outputs = self.core.step()
        self.now.ended = time.perf_counter()
        self.now.total = 1e3 * (self.now.ended - began)
        if self.now.events is not None:
            self.steps.append(self.now)
        return outputs

    def read(self) -> None:
        torch.cuda.synchronize()
        before: Any = None
        for step in self.steps:
            assert step.events is not None
            begin, end = step.events
            step.busy = begin.elapsed_time(end)
            step.idle = 0.0 if before is None else before.elapsed_time(begin)
            before = end


@dataclass
class LoopTimes:
    """What a closed loop was seen to do, in seconds."""

    begin: float = 0.0  # of the steady state
    end: float = 0.0
    firsts: list[float] = field(default_factory=list)  # from a request to its first token, the first requests left out
    generated: list[tuple[float, int]] = field(default_factory=list)  # when a step ended, and its tokens
    gaps: list[float] = field(default_factory=list)  # between two steps that gave a stream tokens, in the steady state
    answers: list[tuple[int, ...]] = field(default_factory=list)  # tokens of each request, in the order of asking

    @property
    def speed(self) -> float:
        return sum(n for at, n in self.generated if self.begin < at <= self.end) / (self.end - self.begin)


def play_loop(
    core: EngineCore, step: Callable[[], list[Any]], streams: int, rounds: int, prompt: int, tokens: int, seed: int = 1
) -> LoopTimes:
    """`streams` that ask again as soon as they have their answer.

    The steady state lasts from the first token of the last stream to the first token of the last request that was sent,
    as in `halfbyte.lab.measure.traffic.window`: whole turns, prompts as well as answers.
    """
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = iter(random_prompts(core.config.vocab, streams * rounds, prompt, seed))
    times = LoopTimes()
    requests: dict[str, tuple[int, int]] = {}
    sent: dict[str, float] = {}
    last: dict[str, float] = {}
    gaps: list[tuple[float, float]] = []
    answers: dict[tuple[int, int], list[int]] = {}

    def ask(stream: int, turn: int) -> None:
        request = Request(next(prompts), params, id=f"{stream}.{turn}")
        requests[request.id], sent[request.id] = (stream, turn), time.perf_counter()
        core.submit(request)

    for stream in range(streams):
        ask(stream, 0)
    while core.has_work:
        outputs = step()
        now = time.perf_counter()
        times.generated.append((now, sum(len(d.tokens) for _, d in outputs)))
        for id, delta in outputs:
            if delta.error is not None:
                raise StepError(delta.error)
            stream, turn = requests[id]
            answers.setdefault((turn, stream), []).extend(delta.tokens)
            if id in last:
                gaps.append((now, now - last[id]))
            else:
                if len(sent) == streams * rounds and id == next(reversed(sent)):
                    times.end = now
                if turn:
                    times.firsts.append(now - sent[id])
                elif len(last) + 1 == streams:
                    times.begin = now
            last[id] = now
            if delta.finish is not None and turn + 1 < rounds:
                ask(stream, turn + 1)
    times.gaps = [gap for at, gap in gaps if times.begin < at <= times.end]
    times.answers = [tuple(answers[key]) for key in sorted(answers)]
    return times


def closed_loop(core: EngineCore, cell: Cell, streams: int, rounds: int, prompt: int, tokens: int) -> list[Result]:
    """What those streams get, and the steps of their steady state taken apart."""
    clock = StepClock(core)
    try:
        times = play_loop(core, clock.step, streams, rounds, prompt, tokens)
    except StepError as e:
        return [Result(cell, refused=str(e))]
    clock.read()
    steady = [s for s in clock.steps if times.begin < s.ended <= times.end]
    results = [
        Result(cell, (
            figure("speed", "tok/s", times.speed), figure("first_token", "ms", [1e3 * s for s in times.firsts]),
            figure("step_p99", "ms", sorted(s.busy + s.idle for s in steady)[int(0.99 * len(steady))]),
            figure("busy", "%", 100 * sum(s.busy for s in steady) / sum(s.busy + s.idle for s in steady)),
        ))
    ]  # fmt: skip
    for kind in sorted({s.kind for s in steady}):
        some = [s for s in steady if s.kind == kind]
        parts = sorted({name for s in some for name in s.host})
        figures: list[Figure] = [
            figure("busy", "ms", [s.busy for s in some]), figure("idle", "ms", [max(0.0, s.idle) for s in some]),
            figure("rows", "tokens", [s.rows for s in some]), figure("host", "ms", [s.total for s in some]),
            *(figure(name, "ms", [s.host.get(name, 0.0) for s in some]) for name in parts),
        ]  # fmt: skip
        where = Cell(cell.kind, cell.model, cell.preset, path=cell.path, shape={**cell.shape, "steps": kind})
        share = sum(s.busy + s.idle for s in some) / sum(s.busy + s.idle for s in steady)
        detail = {
            "steps": len(some), "share_of_time": share, "idle_ms": sum(s.idle for s in some),
            "ahead": sum(s.ahead for s in some),
        }  # fmt: skip
        results.append(Result(where, tuple(figures), detail=detail))
    return results


@dataclass(frozen=True)
class Options:
    model: str = "random:120b"
    preset: str = "fast"
    rows: tuple[int, ...] = option((576, 1163), "of steps that are timed alone")
    decoding: int = option(63, "rows of them that decode")
    context: int = option(1200, "tokens of the sequences that decode")
    streams: tuple[int, ...] = (64,)
    beside: tuple[int, ...] = option((), "rows of a step that also decodes, each of these; empty: the engine's own")
    rounds: int = 3
    prompt: int = 1100
    tokens: int = 256


@measurement("mixed-steps", needs=("gpu",), seconds=120)
def mixed_steps(run: Run, options: Options) -> None:
    torch.set_grad_enabled(False)
    name = load.resolve_model(options.model)
    model = load.load_model(name, gates_.PRESETS[options.preset].gates, device="cuda")
    label = name.random or name.label
    for rows in options.rows:
        shape = {"rows": rows, "decoding": options.decoding, "context": options.context}
        cell = Cell("mixed step", label, options.preset, path="plan", shape=shape)
        run.measure(cell, partial(time_alone, model, cell, rows, options.decoding, options.context))
    model.release_kv()
    torch.cuda.empty_cache()
    core, _, _ = core_for(
        model, load.tokenizer_of(name), EngineOptions(gates=model.gates, max_seqs=64, max_context=16384, kv_gib=24.0)
    )
    warm_up(core, "fast")
    gc.collect()
    gc.freeze()
    for streams in options.streams:
        for beside in options.beside or (core.config.max_rows_with_decode,):
            burst = 0 if options.beside else core.config.max_rows_in_burst
            core = core.anew(replace(core.config, max_rows_with_decode=beside, max_rows_in_burst=burst))
            shape = {"pp": options.prompt, "tg": options.tokens, "concurrency": streams, "beside": beside}
            cell = Cell("closed loop", label, options.preset, path="engine", shape=shape)
            results = closed_loop(core, cell, streams, options.rounds, options.prompt, options.tokens)
            run.add(*results)
            print(*(f"{r.cell.label}: {r.detail}" for r in results if "steps" in r.detail), sep="\n", flush=True)
    core.close()
    run.sources |= engine_sources(model.plan.record.phases())
