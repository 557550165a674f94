"""What measurements of kernels share: inputs, compiling at once, timing by graphs, and ceilings.

A measurement names its cells and says how each is checked and timed. A cell that fails its check, or whose figure
passes its ceiling, has no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from bench.checks.decode_case import random_matrix
from halfbyte.formats import MXTensor
from halfbyte.kernels.launch import Program, compile_program
from halfbyte.lab.machine import device_roof
from halfbyte.lab.result import FigureCeiling
from halfbyte.roofline import Gpu

WARM_UP = 2  # replays in front of those that count
REPEATS = 9  # samples of a figure, unless a measurement says otherwise


def begin() -> None:
    """What every measurement of a kernel does first; references are float32."""
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)


# ---- inputs ---------------------------------------------------------------------------------------------------------


def random_mxfp4(*size: int) -> MXTensor:
    """About normal with variance 1/K, straight in the layout tile16."""
    none = torch.empty(0, dtype=torch.uint8, device="cuda")
    return MXTensor(random_matrix(*size, format="mxfp4"), none, size, "mxfp4", "tile16")


def poison(tensors: Iterable[Tensor]) -> None:
    """NaN in everything that a kernel should write itself: nothing may survive from another run."""
    for tensor in tensors:
        if tensor.dtype in (torch.float32, torch.bfloat16):
            tensor.fill_(float("nan"))


# ---- compiling and timing -------------------------------------------------------------------------------------------


def device_arch() -> str:
    return "sm_{}{}a".format(*torch.cuda.get_device_capability())


def compile_all(programs: Iterable[Program], arch: str | None = None) -> None:
    """All of them at once, into the cache; whoever loads one then finds it there."""
    target = arch or device_arch()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda program: compile_program(program, target), list(programs)))


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`work` as a graph, after one run that compiles and allocates."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int, launches: int = 1, replays: int = 1) -> list[float]:
    """Microseconds of each of `launches` in the graph, one sample for every `replays` of it."""
    return event_us(graph.replay, repeats, replays, launches)


def graph_us(work: Callable[[], object], repeats: int, launches: int = 1) -> list[float]:
    """Samples of the microseconds of each of `launches` that one `work` makes, by replays of its graph."""
    return replay_us(captured(work), repeats, launches)


def event_us(work: Callable[[], object], repeats: int, calls: int = 1, launches: int = 1) -> list[float]:
    """Samples between two events on the stream, of `calls` of `work` with `launches` each."""
    samples = []
    for i in range(repeats + WARM_UP):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            work()
        end.record()
        torch.cuda.synchronize()
        if i >= WARM_UP:
            samples.append(start.elapsed_time(end) * 1e3 / calls / launches)
    return samples


# ---- ceilings -------------------------------------------------------------------------------------------------------


def roof() -> Gpu:
    return device_roof(torch.device("cuda", torch.cuda.current_device()))


def read_ceiling(scale: float = 1e12) -> FigureCeiling:
    """The read bandwidth as a ceiling in TB/s, or in bytes / `scale` a second."""
    return FigureCeiling(roof().read / scale, f"{roof().name}: read bandwidth in roofline.py")


def flop_ceiling(fp8: bool = False) -> FigureCeiling:
    gpu = roof()
    return FigureCeiling(
        (gpu.fp8 if fp8 else gpu.bf16) / 1e12, f"{gpu.name}: {'fp8' if fp8 else 'bf16'} rate in roofline.py"
    )


def detail(**facts: Any) -> dict[str, Any]:
    """For a result: what is worth keeping and has no unit; nothing that is absent."""
    return {name: fact for name, fact in facts.items() if fact is not None}
