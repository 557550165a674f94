"""Measures the spans of a profile: on a GPU from the driver's own timeline, on a CPU by a clock around every phase.

On a GPU a step runs once while every launch says what it is for (`plan.launches`); then many steps run as they do in
service (decode: replayed graphs; prompts: queued eagerly) and their kernels are matched by name and order. Kernels that
nobody here launched are torch's own and stand under "other". A kernel that runs a whole step is divided by the clocks
it reads itself (`decode_trace.py`). Timing under the profiler is kept apart from the undisturbed time of a step, which
stands beside it. Nothing is timed on zeros.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from halfbyte.engine.graphs import DecodeGraph
from halfbyte.errors import EngineError
from halfbyte.lab.machine import device_roof
from halfbyte.lab.measure import decode_trace
from halfbyte.lab.measure.device_timing import (
    Cache,
    decode_step,
    device_us,
    experts_touched,
    fill,
    prefill_step,
    random_tokens,
)
from halfbyte.lab.profile import LABELS, Profile, ProfileRow, Span, summarise
from halfbyte.lab.trace import Interval
from halfbyte.model.gpt_oss import GptOss
from halfbyte.ops.sampling import greedy
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import OTHER, SAMPLING, ordered
from halfbyte.plan.phase import OPERATIONS
from halfbyte.plan.step import Step
from halfbyte.roofline import Work, step_work

CATEGORIES = {"MoE": "moe", "attention": "attention", "router": "router", "other": "other"}  # else linear


def decode_profile(model: GptOss, tokens: int, depth: int, batch: int) -> Profile:
    cache = fill(model, batch, depth + tokens + 64)
    step = decode_step(model, cache, depth, 1)
    touched = experts_touched(model, step)
    work = step_work(
        model.config, model.spec.formats, batch, depth + 1, kv_dtype=model.spec.kv_dtype,
        experts_touched=None if touched is None else touched[0],
    )  # fmt: skip
    title = f"decode, {batch} row{'s' if batch > 1 else ''} at {depth}"
    run = _decode_on_gpu if model.device.type == "cuda" else _decode_on_cpu
    profile = run(model, step, cache, tokens, title, work)
    if touched is not None:
        profile.notes.append(f"{touched[0]:.1f} distinct experts a layer, counted ({touched[1]})")
    regime = model.plan.regime(step)
    profile.phases = {regime: list(dict.fromkeys(b.phase.name for b in model.plan.bound[regime]))}
    return profile


def prefill_profile(model: GptOss, n: int, runs: int = 3) -> Profile:
    cache = fill(model, 1, n)
    work = step_work(model.config, model.spec.formats, 1, n, new=n, logits=1, kv_dtype=model.spec.kv_dtype)
    steps = [prefill_step(model, cache, random_tokens(model, n, i), 0) for i in range(runs + 1)]
    gpu = device_roof(model.device, model.weights.nbytes)
    title = f"prompt of {n}"
    if model.device.type == "cpu":
        spans, step_us = _clocked(model, steps[0], lambda i: steps[1 + i % runs], runs)
        profile = summarise(title, n, spans, runs, step_us, work, gpu, "a clock around every phase")
    else:

        def run(i: int) -> None:
            greedy(model.forward(steps[1 + i % runs]))

        order = launch_order(lambda: run(0))
        host = _host_us(run, runs)
        step_us = _step_us(run, runs)
        spans = match(order, device_kernels(run, runs), runs)
        profile = summarise(title, n, spans, runs, step_us, work, gpu, "the driver's timeline, queued eagerly")
        profile.host_us["eager"] = host
    regime = model.plan.regime(steps[0])
    profile.phases = {regime: list(dict.fromkeys(b.phase.name for b in model.plan.bound[regime]))}
    return profile


# ---- CPU ------------------------------------------------------------------------------------------------------------


def _decode_on_cpu(model: GptOss, step: Step, cache: Cache, tokens: int, title: str, work: dict[str, Work]) -> Profile:
    spans, step_us = _clocked(model, step, lambda i: decode_step(model, cache, int(step.positions[0]), i + 2), tokens)
    gpu = device_roof(model.device, model.weights.nbytes)
    return summarise(title, step.rows, spans, tokens, step_us, work, gpu, "a clock around every phase")


def _clocked(model: GptOss, warm: Step, step_of: Callable[[int], Step], count: int) -> tuple[list[Span], float]:
    """Spans of `count` steps, and the mean microseconds of as many that were not traced."""
    steps = [step_of(i) for i in range(count)]
    greedy(model.forward(warm))
    start = time.perf_counter()
    for step in steps:
        greedy(model.forward(step))
    step_us = (time.perf_counter() - start) * 1e6 / count
    spans: list[Span] = []

    def note(row: ProfileRow, name: str, began: float) -> float:
        now = time.perf_counter()
        spans.append(Span(row, name, began * 1e6, now * 1e6))
        return now

    for step in steps:
        acts = Activations()
        now = time.perf_counter()
        for b in model.plan.walk(step, acts):
            now = note(ProfileRow.of(b.part), b.phase.name, now)
        greedy(acts.logits)
        note(ProfileRow.of(SAMPLING), "greedy", now)
    return spans, step_us


# ---- GPU ------------------------------------------------------------------------------------------------------------


def _decode_on_gpu(model: GptOss, step: Step, cache: Cache, tokens: int, title: str, work: dict[str, Work]) -> Profile:
    context = int(step.positions[0])
    whole_step = model.plan.bound[model.plan.regime(step)][0].phase.covers == OPERATIONS
    graph = DecodeGraph(model, step.rows, cache.blocks, feed_back=True)
    graph.capture()
    for kind, table in cache.tables.items():
        graph.step.block_tables[kind].copy_(table)

    order = launch_order(graph.run)

    def rewind() -> None:
        graph.step.tokens.copy_(random_tokens(model, step.rows, 3))
        graph.step.positions.fill_(context)
        graph.step.kv_lens.fill_(context + 1)

    def run(_: int) -> None:
        graph.replay()

    rewind()
    host = _host_us(run, tokens)
    rewind()
    step_us = device_us(graph.replay, tokens)
    rewind()
    spans = match(order, device_kernels(run, tokens), tokens)
    assert bool(torch.isfinite(graph.logits).all()), "the logits are not numbers"
    within, notes = None, []
    how = "the driver's timeline, graph replays"
    if whole_step:
        traced = decode_trace.trace(decode_trace.traced_step(model, cache, context))
        shares = decode_trace.shares(traced, model.config.layer_kinds)
        within = {
            ProfileRow.of(model.plan.bound["decode"][0].part): {row_labelled(name): us for name, us in shares.items()}
        }
        how = "clocks inside the kernel that runs the whole step; launches and gaps from the driver's timeline"
        notes += [
            f"the traced step took {traced['us']:.0f} us at {traced['clock_ghz']:.2f} GHz",
            "the kernel streams weights ahead, so a row whose weights came in its neighbour's time is one with it",
        ]
    profile = summarise(
        title, step.rows, spans, tokens, step_us, work, device_roof(model.device, model.weights.nbytes), how, within
    )
    profile.notes += notes
    profile.host_us["graph"] = host
    profile.host_us["eager"] = _host_us(lambda _: model.forward(step), min(tokens, 8))
    return profile


def row_labelled(label: str) -> ProfileRow:
    """The category of a part of the kernel that runs a whole step."""
    operations = tuple(op for name in label.split(" + ") for op in LABELS.get(name, ()))
    return ProfileRow(CATEGORIES.get(label, "linear"), operations)


def _host_us(run: Callable[[int], Any], count: int) -> float:
    """What the host spends per step on queueing it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(count):
        run(i)
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent * 1e6 / count


