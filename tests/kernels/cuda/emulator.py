"""CUDA kernels on a CPU: the same sources, built with g++ over `emulator.h`, one fiber per CUDA thread.

A seed decides the order of events. The emulator says nothing about speed and does not reorder memory. It replaces a GPU
(`halfbyte.kernels.cuda.device.host.KernelMachine`) in tests; no plan ever uses it. It needs g++. With `sm80`, or where
HALFBYTE_GPU_INSTRUCTIONS is set, kernels are built from the instructions of SM80 alone, as for a GPU of that age.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.errors import UsageError
from halfbyte.gates import cache_folder
from halfbyte.kernels.cuda.device.host import plain_map, refuse_old
from halfbyte.kernels.launch import SM80, Build, Map, Program
from halfbyte.plan.launches import KernelImage, launched
from halfbyte.plan.machine import instruction_set

HEADER = Path(__file__).with_name("emulator.h")
OPTIONS = ("-O1", "-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-DHB_EMULATE")


def emulator_available() -> str | None:
    """None, or the reason why nothing can be emulated here."""
    return None if shutil.which("g++") else "the emulator needs g++, which is not installed"


class Emulator:
    """`blocks` multiprocessors, scheduled in an order that `seed` decides; every launch takes the next one."""

    def __init__(self, blocks: int, seed: int = 0, *, sm80: bool | None = None) -> None:
        self.blocks, self.seed = blocks, seed
        self.sm80 = instruction_set() is not None if sm80 is None else sm80
        self.failure = torch.zeros(2, dtype=torch.int32)

    def load(self, build: Build) -> object:
        return self._library(build)

    def _library(self, build: Build) -> ctypes.CDLL:
        program = self.program(build)
        if self.sm80:
            refuse_old(build)
            program = replace(program, options=(SM80, *program.options))
        return library(program)

    def program(self, build: Build) -> Program:
        """What is compiled for it. A test may add options."""
        return build.program

    def run(self, build: Build, grid: int, args: ctypes.Structure) -> None:
        self.seed += 1
        self._library(build).hb_run(build.program.entry.encode(), ctypes.byref(args), grid, self.seed)
        launched(_image(build))

    def byte_map(self, data: Tensor, row_bytes: int, box: tuple[int, int]) -> Map:
        """What emulated copies read instead of the copy engine's own format."""
        return plain_map(data, row_bytes)

    def row_map(self, rows: Tensor, box: tuple[int, int]) -> Map:
        return (ctypes.c_uint64 * 16)(rows.data_ptr())


@functools.cache
def _image(build: Build) -> KernelImage:
    return KernelImage(build.program.entry, "emulated", part=build.part)


def sizes(program: Program, count: int) -> list[int]:
    """Sizes that the compiler sees, to compare with the host's mirrors: bytes of the argument, bytes of shared memory,
    threads of a block, or others that the source reports."""
    return [int(library(program).hb_size(i)) for i in range(count)]


def struct_fields(program: Program, struct: str) -> list[tuple[str, int, int]]:
    """(name, offset, size) of a struct's fields as the compiler has them (HB_MIRRORED); of a member's, as mirrors spell
    it."""
    say = getattr(library(program), f"hb_fields_{struct}")
    say.restype = ctypes.c_char_p
    lines = [line.split() for line in say().decode().splitlines()]
    return [(name.replace(".", "_"), int(offset), int(size)) for name, offset, size in lines]


def mirror_fields(mirror: type[ctypes.Structure]) -> list[tuple[str, int, int]]:
    """(name, offset, size) of the fields of Python's ctypes mirror."""
    names = [field[0] for field in mirror._fields_]
    return [(name, getattr(mirror, name).offset, getattr(mirror, name).size) for name in names]


def library(program: Program) -> ctypes.CDLL:
    """Every entry of a source, compiled with the program's options."""
    return _library(replace(program, entry=""))


@functools.cache
def _library(program: Program) -> ctypes.CDLL:
    if reason := emulator_available():
        raise UsageError(f"{reason}.")
    options = (*OPTIONS, *program.options)
    header = program.root / HEADER.name  # a test may change a copy of it
    text = (header if header.exists() else HEADER).read_text(encoding="utf-8")
    key = hashlib.sha256("\0".join((program.hash(), text, *options)).encode()).hexdigest()[:32]
    path = cache_folder("emulator") / f"{program.source.stem}-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            partial = Path(folder) / path.name
            folders = [f"-I{program.root}", f"-I{HEADER.parent}"]
            command = ["g++", *options, *folders, "-x", "c++", str(program.source), "-o", str(partial)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UsageError(f"g++ could not build the emulator of {program.source.name}:\n{done.stderr[:4000]}")
            partial.replace(path)
    return ctypes.CDLL(str(path))
