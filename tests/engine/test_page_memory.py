"""KV pages as bytes: on a CPU, and the order of copies for a GPU on streams that are made up, since none is here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.engine import page_memory
from halfbyte.engine.page_memory import DeviceCopies, PageMemory


def pools() -> list[torch.Tensor]:
    """Two pools of five pages, of 24 and 16 bytes, as the model's and a head's."""
    shapes = ((5, 2, 3, 2), (5, 4, 2))
    return [torch.arange(int(np.prod(s)), dtype=torch.int16).view(s) + 100 * i for i, s in enumerate(shapes)]


def content_of(tensors: list[torch.Tensor], page: int) -> bytes:
    return b"".join(t[page].contiguous().numpy().tobytes() for t in tensors)


def test_a_page_has_a_part_in_every_pool() -> None:
    tensors = pools()
    memory = PageMemory(tensors)
    assert memory.page_bytes == 24 + 16
    before = content_of(tensors, 3)
    page = memory.read(2)
    assert bytes(page) == content_of(tensors, 2)
    memory.write([4, 1], [memory.stage(page), memory.stage(memory.read(0))])
    assert content_of(tensors, 4) == bytes(page)
    assert content_of(tensors, 1) == content_of(tensors, 0)
    assert content_of(tensors, 3) == before


class FakeStream:
    """Notes what is queued on it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> FakeEvent:
        return FakeEvent(f"an event of {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")


class FakeEvent:
    def __init__(self, name: str) -> None:
        self.name, self.done = name, False

    def query(self) -> bool:
        return self.done


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], DeviceCopies, list[str]]:
    log: list[str] = []
    names = iter(("down", "up"))
    steps = FakeStream(log, "steps")

    @contextlib.contextmanager
    def stream(chosen: FakeStream) -> Iterator[None]:
        log.append(f"on {chosen.name}")
        yield

    def empty(size: int, **options: Any) -> torch.Tensor:
        assert options.pop("pin_memory")
        return real_empty(size, **options)

    real_empty = torch.empty
    monkeypatch.setattr(page_memory.torch.cuda, "Stream", lambda device: FakeStream(log, next(names)))
    monkeypatch.setattr(page_memory.torch.cuda, "default_stream", lambda device: steps)
    monkeypatch.setattr(page_memory.torch.cuda, "stream", stream)
    monkeypatch.setattr(page_memory.torch, "empty", empty)
    tensors = pools()
    memory = PageMemory(tensors)
    return tensors, DeviceCopies(memory._pools, torch.device("cpu")), log


def test_a_device_s_page_is_read_behind_the_steps(device: tuple[list[torch.Tensor], DeviceCopies, list[str]]) -> None:
    tensors, copies, log = device
    first, second = copies.read(2), copies.read(3)
    assert (bytes(first), bytes(second)) == (content_of(tensors, 2), content_of(tensors, 3)), "each has its own memory"
    assert log[:3] == ["down waits for steps", "on down", "the host waits for down"]


def test_a_device_s_page_is_written_beside_the_steps(
    device: tuple[list[torch.Tensor], DeviceCopies, list[str]],
) -> None:
    tensors, copies, log = device
    contents = [copies.stage(copies.read(page)) for page in (0, 1)]
    expected = [bytes(content) for content in contents]
    copies.write([4], contents[:1])
    log.clear()
    copies.write([3], contents[1:])
    assert log == ["on up", "steps waits for an event of up"], "no launched step is waited for"
    assert [content_of(tensors, page) for page in (4, 3)] == expected
    copies.behind_steps = True  # pages were cleared by a launched step
    log.clear()
    copies.write([2], contents[:1])
    assert log[0] == "up waits for steps"


def test_staged_memory_is_held_until_it_was_copied(device: tuple[list[torch.Tensor], DeviceCopies, list[str]]) -> None:
    _, copies, _ = device
    for page in range(4):
        copies.write([page], [copies.stage(copies.read(page))])
    assert len(copies._uploads) == 4
    for event, _ in copies._uploads:
        event.done = True  # type: ignore[attr-defined]
    copies.write([0], [copies.stage(copies.read(0))])
    assert len(copies._uploads) == 1
