"""The Triton phases, for the catalogue."""

from __future__ import annotations

from halfbyte.kernels.triton.attention import DecodeAttention, PrefillAttention
from halfbyte.kernels.triton.embed import Embed
from halfbyte.kernels.triton.linear import LmHead, LmHeadSplit, OutProjection, OutProjectionSplit, Qkv, QkvSplit
from halfbyte.kernels.triton.moe import Moe, MoeSplit
from halfbyte.kernels.triton.norm import AttnNorm, FinalNorm
from halfbyte.kernels.triton.rope import RopeAndWrite
from halfbyte.kernels.triton.router import NormAndRouter
from halfbyte.plan.phase import Phase

PHASES: tuple[Phase, ...] = (
    Embed(), AttnNorm(), Qkv(), QkvSplit(), RopeAndWrite(), DecodeAttention(), PrefillAttention(), OutProjection(),
    OutProjectionSplit(), NormAndRouter(), Moe(), MoeSplit(), FinalNorm(), LmHead(), LmHeadSplit(),
)  # fmt: skip
