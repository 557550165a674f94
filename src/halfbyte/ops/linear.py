"""A projection: activations at their quantisation point, times a dense or block-scaled matrix, plus bias.

Activation formats are *quantisation points*: the reference rounds the input exactly as a kernel of that gate does and
multiplies the rounded values in float32. They apply to quantised matrices only; a dense matrix takes its input as is
(or rounded to bf16 where the residual stream is bf16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import FormatError
from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.ops.products import matmul

Matrix = Tensor | MXTensor

ACTIVATIONS = ("f32", "bf16", "int8", "fp8", "mxfp8", "mxfp4")


def dense(w: Matrix | DenseTiles) -> Tensor:
    """The matrix as float32, whatever its format and layout."""
    if isinstance(w, MXTensor):
        return formats.dequantize(w, torch.float32)
    return (w.plain() if isinstance(w, DenseTiles) else w).float()


def round_activation(x: Tensor, activation: str) -> Tensor:
    """The values a kernel of this gate multiplies with, as float32."""
    if activation == "f32":
        return x.float()
    if activation == "bf16":
        return x.to(torch.bfloat16).float()
    if activation == "int8":  # group 32, symmetric, scale amax / 127 in float32, round to nearest even
        rows, k = x.shape
        count = -(-k // 32)  # said, because a step may have no rows at all
        groups = torch.nn.functional.pad(x.float(), (0, -k % 32)).view(rows, count, 32)
        scale = groups.abs().amax(-1, keepdim=True) / 127.0
        codes = torch.where(scale > 0, groups / scale, 0.0).round().clamp(-127, 127)
        return (codes * scale).view(rows, 32 * count)[:, :k]
    if activation == "fp8":  # one float32 scale per row, amax / 448
        scale = x.float().abs().amax(-1, keepdim=True) / 448.0
        safe = torch.where(scale > 0, scale, 1.0)
        return (x.float() / safe).to(torch.float8_e4m3fn).float() * safe
    if activation in ("mxfp8", "mxfp4"):
        return formats.dequantize(formats.quantize(x.float(), activation), torch.float32)
    raise FormatError(f"activation format {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}.")


def linear(x: Tensor, w: Matrix, bias: Tensor | None = None, *, activation: str = "f32") -> Tensor:
    """[R, K] x [N, K] -> float32 [R, N]."""
    if isinstance(w, MXTensor):
        x = round_activation(x, activation)
    y = matmul(x, dense(w))
    return y if bias is None else y + bias.float()
