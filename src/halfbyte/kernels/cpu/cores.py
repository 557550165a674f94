"""How many threads the CPU kernels work with, and where: physical cores within what this process may use.

Honours the affinity mask, a container's share of CPU time and OMP_NUM_THREADS. Two threads of one core share its vector
units, so one of them is enough. Threads are pinned only where they take every core there is: a second process with
fewer threads than cores must not be put onto the same ones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from halfbyte import cgroups
from halfbyte.errors import GateError
from halfbyte.gates import Gates, setting

TOPOLOGY = Path("/sys/devices/system/cpu")
MOST = 512


@dataclass(frozen=True)
class Threads:
    count: int
    cores: tuple[int, ...] | None  # to pin them to, one each


def threads_for(gates: Gates) -> Threads:
    """The number of threads that the gates set, or one for each usable core."""
    cores = physical_cores(allowed_processors())
    if gates.threads != "auto":
        count = int(gates.threads)
        if count > MOST:
            raise GateError(f"--threads is {count}; use at most {MOST}.")
        return Threads(count, tuple(cores) if count == len(cores) else None)
    limits = [len(cores), share_of_time()]
    limit = setting("OMP_NUM_THREADS")
    if limit is not None and limit.split(",")[0].strip().isdigit():
        limits.append(int(limit.split(",")[0]))
    count = max(1, min(n for n in limits if n is not None))
    return Threads(count, tuple(cores) if count == len(cores) else None)


def threads_beside_gpu(gates: Gates) -> Threads:
    """The threads that multiply experts in host memory: two cores stay free for the engine and the server."""
    threads = threads_for(gates)
    return threads if gates.threads != "auto" else Threads(max(1, threads.count - 2), None)


def allowed_processors() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores(processors: list[int], topology: Path = TOPOLOGY) -> list[int]:
    """One processor of each core."""
    first: dict[str, int] = {}
    for processor in processors:
        folder = topology / f"cpu{processor}" / "topology"
        siblings = str(processor)
        for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the older name
            try:
                siblings = (folder / name).read_text().strip()
                break
            except OSError:
                continue
        first.setdefault(siblings, processor)
    return sorted(first.values())


def share_of_time(own: Path = cgroups.OWN, root: Path = cgroups.ROOT) -> int | None:
    """Whole CPUs that a container's quota amounts to; None without one. Threads beyond it would only be stopped."""
    shares = []
    for group in cgroups.above("cpu", own, root):
        try:
            if group.version == 2:
                quota, period = (group.folder / "cpu.max").read_text().split()
            else:
                quota, period = ((group.folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # "max", or -1: no limit
                shares.append(max(1, int(quota) // int(period)))
        except (OSError, ValueError):
            continue
    return min(shares, default=None)
