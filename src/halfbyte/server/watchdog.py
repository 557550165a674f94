"""The memory watchdog: while memory is short, new work is refused.

It never ends anything and takes nothing away from those who run; what counts as short is in `halfbyte.memory`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from halfbyte.memory import MemoryState, gib, read_memory

log = logging.getLogger("halfbyte.watchdog")


class Watchdog:
    """Looks at memory twice a second and sheds load below `floor`; lets it back in above `floor` + a quarter."""

    def __init__(
        self,
        floor: int,
        *,
        read: Callable[[], MemoryState] = read_memory,
        every: float = 0.5,
        pressure_limit: float = 0.5,
    ) -> None:
        self.floor = floor
        self.read = read
        self.every = every
        self.pressure_limit = pressure_limit
        self.shedding = False
        self.reason = ""
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
            self.shedding = True
        elif self.shedding and recovered:
            log.warning("memory is back (%s available); taking requests again", gib(state.available))
            self.shedding = False
        return self.shedding

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
