"""What else a machine did while something was timed: cores used by other processes, stolen time, throttling, clocks.

    meter = DisturbanceMeter()
    before = meter.read()
    work()
    meter.read().since(before).problem  # empty where the machine was quiet

Other processes are all but this one and its descendants, to which the engine under test belongs. Ticks of the kernel
are 10 ms, so that a run's length decides how small a share can be seen; ALLOWANCE is left to them. A run that is too
short for them is judged by the time of all runs around it. Where Linux's files
are missing nothing is known, and nothing is held against a run.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

BUSY = 0.15  # share of the cores' time that others may take
STOLEN = 0.05  # share that a hypervisor may take
ALLOWANCE = 0.04  # seconds: the ticks in which a short run is counted
STAT, CPUS, CGROUP = Path("/proc/stat"), Path("/sys/devices/system/cpu"), Path("/sys/fs/cgroup/cpu.stat")


@dataclass(frozen=True)
class Disturbance:
    """Between two readings."""

    seconds: float = 0.0
    cores: int = 1
    others: float = 0.0  # CPU seconds of other processes
    stolen: float = 0.0  # CPU seconds that a hypervisor gave to others
    throttled: float = 0.0  # seconds without CPU at a container's quota, or events of heat
    mhz: float | None = None  # of the slowest core, at the end

    @property
    def share(self) -> float:
        return self.others / max(self.seconds * self.cores, 1e-9)

    @property
    def tells(self) -> bool:
        """Whether this time was long enough for the kernel's ticks to show twice the work that others may do."""
        return BUSY * self.seconds * self.cores > ALLOWANCE

    @property
    def problem(self) -> str:
        """Why a figure of this time cannot be trusted; empty where nothing speaks against it."""
        total = self.seconds * self.cores
        if self.others > BUSY * total + ALLOWANCE:
            return f"other processes used {self.share:.0%} of this machine's {self.cores} cores"
        if self.stolen > STOLEN * total + ALLOWANCE:
            return f"a hypervisor took {self.stolen / total:.0%} of this machine's {self.cores} cores"
        if self.throttled > 0:
            return "the CPU was throttled"
        return ""


@dataclass(frozen=True)
class MachineReading:
    """Sums since the machine started."""

    at: float
    cores: int
    busy: float
    stolen: float
    own: float
    throttled: float
    mhz: float | None

    def since(self, before: MachineReading) -> Disturbance:
        others = max(0.0, self.busy - before.busy - max(0.0, self.own - before.own))
        return Disturbance(
            self.at - before.at, self.cores, others, self.stolen - before.stolen, self.throttled - before.throttled,
            self.mhz,
        )  # fmt: skip


class DisturbanceMeter:
    """Reads this machine's counters."""

    def read(self) -> MachineReading:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        busy, stolen = core_times(cores)
        return MachineReading(
            time.monotonic(), len(cores), busy, stolen, own_seconds(), throttling(cores), slowest_mhz(cores)
        )


def core_times(cores: set[int]) -> tuple[float, float]:
    """CPU seconds of all processes, and stolen ones, on these cores."""
    tick = os.sysconf("SC_CLK_TCK")
    busy = stolen = 0.0
    with contextlib.suppress(OSError, ValueError):
        for line in STAT.read_text(encoding="ascii").splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
                user, nice, system, _, _, irq, soft, steal = map(int, fields[:8])
                busy += (user + nice + system + irq + soft) / tick
                stolen += steal / tick
    return busy, stolen


def own_seconds() -> float:
    """CPU seconds of this process and its descendants, ended ones included."""
    process = psutil.Process()
    total = 0.0
    for p in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            t = p.cpu_times()
            total += t.user + t.system + t.children_user + t.children_system
    return total


def throttling(cores: set[int]) -> float:
    """Seconds that a container's quota took away, plus events in which a core was slowed by heat."""
    total = 0.0
    with contextlib.suppress(OSError, ValueError):
        rows = dict(line.split() for line in CGROUP.read_text(encoding="ascii").splitlines())
        total += int(rows.get("throttled_usec", 0)) / 1e6
    for core in cores:
        with contextlib.suppress(OSError, ValueError):
            total += int((CPUS / f"cpu{core}/thermal_throttle/core_throttle_count").read_text(encoding="ascii"))
    return total


def slowest_mhz(cores: set[int]) -> float | None:
    clocks = []
    for core in cores:
        with contextlib.suppress(OSError, ValueError):
            clocks.append(int((CPUS / f"cpu{core}/cpufreq/scaling_cur_freq").read_text(encoding="ascii")) / 1e3)
    return min(clocks, default=None)
