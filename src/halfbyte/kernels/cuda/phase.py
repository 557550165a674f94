"""CudaPhase: what a phase in CUDA C++ says besides what every phase says.

`kernels/prove.py` compiles its builds, the record of what ran is held against them, and the launch it binds runs the
same ones. It refuses nothing itself.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable

from halfbyte.kernels.launch import Build, compile_program, declared_kernels, target_of
from halfbyte.plan.launches import Part
from halfbyte.plan.phase import Arch, Phase, Spec
from halfbyte.plan.record import Declared

# What machine code shows of a build.
TENSOR_COPY = r"\bUTMALDG"  # a copy through a map of the weights
BULK_COPY = r"\bUBLKCP"  # a copy of bytes that does not pass through registers
MMA_SYNC = r"\bHMMA\.16816"  # bf16 or f16 products of a warp
WGMMA, WGMMA_FP8 = r"\bHGMMA", r"\bQGMMA"  # products of a warpgroup


# What a kernel of a fused layer is for.
QKV, QKV_AND_ROPE = Part("linear", ("qkv",)), Part("linear", ("qkv", "rope", "kv_write"))
OUT, OUT_AND_ROUTER = Part("linear", ("o",)), Part("linear", ("o", "router"))
ROUTER, CHOICE = Part("router", ("mlp_norm", "router")), Part("router", ("mlp_norm",))
ROPE, ATTENTION = Part("attention", ("rope", "kv_write")), Part("attention", ("attention",))
ROPE_AND_ATTENTION = Part("attention", ("rope", "kv_write", "attention"))
EXPERTS = Part("moe", ("moe",))


class CudaPhase(Phase):
    @abstractmethod
    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        """Every kernel in CUDA C++ that it can launch there for `spec`."""

    def compilations(self, spec: Spec, arch: Arch) -> Iterable[Callable[[], object]]:
        target = target_of(arch)
        return [functools.partial(compile_program, build.program, target) for build in self.builds(spec, arch)]

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return declared_kernels((build.program for build in self.builds(spec, arch)), arch)