def _step_us(run: Callable[[int], Any], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(count):
        run(i)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / count


def match(order: Sequence[tuple[str, ProfileRow]], kernels: Sequence[Interval], steps: int) -> list[Span]:
    """Spans of some equal steps: the k-th kernel of a name does what the k-th launch of that name was for."""
    queues: dict[str, deque[ProfileRow]] = {}
    for name, row in order:
        queues.setdefault(name, deque()).append(row)
    counts = Counter(k.name for k in kernels)
    spans = []
    for kernel in kernels:
        queue = queues.get(kernel.name)
        if queue is None or counts[kernel.name] != len(queue) * steps:
            row = ProfileRow.of(OTHER)  # torch's own, or unknown
        else:
            row = queue[0]
            queue.rotate(-1)
        spans.append(Span(row, kernel.name, kernel.start, kernel.end))
    return spans


def launch_order(run: Callable[[], Any]) -> list[tuple[str, ProfileRow]]:
    """(kernel, row) of every launch of one run, once its kernels are compiled."""
    run()
    with ordered() as order:
        run()
    return [(image.name, ProfileRow.of(part)) for image, part in order]


def device_kernels(run: Callable[[int], Any], count: int) -> list[Interval]:
    """The device's timeline of `count` runs."""
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as traced:
        for i in range(count):
            run(i)
        torch.cuda.synchronize()
    kernels = [
        Interval(event.name.split("(")[0], float(event.time_range.start), float(event.time_range.end))
        for event in traced.events()
        if event.device_type.name == "CUDA"
    ]
    if not kernels:
        raise EngineError("the driver reported no kernel (CUPTI is not available here), so nothing can be profiled.")
    return sorted(kernels, key=lambda k: k.start)
