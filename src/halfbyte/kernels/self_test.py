"""What a self-test must know of kernels: whose they are, and how to make their hand-overs late. Found by name
(`model/self_test.py`), because only a GPU's plans have any.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from halfbyte.kernels.cuda.device.host import gpu, late_program
from halfbyte.kernels.cuda.phase import CudaPhase
from halfbyte.kernels.launch import Program, compile_program, driver_version, target_of
from halfbyte.plan.phase import Arch, Spec
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import REGIMES

KERNELS = Path(__file__).parent
SUFFIXES = (".py", ".cu", ".cuh", ".h")
LATE = 4000  # nanoseconds that a hand-over waits at most, now and then
COMPILERS = ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc")  # what else the machine code depends on


def identity() -> dict[str, str]:
    """Whatever a pass depends on beside the plan: another one has to be shown again."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": "{}.{}".format(*torch.cuda.get_device_capability()),
        "driver": driver_version(),
        "kernels": source_hash(),
    }


@functools.cache
def source_hash() -> str:
    """Of everything that is compiled or launches it, and of the compilers."""
    digest = hashlib.sha256()
    for path in sorted(p for p in KERNELS.rglob("*") if p.suffix in SUFFIXES and "cpu" not in p.parts[-2:]):
        digest.update(path.relative_to(KERNELS).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for name in COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{name} {importlib.metadata.version(name)}\0".encode())
    return digest.hexdigest()[:16]


def late_programs(spec: Spec, chosen: Chosen, arch: Arch) -> list[Program]:
    """The builds whose blocks wait for each other, as `late_hand_overs` will want them."""
    builds = [
        build
        for regime in REGIMES
        for phase in dict.fromkeys(chosen[regime])
        if isinstance(phase, CudaPhase)
        for build in phase.builds(spec.at(regime), arch)
    ]
    return list(dict.fromkeys(late_program(b, LATE) for b in builds if b.cooperative or b.resident))


def compilations(spec: Spec, chosen: Chosen, arch: Arch) -> list[Callable[[], object]]:
    return [functools.partial(compile_program, p, target_of(arch)) for p in late_programs(spec, chosen, arch)]


@contextlib.contextmanager
def late_hand_overs() -> Iterator[None]:
    """What is launched eagerly meanwhile hands over late, now and then."""
    with gpu().late(LATE):
        yield
