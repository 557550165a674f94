"""Do tokens depend on the schedule? Random mixed schedules beside one request at a time, bit for bit.

    python -m bench run schedules --set schedules=1000
    python -m bench run schedules --set presets=fast --set threads=2 --set schedules=100
    python -m bench run schedules --set device=cuda --set presets=exact,balanced,fast --set threads=1 --set jobs=9

A schedule is a list of requests and everything that an engine may do with them: batch sizes, arrival, chunk sizes,
pages that run out, prefix hits in pages, host memory and on disk, cancelled requests, drafts of every kind, an engine
that is built anew in the middle.
Each request is also answered alone: by an engine that was never used, one sequence at a time, without drafts and
without a prefix cache. Tokens and log probabilities must be equal to the last bit.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from bench.measurement import CaseOutcome, Run, engine_sources, measurement, option, run_cases, write_records
from bench.padded_model import load_padded
from halfbyte import gates as gates_
from halfbyte.engine.build import runner_for, separates_steps
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.cpu_runner import CpuRunner
from halfbyte.engine.device_runner import DeviceRunner
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.grammar_work import GrammarWork
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.prefix_tiers import PrefixTiers
from halfbyte.engine.request import Constraint, Logprob, Output, Request, SamplingParams
from halfbyte.engine.runner import ModelRunner
from halfbyte.engine.sequence import Sequence as TokenSequence
from halfbyte.engine.speculative.controller import Controller, Pace
from halfbyte.engine.speculative.eagle3 import Eagle3Proposer
from halfbyte.engine.speculative.methods import make_proposer
from halfbyte.engine.speculative.proposer import Proposal, Proposer
from halfbyte.kv.pages import PagePool
from halfbyte.kv.prefix_store import PrefixStore
from halfbyte.kv.segments import PageLayout
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.model.load import EMBEDDED, load_model, resolve_device, resolve_model, tokenizer_of

METHODS = ("off", "ngram", "suffix", "draft", "eagle3", "partly right")
LONGEST_DRAFT = 6
RESTARTED = 5  # schedules whose answers another process gives, too
GRACE_S = 120.0  # that processes have to end, when no further schedule begins
HAPPENED = ("preemptions", "hits", "from_memory", "from_disk", "accepted", "restarts")  # events that each run must have
MORE_PAGES = 100  # of 64 tokens, where they are not short
LONGEST = 520  # tokens of a request: attention adds up segments of 256 keys
REGEXES = ("[a-z]{3,9}( [a-z]{2,7}){1,3}", "-?[0-9]{1,3}(\\.[0-9]{1,2})?")


@dataclass(frozen=True)
class ChoiceResult:
    """One choice of a request: what must not depend on the schedule."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    finish: str = ""


class AlwaysDrafts(Pace):
    """A draft every time, whatever became of the last."""

    def __init__(self, controller: Controller, rng: random.Random) -> None:
        super().__init__(controller)
        self._rng = rng

    @property
    def resting(self) -> bool:
        return False

    def length(self, batch: int, rows: int, context: int) -> int:
        return self._rng.randint(0, self._controller.longest)


class PartlyRight:
    """Drafts from the true answers, with some tokens replaced: accepted in part, as no other method guarantees."""

    def __init__(self, rng: random.Random, truth: dict[tuple[str, int], ChoiceResult], vocab: int) -> None:
        self._rng, self._truth, self._vocab = rng, truth, vocab
        self.controller = Controller(lambda rows, context: 1.0, longest=LONGEST_DRAFT)

    def propose(self, wants: list[tuple[TokenSequence, int]]) -> list[Proposal]:
        drafts = []
        for seq, most in wants:
            answer = self._truth[seq.request.id, seq.index].tokens
            draft = list(answer[seq.num_generated_tokens : seq.num_generated_tokens + most])
            drafts.append(
                Proposal([t if self._rng.random() < 0.8 else self._rng.randrange(self._vocab) for t in draft])
            )
        return drafts

    def observe(self, seq: TokenSequence, new: int) -> None: ...

    def forget(self, seq: TokenSequence) -> None: ...

    def pace(self, seq: TokenSequence) -> Pace:
        return AlwaysDrafts(self.controller, self._rng)


