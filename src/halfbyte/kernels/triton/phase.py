"""TritonPhase: what a phase in Triton says besides what every phase says. It refuses nothing itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from halfbyte.kernels.triton.call import Call, declared_calls
from halfbyte.plan.phase import ARCHES, Arch, Phase, Spec
from halfbyte.plan.record import Declared


class TritonPhase(Phase):
    @abstractmethod
    def proofs(self, spec: Spec, arch: Arch) -> list[Call]:
        """Every kernel that it launches there for `spec`, in the shapes that a proof compiles."""

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return declared_calls(self.proofs(spec, arch if arch.is_gpu else ARCHES["sm120"]))  # the interpreter's
