"""Another library's products: sums in an order that depends on the shape, and on whether a row is even or odd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

_matmul = torch.matmul


def _order(size: int, *seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(hash((size, *seed)) % 2**31))


def matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    if a.dim() < 2 or b.dim() < 2 or not a.is_floating_point() or a.device.type != "cpu":
        return _matmul(a, b) if out is None else _matmul(a, b, out=out)
    even, odd = (_order(a.shape[-1], *a.shape[-2:], b.shape[-1], i) for i in range(2))
    result = _matmul(a[..., even], b[..., even, :])
    result[..., 1::2, :] = _matmul(a[..., 1::2, odd], b[..., odd, :])
    return result if out is None else out.copy_(result)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = matmul(x if x.dim() > 1 else x[None], weight.transpose(-1, -2)).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def shuffle(monkeypatch: pytest.MonkeyPatch) -> None:
    targets: dict[Any, tuple[str, ...]] = {
        torch: ("mm", "matmul", "bmm"),
        Tensor: ("mm", "matmul", "bmm", "__matmul__"),
    }
    for owner, names in targets.items():
        for name in names:
            monkeypatch.setattr(owner, name, matmul)
    monkeypatch.setattr(F, "linear", linear)
