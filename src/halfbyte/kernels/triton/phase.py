"""TritonPhase: the interface that a phase in Triton adds to `Phase`. It refuses nothing itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from halfbyte.kernels.triton.call import INTERPRETED, TritonCall, declared_calls
from halfbyte.plan.phase import Arch, Phase, Spec
from halfbyte.plan.record import Declared


class TritonPhase(Phase):
    row_invariant = True

    @abstractmethod
    def proofs(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        """Every kernel that the phase launches on `arch` for `spec`, in the shapes that a proof compiles."""

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return declared_calls(self.proofs(spec, arch if arch.is_gpu else INTERPRETED))
