"""What the host has to do with a figure: the pace of this machine's processor, and where a step of vLLM's leaves time.

A single stream inside vLLM waits for Python, not for the GPU, so the same kernels give other figures on other hosts.
`facts` are of the machine alone; `Watch` times vLLM's own functions during a decode. Both go into the receipt, so that
a slow host can be told from a slow path. Judges nothing.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

LOOP = 200_000
# Of vLLM's: what a step is made of on the host. Those that a version does not have are left out.
STEPS = (
    ("vllm.v1.engine.llm_engine", "LLMEngine", "step"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "schedule"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output"),
    ("vllm.v1.engine.output_processor", "OutputProcessor", "process_outputs"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_prepare_inputs"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_build_attention_metadata"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_model_forward"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "execute_model"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "sample_tokens"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_bookkeeping_sync"),
)


def facts() -> dict[str, Any]:
    """Processor, kernel, load, the pace of a loop in Python, and what a launch and a wait cost."""
    report: dict[str, Any] = {
        "processor": _processor(), "cores": os.cpu_count(), "kernel": platform.release(),
        "python": platform.python_version(),
        "load": [round(x, 2) for x in os.getloadavg()], "loop_ns": round(_fastest(_loop) / LOOP * 1e9, 2),
    }  # fmt: skip
    import torch

    if torch.cuda.is_available():
        x = torch.zeros(8, device="cuda")

        def launches() -> None:
            for _ in range(1000):
                x.add_(1)

        def round_trip() -> None:
            x.add_(1)
            torch.cuda.synchronize()

        round_trip()
        report["launch_us"] = round(_fastest(launches) * 1e3, 2)
        torch.cuda.synchronize()
        report["round_trip_us"] = round(median(_seconds(round_trip) for _ in range(200)) * 1e6, 2)
    return report


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _loop() -> None:
    total = 0
    for i in range(LOOP):
        total += i & 3


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _fastest(call: Callable[[], object]) -> float:
    return min(_seconds(call) for _ in range(5))


class CallTimes:
    """Microseconds of every call of vLLM's functions, each with what it calls in turn."""

    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = {}

    @contextmanager
    def over(self, steps: tuple[tuple[str, str, str], ...] = STEPS) -> Iterator[CallTimes]:
        undo: list[tuple[type, str, Any]] = []
        for module, kind, name in steps:
            try:
                owner = getattr(import_module(module), kind)
                before = owner.__dict__[name]
            except (ImportError, AttributeError, KeyError):
                continue
            undo.append((owner, name, before))
            setattr(owner, name, self._timed(f"{kind}.{name}", before))
        try:
            yield self
        finally:
            for owner, name, before in undo:
                setattr(owner, name, before)

    def _timed(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        times = self.calls.setdefault(label, [])

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                times.append(time.perf_counter() - began)

        return timed

    def medians(self) -> dict[str, float]:
        """Microseconds of a call, by function; the first calls of a run hold its prompt, the median does not."""
        return {name: round(median(times) * 1e6, 1) for name, times in self.calls.items() if times}
