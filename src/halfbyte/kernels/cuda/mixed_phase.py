"""MixedPhase: a phase in CUDA C++ that also launches kernels in Triton.

Apart from `CudaPhase`, so that what knows no Triton does not depend on it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from halfbyte.kernels.cuda.phase import CudaPhase
from halfbyte.kernels.triton.call import TritonCall, declared_calls
from halfbyte.plan.phase import Arch, Spec
from halfbyte.plan.record import Declared


class MixedPhase(CudaPhase):
    @abstractmethod
    def calls(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        """Every kernel in Triton that it launches between those of `builds`."""

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return [*super().declares(spec, arch), *declared_calls(self.calls(spec, arch))]
