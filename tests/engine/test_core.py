"""The engine's core on the fake runner: each promise on its own."""

from __future__ import annotations

import random
from typing import cast

import pytest
from engine_fakes import FakeRunner, oracle, random_prompt
from fake_core import GREEDY, Got, collect, drain, make, tokens_of

from halfbyte.engine.batch import Batch
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import Request, SamplingParams


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_a_request_gives_the_same_tokens_in_any_batch(batch: int, run_ahead: bool) -> None:
    rng = random.Random(batch)
    core = make(pages=3000, max_seqs=64, max_rows_per_step=100, run_ahead=run_ahead)
    requests = [
        Request(random_prompt(rng, 1, 60), SamplingParams(seed=i, max_tokens=12, top_p=(1.0, 0.9)[i % 2]), id=f"q{i}")
        for i in range(batch)
    ]
    for r in requests:
        core.submit(r)
    out = drain(core)
    for r in requests:
        assert tokens_of(out[r.id, 0]) == oracle(r, 0, len(r.prompt) + 12, 8)[0]


def test_steps_are_launched_before_the_last_is_committed() -> None:
    core = make()
    core.submit(Request([5, 6, 7], GREEDY, id="a"))
    core.submit(Request([9, 8], GREEDY, id="b"))
    ahead = 0
    while core.has_work:
        before = core.launched
        core.step()
        if before is not None and core.launched is not None and before.step.ahead:
            ahead += 1
            assert all(s.num_pending_tokens <= 1 for s in core.scheduler.running)
    assert ahead >= 25


def test_chunks_beside_decodes_are_launched_ahead_within_the_pages_promised() -> None:
    """A prompt in chunks that others wait for: the device never waits for the host in between."""
    core = make(pages=2000, max_context=4096, max_rows_per_step=64, max_rows_with_decode=32)
    core.submit(Request([5], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), id="short"))
    core.step()
    core.submit(Request([7] * 800, SamplingParams(temperature=0, max_tokens=1), id="long"))
    ahead = mixed = 0
    while core.has_work:
        before = core.launched
        core.step()
        core.check()
        for seq in core.scheduler.running:
            assert seq.num_scheduled_tokens - seq.tables.length <= 64
        if before is not None and core.launched is not None and core.launched.step.rows == 32:
            mixed += 1
            ahead += before.step.ahead
    assert mixed >= 25
    assert ahead == mixed


def test_a_long_prompt_never_stops_others_from_decoding() -> None:
    core = make(pages=2000, max_context=4096, max_rows_per_step=32)
    core.submit(Request([5], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), id="short"))
    out: Got = {}
    collect(core.step(), out)
    core.submit(Request([7] * 1500, SamplingParams(temperature=0, max_tokens=1), id="long"))
    stalls = worst = 0
    for _ in range(45):
        before = len(out.get(("short", 0), []))
        collect(core.step(), out)
        core.check()
        stalls = 0 if len(out[("short", 0)]) > before else stalls + 1
        worst = max(worst, stalls)
    assert worst <= 1, "a decoding sequence waited for more than the step in which the long prompt came"
    # and a short prompt behind the long one does not wait for it either
    core.submit(Request([3, 4, 5], SamplingParams(temperature=0, max_tokens=1), id="late"))
    for _ in range(4):
        collect(core.step(), out)
    assert ("late", 0) in out
    assert ("long", 0) not in out
    drain(core, out)


def test_chunks_are_larger_while_nobody_decodes() -> None:
    rows: list[int] = []
    core = make(
        pages=2000,
        max_context=4096,
        max_seqs=4,
        max_rows_per_step=64,
        max_rows_with_decode=16,
        fault=lambda b: rows.append(b.rows),
    )
    core.submit(Request([7] * 150, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), id="long"))
    out: Got = {}
    for _ in range(5):
        collect(core.step(), out)
    core.submit(Request([3] * 100, SamplingParams(temperature=0, max_tokens=1), id="late"))
    drain(core, out)
    assert rows[:3] == [64, 64, 22]
    assert max(rows[5:]) == 16, "a prompt took more than its share beside a sequence that decodes"


