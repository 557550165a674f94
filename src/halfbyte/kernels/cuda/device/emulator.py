"""The decode step on a CPU: the same source, built with g++ over `emulator.h`, one fiber per CUDA thread. For tests."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

from halfbyte.errors import UsageError
from halfbyte.kernels.cuda.decode.step import StepArgs, StepShape
from halfbyte.kernels.launch import INCLUDES, cache_folder


class Emulator:
    """`blocks` multiprocessors, scheduled in an order that `seed` decides."""

    def __init__(self, shape: StepShape, blocks: int, seed: int = 0, *, cache: Path | None = None) -> None:
        self.blocks, self.seed = blocks, seed
        self._library = ctypes.CDLL(str(_build(shape, cache or cache_folder())))

    def run(self, args: StepArgs) -> None:
        self.seed += 1
        self._library.hb_emulate(ctypes.byref(args), self.blocks, self.seed)

    def sizes(self) -> tuple[int, int, int]:
        """Bytes of Step, Layer and Shared, as the compiler sees them."""
        step, layer, shared = (int(self._library.hb_sizes(i)) for i in range(3))
        return step, layer, shared


def _build(shape: StepShape, cache: Path) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        raise UsageError("the emulator needs g++, which is not installed.")
    program = shape.program()
    options = ("-O1", "-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-DHB_EMULATE", *program.options)
    key = hashlib.sha256("\0".join((program.hash(), *options)).encode()).hexdigest()[:32]
    path = cache / f"decode_step-emulator-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{id(shape)}.tmp")
        command = [compiler, *options, f"-I{INCLUDES}", "-x", "c++", str(program.source), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(f"g++ could not build the emulator:\n{done.stderr[:4000]}")
        partial.replace(path)
    return path
