"""What a user of the engine gets: prompt and decode speed at any depth and concurrency, and the time to a first token.

The same work for every client: an `EngineCore` in this process (scheduler, pages, graphs, device sampling; no HTTP in
the way), a server over HTTP (`http_client.py`), or a fake of known speed. Prompts are random tokens, different in every
run and in every invocation (the seed is in the result); a prompt that a cache held all the same makes its cell INVALID.
Answers are greedy and nothing stops early. Cells run in rounds, without their warm-up (`rounds.py`).

    ppN @ dD, c=C   C prompts of N tokens behind D that the prefix cache holds, until the last has its first token
    tgN @ dD, c=C   N tokens each for C requests of D tokens; only while all of them decode

Each figure stands beside its ceiling. Experts are counted on the tokens of the timed steps, by the router that sees
them again afterwards: a kernel that runs a whole step keeps its choices to itself. A decode speed is compared with the
time of the whole answer: an engine that holds tokens back and sends them in a burst has no decode speed (`check_pace`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.errors import DisturbedError, EngineError, InvalidFigureError, StepError, UsageError
from halfbyte.lab.ceilings import ceilings_of
from halfbyte.lab.machine import device_roof
from halfbyte.lab.measure.device_timing import choices_of, fill, prefill_step
from halfbyte.lab.measure.disturbance import DisturbanceMeter
from halfbyte.lab.measure.event_stream import StreamReading, check_claims
from halfbyte.lab.measure.rounds import CellRuns, Measured, RunLog, in_rounds
from halfbyte.lab.result import Cell, Check, Figure, FigureCeiling, Result, figure, measure_cell
from halfbyte.lab.statistics import median
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.plan.activations import Activations
from halfbyte.roofline import Gpu

SHORTEST_S = 5e-4  # that tokens come in: less is a client that was not there when they came
ATTEMPTS = 6  # of a busy machine's client to be there
BURST = 1.2  # times the speed of the whole answer that the speed of its decode may be, prompt left out
HICCUP_S = 0.02  # seconds that a busy machine may cost
HIDDEN = 0.2  # times the rest of an answer that its first token may take before a longer answer is asked for
LONGER = 4  # times as many tokens of that one
MOMENT_S = 0.5  # a busy machine may hold back a server for so long; a longer answer that comes at once was held back
AT_ONCE = 0.1  # of an answer's time is the most in which all its tokens come where it came whole
SPREAD = 2.0  # times as long as its decode speed explains, at most, took a longer answer that did not come whole
MUCH_LONGER = 16  # times as many tokens of an answer that tells
HELD_BACK = "tokens were held back and sent in a burst."
LONGEST_FIRST = 9.0  # times the rest of an answer that the first token behind a prompt of one token may take
CHUNK = 2048  # rows of a step that only counts experts
LEAST = 128  # rows of the last one: a step of very few may be one kernel, which shows no choices


@dataclass(frozen=True)
class TimedWork:
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
) -> list[TimedWork]:
    """llama-bench's order: by depth, prompts before answers."""
    prompts, tokens, concurrency = list(prompts), list(tokens), list(concurrency)
    return [
        work
        for depth in depths
        for c in concurrency
        for work in (
            *(TimedWork(prompt=n, depth=depth, concurrency=c) for n in prompts),
            *(TimedWork(tokens=n, depth=depth, concurrency=c) for n in tokens),
        )
    ]


class TimedClient(Protocol):
    """A client that has prompts answered: all at once, each with exactly `tokens` tokens."""

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> list[StreamReading]: ...


class CoreClient:
    """The engine's own core in this process, stepped until everybody has an answer."""

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.perf_counter) -> None:
        self.core, self._clock = core, clock

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> list[StreamReading]:
        answers = {}
        start = self._clock()
        for prompt in prompts:
            request = Request(list(prompt), SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
            answers[request.id] = StreamReading(counted_by="ids")
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


def random_prompts(vocab: int, count: int, length: int, seed: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count, length), generator=g).tolist()


def new_seed() -> int:
    return secrets.randbelow(1 << 31)


def time_work(client: TimedClient, work: TimedWork, vocab: int, repeats: int, seed: int = 0) -> CellRuns:
    (runs,) = time_all(client, [work], vocab, repeats, seed)
    if runs.error is not None:
        raise runs.error
    return runs


def time_all(
    client: TimedClient,
    works: Sequence[TimedWork],
    vocab: int,
    repeats: int,
    seed: int = 0,
    log: RunLog | None = None,
    progress: Callable[[int], None] = lambda _: None,
    meter: DisturbanceMeter | None = None,
) -> list[CellRuns]:
    """Every cell in rounds; a cell that failed has its error."""

    def run(i: int, number: int) -> Measured:
        return run_work(client, works[i], vocab, 1000 * (seed + i) + number)

    return in_rounds([str(work) for work in works], run, repeats, log, progress, meter)


