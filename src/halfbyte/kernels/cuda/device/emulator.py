"""CUDA kernels on a CPU: the same sources, built with g++ over `emulator.h`, one fiber per CUDA thread.

Every order of events is one that a seed decides. It says nothing about speed, and it does not reorder memory. It stands
in for a GPU (`host.Machine`) in tests and self-tests; no plan ever takes it. Refuses to run where g++ is missing.
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
from halfbyte.kernels.launch import Build, Map, Program
from halfbyte.plan.launches import KernelImage, launched

OPTIONS = ("-O1", "-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-DHB_EMULATE")
_Map = ctypes.c_uint64 * 16


def emulator_available() -> str | None:
    """None, or why nothing can be emulated here."""
    return None if shutil.which("g++") else "the emulator needs g++, which is not installed"


class Emulator:
    """`blocks` multiprocessors, scheduled in an order that `seed` decides; every launch takes the next one."""

    def __init__(self, blocks: int, seed: int = 0) -> None:
        self.blocks, self.seed = blocks, seed
        self.failure = torch.zeros(2, dtype=torch.int32)

    def load(self, build: Build) -> object:
        return library(self.program(build))

    def program(self, build: Build) -> Program:
        """What is compiled for it. A test may add options."""
        return build.program

    def run(self, build: Build, grid: int, args: ctypes.Structure) -> None:
        self.seed += 1
        library(self.program(build)).hb_run(build.program.entry.encode(), ctypes.byref(args), grid, self.seed)
        launched(_image(build))

    def byte_map(self, data: Tensor, row_bytes: int, box: tuple[int, int]) -> Map:
        """What emulated copies read instead of the copy engine's own format."""
        return _Map(data.data_ptr(), row_bytes, data.numel() * data.element_size() // row_bytes)

    def row_map(self, rows: Tensor, box: tuple[int, int]) -> Map:
        return _Map(rows.data_ptr())


@functools.cache
def _image(build: Build) -> KernelImage:
    return KernelImage(build.program.entry, "emulated", part=build.part)


def sizes(program: Program, count: int) -> list[int]:
    """What the compiler sees, to be compared with the host's mirrors: bytes of the argument, bytes of shared memory,
    threads of a block, or what else the source says."""
    return [int(library(program).hb_size(i)) for i in range(count)]


def struct_fields(program: Program, struct: str) -> list[tuple[str, int, int]]:
    """(name, offset, size) of a struct's fields as the compiler has them (HB_MIRRORED); of a member's, as mirrors spell
    it."""
    say = getattr(library(program), f"hb_fields_{struct}")
    say.restype = ctypes.c_char_p
    lines = [line.split() for line in say().decode().splitlines()]
    return [(name.replace(".", "_"), int(offset), int(size)) for name, offset, size in lines]


def mirror_fields(mirror: type[ctypes.Structure]) -> list[tuple[str, int, int]]:
    """The same of the structure that Python fills."""
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
    key = hashlib.sha256("\0".join((program.hash(), *options)).encode()).hexdigest()[:32]
    path = cache_folder("emulator") / f"{program.source.stem}-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            partial = Path(folder) / path.name
            command = ["g++", *options, f"-I{program.root}", "-x", "c++", str(program.source), "-o", str(partial)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UsageError(f"g++ could not build the emulator of {program.source.name}:\n{done.stderr[:4000]}")
            partial.replace(path)
    return ctypes.CDLL(str(path))
