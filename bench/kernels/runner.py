"""What the scripts here share: arguments, the look for a GPU, compiling at once, timing by graphs, and the receipt.

A script names its cells and says how each is checked and timed. A cell that fails its check, or whose figure passes its
ceiling, has no figure. The receipt is `halfbyte.lab.result`'s schema with the hash of every source file behind the
figures; with --out it is written after every cell, so a run that is ended leaves what it has. The last line of output
is the receipt. The exit status is 1 if a cell was refused, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats import MXTensor
from halfbyte.kernels.launch import Program, compile_program
from halfbyte.lab import environment, receipts
from halfbyte.lab.entry import line_of
from halfbyte.lab.entry import numbers as numbers  # spelled alike everywhere
from halfbyte.lab.levels.decode_case import random_matrix
from halfbyte.lab.machine import device_roof
from halfbyte.lab.result import Ceiling, Cell, Result, ResultFile, measure_cell
from halfbyte.roofline import Gpu

WARM_UP = 2  # replays in front of those that count


def words(text: str) -> list[str]:
    return [w for w in text.split(",") if w]


def arguments(
    doc: str | None, *, models: str | None = None, formats: str | None = None, repeats: int = 9
) -> argparse.ArgumentParser:
    """A parser with the arguments that all scripts spell alike; those a script has no use for are left out."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the receipt here, after every cell")
    parser.add_argument("--repeats", type=int, default=repeats, help="samples of each figure, a median with its spread")
    if models is not None:
        parser.add_argument("--models", type=words, default=words(models), help="shapes: 120b, 20b")
    if formats is not None:
        parser.add_argument(
            "--formats", type=words, default=words(formats), help="of qkv, o and lm_head: mxfp4, q8, checkpoint"
        )
    return parser


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, on a machine with a GPU: elsewhere one sentence and exit status 2."""
    args = parser.parse_args()
    environment.need_gpu()
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False  # references are float32
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    return args


class Receipt:
    """Results as they come, and the file that holds them."""

    def __init__(self, tool: str, out: Path | None, measured: Mapping[str, str]) -> None:
        self.out, self.measured = out, dict(measured)
        self.results: list[Result] = []
        self._empty = receipts.result_file(tool, (), {})

    def add(self, result: Result) -> Result:
        self.results.append(result)
        notes = [f"\n    {c.what}: {'' if c.ok else 'WRONG: '}{c.note}" for c in result.checks if c.note]
        print(line_of(result) + "".join(notes), flush=True)
        if self.out:
            self.file().write(self.out)
        return result

    def measure(self, cell: Cell, work: Callable[[], Result]) -> Result:
        """A cell that raises is a refusal with that reason, and the next one goes on."""
        return self.add(measure_cell(cell, work))

    def file(self) -> ResultFile:
        return replace(self._empty, measured=self.measured, results=tuple(self.results))

    def end(self) -> int:
        print(json.dumps(self.file().as_json(), default=str))
        return int(not self.results or any(r.refused for r in self.results))


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


def read_ceiling(scale: float = 1e12) -> Ceiling:
    """Of a figure in TB/s, or in bytes / `scale` a second."""
    return Ceiling(roof().read / scale, f"{roof().name}: read bandwidth in roofline.py")


def flop_ceiling(fp8: bool = False) -> Ceiling:
    gpu = roof()
    return Ceiling((gpu.fp8 if fp8 else gpu.bf16) / 1e12, f"{gpu.name}: {'fp8' if fp8 else 'bf16'} rate in roofline.py")


def detail(**facts: Any) -> dict[str, Any]:
    """For a result: what is worth keeping and has no unit; nothing that is absent."""
    return {name: fact for name, fact in facts.items() if fact is not None}
