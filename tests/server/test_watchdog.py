"""The memory watchdog: load is shed while memory is short, and let back in."""

from __future__ import annotations

import asyncio

from halfbyte.memory import GIB, MemoryState
from halfbyte.server.watchdog import Watchdog


def test_watchdog_sheds_and_recovers_with_a_margin() -> None:
    now = MemoryState(total=100 * GIB, available=10 * GIB)
    dog = Watchdog(4 * GIB, read=lambda: now)
    assert not dog.look()
    now = MemoryState(total=100 * GIB, available=3 * GIB)
    assert dog.look()
    assert "3.00 GiB" in dog.reason
    now = MemoryState(total=100 * GIB, available=int(4.5 * GIB))
    assert dog.look()  # not yet: it would flap
    now = MemoryState(total=100 * GIB, available=6 * GIB)
    assert not dog.look()
    now = MemoryState(total=100 * GIB, available=60 * GIB, pressure=0.9)
    assert dog.look()


async def test_watchdog_runs_until_stopped() -> None:
    looks = 0

    def read() -> MemoryState:
        nonlocal looks
        looks += 1
        return MemoryState(total=GIB, available=GIB)

    dog = Watchdog(1, read=read, every=0.01)
    dog.start()
    while looks < 3:
        await asyncio.sleep(0.01)
    await dog.stop()
    seen = looks
    await asyncio.sleep(0.05)
    assert looks == seen
