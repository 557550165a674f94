"""The engine's core on the fake runner: grammars that are refused, slow, costly, asleep."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import tracemalloc
from typing import cast

import pytest
from engine_fakes import EOS, GO, PIECES, FakeVocabulary, oracle, text_of
from fake_core import Got, collect, drain, make, refused, tokens_of

from halfbyte.engine import grammar_trial, grammar_work
from halfbyte.engine.batch import Batch
from halfbyte.engine.grammar import GrammarCompiler, GrammarState
from halfbyte.engine.observer import StepObserver
from halfbyte.engine.request import Constraint, Request, SamplingParams
from halfbyte.engine.scheduled_step import ScheduledStep
from halfbyte.errors import CapacityError, HalfbyteError, RequestError


def test_a_grammar_that_cannot_be_used_is_refused_with_the_reason_and_at_once_the_next_time() -> None:
    cases = {
        "Invalid type": ("json_schema", '{"type": "objec"}'),
        "json_schema": ("json_schema", "{"),
        "unclosed group": ("regex", "(ab"),
        "foo": ("ebnf", "start: foo"),
        "no value that it allows": ("json_schema", '{"$ref": "#"}'),
        "no value": ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}'),
        "nest": ("json_schema", json.dumps({"type": "string", "pattern": "(" * 3000 + ")" * 3000})),
    }
    core = make()
    for word, (kind, source) in cases.items():
        request = Request([5], SamplingParams(), Constraint(kind, source))  # type: ignore[arg-type]
        core.submit(request)
        ((id, error),) = refused(core)
        assert id == request.id
        assert isinstance(error, RequestError)
        assert word in str(error)
        assert len(str(error)) < 300
        assert "state" not in str(error)
        with pytest.raises(RequestError, match=re.escape(word)):
            core.submit(Request([5], SamplingParams(), Constraint(kind, source)))  # type: ignore[arg-type]
    core.close()


def test_a_grammar_that_takes_too_long_to_compile_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler has no bound of its own here: this one would take hours."""
    monkeypatch.setattr(grammar_trial, "CPU_SECONDS", 1)
    core = make()
    costly = Request([5], SamplingParams(), Constraint("json_schema", '{"type": "integer", "multipleOf": 9999991}'))
    core.submit(costly)
    bystander = Request([5, 6, 7], SamplingParams(temperature=0, max_tokens=40))
    core.submit(bystander)
    assert costly.id not in core.groups
    got: Got = {}
    told: list[tuple[str, HalfbyteError]] = []
    while bystander.id in core.groups:
        collect(core.step(), got)
        told += core.refusals()
    assert tokens_of(got[bystander.id, 0]) == oracle(bystander, 0, 43, 8)[0]
    ((id, error),) = told + refused(core)
    assert id == costly.id
    assert "too costly" in str(error)
    core.submit(Request([5], SamplingParams(max_tokens=3), Constraint("regex", "[a-z]+")))  # another trial is started
    assert drain(core)
    core.close()


def test_a_mask_that_takes_long_holds_back_its_own_sequence_only() -> None:
    core = make()
    assert core.grammars is not None
    slow = Request([5], SamplingParams(temperature=0, max_tokens=6), Constraint("regex", "[a-z]*"))
    core.submit(slow)
    got: Got = {}
    while (slow.id, 0) not in got:
        collect(core.step(), got)
    gate = threading.Event()
    (seq,) = core.groups[slow.id].seqs
    assert seq.grammar is not None
    while seq.grammar.job is not None:
        collect(core.step(), got)
    seq.grammar.state = cast(GrammarState, Slowed(seq.grammar.state, gate))
    bystander = Request([5, 6, 7], SamplingParams(temperature=0, max_tokens=40))
    core.submit(bystander)
    while bystander.id in core.groups:
        collect(core.step(), got)
        core.check()
    assert tokens_of(got[bystander.id, 0]) == oracle(bystander, 0, 43, 8)[0]
    assert core.waits_for_grammars
    gate.set()
    drain(core, got)
    assert re.fullmatch(rb"[a-z]*", text_of([t for t in tokens_of(got[slow.id, 0]) if t != EOS]))
    core.close()


