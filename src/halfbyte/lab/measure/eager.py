"""A single sequence stepped eagerly, the host waiting for every token: a first look, and what the oracle costs.

No scheduler, no graph, no sampler on the device; what a user gets is measured in `engine_timing.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from halfbyte.lab.machine import device_roof, limit_threads, synchronize
from halfbyte.lab.measure.engine_timing import Work, speed_ceiling
from halfbyte.lab.result import Cell, Check, Result, figure, measure_cell
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.ops.sampling import greedy


def measure_eager(
    model: GptOss,
    works: Sequence[Work],
    repeats: int,
    *,
    cell: Cell,
    checks: tuple[Check, ...] = (),
    chunk: int = 512,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """One sequence, one step at a time, the host waiting for each: the oracle's speed, not a user's."""
    limit_threads(model.device, model.weights.nbytes)
    results = []
    for work in works:
        each = replace(cell, kind="prompt" if work.prompt else "decode", path="eager", shape=work.shape)
        progress(each.label)
        if work.concurrency != 1:
            result = Result(each, refused="one sequence at a time is all that --eager runs")
        elif all(c.ok for c in checks):
            result = measure_cell(each, partial(_result, model, work, each, repeats, chunk))
        else:
            result = Result(each)
        results.append(replace(result, checks=checks))
    return results


def _result(model: GptOss, work: Work, cell: Cell, repeats: int, chunk: int) -> Result:
    run = partial(_prefill, model, work.prompt) if work.prompt else partial(_decode, model, work.tokens)
    rates = [run(work.depth, chunk, seed) for seed in range(repeats + 1)][1:]
    experts = None if work.prompt else float(model.config.top_k)  # one row always touches as many
    ceiling = speed_ceiling(device_roof(model.device), model, work, experts)
    return Result(cell, (figure("speed", "tok/s", rates, ceiling),))


def _tokens(model: GptOss, n: int, seed: int) -> list[int]:
    return torch.randint(0, model.config.vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def _fill(sequence: SingleSequence, tokens: Sequence[int], chunk: int) -> torch.Tensor:
    logits = torch.empty(0)
    for i in range(0, len(tokens), chunk):
        logits = sequence.feed(tokens[i : i + chunk])
    return logits


def _prefill(model: GptOss, n: int, depth: int, chunk: int, seed: int) -> float:
    sequence = SingleSequence(model, depth + n)
    _fill(sequence, _tokens(model, depth, seed), chunk)
    tokens = _tokens(model, n, seed + 1000)
    synchronize(model.device)
    start = time.perf_counter()
    int(greedy(_fill(sequence, tokens, chunk)[0]))
    return n / (time.perf_counter() - start)


def _decode(model: GptOss, n: int, depth: int, chunk: int, seed: int) -> float:
    """Tokens/s over n - 1 intervals."""
    sequence = SingleSequence(model, depth + n + 1)
    logits = _fill(sequence, _tokens(model, max(depth, 1), seed), chunk)
    token = int(greedy(logits[0]))
    start = time.perf_counter()
    for _ in range(n - 1):
        token = int(greedy(sequence.feed([token])[0]))
    return (n - 1) / (time.perf_counter() - start)
