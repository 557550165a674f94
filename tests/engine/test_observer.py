"""A core's observer sees every stage and every launch, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from fake_core import GREEDY, drain, make, tokens_of

from halfbyte.engine.batch import Batch
from halfbyte.engine.observer import Stage, StepObserver
from halfbyte.engine.request import Request
from halfbyte.engine.scheduled_step import ScheduledStep

PROMPTS = [[5, 6, 7, 8] * 12, [9, 10, 11]]


class Diary(StepObserver):
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.rows: list[int] = []

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        self.stages.append(name)
        try:
            yield
        finally:
            self.stages.append(f"/{name}")

    def launched(self, step: ScheduledStep, batch: Batch) -> None:
        firsts = [c.first_sampled for c in step.chunks]
        assert firsts == sorted(firsts)
        assert (step.rows, step.results) == (batch.rows, len(batch.samplers))
        self.rows.append(batch.rows)


def run(observer: StepObserver | None, **settings: bool) -> dict[str, list[int]]:
    core = make(**settings)
    core.observer = observer
    for i, prompt in enumerate(PROMPTS):
        core.submit(Request(prompt, replace(GREEDY, n=2), id=f"q{i}"))
    return {f"{id}/{index}": tokens_of(deltas) for (id, index), deltas in drain(core).items()}


@pytest.mark.parametrize("settings", [{}, {"run_ahead": False}, {"host_steps": True, "run_ahead": False}])
def test_an_observer_sees_every_stage_and_changes_nothing(settings: dict[str, bool]) -> None:
    diary = Diary()
    assert run(diary, **settings) == run(None, **settings) == run(StepObserver(), **settings)
    opened = diary.stages[::2]
    assert diary.stages[1::2] == [f"/{name}" for name in opened]  # stages do not overlap
    launches = len(diary.rows)
    assert launches > 30
    assert [opened.count(name) for name in ("build", "launch", "wait")] == [launches] * 3
    assert opened.count("schedule") >= launches
    assert max(diary.rows) > 4  # chunks of prompts


def test_a_stage_that_fails_is_left() -> None:
    diary = Diary()

    def fault(batch: Batch) -> None:
        if len(diary.rows) == 3:
            raise RuntimeError("planted")

    core = make(fault=fault, run_ahead=False)
    core.observer = diary
    core.submit(Request(PROMPTS[1], GREEDY, id="q"))
    drain(core)
    assert diary.stages.count("wait") == diary.stages.count("/wait") == diary.stages.count("launch")


def test_a_core_made_anew_can_have_another_config() -> None:
    core = make(max_rows_with_decode=32)
    other = core.anew(replace(core.config, max_rows_with_decode=16))
    assert (core.scheduler.max_rows_with_decode, other.scheduler.max_rows_with_decode) == (32, 16)
    assert core.anew().config == core.config