def test_a_prompt_that_can_be_finished_is_not_halved() -> None:
    """Two that share every step would both have their first token at the end: one after the other, one has it early."""
    core = make(pages=2000, max_context=4096, max_seqs=4, max_rows_per_step=64, max_rows_with_decode=33)
    core.submit(Request([5], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True), id="decodes"))
    core.step()
    for token, name in enumerate("ab", 7):
        core.submit(Request([token] * 80, SamplingParams(temperature=0, max_tokens=1), id=name))
    ends: dict[str, int] = {}
    for step in range(12):
        for id, delta in core.step():
            if delta.finish is not None:
                ends[id] = step
    # 32 rows of a; half a step each; the 32 that a has left; then two more for b
    assert ends["b"] - ends["a"] == 2


def test_n_choices_share_their_prompt_pages() -> None:
    core = make(pages=400)
    prompt = list(range(3, 43))
    core.submit(Request(prompt, SamplingParams(seed=1, max_tokens=6, n=4, ignore_eos=True), id="n"))
    shared = 0
    while core.has_work:
        core.step()
        core.check()
        running = core.scheduler.running
        if len(running) == 4:
            shared = len(set.intersection(*(set(s.tables.full) for s in running)))
    assert shared == (len(prompt) - 1) // 4
    runner = core.runner
    assert isinstance(runner, FakeRunner)
    assert runner.computed_rows < 2 * len(prompt) + 4 * 8


def test_n_choices_differ_and_each_equals_its_oracle() -> None:
    core = make(pages=400)
    request = Request([5, 6, 7, 8], SamplingParams(seed=3, max_tokens=10, n=5, temperature=1.5), id="n")
    core.submit(request)
    out = drain(core)
    every = [tokens_of(out["n", i]) for i in range(5)]
    assert every == [oracle(request, i, 14, 8)[0] for i in range(5)]
    assert len({tuple(t) for t in every}) > 1


def test_without_a_prefix_cache_nothing_is_reused_across_requests() -> None:
    for cache, cached in ((True, 28), (False, 0)):
        core = make(prefix_cache=cache)
        for id in ("a", "b"):
            core.submit(Request(list(range(3, 33)), GREEDY, id=id))
            last = drain(core)[id, 0][-1]
        assert last.usage is not None
        assert last.usage.cached_tokens == cached


def test_peak_of_a_32k_request_through_the_scheduler_is_at_most_55_percent() -> None:
    """As tests/kv has it by hand, now with the scheduler's own chunks of 2048 and steps launched ahead."""

    class Nothing:
        def launch(self, batch: Batch):
            return self

        def result(self):
            from halfbyte.engine.runner import StepResult

            return StepResult([7])

        def close(self) -> None: ...

    config = EngineConfig(pages=2000, max_rows_per_step=2048, vocab=1000, eos_tokens=(1,))
    core = EngineCore(Nothing(), config)
    core.submit(Request([5] * (32768 - 64), SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)))
    while core.has_work:
        core.step()
    core.check()
    peak, uniform = core.pages.stats().peak_used, 2 * 32768 // 64
    assert peak <= 0.55 * uniform, f"{peak} of {uniform}"
    assert peak >= 512 + 2, "the accounting cannot be below the full pages and a window"


def test_on_the_host_no_step_runs_that_nobody_waits_for() -> None:
    core = make(host_steps=True, run_ahead=False)
    runner = cast(FakeRunner, core.runner)
    core.submit(Request([1, 2, 3], GREEDY, id="a"))
    for _ in range(4):
        core.step()
    rows = runner.computed_rows
    core.cancel("a")
    assert [d.finish for d in drain(core)["a", 0]] == ["cancelled"]
    assert runner.computed_rows == rows
    core.submit(Request([4, 5, 6], GREEDY, id="b"))
    core.step()  # launched, and not run yet
    core.close()
    assert runner.computed_rows == rows


def test_on_the_host_batches_are_views_and_give_the_same_tokens() -> None:
    prompts = [[i + 1, 2 * i + 3, 7] for i in range(9)]
    answers = []
    for settings in ({}, {"host_steps": True, "run_ahead": False}):
        core = make(pages=600, **settings)
        for i, prompt in enumerate(prompts):  # more than run at once, of other lengths: slots leave and come back
            params = SamplingParams(temperature=0, max_tokens=10 + 7 * (i % 4), ignore_eos=True)
            core.submit(Request(prompt, params, id=str(i)))
        got = drain(core)
        answers.append({key: tokens_of(deltas) for key, deltas in got.items()})
    assert answers[0] == answers[1]