def measure_client(
    client: TimedClient,
    works: Sequence[TimedWork],
    repeats: int,
    cell: Cell,
    vocab: int,
    progress: Callable[[str], None],
    log: RunLog | None = None,
    seed: int | None = None,
    meter: DisturbanceMeter | None = None,
    judge: Callable[[CellRuns], str] = lambda _: "",
) -> list[Result]:
    """Every cell of a client whose model is not in this process: speeds without ceilings. `judge` says why the timed
    answers of a cell cannot be believed, or nothing."""
    cells = [cell_of(cell, work) for work in works]
    seed = new_seed() if seed is None else seed
    runs = time_all(client, works, vocab, repeats, seed, log, lambda i: progress(f"{cells[i].label} over HTTP"), meter)
    results = [measure_cell(c, partial(result_of, w, r, c, None)) for w, r, c in zip(works, runs, cells)]
    results = [replace(r, detail={**r.detail, "seed": seed}) for r in results]
    problems = ["" if result.refused else judge(run) for result, run in zip(results, runs)]
    return [r.invalidated(problem) if problem else r for r, problem in zip(results, problems)]


def run_work(client: TimedClient, work: TimedWork, vocab: int, seed: int) -> Measured:
    prefixes = random_prompts(vocab, work.concurrency, work.depth, 2 * seed) if work.depth else [[]] * work.concurrency
    if work.depth:
        _answered(client.complete(prefixes, 1), 1)  # now the prefix cache holds them
    if work.prompt:
        new = random_prompts(vocab, work.concurrency, work.prompt, 2 * seed + 1)
        prompts = [prefix + tail for prefix, tail in zip(prefixes, new)]
        answers = _answered(client.complete(prompts, 1), 1)
        _check_new(answers, work.depth)
        _check_read(answers, prompts)
        seconds = max(a.first for a in answers)
        computed = sum(len(p) - a.cached for p, a in zip(prompts, answers))
        sequences = [p + a.tokens for p, a in zip(prompts, answers)]
        return _measured(computed / seconds, seconds, answers, sequences)
    trouble = ""
    for attempt in range(ATTEMPTS):
        prompts = prefixes if work.depth else random_prompts(vocab, work.concurrency, 1, ATTEMPTS * seed + attempt)
        answers = _answered(client.complete(prompts, work.tokens), work.tokens)
        _check_read(answers, prompts)
        start, end = max(a.first for a in answers), min(a.last for a in answers)
        at_once = end - start < SHORTEST_S
        # Of several requests one may have ended before another began; a single one that came at once was held back.
        trouble = "" if at_once and work.concurrency > 1 else check_pace(client, prompts, answers, work)
        if not trouble and not at_once:
            break
    else:
        if trouble.endswith(HELD_BACK) and steady_if_longer(client, prompts, answers, work):
            raise DisturbedError(
                f"answers of {work.tokens} tokens took {end:.2g} s and came whole, those of {MUCH_LONGER} times as "
                "many as they were computed: this machine is too busy for so short ones; ask for more tokens (--tg)."
            )
        raise InvalidFigureError(
            trouble or "the tokens came at once, or one request's before another had its first: ask for more (--tg)."
        )
    generated = sum(n for a in answers for at, n in a.arrivals if start < at <= end)
    sequences = [p + a.tokens for p, a in zip(prompts, answers)]
    return _measured(generated / (end - start), end - start, answers, sequences)


def _check_new(answers: Sequence[StreamReading], depth: int) -> None:
    """Prompts are new, so that no cache may hold more of them than the prefix that was put there."""
    most = max(a.cached for a in answers)
    if most > depth:
        raise InvalidFigureError(
            f"{most} tokens of a prompt were in the server's cache, where at most {depth} were sent before; "
            "measure again without --seed, or restart the server."
        )


def _check_read(answers: Sequence[StreamReading], prompts: Sequence[Sequence[int]]) -> None:
    """An engine that says that it read less than a prompt has answered another one."""
    for answer, prompt in zip(answers, prompts):
        read = answer.prompt_tokens
        if read and read < len(prompt):
            raise InvalidFigureError(f"the server read {read} of a prompt's {len(prompt)} tokens.")


