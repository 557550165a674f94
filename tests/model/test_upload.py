"""Streaming through few buffers, with copies that happen as late as they may."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.model import upload
from halfbyte.model.upload import Uploader


class LateStream:
    """Copies when somebody waits for them, or at the end: a buffer that is filled too early shows."""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.log: list[str] = []

    def buffer(self) -> Tensor:
        return torch.zeros(upload.PIECE, dtype=torch.uint8)

    def begin(self) -> None:
        self.log.append("begin")

    def copy(self, dest: Tensor, staged: Tensor) -> Any:
        stream = self

        class Copy:
            done = False
            lock = threading.Lock()

            def synchronize(self) -> None:
                with self.lock:
                    if not self.done:
                        dest.copy_(staged)
                        self.done = True
                        stream.log.append("copy")

        copy = Copy()
        self.queued.append(copy)
        return copy

    def end(self) -> None:
        for copy in self.queued:
            copy.synchronize()
        self.log.append("end")


def from_(source: Tensor) -> upload.Fill:
    def fill(part: Tensor, at: int) -> None:
        part.copy_(source[at : at + part.numel()])

    return fill


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PIECE", 64)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 64 * 7])
def test_every_byte_arrives(size: int) -> None:
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    heard: list[int] = []
    uploader = Uploader(LateStream(), count=3)
    for _ in range(3):  # buffers are used again from tensor to tensor
        dest = torch.zeros(size, dtype=torch.uint8)
        uploader.upload(dest, from_(source), heard.append)
        assert torch.equal(dest, source)
    assert sum(heard) == 3 * size
    uploader.close()


def test_a_buffer_is_not_filled_before_its_copy() -> None:
    """With two buffers the third piece waits for the first copy, which this stream makes only then."""
    stream = LateStream()
    uploader = Uploader(stream, count=2)
    source = torch.arange(64 * 6, dtype=torch.int64).to(torch.uint8)
    dest = torch.zeros(64 * 6, dtype=torch.uint8)
    uploader.upload(dest, from_(source))
    assert torch.equal(dest, source)
    assert stream.log[0] == "begin"
    assert stream.log[-1] == "end"
    assert stream.log.count("copy") == 6
    uploader.close()


def test_a_reader_that_fails_is_heard_and_the_buffers_survive() -> None:
    uploader = Uploader(LateStream(), count=2)

    def broken(part: Tensor, at: int) -> None:
        if at >= 128:
            raise CheckpointError("the disk is gone.")
        part.fill_(7)

    dest = torch.zeros(64 * 5, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="gone"):
        uploader.upload(dest, broken)
    good = torch.zeros(64 * 5, dtype=torch.uint8)
    uploader.upload(good, from_(torch.full((64 * 5,), 9, dtype=torch.uint8)))
    assert bool((good == 9).all())
    uploader.close()
