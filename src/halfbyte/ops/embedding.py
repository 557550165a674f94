"""Token embedding: a row of the table."""

from __future__ import annotations

from torch import Tensor


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    return table[tokens.long()].float()
