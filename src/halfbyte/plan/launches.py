"""Launches: which kernel runs on the device, and for which phase.

Code that launches a kernel calls `launched`; the plan attributes launches by setting the thread's sink and part, and a
phase with several parts marks the start of each with `begin`. Without a sink nothing is counted. Counting a kernel
again costs one addition. No driver is known here: binaries are hashed where they are loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Part:
    """A kernel's purpose in a step: the category of its time, and the operations whose work it is.

    No operations: it serves another kernel (packing), or comes behind the plan (sampling)."""

    category: str
    operations: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)  # by identity: one for every kernel that is loaded, looked up at every launch
class KernelImage:
    """A kernel as it was loaded."""

    name: str  # as the driver knows it
    module: str  # hash of the binary it lies in; of torch's own operations, torch's version
    loaded: bool = True  # by us; torch's operations launch kernels of other names
    part: Part | None = None  # where it does the same for every phase; else the phase says it


SAMPLING, PACKING, OTHER = Part("sample"), Part("quantise"), Part("other")


class Counts(dict[tuple[KernelImage, Part], int]):
    """How often each kernel was launched for each part."""


Order = list[tuple[KernelImage, Part]]  # every launch, as they come


class LaunchState:
    """The sink and part of a thread's launches. A plan fetches it once a step: thread-local state is slow to find."""

    __slots__ = ("order", "part", "sink")

    def __init__(self) -> None:
        self.sink: Counts | None = None
        self.part = OTHER
        self.order: Order | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = LaunchState()


_thread = _Thread()


def state() -> LaunchState:
    """This thread's."""
    return _thread.state


def launched(image: KernelImage) -> None:
    """A kernel was put on the device's queue, or, while a graph is captured, into the graph."""
    now = _thread.state
    sink = now.sink
    if sink is not None:
        key = image, image.part or now.part
        sink[key] = sink.get(key, 0) + 1
    if now.order is not None:
        now.order.append((image, image.part or now.part))


def begin(part: Part) -> None:
    """Count launches for `part` from here on, until the phase ends or another part begins."""
    _thread.state.part = part


@contextmanager
def ordered() -> Iterator[Order]:
    """This thread's launches in order, whichever sink counts them."""
    now = _thread.state
    order: Order = []
    now.order = order
    try:
        yield order
    finally:
        now.order = None


@contextmanager
def uncounted() -> Iterator[None]:
    """Launches that belong to no step: a phase alone, timed or looked into."""
    now = _thread.state
    sink, now.sink = now.sink, None
    try:
        yield
    finally:
        now.sink = sink
