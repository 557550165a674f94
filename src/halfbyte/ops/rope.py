"""YaRN rotary embedding: half-split pairs (i, i + D/2), frequencies blended between interpolation and extrapolation.

cos and sin carry the attention temperature 0.1 * ln(factor) + 1, as in the YaRN paper, or what the model says instead
(`attention_factor`). gpt-oss does not truncate the correction range to whole dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def yarn_frequencies(
    head_dim: int,
    theta: float,
    factor: float,
    original_context: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
    attention_factor: float | None = None,
) -> tuple[Tensor, float]:
    """(inverse frequencies [D/2] in float32, temperature)."""
    half = head_dim // 2
    freq = theta ** (torch.arange(half, dtype=torch.float64) * 2 / head_dim)
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if factor == 1.0:
        return (1.0 / freq).float(), attention_factor

    def dim_of(rotations: float) -> float:
        return head_dim * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(half, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    inverse = ramp / (factor * freq) + (1 - ramp) / freq
    return inverse.float(), attention_factor


def rope_table(inverse: Tensor, temperature: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [R, D/2], in float32."""
    angle = positions.float()[:, None] * inverse.to(positions.device)[None, :]
    angle = angle.double()  # the product is float32 as everywhere; the functions are not sensitive to vector tails
    return (angle.cos() * temperature).float(), (angle.sin() * temperature).float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [R, heads, D]."""
    a, b = x.float().chunk(2, dim=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1)
