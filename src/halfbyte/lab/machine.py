"""The machine a figure is measured on: what its memory and arithmetic can do at most, and how many threads to use."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

import torch

from halfbyte import roofline
from halfbyte.errors import UsageError

SMALL = 1 << 30  # bytes of weights


def limit_threads(device: torch.device, weight_bytes: int) -> None:
    """One thread for a small model on a CPU: more cost it more than they bring, and far more on a busy machine."""
    if device.type == "cpu" and weight_bytes < SMALL:
        torch.set_num_threads(1)


@functools.cache
def device_roof(device: torch.device) -> roofline.Gpu:
    """The roof of this machine: a GPU of the table by name, else read bandwidth and matrix rate measured once."""
    if device.type == "cuda":
        with contextlib.suppress(UsageError):
            return roofline.gpu_named(torch.cuda.get_device_name(device))
    read, flops = _measure_read(device), _measure_matmul(device)
    return roofline.Gpu("this machine", str(device), read, True, flops, flops, 0.0, "measured in this run")


def _measure_read(device: torch.device) -> float:
    """Bytes/s of summing an array far larger than the caches."""
    x = torch.ones(1 << (27 if device.type == "cpu" else 29), dtype=torch.float32, device=device)
    return x.nbytes / _best(lambda: x.sum(), device)


def _measure_matmul(device: torch.device) -> float:
    n = 1024 if device.type == "cpu" else 8192
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a = torch.randn(n, n, device=device).to(dtype)
    return 2.0 * n**3 / _best(lambda: a @ a, device)


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
