"""Steps of a model on a CUDA device without an engine, over full-size random caches: what the device could do alone.

Every run uses other random tokens, every sequence pages of its own, and the experts that timed sequences really touch
are counted from the router's choices. Knows no requests: what a user gets is measured in `engine_timing.py`, and these
figures stand beside those only under a name that says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfbyte.engine.graphs import DecodeGraph
from halfbyte.lab.machine import device_roof
from halfbyte.lab.measure.power import PowerMeter
from halfbyte.lab.result import Cell, FigureCeiling, Result, figure
from halfbyte.model.gpt_oss import GptOss
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import uncounted
from halfbyte.plan.phase import OPERATIONS
from halfbyte.plan.plan import Bound
from halfbyte.plan.step import REGIMES, Step
from halfbyte.roofline import decode_ceiling, prefill_ceiling, unique_experts


def random_tokens(model: GptOss, n: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab, (n,), generator=g, dtype=torch.int32)


def device_us(work: Callable[[], object], count: int) -> float:
    """Microseconds of one `work` on the stream, by events around `count` of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count


@dataclass(frozen=True)
class Cache:
    """A pool with random keys and values in every page, and the block tables of its sequences."""

    sliding: Tensor
    full: Tensor

    @property
    def blocks(self) -> int:
        return int(self.full.shape[1])

    @property
    def tables(self) -> dict[str, Tensor]:
        return {"sliding": self.sliding, "full": self.full}


