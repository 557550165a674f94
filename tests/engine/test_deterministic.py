"""--deterministic: tokens and log probabilities of mixed schedules are those of one request at a time, bit for bit.

On the CPU with the embedded model. For a GPU the policy alone is tested here, on a fake whose values depend on the
regime of the step that wrote them, as kernels' do; no GPU has run it.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from engine_fakes import EOS, VOCAB, FakeRunner, FakeVocabulary, random_prompt
from test_schedules import REGEX, RandomProposer, random_request

from bench.checks.schedules import (
    HAPPENED,
    ChoiceResult,
    ScheduleBench,
    answers_of,
    first_difference,
    gates_of,
    play_part,
    run_schedule,
    verdict,
)
from bench.measurement import CaseOutcome, child_command
from halfbyte import gates
from halfbyte.architectures import REGIMES, RegimeLimits
from halfbyte.engine.batch import Batch
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.prefix_tiers import PrefixTiers
from halfbyte.engine.request import Constraint, Request, SamplingParams
from halfbyte.engine.scheduler import ANSWER_STEPS
from halfbyte.engine.speculative.controller import Controller
from halfbyte.kv.pages import PagePool
from halfbyte.kv.prefix_store import PrefixStore
from halfbyte.kv.segments import PageLayout
from halfbyte.lab.result import Cell

LIMITS = RegimeLimits(decode=1, batch=8, long=40, source="a fake")
LONGEST, WINDOW = 170, 8


class RegimeRunner(FakeRunner):
    """A fake whose keys, values and logits depend on the regime of the step, and on nothing else of it."""

    def stored(self, tokens: np.ndarray, batch: Batch) -> np.ndarray:
        regime = batch.regime or LIMITS.regime(batch.rows)
        if batch.regime == "batch":
            assert batch.rows <= LIMITS.batch, "the kernels of a batch take no more rows"
        self.regimes[regime] += 1
        return tokens + VOCAB * REGIMES.index(regime)

    regimes: Counter[str] = Counter()


def core_of(config: EngineConfig, proposer: RandomProposer | None = None) -> EngineCore:
    core = EngineCore(RegimeRunner(config.pages, config.page_size, WINDOW), config, FakeVocabulary(), proposer)
    assert core.grammars is not None
    core.grammars.compiler.matcher(Constraint("regex", REGEX))
    return core


def play(seed: int, answer_rows: int, folder: Path) -> tuple[list[str], Counter[str]]:
    """A mixed schedule, and every request alone; the differences, and what happened. Before the schedule an engine
    serves the same requests and leaves prefixes in host memory or on disk, and that engine's pages are lost."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    least = 1 + PagePool(9, page_size, WINDOW).peak_pages(LONGEST, 2)
    config = EngineConfig(
        pages=least + rng.randint(0, 60) // page_size, page_size=page_size, window=WINDOW, vocab=VOCAB,
        max_context=LONGEST, eos_tokens=(EOS,), max_seqs=rng.choice([2, 5, 8]),
        max_rows_per_step=rng.choice([8, 16, 64]), max_rows_with_decode=rng.choice([8, 2048]),
        run_ahead=rng.random() < 0.7, prefix_cache=rng.random() < 0.8, answer_rows=answer_rows,
        max_rows_in_burst=24 * (seed % 2),
    )  # fmt: skip
    shared = [random_prompt(rng, 10, 80) for _ in range(2)]
    todo = [random_request(rng, i, shared)[0] for i in range(rng.randint(4, 12))]
    for request in todo:
        request.timeout = None
    alone: dict[tuple[str, int], ChoiceResult] = {}
    for request in todo:
        single = EngineConfig(
            pages=1 + PagePool(9, page_size, WINDOW).peak_pages(LONGEST, 200), page_size=page_size, window=WINDOW,
            vocab=VOCAB, max_context=LONGEST, eos_tokens=(EOS,), max_seqs=1, max_rows_per_step=200,
            run_ahead=False, prefix_cache=False, answer_rows=answer_rows,
        )  # fmt: skip
        alone |= answers_of(outputs_of(core_of(single), [request], random.Random(0), cancels=False))
    controller = Controller(lambda rows, context: 1.0, longest=4, allowance=1.0)
    memory, on_disk = rng.choice([(0, False), (1 << 20, False), (0, True)])
    answers: dict[tuple[str, int], ChoiceResult] = {}
    events: Counter[str] = Counter()
    tiers: PrefixTiers | None = None
    for life in range(2 if memory or on_disk else 1):
        core = core_of(config, RandomProposer(rng, controller) if rng.random() < 0.5 else None)
        if (memory or on_disk) and config.prefix_cache:
            layout = PageLayout(b"regimes" + bytes(9), 8 * page_size, page_size)
            store = PrefixStore(folder / str(seed), layout, 1 << 20) if on_disk else None
            if tiers is None or on_disk:
                tiers = PrefixTiers(core.runner, 8 * page_size, memory, store)  # type: ignore[arg-type]
                tiers.computed = lambda rows, depth, seconds: None  # type: ignore[method-assign]
            tiers._runner = core.runner  # type: ignore[assignment]
            core.attach(tiers)
        lives = answers_of(outputs_of(core, todo, rng, cancels=True))
        answers |= {(f"{id} in life {life}", index): answer for (id, index), answer in lives.items()}
        alone |= {(f"{id} in life {life}", index): alone[id, index] for id, index in lives}
        if tiers is not None and (life or on_disk):
            tiers.close()
        stats = core.stats()
        events.update(
            preemptions=stats.preemptions, hits=stats.prefix_hit_tokens, accepted=stats.accepted_tokens,
            from_memory=stats.prefix_memory_tokens, from_disk=stats.prefix_disk_tokens,
        )  # fmt: skip
    assert core.pages.available == core.pages.capacity, "pages leaked"
    pairs = ((choice, first_difference(alone[choice], answer)) for choice, answer in answers.items())
    return [f"seed {seed}, {choice}: {difference}" for choice, difference in pairs if difference], events


