"""The memory guard: a start that would not fit is refused with numbers; load is shed and let back in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from halfbyte.errors import MemoryError_
from halfbyte.server.guard import GiB, MemoryPlan, MemoryState, Watchdog, read_memory, read_pressure

UNIFIED = MemoryState(total=119 * GiB, available=70 * GiB, unified=True)


def test_a_plan_that_fits() -> None:
    plan = MemoryPlan(weights=60 * GiB, kv=4 * GiB, workspace=2 * GiB)
    assert plan.check(UNIFIED) is UNIFIED


def test_a_plan_that_does_not_fit_names_the_flag_and_the_numbers() -> None:
    plan = MemoryPlan(weights=60 * GiB, kv=16 * GiB, workspace=2 * GiB)
    with pytest.raises(MemoryError_) as e:
        plan.check(UNIFIED)
    text = str(e.value)
    for part in (
        "60.00 GiB",
        "16.00 GiB",
        "78.00 GiB",
        "MemAvailable 70.00 GiB",
        "10.00 GiB short",
        "--kv-memory 6.0GiB",
    ):
        assert part in text


def test_a_model_that_cannot_fit_at_all() -> None:
    with pytest.raises(MemoryError_, match="smaller model"):
        MemoryPlan(weights=69 * GiB, kv=16 * GiB, workspace=2 * GiB).check(UNIFIED)


def test_a_discrete_gpu_counts_its_own_memory() -> None:
    state = MemoryState(total=64 * GiB, available=8 * GiB, device_total=96 * GiB, device_free=90 * GiB)
    MemoryPlan(weights=60 * GiB, kv=16 * GiB, workspace=2 * GiB).check(state)
    full = MemoryState(total=64 * GiB, available=60 * GiB, device_total=96 * GiB, device_free=20 * GiB)
    with pytest.raises(MemoryError_, match=r"free on the GPU 20\.00 GiB"):
        MemoryPlan(weights=60 * GiB, kv=16 * GiB, workspace=2 * GiB).check(full)


def test_watchdog_sheds_and_recovers_with_a_margin() -> None:
    now = MemoryState(total=100 * GiB, available=10 * GiB)
    dog = Watchdog(4 * GiB, read=lambda: now)
    assert not dog.look()
    now = MemoryState(total=100 * GiB, available=3 * GiB)
    assert dog.look()
    assert "3.00 GiB" in dog.reason
    now = MemoryState(total=100 * GiB, available=int(4.5 * GiB))
    assert dog.look()  # not yet: it would flap
    now = MemoryState(total=100 * GiB, available=6 * GiB)
    assert not dog.look()
    now = MemoryState(total=100 * GiB, available=60 * GiB, pressure=0.9)
    assert dog.look()


async def test_watchdog_runs_until_stopped() -> None:
    looks = 0

    def read() -> MemoryState:
        nonlocal looks
        looks += 1
        return MemoryState(total=GiB, available=GiB)

    dog = Watchdog(1, read=read, every=0.01)
    dog.start()
    while looks < 3:
        await asyncio.sleep(0.01)
    await dog.stop()
    seen = looks
    await asyncio.sleep(0.05)
    assert looks == seen


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    state = read_memory()
    assert 0 < state.available <= state.total
    assert state.resident > 0
    psi = tmp_path / "memory"
    psi.write_text("some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
    assert read_pressure(psi) == 0.125
    assert read_pressure(tmp_path / "absent") is None