def fill(model: GptOss, sequences: int, most: int) -> Cache:
    """Room for `sequences` of up to `most` tokens each; replaces the model's pool."""
    blocks = -(-most // model.spec.page_size)
    model.release_kv()  # the old pool must go before the new one comes
    pool = model.allocate_kv(1 + 2 * sequences * blocks)
    g = torch.Generator(device=model.device).manual_seed(0)
    for part in torch.split(pool, 64):
        part.copy_((torch.randn(part.shape, generator=g, device=model.device) * 0.5).to(part.dtype))
    pages = torch.arange(1, 1 + 2 * sequences * blocks, dtype=torch.int32, device=model.device)
    both = pages.view(2, sequences, blocks)
    return Cache(both[0].contiguous(), both[1].contiguous())


def decode_step(model: GptOss, cache: Cache, context: int, seed: int) -> Step:
    """One row of every sequence of the cache, at the end of its context."""
    rows = cache.full.shape[0]

    def ints(value: int) -> Tensor:
        return torch.full((rows,), value, dtype=torch.int32, device=model.device)

    rows_from = torch.arange(rows + 1, dtype=torch.int32, device=model.device)
    return Step(
        tokens=random_tokens(model, rows, seed).to(model.device), positions=ints(context), query_start=rows_from,
        kv_lens=ints(context + 1), row_sequence=rows_from[:rows].clone(), block_tables=cache.tables,
        logit_rows=rows_from[:rows].clone(), max_kv_len=cache.blocks * model.spec.page_size,
    )  # fmt: skip


def prefill_step(model: GptOss, cache: Cache, ids: Tensor, start: int) -> Step:
    """Some rows of the cache's first sequence, from `start` on; logits of the last."""
    n, device = ids.shape[0], model.device

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Step(
        tokens=ids.to(device), positions=torch.arange(start, start + n, dtype=torch.int32, device=device),
        query_start=ints(0, n), kv_lens=ints(start + n),
        row_sequence=torch.zeros(n, dtype=torch.int32, device=device),
        block_tables={kind: table[:1] for kind, table in cache.tables.items()},
        logit_rows=ints(n - 1), max_kv_len=start + n,
    )  # fmt: skip


def experts_touched(model: GptOss, step: Step) -> tuple[float, str] | None:
    """Distinct experts per layer that the rows of this step choose, counted on the device; and whose router chose.

    A kernel that runs a whole step keeps its choices to itself; then the same rows run through the phases of the next
    regime, whose router reads the same weights. One row needs no counting: its choices differ. None where no phase
    shows its choices."""
    if step.rows == 1:
        return float(model.config.top_k), "one row"
    for regime in REGIMES[REGIMES.index(model.plan.regime(step)) :]:
        bound = model.plan.bound[regime]
        if bound[0].phase.choices:
            with uncounted():
                choices = choices_of(model, step)
            return statistics.fmean(len(torch.unique(layer)) for layer in choices), f"router of {regime}"
        if bound[0].phase.covers == OPERATIONS:
            continue
        with uncounted():  # maybe of another regime: no part of what is timed
            counts = _count(model, step, bound)
        if counts:
            return statistics.fmean(torch.stack(counts).tolist()), f"router of {regime}"
    return None


def choices_of(model: GptOss, step: Step) -> Tensor:
    """[layers, rows, top_k], from a phase that runs all layers and can tell."""
    acts = Activations()
    model.plan.bound[model.plan.regime(step)][0].launch(replace(step, choices=True), acts)
    return acts.choices.long()


def _count(model: GptOss, step: Step, bound: Sequence[Bound]) -> list[Tensor]:
    """Distinct experts of every layer whose choices are left where they can be read."""
    acts = Activations()
    counts: list[Tensor] = []
    for b in bound:
        b.launch(step, acts)
        if "router" in b.phase.covers and acts.has("topk_ids"):
            seen = torch.zeros(model.config.experts, dtype=torch.int32, device=model.device)
            seen[acts.topk_ids.long().flatten()] = 1
            counts.append(seen.sum())
    return counts


def capture_decode(model: GptOss, cache: Cache, context: int) -> tuple[DecodeGraph, Callable[[int], None]]:
    """A captured step of the cache's sequences, and what begins them anew at `context` with other tokens."""
    rows = cache.full.shape[0]
    graph = DecodeGraph(model, rows, cache.blocks, feed_back=True)
    graph.capture()
    for kind, table in cache.tables.items():
        graph.step.block_tables[kind].copy_(table)

    def begin(run: int) -> None:
        graph.step.tokens.copy_(random_tokens(model, rows, run))
        graph.step.positions.fill_(context)
        graph.step.kv_lens.fill_(context + 1)

    return graph, begin


def time_graph(model: GptOss, cell: Cell, rows: int, context: int, count: int, repeats: int) -> Result:
    """tg`count` at `context`, one row of each of `rows` sequences: bare replays of a graph that feeds itself.

    What the device can do without a host, a scheduler or a sampler; no user gets it. The experts of the ceiling are
    those of the timed sequences: each run is repeated up to its last step, which is counted instead of timed."""
    cache = fill(model, rows, context + count + 64)
    graph, begin = capture_decode(model, cache, context)
    times = []
    touched: list[tuple[float, str]] = []
    for run in range(repeats + 1):
        begin(run)
        graph.replay()
        times.append(device_us(graph.replay, count - 1))
        begin(run)
        for _ in range(count - 1):
            graph.replay()
        counted = experts_touched(model, graph.step)  # what the last timed step was given
        touched += [] if counted is None else [counted]
    if not bool(torch.isfinite(graph.logits).all()):
        return Result(cell, refused="the logits are not numbers")
    experts = statistics.fmean(n for n, _ in touched) if touched else None
    gpu = device_roof(model.device)
    best = decode_ceiling(
        gpu, model.config, model.spec.formats, context + count // 2, rows, model.spec.kv_dtype, experts
    ).tokens_per_second
    ceiling = FigureCeiling(best, f"{gpu.name}: {gpu.note}")
    detail = {
        "experts_per_layer": experts, "experts_from": touched[0][1] if touched else "not visible",
        "experts_expected": unique_experts(model.config, rows),
    }  # fmt: skip
    steps = times[1:]
    figures = (figure("speed", "tok/s", [rows * 1e6 / us for us in steps], ceiling), figure("step", "us", steps))
    return Result(cell, figures, detail=detail)


def time_sustained(model: GptOss, cell: Cell, rows: int, context: int, seconds: float) -> Result:
    """Decode for so long, beginning anew with other tokens every 128: speed of the second half, and what it draws."""
    count, runs, clock = 128, 0, time.perf_counter
    graph, begin = capture_decode(model, fill(model, rows, context + count + 64), context)
    begin(0)
    graph.replay()
    torch.cuda.synchronize()
    rates: list[float] = []
    with PowerMeter() as meter:
        start = clock()
        while clock() - start < seconds:
            begin(runs)
            rates.append(rows * 1e6 / device_us(graph.replay, count))
            runs += 1
    if not bool(torch.isfinite(graph.logits).all()):
        return Result(cell, refused="the logits are not numbers")
    late = figure("speed", "tok/s", rates[len(rates) // 2 :])
    drawn = meter.summary()
    figures = [late, figure("first", "tok/s", rates[0]), figure("least", "tok/s", min(rates))]
    if drawn:
        figures.append(figure("power", "W", drawn["watts"]))
    joules = drawn["watts"] / late.value if drawn else None
    return meter.judge(
        Result(cell, tuple(figures), detail={"steps": runs * count, "joules_per_token": joules, **drawn})
    )


def time_chunks(model: GptOss, cell: Cell, n: int, chunk: int, depth: int, repeats: int) -> Result:
    """pp`n` in chunks behind `depth` tokens of the cache, step by step without an engine, until the token is here."""
    cache = fill(model, 1, depth + n)
    times = []
    for run in range(repeats + 1):
        ids = random_tokens(model, n, run)
        steps = [prefill_step(model, cache, ids[at : at + chunk], depth + at) for at in range(0, n, chunk)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for step in steps:
            logits = model.forward(step)
        int(logits[0].argmax())
        times.append(time.perf_counter() - start)
    if not bool(torch.isfinite(logits).all()):
        return Result(cell, refused="the logits are not numbers")
    gpu = device_roof(model.device)
    roof = prefill_ceiling(gpu, model.config, model.spec.formats, n, depth)
    ceiling = FigureCeiling(roof.tokens_per_second, f"{gpu.name}: {gpu.note}; bound by {roof.bound}")
    figures = (
        figure("speed", "tok/s", [n / s for s in times[1:]], ceiling),
        figure("ttft", "ms", [1e3 * s for s in times[1:]]),
    )
    return Result(cell, figures, detail={"chunk": chunk})
