"""The Triton phases, for the catalogue."""

from __future__ import annotations

from halfbyte.kernels.triton.attention import DecodeAttention, PrefillAttention
from halfbyte.kernels.triton.embed import TritonEmbed
from halfbyte.kernels.triton.linear import (
    TritonHead,
    TritonHeadSplit,
    TritonOut,
    TritonOutSplit,
    TritonQkv,
    TritonQkvSplit,
)
from halfbyte.kernels.triton.moe import TritonMoe, TritonMoeSplit
from halfbyte.kernels.triton.norm import TritonAttnNorm, TritonFinalNorm
from halfbyte.kernels.triton.rope import RopeAndWrite
from halfbyte.kernels.triton.router import NormAndRouter
from halfbyte.plan.phase import Phase

PHASES: tuple[Phase, ...] = (
    TritonEmbed(),
    TritonAttnNorm(),
    TritonQkv(),
    TritonQkvSplit(),
    RopeAndWrite(),
    DecodeAttention(),
    PrefillAttention(),
    TritonOut(),
    TritonOutSplit(),
    NormAndRouter(),
    TritonMoe(),
    TritonMoeSplit(),
    TritonFinalNorm(),
    TritonHead(),
    TritonHeadSplit(),
)