class ScheduleBench:
    """A loaded model with its draft model and head, on which a schedule builds its engines. They share one memory for
    pages, so that an engine finds there what others have left."""

    def __init__(
        self, gates: gates_.Gates, *, name: str | None = None, device: str | None = None, page_size: int = 64,
        methods: tuple[str, ...] = METHODS,
    ) -> None:  # fmt: skip
        resolved = resolve_model(name)
        self.gates, self.methods = gates, methods
        at = resolve_device(device)
        if at.type == "cpu":
            self.model = load_model(resolved, gates, device=at, page_size=page_size)
        else:  # the shape that the kernels of large models want
            self.model = load_padded(gates, at)
            page_size = self.model.spec.page_size
        self.tokenizer, self.vocab = tokenizer_of(resolved), self.model.config.vocab
        self._pool = PagePool(9, page_size, self.model.config.window)
        self.most_pages = 1 + self._pool.peak_pages(LONGEST, 4096) + MORE_PAGES * 64 // page_size
        self.model.allocate_kv(self.most_pages)
        self._proposers: dict[str, Proposer] = {}
        self._runners: dict[int, ModelRunner] = {}
        self._grammars: GrammarWork | None = None

    def pages(self, chunk: int) -> int:
        """What one request of the longest kind needs."""
        return 1 + self._pool.peak_pages(LONGEST, chunk)

    def core(
        self, config: EngineConfig, method: str = "off", rng: random.Random | None = None,
        truth: dict[tuple[str, int], ChoiceResult] | None = None, tiers: Tiers | PrefixTiers | None = None,
    ) -> EngineCore:  # fmt: skip
        proposer = self._proposer(method, rng or random.Random(0), truth or {})
        observer = proposer if isinstance(proposer, Eagle3Proposer) else None
        if id(observer) not in self._runners:
            options = EngineOptions(gates=self.gates, page_size=config.page_size, max_draft=LONGEST_DRAFT)
            if observer is not None:
                observer.allocate(self.most_pages)
            self._runners[id(observer)] = runner_for(self.model, options, observer, LONGEST, 4096)[0]
        core = EngineCore(self._runners[id(observer)], config, self.tokenizer, proposer)
        if self._grammars is None:
            self._grammars = core.grammars
        core.arrivals.grammars = self._grammars
        if isinstance(tiers, Tiers) and config.prefix_cache:
            tiers = tiers.for_runner(self._runners[id(observer)], config.page_size)
        if isinstance(tiers, PrefixTiers):
            core.attach(tiers)
        return core

    def _proposer(self, method: str, rng: random.Random, truth: dict[tuple[str, int], ChoiceResult]) -> Proposer | None:
        if method == "off":
            return None
        if method == "partly right":
            return PartlyRight(rng, truth, self.vocab)
        if method not in self._proposers:
            new = make_proposer(method, self.model, None, LONGEST_DRAFT, 8, LONGEST)
            assert new is not None
            self._proposers[method] = new
        proposer = self._proposers[method]
        proposer.controller.ledger = None  # nothing is timed: the same schedule gives the same drafts
        proposer.pace = lambda seq: AlwaysDrafts(proposer.controller, rng)  # type: ignore[method-assign]
        return proposer

    def config(self, pages: int, *, max_seqs: int, rows: int, prefix_cache: bool, beside: int = 4096) -> EngineConfig:
        config, on_host = self.model.config, not self.model.arch.is_gpu
        return EngineConfig(
            pages=pages, page_size=self.model.spec.page_size, window=config.window, vocab=config.vocab,
            max_context=LONGEST, eos_tokens=config.eos_tokens, max_seqs=max_seqs, max_rows_per_step=rows,
            max_rows_with_decode=beside, prefix_cache=prefix_cache, host_steps=on_host, run_ahead=not on_host,
            answer_rows=self.model.plan.limits.batch if separates_steps(self.model) else 0,
        )  # fmt: skip

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()


@dataclass(frozen=True)
class Tiers:
    """Where a schedule's engines keep prefixes besides their pages."""

    memory: int  # bytes of host memory
    folder: Path | None

    def for_runner(self, runner: ModelRunner, page_size: int) -> PrefixTiers:
        assert isinstance(runner, CpuRunner | DeviceRunner)
        assert runner.memory is not None
        page_bytes = runner.memory.page_bytes
        layout = PageLayout(page_bytes.to_bytes(16, "little"), page_bytes, page_size)
        store = None if self.folder is None else PrefixStore(self.folder, layout, 1 << 30)
        tiers = PrefixTiers(runner, page_bytes, self.memory, store)
        tiers.computed = lambda rows, depth, seconds: None  # type: ignore[method-assign]  # nothing depends on a clock
        return tiers


