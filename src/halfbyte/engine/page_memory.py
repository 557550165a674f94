"""What KV pages hold, as bytes of host memory and back. A page has a part in each pool: the model's, and that of a head
that drafts.

On a CPU both are plain copies. On a GPU pages are moved beside the steps, by two streams of their own and through
pinned memory.

Down. A page is complete behind the steps that were launched when its sequence ended, and `read` waits for those and for
no later ones.

Up. A page is written at once, since no launched step uses it, and the next step waits for it on the device. Some work
uses pages after they were given back: a step without results, which is committed before it has run, one that failed
halfway, one that clears pages, and those of a head that drafts. Behind such work the next `write` waits.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
# Of pinned memory: pages read at once; pages that are staged, which are those read ahead (AHEAD_BYTES of the tiers) and
# those on their way in two steps.
DOWN_BYTES, UP_BYTES = 16 << 20, 384 << 20


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

    def launched_steps(self) -> object:
        """What `read` is to wait for: the work that was launched so far."""
        return None if self._arrays else self._on_device().launched_steps()

    def read(self, pages: Sequence[int], behind: object) -> tuple[list[memoryview], float]:
        """Copies of pages, and the seconds that copying took. `behind`: an earlier answer of `launched_steps`."""
        if not self._arrays:
            return self._on_device().read(pages, behind)
        start = time.perf_counter()
        contents = [np.concatenate([array[page] for array in self._arrays]).data for page in pages]
        return contents, time.perf_counter() - start

    def stage(self, content: memoryview) -> memoryview:
        """Copy the bytes to where `write` takes them from without delay."""
        assert len(content) == self.page_bytes
        return content if self._arrays else self._on_device().stage(content)

    def buffer(self) -> memoryview:
        """Room for a page's bytes, from where `write` takes them without delay."""
        return np.empty(self.page_bytes, np.uint8).data if self._arrays else self._on_device().buffer()

    def write(self, pages: Sequence[int], contents: Sequence[memoryview]) -> list[tuple[int, float]]:
        """Fill pages before the next step. Returns bytes and seconds of copies that are complete: on a GPU earlier
        ones."""
        if not self._arrays:
            return self._on_device().write(pages, contents)
        start = time.perf_counter()
        for page, content in zip(pages, contents, strict=True):
            assert len(content) == self.page_bytes
            data = np.frombuffer(content, np.uint8)
            begin = 0
            for array in self._arrays:
                array[page] = data[begin : begin + array.shape[1]]
                begin += array.shape[1]
        return [(len(pages) * self.page_bytes, time.perf_counter() - start)]

    def wait_for_steps(self) -> None:
        """Launched work may use pages that no sequence holds any more: the next `write` goes behind it."""
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
        # Of high priority, since torch takes those from another pool than the stream on which graphs are captured.
        self._down = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        count = max(1, DOWN_BYTES // self._page_bytes)
        self._read = torch.empty((count, self._page_bytes), dtype=torch.uint8, pin_memory=True)
        self._staged = PinnedPages(max(1, UP_BYTES // self._page_bytes), self._page_bytes)
        self._uploads: deque[Upload] = deque()
        self.behind_steps = True

    def launched_steps(self) -> Any:
        return torch.cuda.default_stream(self._device).record_event()

    def read(self, pages: Sequence[int], behind: Any) -> tuple[list[memoryview], float]:
        contents: list[memoryview] = []
        seconds, most = 0.0, self._read.shape[0]
        for start in range(0, len(pages), most):
            some = pages[start : start + most]
            with torch.inference_mode(), self._lock:
                begin, end = _timed_event(), _timed_event()
                self._down.wait_event(behind)
                begin.record(self._down)
                with torch.cuda.stream(self._down):
                    for page, target in zip(some, self._read, strict=False):
                        for pool, part in zip(self._pools, self._parts(target), strict=True):
                            part.copy_(pool[page], non_blocking=True)
                end.record(self._down)
                end.synchronize()
                copied = time.perf_counter()
                contents += [target.numpy().copy().data for _, target in zip(some, self._read, strict=False)]
                seconds += begin.elapsed_time(end) / 1e3 + time.perf_counter() - copied
        return contents, seconds

    def stage(self, content: memoryview) -> memoryview:
        page = self._staged.take()
        page[:] = np.frombuffer(content, np.uint8)
        return page.data

    def buffer(self) -> memoryview:
        return self._staged.take().data

    def write(self, pages: Sequence[int], contents: Sequence[memoryview]) -> list[tuple[int, float]]:
        complete: list[tuple[int, float]] = []
        while self._uploads and self._uploads[0].end.query():  # type: ignore[no-untyped-call]
            upload = self._uploads.popleft()
            size = len(upload.buffers) * self._page_bytes
            complete.append((size, upload.begin.elapsed_time(upload.end) / 1e3))
        steps = torch.cuda.default_stream(self._device)
        buffers = [torch.from_numpy(np.frombuffer(content, np.uint8)) for content in contents]
        begin, end = _timed_event(), _timed_event()
        with torch.inference_mode():
            if self.behind_steps or len(self._pools) > 1:
                self._up.wait_stream(steps)
                self.behind_steps = False
            begin.record(self._up)
            with torch.cuda.stream(self._up):
                for page, buffer in zip(pages, buffers, strict=True):
                    for pool, part in zip(self._pools, self._parts(buffer), strict=True):
                        pool[page].copy_(part, non_blocking=True)
            end.record(self._up)
            steps.wait_event(end)
        self._uploads.append(Upload(begin, end, buffers))
        return complete

    def _parts(self, page: Tensor) -> tuple[Tensor, ...]:
        return torch.split(page, [pool.shape[1] for pool in self._pools])


@dataclass(frozen=True, slots=True)
class Upload:
    """Pages on their way to a GPU, with the memory that is still read."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    buffers: list[Tensor]


class PinnedPages:
    """Pinned memory for so many pages, allocated at once, since each allocation of such memory may stop a GPU. A page
    is free again when nothing refers to it; any thread may take one. Pages beyond their number are allocated singly."""

    def __init__(self, count: int, page_bytes: int) -> None:
        self._pages = torch.empty((count, page_bytes), dtype=torch.uint8, pin_memory=True).numpy()
        self._free = deque(range(count))

    def take(self) -> Bytes:
        try:
            number = self._free.popleft()
        except IndexError:
            alone: Bytes = torch.empty(self._pages.shape[1], dtype=torch.uint8, pin_memory=True).numpy()
            return alone
        page: Bytes = self._pages[number]
        weakref.finalize(page, self._free.append, number).atexit = False
        return page


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
