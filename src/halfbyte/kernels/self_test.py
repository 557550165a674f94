"""What the self-test needs from GPU kernels: their identity, and builds with delayed hand-overs.

`model/self_test.py` imports this module by name, because only plans for a GPU need it.
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
from halfbyte.kernels.launch import Program, compile_program, driver_version
from halfbyte.plan.phase import Arch, Spec
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import REGIMES

KERNELS = Path(__file__).parent
SUFFIXES = (".py", ".cu", ".cuh", ".h")
LATE = 4000  # nanoseconds that a hand-over waits at most, now and then
COMPILERS = ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc")  # what else the machine code depends on


def identity() -> dict[str, str]:
    """Everything besides the plan that a passed self-test depends on; if it changes, the test runs again."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": "{}.{}".format(*torch.cuda.get_device_capability()),
        "driver": driver_version(),
        "kernels": source_hash(),
    }


@functools.cache
def source_hash() -> str:
    """The hash of all kernel sources, of the code that launches them, and of the compilers' versions."""
    digest = hashlib.sha256()
    for path in sorted(p for p in KERNELS.rglob("*") if p.suffix in SUFFIXES and "cpu" not in p.parts[-2:]):
        digest.update(path.relative_to(KERNELS).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for name in COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{name} {importlib.metadata.version(name)}\0".encode())
    return digest.hexdigest()[:16]


def late_programs(spec: Spec, chosen: Chosen, arch: Arch) -> list[Program]:
    """Programs with delayed hand-overs for the builds whose blocks wait for each other."""
    builds = [
        build
        for regime in REGIMES
        for phase in dict.fromkeys(chosen[regime])
        if isinstance(phase, CudaPhase)
        for build in phase.builds(spec.at(regime), arch)
    ]
    return list(dict.fromkeys(late_program(b, LATE) for b in builds if b.cooperative or b.resident))


def compilations(spec: Spec, chosen: Chosen, arch: Arch) -> list[Callable[[], object]]:
    return [functools.partial(compile_program, p, arch.target) for p in late_programs(spec, chosen, arch)]


@contextlib.contextmanager
def late_hand_overs() -> Iterator[None]:
    """Within the context, eager launches delay some of their hand-overs."""
    with gpu().late(LATE):
        yield