@dataclass
class Schedule:
    """What became of a seed. `differences` names every choice whose answer depended on the schedule; `digest` is that
    of all answers alone, for a comparison with other processes."""

    seed: int
    digest: str = ""
    differences: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)


def random_request(rng: random.Random, number: int, shared: list[list[int]], vocab: int) -> Request:
    base = rng.choice(shared)
    prompt = base[: rng.choice([len(base), rng.randint(1, len(base))])]
    prompt = prompt + [rng.randrange(vocab // 2) for _ in range(rng.choice([0, 1, 7, rng.randint(0, 90)]))]
    most = rng.choice([1, 4, 10, 24, 24, 60])
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]), seed=rng.randrange(1 << 60), max_tokens=most,
        top_k=rng.choice([0, 0, 5, 40]), top_p=rng.choice([1.0, 1.0, 0.8]), min_p=rng.choice([0.0, 0.0, 0.05]),
        logprobs=rng.choice([None, 0, 0, 3]), n=rng.choice([1, 1, 1, 3]), ignore_eos=rng.random() < 0.7,
    )  # fmt: skip
    if rng.random() < 0.2:
        params = replace(params, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2)
    if rng.random() < 0.2:
        params = replace(params, prompt_logprobs=rng.choice([0, 2]), prompt_logprobs_from=rng.choice([1, 70]))
    constraint = Constraint("regex", rng.choice(REGEXES)) if rng.random() < 0.2 else None
    if constraint is None and rng.random() < 0.1:
        params = replace(params, logit_bias={rng.randrange(vocab): 4.0}, min_tokens=min(3, most))
    return Request(prompt, params, constraint, id=f"r{number}", client=rng.choice(["", "", "a", "b"]))


def answers_of(outputs: Iterable[Output]) -> dict[tuple[str, int], ChoiceResult]:
    """Deltas joined by choice."""
    answers: dict[tuple[str, int], ChoiceResult] = {}
    for id, delta in outputs:
        so_far = answers.get((id, delta.index), ChoiceResult())
        answers[id, delta.index] = ChoiceResult(
            so_far.tokens + tuple(delta.tokens), so_far.logprobs + tuple(delta.logprobs or ()),
            so_far.prompt_logprobs + tuple(delta.prompt_logprobs or ()), delta.finish or so_far.finish,
        )  # fmt: skip
    return answers


def alone(machine: ScheduleBench, requests: list[Request]) -> dict[tuple[str, int], ChoiceResult]:
    """Every request by an engine of its own, one choice after another."""
    answers: dict[tuple[str, int], ChoiceResult] = {}
    for request in requests:
        core = machine.core(machine.config(machine.pages(4096), max_seqs=1, rows=4096, prefix_cache=False))
        core.submit(request)
        answers |= answers_of(_steps(core))
    return answers


def _steps(core: EngineCore) -> Iterator[Output]:
    while core.has_work:
        yield from core.step()


