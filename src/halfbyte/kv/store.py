"""The memory behind the pages: how many fit.

On a discrete GPU the driver knows what is free. On unified memory (GB10) and on a CPU the driver's figure counts the
page cache as used and knows nothing of the rest of the machine, so there it is the kernel's MemAvailable. A reserve
is never touched: it is what keeps the host alive. Refuses, with the numbers, rather than start with a pool that
cannot hold a single useful request.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from halfbyte.errors import MemoryError_

GIB = 1 << 30


@dataclass(frozen=True)
class Memory:
    free: int
    total: int
    source: str  # where the figure comes from


def memory(device: torch.device) -> Memory:
    """What a pool may be taken from on this device."""
    if device.type == "cuda" and not getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        free, total = torch.cuda.mem_get_info(device)
        return Memory(free, total, "the GPU's free memory")
    host = psutil.virtual_memory()
    return Memory(host.available, host.total, "MemAvailable")


def default_reserve(device: torch.device, found: Memory) -> int:
    """Left alone: for activations and fragmentation on a GPU of its own, for the whole machine where it is shared."""
    if found.source == "MemAvailable":
        return max(2 * GIB, found.total // 16)
    return max(GIB, found.total // 40)


def pages_that_fit(
    page_bytes: int, found: Memory, reserve: int, *, least: int, most: int | None = None, what: str = "the KV cache"
) -> int:
    """Pages to make: as many as fit beside the reserve, at most `most`; refuses below `least`."""
    fit = max(0, found.free - reserve) // page_bytes
    if fit < least:
        raise MemoryError_(
            f"{what} needs at least {least} pages of {page_bytes / 2**20:.1f} MiB = {least * page_bytes / GIB:.2f} "
            f"GiB, but {found.source} is {found.free / GIB:.2f} GiB and {reserve / GIB:.2f} GiB of it stay in "
            f"reserve; free memory, lower --max-context, or use --kv-dtype fp8."
        )
    return fit if most is None else min(fit, most)