def check_pace(
    client: TimedClient, prompts: Sequence[list[int]], answers: Sequence[StreamReading], work: TimedWork
) -> str:
    """Why the parts of these answers contradict each other; empty where they do not.

    A decode speed is that of the tokens after the first. Where the whole answer took much longer than that speed
    explains, the prompts are answered again with one token each: what the prompt itself takes is no contradiction. An
    engine may wait in front of every answer and compute meanwhile, so that a first token which takes much of the time
    is held against longer answers: their further tokens must come at the decode speed, too.
    """

    if contradiction(answers, [0.0] * len(answers)) <= BURST:
        return ""
    share = contradiction(answers, [a.first for a in _answered(client.complete(prompts, 1), 1)])
    if share > BURST:
        return f"the decode speed is {share:.3g} times what the whole answer allows: {HELD_BACK}"
    share = median([a.first / max(SHORTEST_S, a.last - a.first) for a in answers])
    if not work.depth and work.concurrency == 1 and share > LONGEST_FIRST:
        return (
            f"the first token behind a prompt of one token took {share:.3g} times as long as the other "
            f"{work.tokens - 1}: when they were computed is not known; ask for more tokens (--tg)."
        )
    if share > HIDDEN and (slower := marginal_pace(client, prompts, answers, work)) > BURST:
        return (
            f"answers of {LONGER} times as many tokens take {slower:.3g} times as long for each further token as the "
            "decode speed says: tokens were computed before the first was sent."
        )
    return ""


def contradiction(answers: Sequence[StreamReading], firsts: Sequence[float]) -> float:
    """How many times as long as the decode speed explains the answers took behind these first tokens; 0 where the
    difference is a machine's hiccup."""
    paces = [len(a.tokens) / (len(a.tokens) - 1) for a in answers]
    spans = [(a.last - first, pace * (a.last - a.first)) for a, first, pace in zip(answers, firsts, paces)]
    return median([total / max(SHORTEST_S, decode) if total - decode > HICCUP_S else 0.0 for total, decode in spans])


def steady_if_longer(
    client: TimedClient, prompts: Sequence[list[int]], answers: Sequence[StreamReading], work: TimedWork
) -> bool:
    """Whether answers that came whole were only too short: on a busy machine a server of several processes may not run
    before its engine has ended. Much longer ones then come as they are computed; an engine that holds back holds back
    those, too. One that holds back a part is no such case."""
    if any(a.last > MOMENT_S or a.last - a.first > AT_ONCE * a.last for a in answers):
        return False
    count = MUCH_LONGER * work.tokens
    try:
        longer = _answered(client.complete(prompts, count), count)
    except EngineError:  # no room in the context
        return False
    return contradiction(longer, [a.first for a in _answered(client.complete(prompts, 1), 1)]) <= SPREAD


def check_texts(work: TimedWork, runs: CellRuns) -> None:
    """Texts without ids have about as many tokens as the engine claims, over all runs of a cell."""
    counts = [m.spelled for m in runs.timed if m.spelled is not None]
    answers = work.concurrency * len(counts)
    if work.tokens:
        check_claims(work.tokens * answers, sum(counts), answers)


def marginal_pace(
    client: TimedClient, prompts: Sequence[list[int]], answers: Sequence[StreamReading], work: TimedWork
) -> float:
    """Seconds for each token that a longer answer has more, in those of the answers' own decode. Behind a deep prompt
    the context may have no room for one."""
    try:
        longer = _answered(client.complete(prompts, LONGER * work.tokens), LONGER * work.tokens)
    except EngineError:
        if work.depth:
            return 0.0
        raise
    further = median([b.last - a.last - HICCUP_S for a, b in zip(answers, longer)]) / ((LONGER - 1) * work.tokens)
    own = median([max(SHORTEST_S, a.last - a.first) for a in answers]) / (work.tokens - 1)
    return further / own


def _measured(rate: float, seconds: float, answers: Sequence[StreamReading], sequences: list[list[int]]) -> Measured:
    firsts, lasts = tuple(a.first for a in answers), tuple(a.last for a in answers)
    counts = [a.spelled for a in answers if a.spelled is not None]
    return Measured(
        rate, seconds, firsts, tuple(a.cached for a in answers), sequences, lasts, answers[0].counted_by,
        tuple(a.text for a in answers), sum(counts) if len(counts) == len(answers) else None, len(answers[0].tokens),
    )  # fmt: skip


def _answered(answers: list[StreamReading], tokens: int) -> list[StreamReading]:
    for answer in answers:
        if len(answer.tokens) != tokens or not answer.arrivals:
            raise InvalidFigureError(f"a request got {len(answer.tokens)} tokens instead of {tokens}.")
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
        if model.plan.bound[model.plan.regime(step)][0].phase.choices:
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
    choices = [torch.cat(parts)[-steps:] for parts in zip(*layers)]
    return torch.stack(choices) if choices else None


def speed_ceiling(gpu: Gpu, model: GptOss, work: TimedWork, experts: float | None = None) -> FigureCeiling:
    """Tokens per second of all requests together, if memory or arithmetic were never waited for."""
    ceilings = ceilings_of(model, gpu)
    if work.tokens:
        return ceilings.decode(work.tokens, work.depth, work.concurrency, experts)
    return ceilings.prompts(work.prompt, work.depth, work.concurrency)


