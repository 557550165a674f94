"""Sizes of pages and pools, and the refusal that carries its numbers."""

from __future__ import annotations

import pytest
import torch

from halfbyte.errors import MemoryError_
from halfbyte.kv.store import GIB, Memory, default_reserve, memory, pages_that_fit

PAGE_120B = 18 * 2 * 8 * 64 * 64 * 2  # 18 layers of a kind, keys and values, 8 heads, 64 tokens of 64 bf16


def test_reserve_is_never_touched() -> None:
    found = Memory(free=10 * GIB, total=128 * GIB, source="MemAvailable")
    reserve = default_reserve(torch.device("cpu"), found)
    assert reserve == 8 * GIB
    pages = pages_that_fit(PAGE_120B, found, reserve, least=1)
    assert pages * PAGE_120B <= 2 * GIB < (pages + 1) * PAGE_120B
    assert pages_that_fit(PAGE_120B, found, reserve, least=1, most=5) == 5


def test_refusal_has_the_numbers() -> None:
    with pytest.raises(MemoryError_, match=r"at least 4096 pages of 2\.2 MiB = 9\.00 GiB.*is 10\.00 GiB and 8\.00"):
        pages_that_fit(PAGE_120B, Memory(10 * GIB, 128 * GIB, "MemAvailable"), 8 * GIB, least=4096)


def test_this_machine_has_memory() -> None:
    found = memory(torch.device("cpu"))
    assert 0 < found.free <= found.total
