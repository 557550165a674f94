"""The memory guard: a plan before anything is loaded, and a watchdog while it runs.

On unified memory (GB10 and its kin) the GPU and the host eat from one plate, and a plan that trusts the driver's figure
freezes the machine. So the plan counts against MemAvailable there, against the driver's free memory elsewhere, and
refuses with the numbers and the flag to change. It never kills anything: it sheds new work.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from halfbyte.errors import MemoryError_

log = logging.getLogger("halfbyte.guard")
GiB = 1 << 30
_PSI = Path("/proc/pressure/memory")


@dataclass(frozen=True)
class MemoryState:
    total: int
    available: int
    swap_used: int = 0
    resident: int = 0
    unified: bool = False
    device_total: int | None = None
    device_free: int | None = None
    pressure: float | None = None  # share of time some task waited for memory, 10 s average

    @property
    def free(self) -> int:
        """What a device allocation can really have."""
        if self.unified or self.device_free is None:
            return self.available
        return self.device_free


def read_pressure(path: Path = _PSI) -> float | None:
    try:
        for line in path.read_text().splitlines():
            kind, *fields = line.split()
            if kind == "some":
                return float(dict(f.split("=", 1) for f in fields)["avg10"]) / 100
    except (OSError, ValueError, KeyError):
        pass  # no PSI in this kernel or container: the figure is simply not published
    return None


def read_device() -> tuple[int | None, int | None, bool]:
    """(total, free, unified) of the first GPU. Drivers answer "not supported" for memory where it is unified."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver or no GPU: there is nothing to read
        return None, None, False
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(info.total), int(info.free), False
    except pynvml.NVMLError_NotSupported:
        return None, None, True
    except pynvml.NVMLError:
        return None, None, False
    finally:
        pynvml.nvmlShutdown()


_device_cache: tuple[float, tuple[int | None, int | None, bool]] | None = None


def read_memory() -> MemoryState:
    global _device_cache
    now = time.monotonic()
    if _device_cache is None or now - _device_cache[0] > 1.0:  # NVML costs milliseconds; a scrape a second is enough
        _device_cache = (now, read_device())
    total, free, unified = _device_cache[1]
    host = psutil.virtual_memory()
    return MemoryState(
        total=int(host.total),
        available=int(host.available),
        swap_used=int(psutil.swap_memory().used),
        resident=int(psutil.Process(os.getpid()).memory_info().rss),
        unified=unified,
        device_total=total,
        device_free=free,
        pressure=read_pressure(),
    )


@dataclass(frozen=True)
class MemoryPlan:
    """What a start will take, in bytes. `reserve` stays free for the host."""

    weights: int
    kv: int
    workspace: int
    reserve: int = 2 * GiB

    @property
    def need(self) -> int:
        return self.weights + self.kv + self.workspace

    def table(self, state: MemoryState) -> str:
        where = "MemAvailable" if state.unified or state.device_free is None else "free on the GPU"
        return (
            f"weights {gib(self.weights)} + KV cache {gib(self.kv)} + workspace {gib(self.workspace)}"
            f" = {gib(self.need)}, reserve {gib(self.reserve)}, {where} {gib(state.free)}"
        )

    def check(self, state: MemoryState | None = None) -> MemoryState:
        """Raise MemoryError_ if this start would take more than there is; say which flag would make it fit."""
        state = state or read_memory()
        short = self.need + self.reserve - state.free
        if short <= 0:
            return state
        fits = state.free - self.reserve - self.weights - self.workspace
        if fits >= self.kv // 16 and fits > 0:
            advice = f"start with --kv-memory {fits / GiB:.1f}GiB or less, or close what else uses memory"
        else:
            advice = "choose a smaller model or free memory first; even a small KV cache would not fit"
        raise MemoryError_(f"not enough memory: {self.table(state)}, {gib(short)} short; {advice}.")


def gib(n: int) -> str:
    return f"{n / GiB:.2f} GiB"


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
