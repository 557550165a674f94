"""The soak's verdict: what it must not overlook, on runs that are made up."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.checks.soak import MIB, Fault, ServerSample, Soak, verdict
from halfbyte.lab.result import Result


def samples(
    front: int = 0, engine: int = 0, zombies: int = 0, descriptors: int = 20, disk: int = 30
) -> list[ServerSample]:
    """Growing by so many MiB a sample; the engine has so many descriptors before it has 20."""
    return [
        ServerSample(
            2.0 * t, (300 + front * t) * MIB, (500 + engine * t) * MIB, 7, 20, zombies,
            descriptors if t == 50 else 20, disk * MIB,
        )
        for t in range(90)
    ]  # fmt: skip


def run(**changes: object) -> Soak:
    soak = Soak(
        outcomes=Counter(answered=90, cancelled=5, refused=5, told=3),
        faults=[Fault("stop", 30.0, 70.0, '{"status":"ready","seconds_since_step":12.5}'), Fault("kill", 100.0, 104.0)],
        samples=samples(),
        tier_tokens=Counter(pages=900, memory=90, disk=9),
    )
    for name, value in changes.items():
        setattr(soak, name, value)
    return soak


def judged(soak: Soak, code: int = 0, log: str = "") -> Result:
    return verdict(soak, 180.0, 6, (), code, log)


def test_a_good_run_has_figures() -> None:
    result = judged(run())
    assert not result.refused
    assert result.figure("answer_after_stop").value == 40.0
    assert result.figure("requests").value == 103


@pytest.mark.parametrize(
    ("soak", "what"),
    [
        (run(lost=["chat: cut"]), "every request ended"),
        (run(unprovoked=["chat"]), "errors only around faults"),
        (run(faults=[]), "in time after every fault"),
        (run(faults=[Fault("kill", 1.0)]), "in time after every fault"),
        (run(faults=[Fault("kill", 1.0, 500.0)]), "in time after every fault"),
        (run(faults=[Fault("stop", 1.0, 40.0, "ready")]), "health knew"),
        (run(outcomes=Counter(answered=9, refused=1)), "all happened"),
        (run(samples=samples(front=3)), "memory of the front end"),
        (run(samples=samples(engine=3)), "memory of the engine"),
        (run(samples=samples(zombies=1)), "zombies"),
        (run(samples=samples(descriptors=90)), "descriptors of the engine"),
        (run(samples=samples(disk=33)), "within its bound"),
        (run(samples=samples(disk=1)), "within its bound"),
        (run(tier_tokens=Counter(pages=9, memory=9)), "in every tier"),
        (run(samples=[]), "memory of the front end"),
    ],
)
def test_a_bad_run_is_refused(soak: Soak, what: str) -> None:
    result = judged(soak)
    assert what in result.refused
    assert not result.figures


def test_the_end_and_the_log_count() -> None:
    assert "SIGTERM" in judged(run(), code=1).refused
    assert "traceback" in judged(run(), log="x\nTraceback (most recent call last):").refused


def test_an_error_is_excused_by_a_fault_under_way_only() -> None:
    soak = run(start=-200.0, faults=[Fault("kill", 100.0, 104.0)])
    assert soak.excused(103.0)
    assert not soak.excused(105.0)
    soak.faults.append(Fault("stop", 150.0))
    soak.ended("chat", "answered", 149.0)  # it began before the fault and says nothing of it
    assert soak.open_fault is not None
    soak.ended("chat", "answered", 151.0)
    assert soak.open_fault is None
