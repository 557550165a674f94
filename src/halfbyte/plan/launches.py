"""Launches: which kernel runs on the device, and for whom.

Whoever launches a kernel says so with `launched`; the plan says whose it is by setting the thread's sink and part, and
a phase that does several things one after another says which one begins with `begin`. With no sink nothing is kept.
A launch that was seen before costs an addition. Knows no driver: what was loaded is hashed where it is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, eq=False)
class Part:
    """What a kernel does for a step: the category of its time, and the operations whose work it is.

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


class Sink(Protocol):
    def add(self, image: KernelImage, part: Part) -> None: ...


class Counts(dict[tuple[KernelImage, Part], int]):
    """How often each kernel was launched for each part."""

    def add(self, image: KernelImage, part: Part) -> None:
        key = image, part
        self[key] = self.get(key, 0) + 1


class Order(list[tuple[KernelImage, Part]]):
    """Every launch, in order."""

    def add(self, image: KernelImage, part: Part) -> None:
        self.append((image, part))


class _Current(threading.local):
    sink: Sink | None = None
    part: Part = OTHER
    order: Order | None = None


current = _Current()


def launched(image: KernelImage) -> None:
    """A kernel was put on the device's queue, or, while a graph is captured, into the graph."""
    part = image.part or current.part
    if current.sink is not None:
        current.sink.add(image, part)
    if current.order is not None:
        current.order.add(image, part)


def begin(part: Part) -> None:
    """What is launched from here on is for `part`, until the phase ends or another begins."""
    current.part = part


@contextmanager
def ordered() -> Iterator[Order]:
    """This thread's launches in the order they come, whoever counts them."""
    current.order = order = Order()
    try:
        yield order
    finally:
        current.order = None
