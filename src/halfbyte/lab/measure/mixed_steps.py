"""Steps in which a prompt is read while others decode: what the host and the device spend on them.

    python -m halfbyte.lab.measure.mixed_steps random:120b --preset fast --rows 576,1163 --streams 64 --rounds 3

A step of --rows rows (so many of them decode, the rest is one prompt's) is timed as it is queued eagerly and as a
captured graph, which is what the device needs alone, and taken apart kernel by kernel. Then the engine serves --streams
requests that are asked again as soon as they end, without HTTP: for every step how long the host scheduled, built,
launched and waited, how long the device worked on it and how long it had stood idle before. Compares nothing: that is
done by `halfbyte bench`. What clients get is measured by `halfbyte.lab.measure.serving`. The last line is the receipt.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte import gates as gates_
from halfbyte.engine.batch import Batch
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.runner import StepHandle
from halfbyte.engine.warm_up import warm_up
from halfbyte.lab import environment, receipts, timeline
from halfbyte.lab.entry import finish, line_of, numbers
from halfbyte.lab.measure.device_timing import Cache, device_us, fill, random_tokens
from halfbyte.lab.measure.engine_timing import random_prompts
from halfbyte.lab.profile import Span, own_time
from halfbyte.lab.result import Cell, Figure, Result, figure, measure_cell
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
    """Of the device in a graph and eagerly, of the host that queues it, and of every kernel."""
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
    for span, us in own_time(spans):
        name = span.name[:48]
        if name == "grouped":
            place = products % (len(PRODUCTS) * layers + 1)
            name = "lm_head" if place == len(PRODUCTS) * layers else PRODUCTS[place % len(PRODUCTS)]
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
    events: tuple[Any, Any] | None = None  # around what it put on the device's queue
    busy: float = 0.0
    idle: float = 0.0  # of the device, in front of it

    @property
    def kind(self) -> str:
        if self.rows == self.sampled:
            return "decode"
        return f"mixed to {next((s for s in SIZES if self.rows <= s), self.rows)}"


class TimedHandle:
    """Of a launched step: what is waited for it belongs to the call that waits."""

    def __init__(self, handle: StepHandle, clock: Clock) -> None:
        self.result = clock.part("wait", handle.result)


class Clock:
    """Looks on while an engine steps."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.steps, self.now = core, list[TimedStep](), TimedStep()
        self._launch: Callable[[Batch], StepHandle] = type(core.runner).launch.__get__(core.runner)
        core.runner.launch = self.launch  # type: ignore[method-assign]
        core.scheduler.schedule = self.part("schedule", core.scheduler.schedule)  # type: ignore[method-assign]
        core.builder.build = self.part("build", core.builder.build)  # type: ignore[method-assign]

    def part(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*args, **named)
            finally:
                self.now.host[name] = self.now.host.get(name, 0.0) + 1e3 * (time.perf_counter() - began)

        return timed

    def launch(self, batch: Batch) -> StepHandle:
        now = self.now
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        begin.record()
        handle = self._launch(batch)
        end.record()
        now.host["launch"] = 1e3 * (time.perf_counter() - began)
        now.rows, now.sampled, now.events = batch.rows, len(batch.samplers), (begin, end)
        now.ahead = batch.token_from is not None
        return TimedHandle(handle, self)

    def step(self) -> list[Any]:
        self.now = TimedStep()
        began = time.perf_counter()
        outputs = self.core.step()
        self.now.total = 1e3 * (time.perf_counter() - began)
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


def closed_loop(core: EngineCore, cell: Cell, streams: int, rounds: int, prompt: int, tokens: int) -> list[Result]:
    """What `streams` get that ask again as soon as they have their answer; steady state as `serving` has it."""
    clock = Clock(core)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = iter(random_prompts(190_000, streams * rounds, prompt, 1))
    asked: dict[str, tuple[int, int]] = {}
    firsts: list[float] = []
    sent: dict[str, float] = {}
    counted, begin, end = 0, 0.0, 0.0

    def ask(stream: int, turn: int) -> None:
        request = Request(next(prompts), params, id=f"{stream}.{turn}")
        asked[request.id], sent[request.id] = (stream, turn), time.perf_counter()
        core.submit(request)

    for stream in range(streams):
        ask(stream, 0)
    started: set[str] = set()
    generated: list[tuple[float, int]] = []
    first_step = 0
    while core.has_work:
        outputs = clock.step()
        now = time.perf_counter()
        generated.append((now, sum(len(d.tokens) for _, d in outputs)))
        for id, delta in outputs:
            if delta.error is not None:
                return [Result(cell, refused=delta.error)]
            stream, turn = asked[id]
            if id not in started:
                started.add(id)
                if turn:
                    firsts.append(1e3 * (now - sent[id]))
                elif len(started) == streams:
                    begin, first_step = now, len(clock.steps)
            if delta.finish is not None and turn + 1 < rounds:
                ask(stream, turn + 1)
                end = time.perf_counter()
    clock.read()
    counted = sum(n for at, n in generated if begin < at <= end)
    last = next(i for i, (at, _) in enumerate(generated) if at > end)
    steady = clock.steps[first_step:last]
    results = [
        Result(cell, (
            figure("speed", "tok/s", counted / (end - begin)), figure("first_token", "ms", firsts),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:120b")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--rows", type=numbers, default=[576, 1163], help="of steps that are timed alone")
    parser.add_argument("--decoding", type=int, default=63, help="rows of them that decode")
    parser.add_argument("--context", type=int, default=1200, help="tokens of those that decode")
    parser.add_argument("--streams", type=numbers, default=[64])
    parser.add_argument(
        "--beside", type=numbers, default=[], help="rows of a step in which others decode: each of these"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=1100)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    torch.set_grad_enabled(False)
    name = load.resolve_model(args.model)
    model = load.load_model(name, gates_.PRESETS[args.preset].gates, device="cuda")
    label = name.label.removeprefix("random:")
    results: list[Result] = []

    def keep(some: list[Result]) -> None:
        print(*(f"{line_of(r)} {r.detail if 'steps' in r.detail else ''}" for r in some), sep="\n", flush=True)
        results.extend(some)

    for rows in args.rows:
        shape = {"rows": rows, "decoding": args.decoding, "context": args.context}
        cell = Cell("mixed step", label, args.preset, path="plan", shape=shape)
        keep([measure_cell(cell, partial(time_alone, model, cell, rows, args.decoding, args.context))])
    model.release_kv()
    torch.cuda.empty_cache()
    options = EngineOptions(gates=model.gates, max_seqs=64, max_context=16384, kv_gib=24.0)
    core, _, _ = core_for(model, load.tokenizer_of(name), options)
    warm_up(core, "fast")
    gc.collect()
    gc.freeze()
    for streams in args.streams:
        for beside in args.beside or [core.config.beside_decode]:
            core = core.anew()
            core.scheduler.most_rows_beside_decode = beside
            shape = {"pp": args.prompt, "tg": args.tokens, "concurrency": streams, "beside": beside}
            cell = Cell("closed loop", label, args.preset, path="engine", shape=shape)
            keep(closed_loop(core, cell, streams, args.rounds, args.prompt, args.tokens))
    core.close()
    engine = receipts.sources_of([receipts.PACKAGE / "engine" / "build.py"], ("kernels", "engine"))
    measured = receipts.hashes(engine) | receipts.measured(model.plan.record.phases())
    return finish("python -m halfbyte.lab.measure.mixed_steps", results, measured, args.out)


if __name__ == "__main__":
    sys.exit(main())
