"""The expert MLP: gate_up, clamped swiglu on interleaved rows, down, weighted sum in the router's order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halfbyte.ops.products import sigmoid

Project = Callable[[int, Tensor], Tensor]  # (expert, rows [n, K]) -> [n, N] with bias


def swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """[n, 2I] with gate and up interleaved -> [n, I]: (up + 1) * gate * sigmoid(alpha * gate), both clamped."""
    gate = gate_up[..., 0::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1.0) * gate * sigmoid(alpha * gate)


def moe(h: Tensor, ids: Tensor, weights: Tensor, gate_up: Project, down: Project, limit: float, alpha: float) -> Tensor:
    """sum over the chosen experts of weight * down(swiglu(gate_up(h))), as float32 [R, hidden]."""
    rows, top_k = ids.shape
    parts: Tensor | None = None
    for expert in torch.unique(ids).tolist():
        row, slot = (ids == expert).nonzero(as_tuple=True)
        y = down(expert, swiglu(gate_up(expert, h[row]), limit, alpha))
        if parts is None:
            parts = y.new_zeros((rows, top_k, y.shape[-1]))
        parts[row, slot] = y * weights[row, slot, None]
    if parts is None:
        return h.float().new_zeros(h.shape)
    total = parts[:, 0]
    for i in range(1, top_k):
        total = total + parts[:, i]
    return total