def test_masks_beyond_the_budget_of_a_request_end_it_in_the_middle_and_the_grammar_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make()
    assert core.grammars is not None
    request = Request([5], SamplingParams(temperature=0, max_tokens=30, n=2), Constraint("regex", "[a-z]{30,}"))
    core.submit(request)
    got: Got = {}
    while (request.id, 0) not in got:
        collect(core.step(), got)
    monkeypatch.setattr(grammar_work, "BUDGET_S", -1.0)
    monkeypatch.setattr(grammar_work, "BUDGET_PER_TOKEN_S", 0.0)
    ((id, error),) = refused(core)
    assert (id, "too costly" in str(error)) == (request.id, True)
    assert core.pages.available == core.pages.capacity, "pages leaked"
    with pytest.raises(RequestError, match="too costly"):
        core.submit(Request([5], SamplingParams(), Constraint("regex", "[a-z]{30,}")))
    core.close()


def test_a_request_whose_grammar_is_being_compiled_can_be_cancelled_and_times_out() -> None:
    now = 0.0
    core = make(clock=lambda: now)
    costly = Constraint("json_schema", '{"type": "integer", "multipleOf": 9999991}')
    core.submit(Request([5], SamplingParams(), costly, id="a"))
    core.submit(Request([5], SamplingParams(n=2), costly, timeout=5.0, id="b"))
    assert core.cancel("a")
    now = 6.0
    assert [(id, d.index, d.finish) for id, d in core.step()] == [
        ("a", 0, "cancelled"), ("b", 0, "timeout"), ("b", 1, "timeout"),
    ]  # fmt: skip
    assert not core.has_work
    core.close()


def words(number: int, count: int) -> Constraint:
    """A schema of its own for each number, whose grammar takes some kilobytes for each of its words."""
    return Constraint("json_schema", json.dumps({"enum": [f"{number} {i}" for i in range(count)]}))


def test_of_grammars_that_were_refused_only_the_reason_is_kept() -> None:
    core = make()
    tracemalloc.start()
    try:
        for number in range(8):
            source = json.dumps({"type": "objec", "description": f"{number}" * (2 << 20)})
            core.submit(Request([5], SamplingParams(), Constraint("json_schema", source)))
            assert len(refused(core)) == 1
            with pytest.raises(RequestError, match="Invalid type"):
                core.submit(Request([5], SamplingParams(), Constraint("json_schema", source)))
        del source
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4 << 20
    core.close()


def test_compiled_grammars_are_kept_by_the_memory_they_take() -> None:
    work = grammar_work.GrammarWork(FakeVocabulary(), (EOS,))
    trials = grammar_trial.Trials(work.compiler.vocabulary, work.compiler.end_tokens)
    size = trials.check(words(0, 4000))
    trials.close()
    assert size > 400_000
    work.compiler = GrammarCompiler(work.compiler.vocabulary, (EOS,), cache_bytes=3 * size)
    large = [words(number, 4000) for number in range(6)]
    for constraint in large:
        work.prepare(constraint, [5]).result()
    known = [work.compiler.has(constraint) for constraint in large]
    assert known[-1]
    assert 1 <= sum(known) <= 4
    work.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_trial_that_something_else_ends_is_no_verdict(end: signal.Signals) -> None:
    trials = grammar_trial.Trials(FakeVocabulary(), (EOS,))
    trials.check(Constraint("regex", "a"))
    assert trials._process is not None
    pid = trials._process.pid
    os.kill(pid, signal.SIGSTOP)  # the next trial waits until the process is ended

    def end_it() -> None:
        os.kill(pid, end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(0.3, end_it)
    timer.start()
    assert trials.check(Constraint("regex", "b")) >= 0
    trials.close()


def test_trials_that_something_else_always_ends_are_asked_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    work = grammar_work.GrammarWork(FakeVocabulary(), (EOS,))

    def killed(trials: grammar_trial.Trials) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial.Trials, "_start", killed)
        with pytest.raises(CapacityError):
            work.prepare(Constraint("regex", "[ab]"), [5]).result()
    assert work.prepare(Constraint("regex", "[ab]"), [5]).result()  # nothing was remembered against it
    work.close()


