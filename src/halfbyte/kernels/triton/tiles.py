"""Which tile a matrix product takes: by architecture, formats and rows, or as `--tile` says.

BM is rows of activations, BN rows of weights, BK elements of K a step. Every tile that `tile_for` can return is
compiled by the proof tests, which hold it to no spills and to the shared memory of each architecture.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.triton.call import triton_version
from halfbyte.plan.phase import Arch, Spec

NARROW = 8192  # columns up to which few rows leave multiprocessors idle unless tiles are narrow
E4M3 = ("fp8", "mxfp8")
MMA_SYNC = ("sm8x", "sm12x")  # families whose products are a warp's, within 99 KB of shared memory
# The format activations have inside a kernel, by gate.
OPERAND = {"bf16": "bf16", "int8": "int8", "fp8": "e4m3", "mxfp8": "e4m3", "mxfp4": "e2m1"}


@dataclass(frozen=True)
class TritonTile:
    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False

    @property
    def options(self) -> dict[str, int]:
        """Few rows: left to itself ptxas aims at 80 registers there and spills a few to get them."""
        return {"maxnreg": 128} if self.bm == 16 and self.bn <= 64 else {}


def rows_step(rows: int) -> int:
    """BM for this many rows of one matrix: padding costs less than reading the weights again."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 96 else 128


def tile_for(arch: Arch, rows: int, columns: int, wf: str, xf: str, gate: str = "auto") -> TritonTile:
    """`wf`: dense, q8, mxfp4 or split; `xf`: bf16, int8, e4m3, e2m1; `rows`: expected of a matrix of `columns`.

    Measured on an H200 (bench/results/triton-gpu-20261115-2.json): long K steps for few rows, where every step waits
    for memory; 64 rows rather than 128 for many, where widening the weights costs registers."""
    if gate != "auto":
        bm, bn = (int(n) for n in gate.split("x"))
    else:
        bm = min(rows_step(rows), 64 if "wgmma" in arch.features and wf == "mxfp4" and xf == "bf16" else 128)
        bn = 128 if bm >= 64 else 32 if bm == 16 and columns <= NARROW else 64
    small = arch.family in MMA_SYNC
    warps = 8 if bm * bn >= (64 if small else 128) * 128 else 4
    if wf == "q8" or xf == "int8":
        return TritonTile(
            bm, min(bn, 64), 64, 8 if bm == 128 else 4, 3
        )  # a second accumulator, per group, needs the room
    swap = "tcgen05" in arch.features and bm < 128
    if swap:
        bn = 128
    elif small and wf == "mxfp4" and xf == "bf16" and bm <= 32:
        # Widened weights then go straight into registers: a fifth of the instructions. Before 3.9 they spill there.
        swap = triton_version() >= (3, 9)
    bk = 64 if bm >= 64 and xf == "bf16" else 128
    if wf == "dense" and bm > 16:
        bk = 64
    return TritonTile(bm, bn, bk, warps, 4 if bm <= 32 else 3, swap)


def refuse_gpu(arch: Arch) -> str | None:
    if not arch.is_gpu:
        return "needs an NVIDIA GPU"
    if arch.shared_memory < 101_376:
        return f"needs 101376 bytes of shared memory a block, {arch.name} has {arch.shared_memory}"
    return None


def refuse_product(spec: Spec, arch: Arch, roles: tuple[str, ...], split: bool) -> str | None:
    """Why no Triton product can multiply these weights with the activations of this gate."""
    reason = refuse_gpu(arch)
    if reason is not None:
        return reason
    native12 = "block_scaled_mma_sync" in arch.features
    for role in roles:
        kind = spec.formats[role]
        if kind not in ("bf16", "q8", "mxfp4"):
            return f"{role} is {kind}, and this kernel multiplies bf16, q8 and mxfp4"
        if split and kind != "mxfp4":
            return f"{role} is {kind}, and the layout w4a8_split holds mxfp4"
        if kind == "bf16":
            continue
        if kind == "q8" and spec.activation not in ("bf16", "int8"):
            return f"{role} is q8, which takes bf16 or int8 activations here, not {spec.activation}"
        if spec.activation not in OPERAND:
            return f"has no {spec.activation} activations"
        if arch.family == "sm8x" and spec.activation not in ("bf16", "int8"):
            return f"multiplies bf16 and int8 on {arch.name}, and {spec.activation} would only round what is multiplied"
        if split and spec.activation not in E4M3:
            return f"widens to E4M3 for fp8 and mxfp8 activations, not for {spec.activation}"
        if split and not native12:
            return f"is for SM12x; {arch.name} multiplies E4M3 with E2M1 from the plain layout"
        if kind == "mxfp4" and not split and native12 and spec.activation in E4M3:
            return f"{arch.name} has no E4M3 x E2M1 block-scaled MMA in Triton; the layout w4a8_split is the way there"
    for role in roles:
        if spec.formats[role] == "q8" and (spec.hidden % 64 or spec.heads * spec.head_dim % 64):
            return "reads q8 scales in pairs: hidden and q must be whole groups of 64"
    if "lm_head" in roles and spec.formats["lm_head"] != "bf16" and spec.vocab * spec.hidden // 32 % 4:
        return f"reads scales as words, and {spec.vocab} rows of them are no whole number"
    for width, dimension in (
        (spec.hidden, "hidden"),
        (spec.intermediate, "intermediate"),
        (spec.heads * spec.head_dim, "q"),
    ):
        if width % 32:
            return f"needs {dimension} to be a multiple of 32, not {width}"
    return None


def needed_instruction(arch: Arch, wf: str, xf: str, tile: TritonTile) -> tuple[str, str]:
    """(pattern the machine code must show, pattern it must not) for a product."""
    if xf == "int8":  # on SM100 newer Tritons keep whole numbers in tensor memory from 64 rows on
        patterns = {"sm90": r"\bIGMMA" if tile.bm >= 64 else r"\bIMMA", "sm10x": r"\b(UTC)?IMMA"}
        return patterns.get(arch.family, r"\bIMMA"), r"\b(UTC)?HG?MMA"
    if arch.family == "sm8x":
        return r"\bHMMA", ""
    if arch.family == "sm12x":
        if wf == "split":
            return r"\bQMMA\.SF\.16832", r"\bHMMA"
        if wf == "mxfp4" and xf == "e2m1":
            return r"\bOMMA\.SF\.16864", r"\bHMMA"
        return r"\bHMMA", r"\b[OQ]MMA"
    if arch.family == "sm10x":
        if wf in ("mxfp4", "split"):
            return {"e2m1": r"\bUTCOMMA", "e4m3": r"\bUTCQMMA", "bf16": r"\bUTCHMMA"}[xf], r"\bHMMA"
        return (r"\bUTCHMMA", r"\bHMMA") if wf == "dense" else (r"\b(UTCHMMA|HMMA)", "")
    # Triton itself turns a block-scaled product round where the weights have the 64 rows that wgmma wants.
    wide = tile.bm >= 64 or (wf == "mxfp4" and xf == "bf16" and tile.bn >= 64)
    return (r"\bHGMMA", r"\bHMMA") if wide else (r"\bHMMA", "")
