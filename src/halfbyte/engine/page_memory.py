"""What KV pages hold, as bytes of host memory and back. A page has a part in each pool: the model's, and that of a head
that drafts.

On a CPU both are plain copies. On a GPU pages are moved beside the steps, by two streams of their own and through
pinned memory. A page is read behind the steps launched so far. It is written at once, since no launched step uses it,
and the next step waits for it on the device. The code for a GPU has been type-checked and read, and has never run on
one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]


class PageMemory:
    def __init__(self, pools: Sequence[Tensor]) -> None:
        # One row of bytes for each page; the views share the pools' memory.
        self._pools = [pool.view(torch.uint8).view(pool.shape[0], -1) for pool in pools]
        self.page_bytes = sum(pool.shape[1] for pool in self._pools)
        self._device = pools[0].device
        self._arrays: list[Bytes] = []
        self._copies: DeviceCopies | None = None
        if self._device.type == "cpu":
            self._arrays = [pool.numpy() for pool in self._pools]

    def read(self, page: int) -> memoryview:
        if self._arrays:
            return np.concatenate([array[page] for array in self._arrays]).data
        return self._on_device().read(page)

    def stage(self, content: memoryview) -> memoryview:
        """Copy the bytes to where `write` takes them from without delay."""
        assert len(content) == self.page_bytes
        return content if self._arrays else self._on_device().stage(content)

    def write(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        if not self._arrays:
            self._on_device().write(pages, contents)
            return
        for page, content in zip(pages, contents, strict=True):
            assert len(content) == self.page_bytes
            data = np.frombuffer(content, np.uint8)
            start = 0
            for array in self._arrays:
                array[page] = data[start : start + array.shape[1]]
                start += array.shape[1]

    def cleared(self) -> None:
        """Launched work writes pages that no sequence holds: the next `write` goes behind it."""
        if self._copies is not None:
            self._copies.behind_steps = True

    def _on_device(self) -> DeviceCopies:
        if self._copies is None:
            self._copies = DeviceCopies(self._pools, self._device)
        return self._copies


class DeviceCopies:
    """Copies between a GPU's pages and host memory, beside its steps."""

    def __init__(self, pools: Sequence[Tensor], device: torch.device) -> None:
        self._pools, self._device = pools, device
        self._page_bytes = sum(pool.shape[1] for pool in pools)
        self._lock = threading.Lock()  # readers share a stream and its pinned memory
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = self._pinned_page()
        self._uploads: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()  # with the memory that they still read
        self.behind_steps = True

    def _pinned_page(self) -> Tensor:
        return torch.empty(self._page_bytes, dtype=torch.uint8, pin_memory=True)

    def read(self, page: int) -> memoryview:
        with torch.inference_mode(), self._lock:
            self._down.wait_stream(torch.cuda.default_stream(self._device))
            with torch.cuda.stream(self._down):
                for pool, part in zip(self._pools, self._parts(self._pinned), strict=True):
                    part.copy_(pool[page], non_blocking=True)
            self._down.synchronize()
            content: memoryview = self._pinned.numpy().copy().data
            return content

    def stage(self, content: memoryview) -> memoryview:
        pinned = self._pinned_page().numpy()
        pinned[:] = np.frombuffer(content, np.uint8)
        return pinned.data

    def write(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        while self._uploads and self._uploads[0][0].query():  # type: ignore[no-untyped-call]
            self._uploads.popleft()
        steps = torch.cuda.default_stream(self._device)
        buffers = [torch.from_numpy(np.frombuffer(content, np.uint8)) for content in contents]
        with torch.inference_mode():
            if self.behind_steps:
                self._up.wait_stream(steps)
                self.behind_steps = False
            with torch.cuda.stream(self._up):
                for page, buffer in zip(pages, buffers, strict=True):
                    for pool, part in zip(self._pools, self._parts(buffer), strict=True):
                        pool[page].copy_(part, non_blocking=True)
            event = self._up.record_event()
            steps.wait_event(event)
        self._uploads.append((event, buffers))

    def _parts(self, page: Tensor) -> tuple[Tensor, ...]:
        return torch.split(page, [pool.shape[1] for pool in self._pools])