def outputs_of(core: EngineCore, requests: list[Request], rng: random.Random, *, cancels: bool):
    todo, sent = list(requests), []
    while todo or core.has_work:
        while todo and rng.random() < 0.4:
            sent.append(todo.pop())
            core.submit(sent[-1])
        if cancels and sent and rng.random() < 0.01:
            core.cancel(rng.choice(sent).id)
        yield from core.step()
        core.check()
    yield from core.step()


@pytest.fixture(scope="module")
def machine():
    machine = ScheduleBench(gates.parse({"threads": "1", "deterministic": "on"}, env={}), page_size=16)
    yield machine
    machine.close()


def test_no_schedule_changes_an_answer_on_a_cpu(machine: ScheduleBench) -> None:
    total: Counter[str] = Counter()
    for seed in range(100, 160):
        schedule = run_schedule(machine, seed, requests=4)
        assert not schedule.differences, schedule.differences[0]
        total += schedule.events
    assert min(total[k] for k in HAPPENED) > 0, total


def test_another_process_gives_the_same_answers(machine: ScheduleBench, tmp_path: Path) -> None:
    out, methods, until = tmp_path / "part.json", ["off", "ngram"], time.time() + 3600
    subprocess.run(child_command(play_part, "int8", 2, 16, 104, 105, False, out, 4, "cpu", methods, until), check=True)
    (record,) = json.loads(out.read_text())
    assert record["digests"] == [run_schedule(machine, 104, requests=4).digest]
    assert record["differences"] == []


def part(first: int, digests: list[str], *, full: bool = True, happened: int = 1, differs: str = "") -> CaseOutcome:
    record = {
        "full": full, "first": first, "digests": digests, "events": dict.fromkeys(HAPPENED, happened),
        "differences": [differs] if differs else [], "phases": [], "seconds": 1.0, "device": "cpu",
    }  # fmt: skip
    return CaseOutcome((), [record], "")


def test_schedules_in_parts_are_judged_together() -> None:
    cell, again = Cell("schedules"), part(0, ["a"], full=False)
    good = verdict(cell, [part(2, ["c", "d"]), part(0, ["a", "b"]), again])
    assert not good.refused
    assert good.figure("schedules").value == 4
    for outcomes in (
        [part(0, ["a", "b"], differs="seed 1"), again],
        [part(0, ["b", "a"]), again],  # another process answers otherwise
        [part(0, ["a", "b"], happened=0), again],
        [part(0, ["a", "b"]), CaseOutcome((), [], "exit code 1"), again],
        [part(0, ["a", "b"])],
    ):
        assert verdict(cell, outcomes).refused


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["exact", "int8", "balanced", "fast"])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_schedule_of_a_thousand_changes_an_answer_on_a_cpu(preset: str, threads: int) -> None:
    machine = ScheduleBench(gates_of(preset, threads), page_size=64 if threads == 2 else 16)
    for seed in range(1000 * threads, 1000 * threads + 125):
        schedule = run_schedule(machine, seed)
        assert not schedule.differences, schedule.differences[0]
    machine.close()


def test_no_schedule_changes_an_answer_where_regimes_round_differently(tmp_path: Path) -> None:
    RegimeRunner.regimes = Counter()
    total: Counter[str] = Counter()
    for seed in range(16):
        differences, events = play(seed, LIMITS.batch, tmp_path)
        assert not differences, differences[0]
        total += events
    assert set(RegimeRunner.regimes) == {"batch", "prefill"}
    assert min(total[k] for k in HAPPENED if k != "restarts") > 0, total


@pytest.mark.slow
def test_no_schedule_of_a_thousand_changes_an_answer_where_regimes_round_differently(tmp_path: Path) -> None:
    for seed in range(16, 1016):
        differences, _ = play(seed, LIMITS.batch, tmp_path)
        assert not differences, differences[0]


def test_prompts_are_gathered_while_answers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of prompts after some of answers, with so many times the rows; and at once where nothing answers."""
    steps: list[tuple[str | None, int]] = []

    def launch(runner: RegimeRunner, batch: Batch) -> object:
        steps.append((batch.regime, batch.rows))
        return FakeRunner.launch(runner, batch)

    monkeypatch.setattr(RegimeRunner, "launch", launch)
    config = EngineConfig(
        pages=200, page_size=4, window=WINDOW, vocab=VOCAB, max_context=LONGEST, eos_tokens=(EOS,), max_seqs=4,
        max_rows_per_step=64, max_rows_with_decode=8, run_ahead=False, answer_rows=LIMITS.batch,
    )  # fmt: skip
    core = core_of(config)
    for number in range(4):
        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        core.submit(Request(id=f"{number}", prompt=[number + 2, *range(2, 41)], sampling=sampling))
        for _ in range(2):
            core.step()
    while core.has_work:
        core.step()
    assert steps[0] == ("prefill", 40), "nothing waits for it"
    alone = [rows for i, (regime, rows) in enumerate(steps) if regime == "prefill" and i]
    assert max(alone) == ANSWER_STEPS * 8
    beside = "".join(str(regime)[0] for regime, _ in steps)
    assert "ppp" not in beside
    assert "p" + "b" * ANSWER_STEPS + "p" in beside


def test_without_it_such_regimes_show(tmp_path: Path) -> None:
    assert sum(bool(play(seed, 0, tmp_path)[0]) for seed in range(4)) > 1
