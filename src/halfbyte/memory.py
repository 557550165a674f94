"""The one account of memory: what a machine has, what a start takes from it, and what stays free.

`serve` asks before anything is loaded, the engine when it sizes its KV pages, metrics and the watchdog while it runs;
they all ask here, so their numbers agree. On a discrete GPU the driver knows what is free. On a CPU, and on unified
memory (GB10 and its kin), where GPU and host eat from one plate, the driver's figure counts the page cache as used and
knows nothing of the rest of the machine: there it is the kernel's MemAvailable, or what a cgroup's limit leaves if that
is less. A reserve is never planned for: it keeps the host alive.

Refuses a plan that does not fit, with the numbers and the flag to change. Allocates nothing and ends nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from halfbyte import cgroups
from halfbyte.errors import NotEnoughMemoryError

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
GIB = 1 << 30
PRESSURE = Path("/proc/pressure/memory")


def gib(n: int) -> str:
    return f"{n / GIB:.2f} GiB"


@dataclass(frozen=True)
class MemoryState:
    """What a machine has at this moment, seen from one device of it."""

    total: int  # of the host, or of the cgroup that limits it
    available: int  # MemAvailable, or what the cgroup leaves
    swap_used: int = 0
    resident: int = 0  # of this process
    unified: bool = False  # the GPU has no memory of its own
    device_total: int | None = None  # of a discrete GPU; None on a CPU and on unified memory
    device_free: int | None = None
    pressure: float | None = None  # share of time some task waited for memory, 10 s average
    limited: bool = False  # a cgroup leaves less than the machine has

    @property
    def shared(self) -> bool:
        """The model takes from the memory that everything else on the machine lives in."""
        return self.device_free is None

    @property
    def on_gpu(self) -> bool:
        return self.unified or not self.shared

    @property
    def free(self) -> int:
        """What a device allocation can really have."""
        return self.available if self.device_free is None else self.device_free

    @property
    def size(self) -> int:
        """All of the memory that `free` is a part of."""
        return self.total if self.device_total is None else self.device_total

    @property
    def source(self) -> str:
        """Where `free` comes from."""
        if not self.shared:
            return "free on the GPU"
        return "free in the cgroup" if self.limited else "MemAvailable"

    @property
    def reserve(self) -> int:
        """Left alone unless a person says otherwise: for fragmentation on a GPU of its own, for the whole machine where
        memory is shared."""
        return max(2 * GIB, self.size // 16) if self.shared else max(GIB, self.size // 40)

    def floor(self, reserve: int) -> int:
        """Below this much available host memory no new work is taken. Less than what a start leaves free, or a server
        that fits exactly would refuse everybody; never nothing, or nobody would look."""
        return max(GIB // 4, min(2 * GIB, reserve // 2)) if self.shared else 2 * GIB

    def last(self, reserve: int) -> int:
        """Below this much available host memory the server ends, before the machine swaps: half the floor. Nothing
        where a GPU has memory of its own: there the host would get little back."""
        return self.floor(reserve) // 2 if self.shared else 0

    @property
    def crowded(self) -> bool:
        """The page cache takes from the memory that the model needs, and is given back too late or not at all: a GPU in
        the host's memory, or a cgroup whose limit counts the cache."""
        return self.unified or self.limited


@dataclass(frozen=True)
class MemoryAccount:
    """What a start takes from a machine, in bytes. `weights` are those still to be loaded: none once they are there."""

    state: MemoryState
    weights: int
    workspace: int
    reserve: int

    @property
    def kv_room(self) -> int:
        """What is left for the KV cache; negative if nothing is."""
        return self.state.free - self.weights - self.workspace - self.reserve

    def table(self, kv: int) -> str:
        return (
            f"weights {gib(self.weights)} + KV cache {gib(kv)} + workspace {gib(self.workspace)}"
            f" = {gib(self.weights + kv + self.workspace)}, reserve {gib(self.reserve)},"
            f" {self.state.source} {gib(self.state.free)}"
        )

    def check(self, kv: int) -> None:
        """Refuse a start with this much KV cache if it would take more than there is; say which flag makes it fit."""
        if kv <= self.kv_room:
            return
        if self.kv_room >= kv // 16 and self.kv_room > 0:
            fits = math.floor(10 * self.kv_room / GIB) / 10
            advice = f"start with --kv-memory {fits:.1f} (GiB) or less, or close what else uses memory"
        else:
            advice = "choose a smaller model or free memory first; even a small KV cache would not fit"
        raise NotEnoughMemoryError(f"not enough memory: {self.table(kv)}, {gib(kv - self.kv_room)} short; {advice}.")

    def pages(self, page_bytes: int, *, least: int, most: int) -> int:
        """KV pages to make: as many as fit, at most `most`; refuses below `least`."""
        fit = max(0, self.kv_room) // page_bytes
        if fit < least:
            raise NotEnoughMemoryError(
                f"the KV cache needs at least {least} pages of {page_bytes / MIB:.1f} MiB = {gib(least * page_bytes)}, "
                f"but {self.state.source} is {gib(self.state.free)}, of which {gib(self.workspace)} are workspace and "
                f"{gib(self.reserve)} stay in reserve; free memory, lower --max-context, or use --kv-dtype fp8."
            )
        return min(fit, most)


