"""YaRN rotary embedding: half-split pairs (i, i + D/2), frequencies blended between interpolation and extrapolation.

cos and sin carry the attention temperature 0.1 * ln(factor) + 1, as in the YaRN paper, or the model's own value
(`attention_factor`). gpt-oss does not truncate the correction range to whole dimensions.

Frequencies are computed in float32 in the order of OpenAI's code, which transformers follows too: at 100,000 tokens
one unit in the last place of a frequency is 1e-3 radians, so exact values would be further from the trained model.
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
    frequencies = _powers(theta, torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if factor == 1.0:
        return 1.0 / frequencies, attention_factor

    def dim_of(rotations: float) -> float:
        return head_dim * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolated = 1 - ramp
    return 1.0 / (factor * frequencies) * (1 - extrapolated) + 1.0 / frequencies * extrapolated, attention_factor


def _powers(base: float, exponents: Tensor) -> Tensor:
    """base ** exponents by the vector code of torch alone: its scalar tail rounds some powers differently."""
    count = exponents.numel()
    padded: Tensor = base ** torch.nn.functional.pad(exponents, (0, -count % 64))
    return padded[:count].clone()


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
