"""The plan alone: one sequence stepped eagerly, the host waiting for every step, as llama-bench measures llama.cpp.

No scheduler, no graph, no sampler: steps of random tokens are made first and then run. What a user gets is measured in
`engine_timing.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from halfbyte.lab.machine import device_roof, synchronize
from halfbyte.lab.measure.engine_timing import TimedWork, speed_ceiling
from halfbyte.lab.result import Cell, Check, Result, figure, measure_cell
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.plan.step import Step


def measure_eager(
    model: GptOss,
    works: Sequence[TimedWork],
    repeats: int,
    *,
    cell: Cell,
    checks: tuple[Check, ...] = (),
    chunk: int = 512,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """One sequence, one step at a time, the host waiting for each: the plan's speed, not a user's."""
    results = []
    for work in works:
        work_cell = replace(cell, kind="prompt" if work.prompt else "decode", path="eager", shape=work.shape)
        progress(work_cell.label)
        if work.concurrency != 1:
            result = Result(work_cell, refused="one sequence at a time is all that --eager runs")
        elif all(c.ok for c in checks):
            result = measure_cell(work_cell, partial(_result, model, work, work_cell, repeats, chunk))
        else:
            result = Result(work_cell)
        results.append(replace(result, checks=checks))
    return results


def _result(model: GptOss, work: TimedWork, cell: Cell, repeats: int, chunk: int) -> Result:
    device_roof(model.device, model.weights.nbytes)
    run = partial(_prefill, model, work.prompt) if work.prompt else partial(_decode, model, work.tokens)
    rates = [run(work.depth, chunk, seed) for seed in range(repeats + 1)][1:]
    experts = None if work.prompt else float(model.config.top_k)  # one row always touches as many
    ceiling = speed_ceiling(device_roof(model.device, model.weights.nbytes), model, work, experts)
    return Result(cell, (figure("speed", "tok/s", rates, ceiling),))


def _tokens(model: GptOss, n: int, seed: int) -> list[int]:
    return torch.randint(0, model.config.vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def _steps(model: GptOss, sequence: SingleSequence, count: int, rows: int, seed: int) -> list[Step]:
    """Random tokens, so many to a step, made before the clock starts."""
    tokens = _tokens(model, count, seed)
    return [sequence.step(tokens[i : i + rows]) for i in range(0, count, rows)]


def _run(model: GptOss, steps: Sequence[Step]) -> float:
    """Seconds; the host waits for every step."""
    start = time.perf_counter()
    for step in steps:
        model.forward(step)
        synchronize(model.device)
    return time.perf_counter() - start


def _prefill(model: GptOss, n: int, depth: int, chunk: int, seed: int) -> float:
    sequence = SingleSequence(model, depth + n)
    _run(model, _steps(model, sequence, depth, chunk, seed))
    return n / _run(model, _steps(model, sequence, n, chunk, seed + 1000))


def _decode(model: GptOss, n: int, depth: int, chunk: int, seed: int) -> float:
    """`n` steps, counted like llama-bench's, of one random token each, none of them sampled."""
    sequence = SingleSequence(model, depth + n)
    _run(model, _steps(model, sequence, depth, chunk, seed))
    return n / _run(model, _steps(model, sequence, n, 1, seed + 1000))
