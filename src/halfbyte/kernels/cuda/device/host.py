"""Host code that all CUDA kernels share: the machine that runs them, their arguments and their buffers.

A kernel is described once, as a `Build`. A `KernelMachine` runs it: `CudaMachine` on the current CUDA device, or the
tests' emulator on a CPU (`tests/kernels/cuda/emulator.py`). Nothing here depends on a particular kernel. A launch
allocates nothing, waits for nothing and reads no device data, so that it can be captured in a CUDA graph; buffers that
a captured graph may hold are never replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.kernels.cuda.phase import NEWER_PRODUCTS
from halfbyte.kernels.launch import (
    Build,
    Kernel,
    Map,
    Program,
    byte_map,
    compile_program,
    current_arch,
    shared_by_mps,
    tensor_map,
)
from halfbyte.plan.phase import ARCHES
from halfbyte.plan.stopped import report_stops

FORMATS = {"mxfp4": 0, "q8": 1, "bf16": 2}  # of weights, as HB_FORMAT numbers them
GRAPH_ROWS = max(arch.limits.batch for arch in ARCHES.values())  # steps of up to so many rows may be captured
POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float


class KernelMachine(Protocol):
    blocks: int  # multiprocessors: a persistent kernel has a block on each
    failure: Tensor  # int32 [2], the host's: the wait that a kernel gave up before it stopped itself, and who waited

    def load(self, build: Build) -> object:
        """Compile and load a kernel, so that its first run may be captured."""
        ...

    def run(self, build: Build, grid: int, args: ctypes.Structure) -> None:
        """One launch, with `args` by value."""
        ...

    def byte_map(self, data: Tensor, row_bytes: int, box: tuple[int, int]) -> Map:
        """See `launch.byte_map`."""
        ...

    def row_map(self, rows: Tensor, box: tuple[int, int]) -> Map:
        """See `launch.tensor_map`."""
        ...


class CudaMachine:
    """The current CUDA device. A kernel is compiled and loaded when it is first run, unless `load` came before."""

    def __init__(self) -> None:
        arch = current_arch()
        self.arch = arch.target
        self._engine, self._early = "bulk_copies" in arch.features, "early_launches" in arch.features
        self.blocks = torch.cuda.get_device_properties().multi_processor_count
        self._kernels: dict[tuple[Build, int], Kernel] = {}
        self._late = 0
        if shared_by_mps():
            raise PlanError(MPS)
        self.failure = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        report_stops(lambda: given_up(self.failure))

    def load(self, build: Build) -> Kernel:
        kernel = self._kernels.get((build, self._late))
        if kernel is None:
            if not self._engine:
                refuse_old(build)
            program = late_program(build, self._late) if self._late else self.program(build)
            cubin = compile_program(program, self.arch)
            kernel = Kernel(cubin, build.program.entry, build.shared, build.part)
            if build.resident or build.cooperative:
                check_resident(build, kernel.blocks_at_once(build.threads))
            self._kernels[build, self._late] = kernel
        return kernel

    @contextlib.contextmanager
    def late(self, nanoseconds: int) -> Iterator[None]:
        """Within the context, kernels whose blocks wait for each other delay some hand-overs by up to this time."""
        self._late = nanoseconds
        try:
            yield
        finally:
            self._late = 0

    def program(self, build: Build) -> Program:
        """What is compiled for it. An experiment may add options."""
        return build.program

    def run(self, build: Build, grid: int, args: ctypes.Structure) -> None:
        early = build.early and self._early
        self.load(build).launch(grid, build.threads, args, cooperative=build.cooperative, early=early)

    def byte_map(self, data: Tensor, row_bytes: int, box: tuple[int, int]) -> Map:
        return byte_map(data, row_bytes, box) if self._engine else plain_map(data, row_bytes)

    def row_map(self, rows: Tensor, box: tuple[int, int]) -> Map:
        return tensor_map(rows, box)


def plain_map(data: Tensor, row_bytes: int) -> Map:
    """What a kernel reads in place of the copy engine's map where there is none: address, bytes and number of rows."""
    return (ctypes.c_uint64 * 16)(data.data_ptr(), row_bytes, data.numel() * data.element_size() // row_bytes)


def refuse_old(build: Build) -> None:
    """Refuse a kernel whose instructions begin with SM90. No plan for an older GPU takes one; a test may ask for it."""
    if set(build.need) & set(NEWER_PRODUCTS):
        raise PlanError(f"{build.name} {NEWER}.")


NEWER = "multiplies with instructions that no GPU before SM90 has"


@functools.cache
def gpu() -> CudaMachine:
    return CudaMachine()


MPS = (
    "the CUDA kernels cannot share a GPU through MPS: their blocks wait for each other, and another process's kernel "
    "can keep some of them from starting; stop MPS (echo quit | nvidia-cuda-mps-control), or use the Triton kernels "
    "(--moe-kernel triton --linear-kernel triton --attention triton)."
)


def late_program(build: Build, nanoseconds: int) -> Program:
    """A kernel whose blocks wait for each other, with delays at its hand-overs (HB_DELAYS); any other as it is."""
    if not (build.cooperative or build.resident):
        return build.program
    return replace(build.program, options=(*build.program.options, f"-DHB_DELAYS={nanoseconds}"))


def check_resident(build: Build, at_once: int) -> None:
    """Check that blocks that wait for each other can all be resident: one on each multiprocessor."""
    if at_once < 1:
        raise PlanError(
            f"{build.name} needs a block of {build.threads} threads and {build.shared} bytes of shared memory on every "
            "multiprocessor at once, and this GPU has no room for one; use the Triton kernels (--moe-kernel triton)."
        )


def given_up(failure: Tensor) -> str | None:
    """The wait inside a kernel that timed out, after which the launch fails; None if there was none."""
    where, waiter = (int(v) & 0xFFFFFFFF for v in failure)
    return f"wait {where:#x} was given up in block {waiter >> 16}, thread {waiter & 0xFFFF}" if where else None


def options(values: Mapping[str, int]) -> tuple[str, ...]:
    """Compiler options of a program: -DHB_NAME=value."""
    return tuple(f"-DHB_{name}={value}" for name, value in values.items())


def fields(kind: type, *names: str) -> list[tuple[str, type]]:
    """Fields of one type for a ctypes.Structure."""
    return [(name, kind) for name in names]


def pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def is_float(t: Tensor | None) -> int:
    """1 where values are float32, 0 where they are bf16 or absent."""
    if t is None:
        return 0
    if t.dtype not in (torch.float32, torch.bfloat16):
        raise PlanError(f"the CUDA kernels read float32 and bf16, not {t.dtype}.")
    return int(t.dtype == torch.float32)


def is_float_vector(t: Tensor | None) -> int:
    """Like `is_float`, and requires a contiguous vector."""
    if t is not None and not t.is_contiguous():
        raise PlanError("the CUDA kernels read contiguous vectors, but this one is a strided view.")
    return is_float(t)


class Workspace:
    """A machine and its named buffers, shared by all layers, which run one after the other."""

    def __init__(self, machine: KernelMachine, buffers: dict[str, Tensor], device: torch.device) -> None:
        self.machine, self._buffers, self.device = machine, buffers, device

    def fixed(self, name: str, *size: int, dtype: torch.dtype) -> Tensor:
        """A buffer of zeros, made once and never replaced."""
        if name not in self._buffers:
            self._buffers[name] = torch.zeros(size, dtype=dtype, device=self.device)
        buffer = self._buffers[name]
        assert buffer.shape == size, f"{name} was made for another model"
        return buffer

    def growing(self, name: str, rows: int, size: Callable[[int], int], dtype: torch.dtype) -> Tensor:
        """A buffer of at least size(rows) elements, which grows when more rows come than ever before. Steps that may be
        captured have one of their own, made for the largest of them and never replaced."""
        small = rows <= GRAPH_ROWS
        key = f"{name}.small" if small else name
        count = size(GRAPH_ROWS if small else rows)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            assert buffer is None or not small, f"{key} was made for another model"
            buffer = self._buffers[key] = torch.zeros(count, dtype=dtype, device=self.device)
        return buffer
