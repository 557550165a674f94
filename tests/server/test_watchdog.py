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


# ---- when shedding does not help ------------------------------------------------------------------------------------


def states(*available: float, swap: float = 0.0) -> list[MemoryState]:
    return [MemoryState(total=100 * GIB, available=int(a * GIB), swap_used=int(swap * GIB)) for a in available]


def test_it_ends_after_looks_below_the_last_line_and_not_before() -> None:
    looks = states(3, 1, 1, 1, 3, 1, 1, 1, 1)  # four in a row only at the end
    dog = Watchdog(4 * GIB, 2 * GIB, read=lambda: looks.pop(0), patience=4)
    for _ in range(8):
        assert dog.look()
        assert not dog.spent
    assert dog.look()
    assert "1.00 GiB" in dog.spent
    assert "last 2.00 GiB" in dog.spent


def test_it_ends_when_the_machine_swaps_while_memory_is_short() -> None:
    looks = [*states(60, swap=5), *states(3, swap=5), *states(3, swap=5.1), *states(3, swap=5.5)]
    dog = Watchdog(4 * GIB, 2 * GIB, read=lambda: looks.pop(0))
    for _ in range(3):
        dog.look()
        assert not dog.spent
    dog.look()
    assert "begun to swap (0.50 GiB" in dog.spent


def test_swap_without_need_ends_nothing() -> None:
    """The kernel moves idle pages out when it likes; that alone is no trouble."""
    looks = [*states(60), *states(60, swap=30), *states(3, swap=30), *states(3, swap=30)]
    dog = Watchdog(4 * GIB, 2 * GIB, read=lambda: looks.pop(0))
    for _ in range(4):
        dog.look()
    assert not dog.spent


def test_without_a_last_line_it_only_sheds() -> None:
    """A GPU with memory of its own: ending would give the host little back."""
    looks = states(*[0.1] * 50, swap=9)
    dog = Watchdog(4 * GIB, read=lambda: looks.pop(0))
    for _ in range(50):
        assert dog.look()
    assert not dog.spent
