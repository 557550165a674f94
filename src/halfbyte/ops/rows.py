"""Fixed row blocks: how the reference is independent of batch composition.

A matrix product's rounding depends on the shape it is called with, because the library picks another kernel for
another shape. So every product here has the same number of rows: the input is padded to a multiple of ROWS and
multiplied block by block. Within one shape a row's result does not depend on its place or on its neighbours (tested).
Exponentials go through float64, because vector units and their scalar tails may differ in the last float32 bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 32


def matmul_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K] @ weight[N, K].T in float32, in blocks of ROWS rows."""
    rows = x.shape[0]
    if rows == 0:
        return x.new_zeros((0, weight.shape[0]), dtype=torch.float32)
    padded = F.pad(x.float(), (0, 0, 0, -rows % ROWS)).contiguous()
    weight = weight.float()
    out = torch.empty((padded.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    for start in range(0, padded.shape[0], ROWS):
        torch.mm(padded[start : start + ROWS], weight.t(), out=out[start : start + ROWS])
    return out[:rows]


def sum_rows(x: Tensor) -> Tensor:
    """Sum over the last dimension of [R, K], in blocks of ROWS rows, accumulated in float64."""
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % ROWS))
    return (
        torch.cat([b.double().sum(-1) for b in torch.split(padded, ROWS)])[:rows] if rows else x.new_zeros(0).double()
    )


def exp(x: Tensor) -> Tensor:
    return torch.exp(x.double()).float()


def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x.double()).float()