def result_of(
    work: TimedWork, runs: CellRuns, cell: Cell, model: GptOss | None, experts: float | None = None
) -> Result:
    """A cell's figures with their ceilings, which are known only with a model."""
    if runs.error is not None:
        raise runs.error
    ceiling = floor = None
    if model is not None and model.gates.speculate == "off":  # a step that verifies drafts reads less per token
        gpu = device_roof(model.device, model.weights.nbytes)
        ceiling = speed_ceiling(gpu, model, work, experts)
        if work.prompt:
            floor = ceilings_of(model, gpu).first_token(work.prompt, work.depth)
    check_texts(work, runs)
    figures: list[Figure] = [figure("speed", "tok/s", runs.rates, ceiling)]
    figures.append(figure("ttft", "ms", [1e3 * s for s in runs.first], floor))
    if work.tokens and (total := [s for m in runs.timed for s in m.last]):
        figures.append(figure("e2e", "ms", [1e3 * s for s in total]))
    checks = []
    page = 64 if model is None else model.spec.page_size
    if work.depth and work.prompt:
        least = min(runs.cached)
        checks.append(Check("the prefix was in the cache", least > work.depth - 2 * page, float(least)))
    detail: dict[str, Any] = {"timed_s": runs.seconds, "warm_up_runs": runs.skipped, "counted_by": runs.counted_by}
    if experts is not None:
        detail["experts_per_layer"] = experts
    if runs.load:
        shares = [d.share for d in runs.load]
        detail["machine"] = {"others": max(shares), "disturbed_runs": len(runs.disturbed), "mhz": runs.load[-1].mhz}
    if work.tokens:
        figures += runs.power.figures(1.0, 1.0 / median(runs.rates))
    targets = () if runs.settled else (Check("the runs settled", False, note=f"{runs.rates} tok/s"[:200]),)
    failed = any(not c.ok for c in checks)
    return runs.power.judge(Result(cell, () if failed else tuple(figures), tuple(checks), targets, detail=detail))


# ---- all cells of a model --------------------------------------------------------------------------------------------


def measure_engine(
    model: GptOss,
    tokenizer: Tokenizer,
    works: Sequence[TimedWork],
    repeats: int,
    *,
    cell: Cell,
    checks: tuple[Check, ...] = (),
    options: EngineOptions | None = None,
    progress: Callable[[str], None] = lambda _: None,
    log: RunLog | None = None,
    seed: int | None = None,
    gpu_memory: int | None = None,
) -> list[Result]:
    """Every cell through one engine, made as `halfbyte serve` makes it; one that fails says why and costs no other."""
    cells = [cell_of(cell, work) for work in works]
    longest = max((work.length for work in works), default=0)
    if longest > model.config.max_context:
        raise UsageError(f"{longest} tokens are more than this model's context of {model.config.max_context}.")
    if any(not c.ok for c in checks):
        return [Result(c, checks=checks) for c in cells]
    most = max((work.concurrency for work in works), default=1)
    options = options or EngineOptions(gates=model.gates, max_seqs=max(64, most), gpu_memory=gpu_memory)
    core, _, _ = core_for(model, tokenizer, options)
    try:
        seed = new_seed() if seed is None else seed
        vocab = model.config.vocab
        runs = time_all(CoreClient(core), works, vocab, repeats, seed, log, lambda i: progress(cells[i].label))
        core.check()
    finally:
        core.close()
    record, ran = model.plan.record.as_dict(), record_check(model)
    del core
    model.release_kv()
    results = []
    for work, work_cell, these in zip(works, cells, runs):
        progress(f"experts of {work_cell.label}")
        result = measure_cell(work_cell, partial(_with_experts, work, these, work_cell, model))
        figures = result.figures if ran.ok else ()
        detail = {**result.detail, "seed": seed}
        every = (*checks, ran, *result.checks)
        results.append(replace(result, figures=figures, checks=every, record=record, detail=detail))
    model.release_kv()
    return results


def record_check(model: GptOss) -> Check:
    """A cell that another kernel than the chosen one ran has no number."""
    differences = [str(d) for d in model.plan.differences()]
    return Check("the chosen kernels ran", not differences, note="; ".join(differences)[:400])


def cell_of(cell: Cell, work: TimedWork) -> Cell:
    return replace(cell, kind="prompt" if work.prompt else "decode", shape=work.shape)


def _with_experts(work: TimedWork, runs: CellRuns, cell: Cell, model: GptOss) -> Result:
    counted = work.tokens and runs.error is None
    return result_of(work, runs, cell, model, count_experts(model, runs.sequences, work.tokens) if counted else None)


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
