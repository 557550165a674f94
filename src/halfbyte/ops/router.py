"""Router: linear with bias, the top k logits (ties to the lower expert), softmax over those k."""

from __future__ import annotations

from torch import Tensor

from halfbyte.ops.products import FixedPoint, exp, matmul


def route(h: Tensor, weight: Tensor | FixedPoint, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(ids int64 [R, top_k] in order of falling weight, weights float32 [R, top_k])."""
    logits = matmul(h, weight) + bias.float()
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    values, ids = values[:, :top_k], ids[:, :top_k]
    e = exp(values - values[:, :1])
    total = e[:, 0]
    for i in range(1, top_k):
        total = total + e[:, i]
    return ids, e / total[:, None]
