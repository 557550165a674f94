"""Bytes from files to a device: readers fill pinned buffers ahead while earlier ones are still being copied.

A buffer is filled again only when its copy is done, and the copies run on a stream of their own; the owner of the
destination finds it complete, in stream order, without the host having waited. Knows no files: a caller says how to
fill a buffer. Errors of a reader are raised to the caller once every other reader has stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

PIECE = 16 << 20
BUFFERS = 8

Fill = Callable[[Tensor, int], None]  # (where to, from which byte of the tensor on)


class CopyEvent(Protocol):
    def synchronize(self) -> None: ...


class CopyStream(Protocol):
    """How copies run concurrently with other work."""

    def buffer(self) -> Tensor: ...

    def begin(self) -> None:
        """Copies must not overtake work that was queued on the destination before."""

    def copy(self, dest: Tensor, staged: Tensor) -> CopyEvent: ...

    def end(self) -> None:
        """Work queued from here on comes after the copies."""


class CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self) -> Tensor:
        return torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, dest: Tensor, staged: Tensor) -> CopyEvent:
        with torch.cuda.stream(self._stream):
            dest.copy_(staged, non_blocking=True)
            done: CopyEvent = self._stream.record_event()
        return done

    def end(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._stream)


@dataclass
class Slot:
    buffer: Tensor
    busy: CopyEvent | None = None  # the copy out of it


class Uploader:
    """Some buffers and a thread for each, for all tensors of one device."""

    def __init__(self, copies: CopyStream, count: int = BUFFERS) -> None:
        self.copies = copies
        self._free = deque(Slot(copies.buffer()) for _ in range(count))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="halfbyte-read")

    def upload(self, dest: Tensor, fill: Fill, on_bytes: Callable[[int], None] | None = None) -> None:
        """Fill `dest` (flat uint8) piece by piece; returns when every byte is read and every copy is queued."""
        in_flight: deque[tuple[Future[None], Slot, Tensor]] = deque()
        self.copies.begin()
        try:
            for start in range(0, dest.numel(), PIECE):
                if not self._free:
                    self._copy_oldest(in_flight, on_bytes)
                slot, part = self._free.popleft(), dest[start : start + PIECE]
                in_flight.append((self._threads.submit(_read, slot, part.numel(), start, fill), slot, part))
            while in_flight:
                self._copy_oldest(in_flight, on_bytes)
        finally:
            wait([future for future, _, _ in in_flight])
            self._free.extend(slot for _, slot, _ in in_flight)
            self.copies.end()

    def _copy_oldest(
        self, in_flight: deque[tuple[Future[None], Slot, Tensor]], on_bytes: Callable[[int], None] | None
    ) -> None:
        future, slot, part = in_flight.popleft()
        try:
            future.result()
            slot.busy = self.copies.copy(part, slot.buffer[: part.numel()])
        finally:
            self._free.append(slot)
        if on_bytes is not None:
            on_bytes(part.numel())

    def close(self) -> None:
        self._threads.shutdown()
        for slot in self._free:
            if slot.busy is not None:
                slot.busy.synchronize()
        self._free.clear()


def _read(slot: Slot, size: int, start: int, fill: Fill) -> None:
    if slot.busy is not None:
        slot.busy.synchronize()
        slot.busy = None
    fill(slot.buffer[:size], start)
