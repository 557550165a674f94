"""CudaPhase: what a phase in CUDA C++ says besides what every phase says.

`kernels/prove.py` compiles its builds, the record of what ran is held against them, and the launch it binds runs the
same ones. It refuses nothing itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from halfbyte.kernels.launch import Build, declared_kernels
from halfbyte.kernels.triton.call import Call, declared_calls
from halfbyte.plan.phase import Arch, Phase, Spec
from halfbyte.plan.record import Declared

# What machine code shows of a build.
TENSOR_COPY = r"\bUTMALDG"  # a copy through a map of the weights
BULK_COPY = r"\bUBLKCP"  # a copy of bytes that does not pass through registers
MMA_SYNC = r"\bHMMA\.16816"  # bf16 or f16 products of a warp
WGMMA, WGMMA_FP8 = r"\bHGMMA", r"\bQGMMA"  # products of a warpgroup


class CudaPhase(Phase):
    @abstractmethod
    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        """Every kernel in CUDA C++ that it can launch there for `spec`."""

    def calls(self, spec: Spec, arch: Arch) -> list[Call]:
        """Every kernel in Triton that it launches between them."""
        return []

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        programs = (build.program for build in self.builds(spec, arch))
        return [*declared_kernels(programs, arch), *declared_calls(self.calls(spec, arch))]
