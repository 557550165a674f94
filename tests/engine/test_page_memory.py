"""KV pages as bytes: on a CPU, the order of copies for a GPU on streams that are made up, and on a GPU."""

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
    (page, other), seconds = memory.read([2, 0], memory.launched_steps())
    assert (bytes(page), bytes(other)) == (content_of(tensors, 2), content_of(tensors, 0))
    assert seconds > 0
    ((size, seconds),) = memory.write([4, 1], [memory.stage(page), memory.stage(other)])
    assert size == 80
    assert seconds > 0
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


class FakeEvent:
    def __init__(self, name: str = "", *, enable_timing: bool = False) -> None:
        self.name, self.done = name, False

    def record(self, stream: FakeStream) -> None:
        self.name, self.log = f"an event of {stream.name}", stream.log

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end: FakeEvent) -> float:
        return 2.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], DeviceCopies, list[str]]:
    log: list[str] = []
    names = iter(("down", "up"))
    steps = FakeStream(log, "steps")

    @contextlib.contextmanager
    def stream(chosen: FakeStream) -> Iterator[None]:
        log.append(f"on {chosen.name}")
        yield

    def empty(size: Any, **options: Any) -> torch.Tensor:
        assert options.pop("pin_memory")
        return real_empty(size, **options)

    real_empty = torch.empty
    monkeypatch.setattr(page_memory, "DOWN_BYTES", 48)  # two pages
    monkeypatch.setattr(page_memory, "UP_BYTES", 72)  # three
    monkeypatch.setattr(page_memory.torch.cuda, "Stream", lambda device, priority: FakeStream(log, next(names)))
    monkeypatch.setattr(page_memory.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(page_memory.torch.cuda, "default_stream", lambda device: steps)
    monkeypatch.setattr(page_memory.torch.cuda, "stream", stream)
    monkeypatch.setattr(page_memory.torch, "empty", empty)
    tensors = [pools()[0]]
    memory = PageMemory(tensors)
    return tensors, DeviceCopies(memory._pools, torch.device("cpu")), log


Device = tuple[list[torch.Tensor], DeviceCopies, list[str]]


def read(copies: DeviceCopies, *pages: int) -> list[memoryview]:
    return copies.read(pages, copies.launched_steps())[0]


def test_a_device_s_pages_are_read_behind_the_steps(device: Device) -> None:
    tensors, copies, log = device
    contents, seconds = copies.read([2, 3, 0], copies.launched_steps())
    assert [bytes(c) for c in contents] == [content_of(tensors, page) for page in (2, 3, 0)], "each has its own memory"
    portion = ["down waits for an event of steps", "on down", "the host waits for an event of down"]
    assert log == portion * 2, "as many at once as the pinned memory holds"
    assert seconds > 2 * 0.002


def test_a_device_s_page_is_written_beside_the_steps(device: Device) -> None:
    tensors, copies, log = device
    contents = [copies.stage(content) for content in read(copies, 0, 1)]
    expected = [bytes(content) for content in contents]
    copies.write([4], contents[:1])
    log.clear()
    copies.write([3], contents[1:])
    assert log == ["on up", "steps waits for an event of up"], "no launched step is waited for"
    assert [content_of(tensors, page) for page in (4, 3)] == expected
    copies.behind_steps = True  # launched work uses pages that were given back
    log.clear()
    copies.write([2], contents[:1])
    copies.write([2], contents[:1])
    assert [line for line in log if line.startswith("up")] == ["up waits for steps"], "once"


def test_a_head_that_drafts_is_waited_for(device: Device) -> None:
    _, _, log = device
    page_memory.torch.cuda.Stream = lambda device, priority: FakeStream(log, "another")  # type: ignore[assignment, misc]
    copies = DeviceCopies(PageMemory(pools())._pools, torch.device("cpu"))
    content = copies.stage(read(copies, 1)[0])
    for _ in range(2):
        log.clear()
        copies.write([2], [content])
        assert log[0] == "another waits for steps", "it works on pages behind the results of a step"


def test_staged_memory_is_held_until_it_was_copied(device: Device) -> None:
    _, copies, _ = device
    contents = read(copies, *range(4))
    for page in range(4):
        assert copies.write([page], [copies.stage(contents[page])]) == []
    assert len(copies._uploads) == 4
    assert not copies._staged._free, "three pages, and one of its own"
    for upload in copies._uploads:
        upload.end.done = True  # type: ignore[attr-defined]
    assert copies.write([0], [copies.stage(contents[0])]) == [(24, 0.002)] * 4
    assert len(copies._uploads) == 1
    assert len(copies._staged._free) == 3, "the last one has memory of its own"


# ---- on a GPU -------------------------------------------------------------------------------------------------------

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
LONG = 400_000_000  # cycles of a kernel that does nothing, some 0.2 s


def gpu_pools(dtype: torch.dtype, *, head: bool) -> list[torch.Tensor]:
    """Pools of 40 pages with random bytes, the model's and perhaps that of a head that drafts."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(40, 4, 2, 2, 64, 64)] + [(40, 1, 2, 2, 64, 64)] * head
    made = [torch.randint(0, 256, (*s[:-1], s[-1] * dtype.itemsize), generator=generator) for s in shapes]
    return [t.to(torch.uint8).view(dtype).cuda() for t in made]


def bytes_of(tensors: list[torch.Tensor], page: int) -> bytes:
    return b"".join(t[page].view(torch.uint8).cpu().numpy().tobytes() for t in tensors)


@pytest.mark.parametrize("head", [pytest.param(h, marks=on_gpu) for h in (False, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_go_down_and_up_with_every_bit(dtype: torch.dtype, head: bool) -> None:
    tensors = gpu_pools(dtype, head=head)
    memory = PageMemory(tensors)
    before = {page: bytes_of(tensors, page) for page in range(40)}
    contents, seconds = memory.read(list(range(20)), memory.launched_steps())
    assert [bytes(c) for c in contents] == [before[page] for page in range(20)]
    assert seconds > 0
    memory.write(list(range(20, 40)), [memory.stage(content) for content in contents])
    again, _ = memory.read(list(range(20, 40)), memory.launched_steps())
    assert [bytes(c) for c in again] == [before[page] for page in range(20)]
    assert [bytes_of(tensors, page) for page in range(20)] == [before[page] for page in range(20)]
    ((size, seconds),) = memory.write([0], [memory.stage(again[3])])
    assert size == 20 * memory.page_bytes
    assert seconds > 0
    torch.cuda.synchronize()
    assert bytes_of(tensors, 0) == before[3]


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=on_gpu)])
def test_a_page_is_read_behind_earlier_work_and_before_later_work(dtype: torch.dtype) -> None:
    tensors = gpu_pools(dtype, head=False)
    memory = PageMemory(tensors)
    memory.read([1], memory.launched_steps())
    torch.cuda._sleep(LONG)
    tensors[0][1].fill_(3.0)
    behind = memory.launched_steps()
    torch.cuda._sleep(10 * LONG)
    later = torch.cuda.Event()
    later.record()
    (content,), _ = memory.read([1], behind)
    assert not later.query(), "it was not waited for"
    assert np.frombuffer(content, np.uint16).tolist() == [0x4040] * (memory.page_bytes // 2)


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=on_gpu)])
def test_a_page_is_written_before_the_next_step_and_behind_work_that_uses_it(dtype: torch.dtype) -> None:
    tensors = gpu_pools(dtype, head=False)
    memory = PageMemory(tensors)
    content = memory.stage(memory.read([1], memory.launched_steps())[0][0])
    for _ in range(3):
        torch.cuda._sleep(LONG // 10)
        tensors[0][2].fill_(3.0)  # a step without results, which gave this page back
        memory.wait_for_steps()
        memory.write([2], [content])
        seen = tensors[0][2].clone()  # the next step
        torch.cuda.synchronize()
        assert torch.equal(seen.view(torch.uint8), tensors[0][1].view(torch.uint8))
    torch.cuda._sleep(10 * LONG)
    running = torch.cuda.Event()
    running.record()
    memory.write([3], [content])
    memory._copies._uploads[-1].end.synchronize()  # type: ignore[union-attr]
    assert not running.query(), "written beside a step that runs"
