"""ggml's block types that halfbyte computes with in no form of their own, read as q8 by the `gguf` package's numbers.

Blocks of 32 codes under one float16 scale (Q4_0, Q5_0, IQ4_NL) become q8 with that scale and lose nothing. The others
have a minimum beside the scale, or scales for parts of a block, and are rounded to q8: an error of at most 1/254 of the
largest number among 32, where these types already miss the original weights by more.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from halfbyte import formats
from halfbyte.formats import q8
from halfbyte.formats.tensor import MXTensor

Type = GGMLQuantizationType
ONE_SCALE = (Type.Q4_0, Type.Q5_0, Type.IQ4_NL)
READ_AS_Q8 = (
    *ONE_SCALE, Type.Q4_1, Type.Q5_1, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS, Type.IQ3_S,
    Type.IQ3_XXS, Type.IQ2_S, Type.IQ2_XS, Type.IQ2_XXS,
)  # fmt: skip


def to_q8(raw: Tensor, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> MXTensor:
    """The blocks of a tensor of this shape, uint8 on the CPU, as q8 in the layout "plain"."""
    block, size = GGML_QUANT_SIZES[kind]
    rows = raw.view(-1, shape[-1] // block * size)
    with np.errstate(all="ignore"):  # infinite scales are found by the scan of what comes out
        values = torch.from_numpy(dequantize(rows.numpy(), kind)).view(shape)
    if kind not in ONE_SCALE:
        return formats.quantize(values, "q8")
    scales = raw.view(-1, size)[:, :2].contiguous().view(torch.float16).view(*shape[:-1], -1)
    groups = values.view(*scales.shape, q8.GROUP)
    codes = (groups / scales.float().unsqueeze(-1)).nan_to_num_(0, 0, 0).round_().to(torch.int8)
    return MXTensor(data=codes.view(shape), scales=scales, shape=shape, format="q8")
