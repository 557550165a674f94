"""The memory behind the pages: how many fit, and the one tensor that holds them.

On a discrete GPU the driver knows what is free. On unified memory (GB10) and on a CPU the driver's figure counts the
page cache as used and knows nothing of the rest of the machine, so there it is the kernel's MemAvailable. A reserve
is never touched: it is what keeps the host alive. Refuses, with the numbers, rather than start with a pool that
cannot hold a single useful request.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from halfbyte.errors import MemoryError_

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
GIB = 1 << 30


@dataclass(frozen=True)
class PageShape:
    """One page: `page_size` tokens of all layers of one kind, keys then values."""

    layers: int  # of the kind that has more
    kv_heads: int
    page_size: int
    head_dim: int
    dtype: str = "bf16"

    @property
    def bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.page_size * self.head_dim * DTYPES[self.dtype].itemsize


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
    shape: PageShape, found: Memory, reserve: int, *, least: int, most: int | None = None, what: str = "the KV cache"
) -> int:
    """Pages to make: as many as fit beside the reserve, at most `most`; refuses below `least`."""
    fit = max(0, found.free - reserve) // shape.bytes
    if fit < least:
        raise MemoryError_(
            f"{what} needs at least {least} pages of {shape.bytes / 2**20:.1f} MiB = {least * shape.bytes / GIB:.2f} "
            f"GiB, but {found.source} is {found.free / GIB:.2f} GiB and {reserve / GIB:.2f} GiB of it stay in "
            f"reserve; free memory, lower --max-context, or use --kv-dtype fp8."
        )
    return fit if most is None else min(fit, most)


def make_pool(shape: PageShape, pages: int, device: torch.device) -> Tensor:
    """[pages, layers, 2, kv_heads, page_size, head_dim], zeroed so that no read can meet a NaN left in memory."""
    size = (pages, shape.layers, 2, shape.kv_heads, shape.page_size, shape.head_dim)
    try:
        if shape.dtype == "fp8":  # zeros is not implemented for float8 on every device
            return torch.zeros(size, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        return torch.zeros(size, dtype=DTYPES[shape.dtype], device=device)
    except (torch.OutOfMemoryError, RuntimeError) as e:
        raise MemoryError_(
            f"{pages} KV pages ({pages * shape.bytes / GIB:.2f} GiB) could not be taken ({str(e).splitlines()[0]}); "
            f"lower --kv-memory."
        ) from None
