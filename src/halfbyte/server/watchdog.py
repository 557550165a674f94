"""The memory watchdog: while memory is short, new work is refused; when that does not help, the server has to end.

Where the model lives in the host's memory, a machine that begins to swap stops answering altogether, often for good.
Refusing new work keeps the server from making it worse; ending it gives everything back while the machine still can.
What counts as short is in `halfbyte.memory`; who ends the server is `run.py`. It never takes anything away from those
who run as long as it only sheds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from halfbyte.memory import MIB, MemoryState, gib, read_memory

log = logging.getLogger("halfbyte.watchdog")

PATIENCE = 4  # looks below the last line before the server ends: two seconds
SWAPPED = 256 * MIB  # that went to swap since memory became short: the machine swaps


class Watchdog:
    """Looks at memory twice a second and sheds load below `floor`; lets it back in above `floor` + a quarter. Below
    `last` (0: never) for `patience` looks, or when the machine swaps while memory is short, `spent` says why it must
    end."""

    def __init__(
        self,
        floor: int,
        last: int = 0,
        *,
        read: Callable[[], MemoryState] = read_memory,
        every: float = 0.5,
        pressure_limit: float = 0.5,
        patience: int = PATIENCE,
    ) -> None:
        self.floor = floor
        self.last = last
        self.read = read
        self.every = every
        self.pressure_limit = pressure_limit
        self.patience = patience
        self.shedding = False
        self.reason = ""
        self.spent = ""
        self._looks_below = 0
        self._swap_before = 0
        self._task: asyncio.Task[None] | None = None

    def look(self) -> bool:
        """One look. True while new work must be refused."""
        state = self.read()
        low = state.available < self.floor
        stalled = state.pressure is not None and state.pressure > self.pressure_limit
        recovered = state.available > self.floor * 5 // 4 and not stalled
        if low or stalled:
            # The refusal a client sees has the numbers too.
            self.reason = (
                f"only {gib(state.available)} of memory are available and the server keeps {gib(self.floor)} free"
                if low
                else f"memory pressure is {100 * (state.pressure or 0):.0f} %"
            )
            if not self.shedding:
                log.warning("shedding load: %s", self.reason)
                self._swap_before = state.swap_used
            self.shedding = True
        elif self.shedding and recovered:
            log.warning("memory is back (%s available); taking requests again", gib(state.available))
            self.shedding = False
        self._judge(state)
        return self.shedding

    def _judge(self, state: MemoryState) -> None:
        """Whether shedding was not enough."""
        self._looks_below = self._looks_below + 1 if state.available < self.last else 0
        swapped = state.swap_used - self._swap_before
        if self._looks_below >= self.patience:
            self.spent = (
                f"only {gib(state.available)} of memory are available, less than the last {gib(self.last)}, although no"
                " new work was taken"
            )
        elif self.last and self.shedding and state.available < self.floor and swapped > SWAPPED:
            self.spent = (
                f"the machine has begun to swap ({gib(swapped)} since memory became short), and only"
                f" {gib(state.available)} are available"
            )

    async def _run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(self.every)

    def start(self) -> None:
        if self._task is None and self.floor > 0:
            self.look()
            self._task = asyncio.create_task(self._run(), name="memory-watchdog")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
