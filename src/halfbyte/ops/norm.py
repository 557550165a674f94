"""RMS norm: x * weight / sqrt(mean(x^2) + eps), in float32."""

from __future__ import annotations

from torch import Tensor

from halfbyte.ops.products import sum_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    mean = sum_rows(x * x) / x.shape[-1]
    return x * (mean + eps).rsqrt().float()[:, None] * weight.float()
