"""The only account of memory: what a machine has, what a start takes from it, and what stays free.

`serve` checks it before anything is loaded, the engine when it sizes its KV pages, metrics and the watchdog at run
time; all of them use this module, so their numbers agree. On a discrete GPU the driver reports the free memory. On a
CPU, and on unified memory (GB10), which GPU and host share, the driver's figure counts the page cache as used and
ignores the rest of the machine; there the free memory is the kernel's MemAvailable, or what a cgroup's limit leaves if
that is less. A reserve is always kept free for the host.

A plan that does not fit is refused, with the numbers and the flag to change. Nothing is allocated or ended here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from halfbyte import cgroups
from halfbyte.errors import NotEnoughMemoryError, UsageError

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
GIB = 1 << 30
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"k": 1 << 10, "m": MIB, "g": GIB, "t": 1 << 40, "kib": 1 << 10, "mib": MIB, "gib": GIB, "tib": 1 << 40}
PRESSURE = Path("/proc/pressure/memory")


def parse_size(text: str | None) -> int | None:
    """Bytes of a size as a person types it: 8GiB, 500MB, 0. None is None."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = None if match is None else UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise UsageError(f"{text!r} is not a size; give a number and a unit, for example 8GiB, 500MB or 0.")
    if not match[2] and float(match[1]) > 0:
        raise UsageError(f"the size {text!r} has no unit; give one, for example {text.strip()}GiB.")
    return int(float(match[1]) * unit)


def gib(n: int) -> str:
    return f"{n / GIB:.2f} GiB"


@dataclass(frozen=True)
class MemoryState:
    """A machine's memory at one moment, for one of its devices."""

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
        """Whether the model shares its memory with everything else on the machine."""
        return self.device_free is None

    @property
    def on_gpu(self) -> bool:
        return self.unified or not self.shared

    @property
    def free(self) -> int:
        """The bytes available to device allocations."""
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
        """The default reserve: for fragmentation on a discrete GPU, for the rest of the machine on shared memory."""
        return max(2 * GIB, self.size // 16) if self.shared else max(GIB, self.size // 40)

    def floor(self, reserve: int) -> int:
        """Below this much available host memory, new work is refused. It is less than a start leaves free, so that a
        server that fits exactly still accepts work, and never zero, so that the check has an effect."""
        return max(GIB // 4, min(2 * GIB, reserve // 2)) if self.shared else 2 * GIB

    def last(self, reserve: int) -> int:
        """Below this much available host memory the server ends, before the machine swaps: half the floor. Zero on a
        discrete GPU, where ending would return little to the host."""
        return self.floor(reserve) // 2 if self.shared else 0

    def limited_to(self, size: int | None, used: int = 0) -> MemoryState:
        """This state on a GPU of which only `size` bytes may be used, `used` of them already by this process."""
        if size is None:
            return self
        if self.device_total is None or self.device_free is None:
            raise UsageError("--gpu-memory is for a GPU with a memory of its own; leave it out, or use --kv-memory.")
        return replace(
            self, device_total=min(self.device_total, size), device_free=max(0, min(self.device_free, size - used))
        )

    @property
    def crowded(self) -> bool:
        """Whether the page cache competes with the model and is freed too late or not at all: on unified memory, or in
        a cgroup whose limit counts the cache."""
        return self.unified or self.limited


@dataclass(frozen=True)
class MemoryAccount:
    """The memory of a start, in bytes. `weights` counts those still to be loaded: zero once they are loaded."""

    state: MemoryState
    weights: int
    workspace: int
    reserve: int

    @property
    def kv_room(self) -> int:
        """Bytes left for the KV cache; negative if the rest does not fit."""
        return self.state.free - self.weights - self.workspace - self.reserve

    def table(self, kv: int) -> str:
        return (
            f"weights {gib(self.weights)} + KV cache {gib(kv)} + workspace {gib(self.workspace)}"
            f" = {gib(self.weights + kv + self.workspace)}, reserve {gib(self.reserve)},"
            f" {self.state.source} {gib(self.state.free)}"
        )

    def check(self, kv: int) -> None:
        """Refuse a start whose KV cache does not fit, and name the flag that makes it fit."""
        if kv <= self.kv_room:
            return
        if self.kv_room >= kv // 16 and self.kv_room > 0:
            fits = math.floor(10 * self.kv_room / GIB) / 10
            advice = f"start with --kv-memory {fits:.1f} (GiB) or less, or stop other programs that use memory"
        else:
            advice = "choose a smaller model or free memory first; even a small KV cache would not fit"
        raise NotEnoughMemoryError(f"not enough memory: {self.table(kv)}, {gib(kv - self.kv_room)} short; {advice}.")

    def pages(self, page_bytes: int, *, least: int, most: int) -> int:
        """The number of KV pages: as many as fit, at most `most`; NotEnoughMemoryError below `least`."""
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
    """The present state of memory, for a model on `device`."""
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
    """Whether this GPU uses the host's memory, according to the driver. The query creates no context."""
    import torch

    return bool(getattr(torch.cuda.get_device_properties(index), "is_integrated", False))


def read_card(index: int) -> tuple[int, int]:
    """(total, free) of a discrete GPU, from NVML, which uses no memory on the card.

    In a container with CUDA but without NVML, the CUDA runtime is used; it creates a context, whose memory no longer
    counts as free.
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
            pinned = sum(int(stat[name]) for name in held_names)
            slab = int(stat.get("slab_reclaimable", 0))  # version one does not say
            yield limit, max(0, limit - used + max(0, cached - pinned) + slab)
        except (OSError, ValueError, KeyError):
            continue
