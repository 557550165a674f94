"""The machine a figure is measured on: what its memory and arithmetic can do at most, and how many threads to use."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator

import torch

from halfbyte import roofline
from halfbyte.errors import UsageError
from halfbyte.kernels.cpu.build import Unavailable
from halfbyte.kernels.cpu.cores import Threads
from halfbyte.kernels.cpu.library import open_library, read_memory

SMALL = 1 << 30  # bytes of weights
LARGE = 1 << 29  # bytes that no cache holds


def limit_threads(device: torch.device, weight_bytes: int) -> None:
    """One of torch's threads for a small model on a CPU: more cost it more than they bring, and far more on a busy
    machine. The kernels' own threads are a gate."""
    if device.type == "cpu" and weight_bytes < SMALL:
        torch.set_num_threads(1)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_roof(device: torch.device, weight_bytes: int = LARGE) -> roofline.Gpu:
    """The roof of this machine: a GPU of the table by name, else read bandwidth and matrix rate as measured here.

    On a CPU a small model's weights stay in the caches, so that its roof is the rate at which an array as large as
    they are is read again and again; and its products are int8, which no float rate bounds. Other tenants of a machine
    take their share of its memory for seconds at a time, so the bandwidth is measured again by every call, and a roof
    is the best of all of them: ask before and after what is timed.
    """
    if device.type == "cuda":
        with contextlib.suppress(UsageError):
            return roofline.gpu_named(torch.cuda.get_device_name(device))
    size = min(weight_bytes, LARGE)
    read = _best_read[device, size] = max(_best_read.get((device, size), 0.0), _on_threads(device, measure_read, size))
    floats, integers = _arithmetic(device)
    return roofline.Gpu(
        "this machine", str(device), read, True, max(floats, integers), floats, 0.0, "measured in this run"
    )


_best_read: dict[tuple[torch.device, int], float] = {}


@functools.cache
def _arithmetic(device: torch.device) -> tuple[float, float]:
    """Operations/s of float and of int8 products."""
    integers = _on_threads(device, _measure_int8) if device.type == "cpu" else 0.0
    return _on_threads(device, _measure_matmul), integers


def _on_threads(device: torch.device, measure: Callable[..., float], *more: int) -> float:
    """The better of all threads and one: on a busy machine the threads of one operation rarely run together."""
    best = 0.0
    for threads in {cores(), 1} if device.type == "cpu" else {torch.get_num_threads()}:
        with _threads(threads):
            best = max(best, measure(device, *more))
    return best


def forget_roofs() -> None:
    _best_read.clear()
    _arithmetic.cache_clear()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """What the machine can do, even where torch's threads are limited for a small model."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_read(device: torch.device, size: int = LARGE) -> float:
    """Bytes/s of reading an array of so many bytes; one far larger than the caches comes from memory.

    On a CPU our own reader is tried beside torch's sum, which follows one stream a thread and leaves some of what the
    memory can do unused.
    """
    x = torch.ones(max(size, 1 << 20) // 4, dtype=torch.float32, device=device)
    repeats = max(10, (1 << 30) // x.nbytes if x.nbytes < LARGE else 0)
    seconds = _best(lambda: x.sum(), device, repeats)
    if device.type == "cpu":
        with contextlib.suppress(Unavailable):
            library, threads = open_library(), Threads(torch.get_num_threads(), None)
            read = functools.partial(read_memory, library, threads, x.data_ptr(), x.nbytes // 8)
            seconds = min(seconds, _best(read, device, repeats))
    return x.nbytes / seconds


def _measure_matmul(device: torch.device) -> float:
    n = 1024 if device.type == "cpu" else 8192
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a = torch.randn(n, n, device=device).to(dtype)
    return 2.0 * n**3 / _best(lambda: a @ a, device)


def _measure_int8(device: torch.device) -> float:
    """Operations/s of an int8 product; where torch has no fast one, still four for each of float32's."""
    n = 1024
    a = torch.ones((n, n), dtype=torch.int8, device=device)
    return max(4 * _measure_matmul(device), 2.0 * n**3 / _best(lambda: torch._int_mm(a, a), device))


def _best(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
