"""Counts the keys and values of an fp8 cache that lie at the end of E4M3's range, as pages are filled.

Kernels saturate at 448 and do not report it. What they wrote does: 448 is what 432 and everything above become. A page
is looked at once, when a sequence has filled it, behind the step that did; the last page of a sequence, which it fills
in part, and pages that come back from a store are not. No kernel has a part in it, and nothing waits for a GPU: there
the figures lag behind. Says so once where more than `MANY` of the values are there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from halfbyte.ops.attention import STORE_DTYPES

LARGEST = 0x7E  # the code of 448 without its sign; 0x7f is NaN
AT_ONCE = 16  # pages, which are copied: some 20 MB of gpt-oss-120b
MANY, FEWEST = 1e-3, 1 << 20  # share of values, of so many at least
log = logging.getLogger("halfbyte")


class SaturationCount:
    """`values` that were looked at, and those of them that are `saturated`."""

    def __init__(self, pool: Tensor) -> None:
        assert pool.dtype == STORE_DTYPES["fp8"], "only fp8 saturates"
        self.pool, self._codes = pool, pool.view(torch.uint8)
        self._count = torch.zeros(1, dtype=torch.int64, device=pool.device)
        on_gpu = pool.device.type == "cuda"
        self._copy = torch.zeros(1, dtype=torch.int64, pin_memory=True) if on_gpu else self._count
        self._warned = False
        self.values = 0

    def add(self, pages: Sequence[int]) -> None:
        """Count these pages, which launched steps have filled."""
        for start in range(0, len(pages), AT_ONCE):
            some = torch.tensor(pages[start : start + AT_ONCE]).to(self.pool.device, non_blocking=True)
            codes = self._codes[some]
            self._count += (codes.bitwise_and_(0x7F) == LARGEST).sum()
            self.values += codes.numel()
        if self._copy is not self._count:
            self._copy.copy_(self._count, non_blocking=True)

    @property
    def saturated(self) -> int:
        count = int(self._copy)
        if not self._warned and self.values >= FEWEST and count > MANY * self.values:
            self._warned = True
            log.warning(
                "%.1f %% of the keys and values in the fp8 cache are at its largest number, 448, and may have been "
                "larger; --kv-dtype bf16 holds them.",
                100 * count / self.values,
            )
        return count
