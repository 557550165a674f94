"""What a user of the engine gets: prompt and decode speed at any depth and concurrency, and the time to a first token.

The same work for every client: an `EngineCore` in this process (scheduler, pages, graphs, device sampling; no HTTP in
the way), a server over HTTP (`http_client.py`), or a fake of known speed. Prompts are random tokens, different in every
run; answers are greedy and nothing stops early. Cells run in rounds, without their warm-up (`rounds.py`).

    ppN @ dD, c=C   C prompts of N tokens behind D that the prefix cache holds, until the last has its first token
    tgN @ dD, c=C   N tokens each for C requests of D tokens; only while all of them decode

Each figure stands beside its ceiling. Experts are counted on the tokens of the timed steps, by the router that sees
them again afterwards: a kernel that runs a whole step keeps its choices to itself. Nothing is compared here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.errors import StepError, UsageError
from halfbyte.lab.ceilings import ceilings_of
from halfbyte.lab.machine import device_roof
from halfbyte.lab.measure.device_timing import choices_of, fill, prefill_step
from halfbyte.lab.measure.power import PowerMeter
from halfbyte.lab.measure.rounds import Measured, RunLog, Runs, in_rounds
from halfbyte.lab.result import Ceiling, Cell, Check, Figure, Result, figure, measure_cell
from halfbyte.lab.statistics import median
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.plan.activations import Activations
from halfbyte.roofline import Gpu

SHORTEST_S = 5e-4  # that tokens come in: less is a client that was not there when they came
ATTEMPTS = 3  # of a busy machine's client to be there
CHUNK = 2048  # rows of a step that only counts experts
LEAST = 128  # rows of the last one: a step of very few may be one kernel, which shows no choices


@dataclass(frozen=True)
class Work:
    """One cell: a prompt to read or tokens to generate, behind `depth` tokens, by so many requests at once."""

    prompt: int = 0
    tokens: int = 0
    depth: int = 0
    concurrency: int = 1

    @property
    def shape(self) -> dict[str, int]:
        name, count = ("pp", self.prompt) if self.prompt else ("tg", self.tokens)
        return {name: count, "depth": self.depth, "concurrency": self.concurrency}

    @property
    def length(self) -> int:
        """Tokens of one request, answer included."""
        return self.depth + self.prompt + max(1, self.tokens) + 1


def all_work(
    prompts: Iterable[int], tokens: Iterable[int], depths: Iterable[int], concurrency: Iterable[int]
) -> list[Work]:
    """llama-bench's order: by depth, prompts before answers."""
    prompts, tokens, concurrency = list(prompts), list(tokens), list(concurrency)
    return [
        work
        for depth in depths
        for c in concurrency
        for work in (
            *(Work(prompt=n, depth=depth, concurrency=c) for n in prompts),
            *(Work(tokens=n, depth=depth, concurrency=c) for n in tokens),
        )
    ]


