"""CudaPhase: what a phase in CUDA C++ says besides what every phase says.

`kernels/prove.py` asks it for its builds; the launch it binds runs the same ones. It refuses nothing itself.
"""

from __future__ import annotations

from abc import abstractmethod

from halfbyte.kernels.launch import Build
from halfbyte.plan.phase import Arch, Phase, Spec

# What machine code shows of a build.
TENSOR_COPY = r"\bUTMALDG"  # a copy through a map of the weights
BULK_COPY = r"\bUBLKCP"  # a copy of bytes that does not pass through registers
MMA_SYNC = r"\bHMMA\.16816"  # bf16 or f16 products of a warp
WGMMA, WGMMA_FP8 = r"\bHGMMA", r"\bQGMMA"  # products of a warpgroup


class CudaPhase(Phase):
    @abstractmethod
    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        """Every kernel that it can launch there for `spec`."""
