"""CudaPhase: the interface that a phase in CUDA C++ adds to `Phase`.

`kernels/prove.py` compiles its builds, the record of a run is compared with them, and the bound launch runs them.
`families` lists where it runs; each phase calls `refuse_family` first.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable

from halfbyte.architectures import Family
from halfbyte.kernels.launch import Build, compile_program, declared_kernels
from halfbyte.plan.launches import Part
from halfbyte.plan.phase import Arch, Phase, Spec
from halfbyte.plan.record import Declared

# What machine code shows of a build.
TENSOR_COPY = r"\bUTMALDG"  # a copy through a map of the weights
BULK_COPY = r"\bUBLKCP"  # a copy of bytes that does not pass through registers
UNIT_COPY = r"\bLDGSTS\.E\.(LTC128B\.)?BYPASS\.(LTC128B\.)?128"  # sixteen bytes of every lane, past L1 and registers
MMA_SYNC = r"\bHMMA\.16816"  # bf16 or f16 products of a warp
MXFP8_SYNC, MXFP4_SYNC = r"\bQMMA\.SF\.16832\.F32\.E2M1\.E4M3", r"\bOMMA\.SF\.16864"  # block-scaled ones
WGMMA, WGMMA_FP8 = r"\bHGMMA", r"\bQGMMA"  # products of a warpgroup
NEWER_PRODUCTS = (MXFP8_SYNC, MXFP4_SYNC, WGMMA, WGMMA_FP8)  # from SM90 on


def promises(build: Build, arch: Arch) -> tuple[tuple[str, ...], str]:
    """(patterns that the machine code of a build must show on this architecture, one that it must not show). Where
    there is no copy engine, threads copy sixteen bytes each instead."""
    if "bulk_copies" in arch.features:
        return build.need, build.ban
    need = (UNIT_COPY if pattern in (BULK_COPY, TENSOR_COPY) else pattern for pattern in build.need)
    return tuple(dict.fromkeys(need)), "|".join(filter(None, (build.ban, BULK_COPY, TENSOR_COPY)))


# What a kernel of a fused layer is for.
QKV, QKV_AND_ROPE = Part("linear", ("qkv",)), Part("linear", ("qkv", "rope", "kv_write"))
OUT, OUT_AND_ROUTER = Part("linear", ("o",)), Part("linear", ("o", "router"))
ROUTER, CHOICE = Part("router", ("mlp_norm", "router")), Part("router", ("mlp_norm",))
ROPE, ATTENTION = Part("attention", ("rope", "kv_write")), Part("attention", ("attention",))
ROPE_AND_ATTENTION = Part("attention", ("rope", "kv_write", "attention"))
EXPERTS = Part("moe", ("moe",))


class CudaPhase(Phase):
    families: tuple[Family, ...] = ("sm8x", "sm90", "sm12x")  # of architectures that it is written and proved for
    instruction = ""  # that decides them, for the refusal
    row_invariant = True

    def refuse_family(self, arch: Arch) -> str | None:
        if arch.family in self.families:
            return None
        reason = f" ({self.instruction})" if self.instruction else ""
        *most, last = self.families
        names = f"{', '.join(most)} and {last}" if most else last
        return f"is written for {names}{reason}, not for {arch.name}"

    @abstractmethod
    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        """Every CUDA C++ kernel that the phase can launch on `arch` for `spec`."""

    def compilations(self, spec: Spec, arch: Arch) -> Iterable[Callable[[], object]]:
        target = arch.target
        return [functools.partial(compile_program, build.program, target) for build in self.builds(spec, arch)]

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return declared_kernels((build.program for build in self.builds(spec, arch)), arch)