# ---- reading the machine ------------------------------------------------------------------------------------------


def read_memory(device: torch.device | str = "cpu") -> MemoryState:
    """The machine as it is now, for a model on `device`."""
    import torch  # here and below: the doctor reads cgroups where torch does not load

    device = torch.device(device)
    unified = device.type == "cuda" and is_unified(device.index or 0)
    card = read_card(device.index or 0) if device.type == "cuda" and not unified else None
    host = psutil.virtual_memory()
    total, available = int(host.total), int(host.available)
    limits = list(cgroup_limits())
    return MemoryState(
        total=min([total, *(limit for limit, _ in limits)]),
        available=min([available, *(left for _, left in limits)]),
        swap_used=int(psutil.swap_memory().used),
        resident=int(psutil.Process(os.getpid()).memory_info().rss),
        unified=unified,
        device_total=None if card is None else card[0],
        device_free=None if card is None else card[1],
        pressure=read_pressure(),
        limited=any(left < available for _, left in limits),
    )


@cache
def is_unified(index: int) -> bool:
    """Does this GPU live in the host's memory? The driver's own word; asking makes no context."""
    import torch

    return bool(getattr(torch.cuda.get_device_properties(index), "is_integrated", False))


def read_card(index: int) -> tuple[int, int]:
    """(total, free) of a discrete GPU, from NVML, which takes no memory to ask.

    Where a container has CUDA but no NVML the CUDA runtime is asked; that makes a context, and its free memory is
    counted without it.
    """
    import torch

    try:
        import pynvml

        info = pynvml.nvmlDeviceGetMemoryInfo(torch.cuda._get_pynvml_handler(index))
        return int(info.total), int(info.free)
    except Exception:  # no package, no library, not allowed: NVML has a dozen ways to say so
        free, total = torch.cuda.mem_get_info(index)
        return total, free


def read_pressure(path: Path = PRESSURE) -> float | None:
    try:
        for line in path.read_text().splitlines():
            scope, *fields = line.split()
            if scope == "some":
                return float(dict(f.split("=", 1) for f in fields)["avg10"]) / 100
    except (OSError, ValueError, KeyError):
        pass  # no PSI in this kernel or container: the figure is simply not published
    return None


def cgroup_limits(own: Path = cgroups.OWN, root: Path = cgroups.ROOT) -> Iterator[tuple[int, int]]:
    """(limit, what it leaves) of every cgroup above this process that limits memory.

    Page cache counts as left, as it does in MemAvailable, whether it was touched lately or not: the kernel drops it
    before it refuses memory. What is mapped (programs, a model's own embedding) or still to be written does not.
    """
    for group in cgroups.above("memory", own, root):
        if group.version == 2:
            limit_name, used_name, total = "memory.max", "memory.current", ""
            held_names = ("file_mapped", "file_dirty", "file_writeback")
        else:
            limit_name, used_name, total = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
            held_names = ("total_mapped_file", "total_dirty", "total_writeback")
        try:
            limit = int((group.folder / limit_name).read_text())  # "max": no limit
            used = int((group.folder / used_name).read_text())
            stat = dict(entry.split() for entry in (group.folder / "memory.stat").read_text().splitlines())
            cached = int(stat[f"{total}inactive_file"]) + int(stat[f"{total}active_file"])
            held = sum(int(stat[name]) for name in held_names)
            slab = int(stat.get("slab_reclaimable", 0))  # version one does not say
            yield limit, max(0, limit - used + max(0, cached - held) + slab)
        except (OSError, ValueError, KeyError):
            continue