def run_schedule(machine: ScheduleBench, seed: int, *, requests: int = 5) -> Schedule:
    rng = random.Random(seed)
    schedule = Schedule(seed)
    shared = [[rng.randrange(machine.vocab // 2) for _ in range(rng.randint(10, LONGEST - 160))] for _ in range(2)]
    todo = [random_request(rng, i, shared, machine.vocab) for i in range(rng.randint(3, requests))]
    truth = alone(machine, todo)
    pages = machine.pages(64) + rng.choice([0, rng.randint(0, 10), MORE_PAGES]) * 64 // machine.model.spec.page_size
    max_seqs = rng.choice([2, 4, 16])
    config = machine.config(
        min(pages, machine.most_pages), max_seqs=max_seqs, rows=rng.choice([16, 61, 64, 200, 2048]),
        beside=rng.choice([20, 80, 2048]), prefix_cache=rng.random() < 0.85,
    )  # fmt: skip
    method = rng.choice(machine.methods)
    with tempfile.TemporaryDirectory() as folder:
        tiers = rng.choice(
            [None, Tiers(1 << 26, None), Tiers(0, Path(folder) / "p"), Tiers(1 << 18, Path(folder) / "p")]
        )
        answers = _play(machine, schedule, config, method, rng, todo, truth, tiers)
    for (id, index), answer in answers.items():
        schedule.events["choices"] += 1
        schedule.events["cancelled"] += answer.finish == "cancelled"
        difference = first_difference(truth[id, index], answer)
        if difference:
            schedule.differences.append(f"seed {seed} ({method}), request {id}, choice {index}: {difference}")
    if answers.keys() != truth.keys():
        schedule.differences.append(f"seed {seed}: choices {sorted(truth.keys() - answers.keys())} have no answer")
    schedule.digest = blake2b(repr(sorted(truth.items())).encode(), digest_size=8).hexdigest()
    return schedule


def _play(
    machine: ScheduleBench, schedule: Schedule, config: EngineConfig, method: str, rng: random.Random,
    todo: list[Request], truth: dict[tuple[str, int], ChoiceResult], tiers: Tiers | None,
) -> dict[tuple[str, int], ChoiceResult]:  # fmt: skip
    """Serve the requests by an engine that does everything with them that the generator says."""
    core = machine.core(config, method, rng, truth, tiers)
    restart = rng.randint(1, len(todo)) if rng.random() < 0.3 else 0  # requests after which the engine is built anew
    hurry = rng.choice([0.05, 0.3, 0.9])
    sent: list[Request] = []
    outputs: list[Output] = []
    while todo or core.has_work:
        while todo and rng.random() < hurry and not (restart and len(sent) == restart):
            sent.append(todo.pop())
            core.submit(sent[-1])
        if sent and rng.random() < 0.01:
            core.cancel(rng.choice(sent).id)
        outputs += core.step()
        if restart and len(sent) == restart and not core.has_work:
            in_memory = core.tiers is not None and core.tiers.store is None  # what outlives the engine alone
            _count(schedule, core, close=not in_memory)
            core, restart = machine.core(config, method, rng, truth, core.tiers if in_memory else tiers), 0
            schedule.events["restarts"] += 1
    outputs += core.step()
    _count(schedule, core)
    schedule.events[method] += 1
    return answers_of(outputs)


def _count(schedule: Schedule, core: EngineCore, *, close: bool = True) -> None:
    """Count what an engine has done, and end its tiers."""
    stats = core.stats()
    schedule.events.update(
        preemptions=stats.preemptions, hits=stats.prefix_hit_tokens, drafted=stats.drafted_tokens,
        accepted=stats.accepted_tokens, generated=stats.generated_tokens, steps=stats.steps,
        from_memory=stats.prefix_memory_tokens, from_disk=stats.prefix_disk_tokens,
    )  # fmt: skip
    if core.tiers is not None and close:
        core.tiers.close()


def first_difference(alone: ChoiceResult, mixed: ChoiceResult) -> str:
    """Where two results part; empty if they do not. A cancelled one is a beginning of the other."""
    if mixed.finish == "cancelled":
        tokens, scores = len(mixed.tokens), len(mixed.prompt_logprobs)
        alone = ChoiceResult(
            alone.tokens[:tokens], alone.logprobs[:tokens], alone.prompt_logprobs[:scores], "cancelled"
        )
    for name in ("tokens", "logprobs", "prompt_logprobs"):
        a, b = getattr(alone, name), getattr(mixed, name)
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            return f"{name} part at {at} of {len(a)}: {a[at : at + 1]} alone, {b[at : at + 1]} here"
    return "" if alone.finish == mixed.finish else f"ends by {mixed.finish}, alone by {alone.finish}"


def gates_of(preset: str, threads: int) -> gates_.Gates:
    return gates_.parse({"threads": str(threads), "deterministic": "on"}, preset=preset)


@dataclass(frozen=True)
class Options:
    schedules: int = option(1000, "schedules of all presets and numbers of threads together")
    presets: tuple[str, ...] = option(("exact", "int8", "balanced", "fast"), "presets")
    threads: tuple[int, ...] = option((1, 2), "threads of the CPU kernels")
    first: int = option(0, "the first seed")
    requests: int = option(5, "requests of a schedule, at most")
    device: str = option("", "cpu or cuda; empty: cuda where there is a GPU")
    methods: tuple[str, ...] = option(METHODS, "who drafts")
    jobs: int = option(1, "processes at once; each of them plays a part of the schedules of a preset")
    seconds: float = option(7200.0, "after which no schedule begins")


@measurement("schedules", seconds=7200)
def schedules(run: Run, options: Options) -> None:
    """Every preset and number of threads in parts, a process each, and its first schedules once more in another."""
    kinds = [(preset, threads) for preset in options.presets for threads in options.threads]
    per_kind = -(-options.schedules // len(kinds))
    parts = max(1, -(-options.jobs // len(kinds)))
    until = time.time() + options.seconds
    repeated: list[tuple[Any, ...]] = []  # first of all, since they are few and nothing counts without them
    cases: list[tuple[Any, ...]] = []
    for number, (preset, threads) in enumerate(kinds):
        first, page_size = options.first + number * per_kind, 64 if number % 2 else 16
        bounds = [first + per_kind * part // parts for part in range(parts + 1)]
        facts = (preset, threads, page_size)
        cases += [(*facts, begin, end, True) for begin, end in itertools.pairwise(bounds)]
        repeated.append((*facts, first, min(first + RESTARTED, first + per_kind), False))
    cases = repeated + cases
    shared = (options.requests, options.device, options.methods, until)
    outcomes = run_cases(play_part, cases, *shared, jobs=options.jobs, seconds=options.seconds + GRACE_S)
    waiting = Counter(case[:2] for case in cases)
    ended: dict[tuple[Any, ...], list[CaseOutcome]] = {kind: [] for kind in kinds}
    phases: set[str] = set()
    for outcome in outcomes:
        kind = outcome.case[:2]
        ended[kind].append(outcome)
        phases.update(phase for record in outcome.records for phase in record["phases"])
        if len(ended[kind]) == waiting[kind]:
            cell = Cell("schedules", "tiny", preset=kind[0], path="engine", shape={"threads": kind[1]})
            run.sources |= engine_sources(sorted(phases)) | receipts.weights(EMBEDDED)
            run.add(verdict(cell, ended[kind]))


def play_part(
    preset: str, threads: int, page_size: int, first: int, end: int, full: bool, out: str, requests: int, device: str,
    methods: Sequence[str], until: float,
) -> None:  # fmt: skip
    """Play these seeds in this process and write down what became of them, after every few. Where they are not played
    in `full`, only the answers of one request at a time are wanted."""
    machine = ScheduleBench(
        gates_of(preset, threads), device=device or None, page_size=page_size, methods=tuple(methods)
    )
    events: Counter[str] = Counter()
    differences: list[str] = []
    digests: list[str] = []
    start = time.perf_counter()
    for seed in range(first, end):
        if full and time.time() > until:
            break
        schedule = run_schedule(machine, seed, requests=requests)
        events += schedule.events
        differences += schedule.differences
        digests.append(schedule.digest)
        if len(digests) % RESTARTED == 0 or seed + 1 == end:
            phases = sorted({name for chosen in machine.model.plan.selection.chosen.values() for name in chosen})
            record = {
                "full": full, "first": first, "digests": digests, "events": events, "differences": differences[:8],
                "phases": phases, "seconds": time.perf_counter() - start, "device": str(machine.model.device),
            }  # fmt: skip
            write_records(out, [record])
    machine.close()


def verdict(cell: Cell, outcomes: list[CaseOutcome]) -> Result:
    """The result of a preset and number of threads from all of its parts."""
    failed = "; ".join(outcome.failed for outcome in outcomes if outcome.failed)
    records = sorted((r for outcome in outcomes for r in outcome.records), key=lambda r: int(r["first"]))
    played, again = ([r for r in records if r["full"] is full] for full in (True, False))
    if not played or not again:
        return Result(cell, refused=f"no schedule was played ({failed or 'no time was left'})")
    events: Counter[str] = Counter()
    for record in played:
        events.update(record["events"])
    differences = [text for record in records for text in record["differences"]]
    digests = again[0]["digests"]
    same = played[0]["first"] == again[0]["first"] and played[0]["digests"][: len(digests)] == digests
    count = sum(len(record["digests"]) for record in played)
    mixed = min(events[name] for name in HAPPENED) > 0
    note = ", ".join(f"{name} {count}" for name, count in events.items())
    checks = (
        Check("every answer is that of one request at a time", not differences, note="; ".join(differences)[:400]),
        Check("another process gives the same answers", same),
        Check(
            "pages ran out, prefixes were found in every tier, drafts accepted, engines built anew", mixed, note=note
        ),
        Check("every process went to its end", not failed, note=failed),
    )
    detail = {"seconds": [r["seconds"] for r in played], "device": played[0]["device"], **events}
    figures = (figure("schedules", "tests", count),) if all(c.ok for c in checks) else ()
    return Result(cell, figures, checks, detail=detail)