class Slowed:
    """A grammar's state whose masks come when the gate opens."""

    def __init__(self, state: GrammarState, gate: threading.Event) -> None:
        self._state, self._gate = state, gate

    def __getattr__(self, name: str) -> object:
        return getattr(self._state, name)

    def masks(self, draft: list[int]) -> object:
        assert self._gate.wait(120)
        return self._state.masks(draft)


def test_grammar_sleeps_until_its_trigger_and_ends_with_an_end_token() -> None:
    core = make()
    constraint = Constraint("regex", "[0-9]{2,3}", triggers=((GO,),))
    for seed in range(8):
        core.submit(
            Request([5], SamplingParams(seed=seed, max_tokens=40, logit_bias={GO: 2.0}), constraint, id=f"g{seed}")
        )
    out = drain(core)
    woke = 0
    for deltas in out.values():
        tokens = tokens_of(deltas)
        if GO in tokens and deltas[-1].finish == "stop" and tokens.index(GO) < tokens.index(EOS):
            woke += 1
            text = text_of(tokens[tokens.index(GO) + 1 : -1])
            assert text.isdigit()
            assert 2 <= len(text) <= 3
    assert woke >= 3


def test_end_tokens_of_a_constraint_are_its_own() -> None:
    core = make()
    dot = PIECES.index(b"z")
    request = Request(
        [5], SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(dot,)), Constraint("regex", "12", (), (dot,))
    )
    core.submit(request)
    tokens = tokens_of(drain(core)[request.id, 0])
    assert text_of(tokens) == b"12z"


class _Ahead(StepObserver):
    """Counts the launched steps that let the next one be scheduled before they are committed."""

    def __init__(self) -> None:
        self.ahead: list[bool] = []

    def launched(self, step: ScheduledStep, batch: Batch) -> None:
        self.ahead.append(step.ahead)


def test_a_sleeping_grammar_costs_no_step_ahead_until_its_trigger_is_near() -> None:
    """Nine steps of ten run ahead as without a grammar, and every mask is there when the trigger is complete."""
    words = [PIECES.index(b"a"), PIECES.index(b"b"), GO]
    constraint = Constraint("regex", "[0-9]{2,3}", triggers=(tuple(words),))
    core = make()
    core.observer = steps = _Ahead()
    core.submit(Request([5], SamplingParams(seed=1, max_tokens=200, ignore_eos=True), constraint))
    tokens = tokens_of(next(iter(drain(core).values())))
    assert len(tokens) == 200
    assert sum(steps.ahead) > 0.9 * len(steps.ahead)
    core.close()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_trigger_of_any_length_binds_the_very_next_token(length: int) -> None:
    core = make()
    words = (PIECES.index(b"a"), PIECES.index(b"b"), GO)[3 - length :]
    constraint = Constraint("regex", "[0-9]{2,3}", triggers=(words,))
    bias = dict.fromkeys(words, 6.0)
    for seed in range(24):
        sampling = SamplingParams(seed=seed, max_tokens=60, logit_bias=bias)
        core.submit(Request([5], sampling, constraint, id=f"g{seed}"))
    woke = 0
    for deltas in drain(core).values():
        tokens = tokens_of(deltas)
        for at in range(length, len(tokens)):
            if tuple(tokens[at - length : at]) == words:
                woke += 1
                assert text_of(tokens[at : at + 1]).isdigit()
                break
    assert woke >= 3
    core.close()