@dataclass
class Answer:
    """What one request got: (seconds since all were submitted, tokens that came then)."""

    arrivals: list[tuple[float, float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # tokens of the prompt that the prefix cache held

    @property
    def first(self) -> float:
        return self.arrivals[0][0]

    @property
    def last(self) -> float:
        return self.arrivals[-1][0]


class Client(Protocol):
    """Whoever has prompts answered: all at once, each with exactly `tokens` tokens."""

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> list[Answer]: ...


class CoreClient:
    """The engine's own core in this process, stepped until everybody has an answer."""

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.perf_counter) -> None:
        self.core, self._clock = core, clock

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
        answers = {}
        start = self._clock()
        for prompt in prompts:
            request = Request(list(prompt), SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
            answers[request.id] = Answer()
            self.core.submit(request)
        while self.core.has_work:
            for id, delta in self.core.step():
                if delta.finish not in (None, "length"):
                    raise StepError(f"a request ended with {delta.finish}: {delta.error or 'no reason given'}.")
                answer = answers[id]
                if delta.tokens:
                    answer.arrivals.append((self._clock() - start, len(delta.tokens)))
                    answer.tokens += delta.tokens
                if delta.usage is not None:
                    answer.cached = delta.usage.cached_tokens
        return list(answers.values())


# ---- one cell --------------------------------------------------------------------------------------------------------


@dataclass
class Timing:
    """The samples of one cell, without its warm-up."""

    work: Work
    rates: list[float]
    first: list[float]  # seconds to the first token, of every request
    cached: list[int]
    sequences: list[list[int]]  # of the last run: prompt and answer, whose experts can be counted
    seconds: float  # of the timed part of all runs
    warm_up: int = 1  # runs that were left out
    settled: bool = True
    power: PowerMeter = field(default_factory=PowerMeter)


def random_prompts(vocab: int, count: int, length: int, seed: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count, length), generator=g).tolist()


def time_work(client: Client, work: Work, vocab: int, repeats: int, seed: int = 0) -> Timing:
    (timing,) = time_all(client, [work], vocab, repeats, seed)
    if isinstance(timing, Exception):
        raise timing
    return timing


def time_all(
    client: Client,
    works: Sequence[Work],
    vocab: int,
    repeats: int,
    seed: int = 0,
    log: RunLog | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Timing | Exception]:
    """Every cell in rounds; what a cell failed with stands in its place."""

    def run(i: int, number: int) -> Measured:
        return run_work(client, works[i], vocab, 1000 * (seed + i) + number)

    keys = [str(work) for work in works]
    return [r.error or _timing(work, r) for work, r in zip(works, in_rounds(keys, run, repeats, log, progress))]


def _timing(work: Work, runs: Runs) -> Timing:
    timed = runs.timed
    return Timing(
        work, [m.rate for m in timed], [s for m in timed for s in m.first], [n for m in timed for n in m.cached],
        [list(s) for s in runs.all[-1].sequences], sum(m.seconds for m in timed), runs.skipped, runs.settled,
        runs.power,
    )  # fmt: skip


def run_work(client: Client, work: Work, vocab: int, seed: int) -> Measured:
    prefixes = random_prompts(vocab, work.concurrency, work.depth, 2 * seed) if work.depth else [[]] * work.concurrency
    if work.depth:
        _answered(client.complete(prefixes, 1), 1)  # now the prefix cache holds them
    if work.prompt:
        new = random_prompts(vocab, work.concurrency, work.prompt, 2 * seed + 1)
        prompts = [prefix + tail for prefix, tail in zip(prefixes, new)]
        answers = _answered(client.complete(prompts, 1), 1)
        seconds = max(a.first for a in answers)
        computed = sum(len(p) - a.cached for p, a in zip(prompts, answers))
        return _measured(computed / seconds, seconds, answers, prompts)
    prompts = prefixes if work.depth else random_prompts(vocab, work.concurrency, 1, 2 * seed)
    for _ in range(ATTEMPTS):
        answers = _answered(client.complete(prompts, work.tokens), work.tokens)
        start, end = max(a.first for a in answers), min(a.last for a in answers)
        if end - start >= SHORTEST_S:
            break
    else:
        raise StepError("the tokens came at once, or one request's before another had its first: ask for more (--tg).")
    generated = sum(n for a in answers for at, n in a.arrivals if start < at <= end)
    sequences = [p + a.tokens for p, a in zip(prompts, answers)]
    return _measured(generated / (end - start), end - start, answers, sequences)


def _measured(rate: float, seconds: float, answers: Sequence[Answer], sequences: list[list[int]]) -> Measured:
    return Measured(rate, seconds, tuple(a.first for a in answers), tuple(a.cached for a in answers), sequences)


def _answered(answers: list[Answer], tokens: int) -> list[Answer]:
    for answer in answers:
        if len(answer.tokens) != tokens or not answer.arrivals:
            raise StepError(f"a request got {len(answer.tokens)} tokens instead of {tokens}.")
    return answers


# ---- what they could be at most -------------------------------------------------------------------------------------


def count_experts(model: GptOss, sequences: Sequence[Sequence[int]], tokens: int) -> float | None:
    """Distinct experts per layer and step while these sequences decoded their last `tokens` tokens together.

    Every sequence goes through the model once more; the router's choices of the rows that decoded are compared across
    sequences, step by step. None where no phase leaves its choices to be read. Replaces the model's KV pool.
    """
    if len(sequences) == 1:
        return float(model.config.top_k)
    steps = tokens - 1  # the last token was not fed back
    seen: Tensor | None = None
    for sequence in sequences:
        ids = torch.tensor(sequence[:-1], dtype=torch.int32)
        chosen = _choices(model, ids, steps)
        if chosen is None:
            return None
        if seen is None:
            seen = torch.zeros((*chosen.shape[:2], model.config.experts), dtype=torch.bool, device=model.device)
        seen.scatter_(2, chosen, True)
    return None if seen is None else float(seen.sum(-1).float().mean())


def _choices(model: GptOss, ids: Tensor, steps: int) -> Tensor | None:
    """[layers, steps, top_k]: the experts of the last rows of a sequence."""
    cache = fill(model, 1, len(ids))
    layers: list[list[Tensor]] = []
    last = min(len(ids), max(steps, LEAST))
    ends = [*range(CHUNK, len(ids) - last, CHUNK), len(ids) - last, len(ids)]
    for at, end in zip([0, *ends], ends):
        if at == end:
            continue
        step = prefill_step(model, cache, ids[at:end], at)
        if model.plan.bound[model.plan.regime(step)][0].phase.taps:
            layers.append(list(choices_of(model, step)))
            continue
        acts = Activations()
        rows: list[Tensor] = []
        for bound in model.plan.walk(step, acts):
            if "router" in bound.phase.covers:
                if not acts.has("topk_ids"):
                    return None
                rows.append(acts.topk_ids.long().clone())
        layers.append(rows)
    whole = [torch.cat(parts)[-steps:] for parts in zip(*layers)]
    return torch.stack(whole) if whole else None


def speed_ceiling(gpu: Gpu, model: GptOss, work: Work, experts: float | None = None) -> Ceiling:
    """Tokens per second of all requests together, if memory or arithmetic were never waited for."""
    ceilings = ceilings_of(model, gpu)
    if work.tokens:
        return ceilings.decode(work.tokens, work.depth, work.concurrency, experts)
    return ceilings.prompts(work.prompt, work.depth, work.concurrency)


def result_of(timing: Timing, cell: Cell, model: GptOss | None, experts: float | None = None) -> Result:
    """A cell's figures beside their ceilings; without a model nobody knows these."""
    work = timing.work
    ceiling = floor = None
    if model is not None and model.gates.speculate == "off":  # a step that verifies drafts reads less per token
        gpu = device_roof(model.device, model.weights.nbytes)
        ceiling = speed_ceiling(gpu, model, work, experts)
        if work.prompt:
            floor = ceilings_of(model, gpu).first_token(work.prompt, work.depth)
    figures: list[Figure] = [figure("speed", "tok/s", timing.rates, ceiling)]
    if work.prompt:
        figures.append(figure("ttft", "ms", [1e3 * s for s in timing.first], floor))
    checks = []
    page = 64 if model is None else model.spec.page_size
    if work.depth and work.prompt:
        least = min(timing.cached)
        checks.append(Check("the prefix was in the cache", least > work.depth - 2 * page, float(least)))
    detail: dict[str, Any] = {"timed_s": timing.seconds, "warm_up_runs": timing.warm_up}
    if experts is not None:
        detail["experts_per_layer"] = experts
    if work.tokens:
        figures += timing.power.figures(1.0, 1.0 / median(timing.rates))
    targets = () if timing.settled else (Check("the runs settled", False, note=f"{timing.rates} tok/s"[:200]),)
    failed = any(not c.ok for c in checks)
    return timing.power.judge(Result(cell, () if failed else tuple(figures), tuple(checks), targets, detail=detail))


# ---- all cells of a model --------------------------------------------------------------------------------------------


def measure_engine(
    model: GptOss,
    tokenizer: Tokenizer,
    works: Sequence[Work],
    repeats: int,
    *,
    cell: Cell,
    checks: tuple[Check, ...] = (),
    options: EngineOptions | None = None,
    progress: Callable[[str], None] = lambda _: None,
    log: RunLog | None = None,
) -> list[Result]:
    """Every cell through one engine, made as `halfbyte serve` makes it; one that fails says why and costs no other."""
    cells = [_cell_of(cell, work) for work in works]
    longest = max((work.length for work in works), default=0)
    if longest > model.config.max_context:
        raise UsageError(f"{longest} tokens are more than this model's context of {model.config.max_context}.")
    if any(not c.ok for c in checks):
        return [Result(c, checks=checks) for c in cells]
    most = max((work.concurrency for work in works), default=1)
    options = options or EngineOptions(gates=model.gates, max_seqs=max(64, most))
    core, _, _ = core_for(model, tokenizer, options)
    try:
        timings = time_all(
            CoreClient(core), works, model.config.vocab, repeats, log=log, progress=lambda i: progress(cells[i].label)
        )
        core.check()
    finally:
        core.close()
    record, ran = model.plan.record.as_dict(), record_check(model)
    del core
    model.release_kv()
    results = []
    for each, timing in zip(cells, timings):
        progress(f"experts of {each.label}")
        result = measure_cell(each, partial(_judged, timing, each, model))
        figures = result.figures if ran.ok else ()
        results.append(replace(result, figures=figures, checks=(*checks, ran, *result.checks), record=record))
    model.release_kv()
    return results


def record_check(model: GptOss) -> Check:
    """A cell that another kernel than the chosen one ran has no number."""
    differences = [str(d) for d in model.plan.differences()]
    return Check("the chosen kernels ran", not differences, note="; ".join(differences)[:400])


def _cell_of(cell: Cell, work: Work) -> Cell:
    return Cell("prompt" if work.prompt else "decode", cell.model, cell.preset, cell.gates, cell.path, work.shape)


def _judged(timing: Timing | Exception, cell: Cell, model: GptOss) -> Result:
    if isinstance(timing, Exception):
        raise timing
    tokens = timing.work.tokens
    return result_of(timing, cell, model, count_experts(model, timing.sequences, tokens) if tokens else None)


def table(results: Sequence[Result]) -> list[dict[str, str]]:
    """Rows for a terminal: the speed of each cell beside its ceiling, and the time to a first token of prompts."""
    rows = []
    for r in results:
        named = {f.name: f for f in r.figures}
        speed, ttft, ratio = named.get("speed"), named.get("ttft"), named.get("ratio")
        value = r.state.upper() if r.refused else f"{ratio.value:.3f} of it" if ratio else "–"
        if speed:
            value = f"{speed.value:.2f} ({speed.low:.2f}–{speed.high:.2f})"
        rows.append(
            {
                "test": r.cell.label,
                "by": r.cell.path,
                "t/s": value,
                "ceiling t/s": f"{speed.ceiling.value:.1f}" if speed and speed.ceiling else "",
                "share": f"{100 * speed.share:.1f} %" if speed and speed.share else "",
                "ttft ms": f"{ttft.value:.1f}" if ttft else "",
            }
        )
    return rows
