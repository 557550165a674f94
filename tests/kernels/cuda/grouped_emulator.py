"""The grouped products on a CPU: the same sources, built with g++ over `emulator.h`, one fiber per CUDA thread."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from torch import Tensor

from halfbyte.kernels.cuda.prefill.builds import ROWS_PROGRAM, ProductArgs, RowsArgs, Variant
from halfbyte.kernels.launch import INCLUDES, Map, Program

Map16 = ctypes.c_uint64 * 16
CACHE = Path(tempfile.gettempdir()) / "halfbyte-emulator"


@functools.cache
def build(program: Program) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the emulator needs g++")
    options = ("-O1", "-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-DHB_EMULATE", *program.options)
    key = hashlib.sha256("\0".join((program.hash(), *options)).encode()).hexdigest()[:32]
    path = CACHE / f"{program.source.stem}-{key}.so"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            partial = Path(folder) / "library.so"
            command = [compiler, *options, f"-I{INCLUDES}", "-x", "c++", str(program.source), "-o", str(partial)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[:4000]
            partial.replace(path)
    return ctypes.CDLL(str(path))


class Emulator:
    def __init__(self, blocks: int, seed: int = 0) -> None:
        self.blocks, self.seed = blocks, seed

    def map(self, data: Tensor, row_bytes: int, box: tuple[int, int]) -> Map:
        """What `copy_tile` of grouped.cuh reads instead of the copy engine's own format."""
        return Map16(data.data_ptr(), row_bytes, data.numel() * data.element_size() // row_bytes)

    def product(self, variant: Variant, args: ProductArgs) -> None:
        self.seed += 1
        build(variant.program()).hb_grouped(ctypes.byref(args), self.blocks // variant.pair * variant.pair, self.seed)

    def rows(self, entry: str, grid: int, args: RowsArgs) -> None:
        self.seed += 1
        build(Program(ROWS_PROGRAM, "rows")).hb_rows(entry.encode(), ctypes.byref(args), grid, self.seed)
