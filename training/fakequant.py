"""MXFP4 as training sees it: weights rounded to what the checkpoint can hold, gradients passed straight through.

The scale of a group of 32 is the smallest power of two under which no value rounds past 6, so nothing is clipped. Since
the largest element is then always 4 or 6, quantising the rounded weights again with the OCP rule gives the same bytes:
that is how the export packs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32


def rounded(w: Tensor) -> Tensor:
    """`w` with its last dimension rounded to MXFP4, in float32."""
    g = w.float().unflatten(-1, (-1, GROUP))
    largest = g.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    # 2^(floor(log2 m) - 2) leaves the largest in [4, 8); past 7 it would be clipped, so take the next power.
    scale = (largest.view(torch.int32) & 0x7F800000).view(torch.float32) / 4
    scale = torch.where(largest > 7 * scale, 2 * scale, scale)
    x = (g / scale).abs()
    step = torch.where(x < 2, 0.5, torch.where(x < 4, 1.0, 2.0))
    on_grid = ((x / step).round() * step).clamp(max=6.0)
    return (on_grid * scale * g.sign()).flatten(-2)


def straight(w: Tensor, on: Tensor | bool = True) -> Tensor:
    """`w` rounded where `on` is 1, itself where 0; a tensor, so that switching does not recompile."""
    off = (rounded(w) - w).detach()
    return w + off if on is True else w + off * on
