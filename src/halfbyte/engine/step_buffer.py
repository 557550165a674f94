"""One step's numbers on their way to the device: packed into one pinned buffer, sent by one copy, read as views.

Every view begins at a multiple of 16 bytes, so that kernels compiled for aligned pointers can read all of them. The
device side is one fixed buffer: steps run in the order of one stream, so the next copy cannot overtake a kernel that
still reads it, and a captured graph can read its inputs from the beginning of the buffer. On the host a few pinned
buffers take turns, each reused once its copy is complete. On a CPU the packed buffer is the device's buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGN = 4  # words
DEPTH = 4  # steps whose copies may be pending


def aligned(num_words: int) -> int:
    return -(-num_words // ALIGN) * ALIGN


def padded_blocks(blocks: int) -> int:
    """Blocks of a table as it is sent: a multiple of 64 bytes, so that strides are always aligned."""
    return -(-blocks // 16) * 16


class StepBuffer:
    def __init__(self, device: torch.device, num_words: int, more: int = 0) -> None:
        """`num_words` 32-bit words fit in one copy; the `more` words of `memory` after them belong to the caller."""
        self.device = device
        self.cuda = device.type == "cuda"
        self.num_words = num_words = aligned(max(num_words, 1024))
        self.memory = torch.zeros(num_words + more, dtype=torch.int32, device=device)
        self._pinned = (
            [torch.zeros(num_words, dtype=torch.int32, pin_memory=True) for _ in range(DEPTH)] if self.cuda else []
        )
        self._host: list[NDArray[np.int32]] = [p.numpy() for p in self._pinned]
        self._sent: list[torch.cuda.Event | None] = [None] * DEPTH
        self._turn = 0

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Copy int32, float32 or int64 arrays to the device; returns views of them there."""
        num_words = sum(aligned(a.nbytes // 4) for a in arrays)
        if num_words > self.num_words:  # too large: a buffer of its own, kept alive by the allocators
            large = torch.zeros(num_words, dtype=torch.int32, pin_memory=self.cuda)
            self._pack(arrays, large.numpy())
            return self._views(arrays, large.to(self.device, non_blocking=True))
        if not self.cuda:
            self._pack(arrays, self.memory.numpy())
            return self._views(arrays, self.memory)
        turn = self._turn
        self._turn = (turn + 1) % DEPTH
        last = self._sent[turn]
        if last is None:
            last = self._sent[turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            last.synchronize()
        self._pack(arrays, self._host[turn])
        self.memory[:num_words].copy_(self._pinned[turn][:num_words], non_blocking=True)
        last.record()
        return self._views(arrays, self.memory)

    @staticmethod
    def _pack(arrays: Sequence[NDArray[Any]], out: NDArray[np.int32]) -> None:
        at = 0
        for a in arrays:
            flat = np.ascontiguousarray(a).reshape(-1).view(np.int32)
            out[at : at + flat.shape[0]] = flat
            at += aligned(flat.shape[0])

    @staticmethod
    def _views(arrays: Sequence[NDArray[Any]], buffer: Tensor) -> list[Tensor]:
        out, at = [], 0
        for a in arrays:
            num_words = a.nbytes // 4
            view = buffer[at : at + num_words]
            if a.dtype != np.int32:
                view = view.view(_TYPES[a.dtype.name])
            out.append(view.view(a.shape))
            at += aligned(num_words)
        return out


_TYPES = {"float32": torch.float32, "int64": torch.int64}
