"""Sizes of pages and pools, and the refusal that carries its numbers."""

from __future__ import annotations

import pytest
import torch

from halfbyte.errors import MemoryError_
from halfbyte.kv.store import GIB, Memory, PageShape, default_reserve, make_pool, memory, pages_that_fit

SHAPE_120B = PageShape(layers=18, kv_heads=8, page_size=64, head_dim=64)


def test_a_page_of_120b_has_the_bytes_the_arithmetic_says() -> None:
    assert SHAPE_120B.bytes == 18 * 2 * 8 * 64 * 64 * 2
    assert PageShape(18, 8, 64, 64, "fp8").bytes * 2 == SHAPE_120B.bytes


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8"])
def test_pool_has_the_contract_shape_and_no_garbage(dtype: str) -> None:
    pool = make_pool(PageShape(2, 3, 4, 5, dtype), 7, torch.device("cpu"))
    assert pool.shape == (7, 2, 2, 3, 4, 5)
    assert pool.element_size() * pool.numel() == 7 * PageShape(2, 3, 4, 5, dtype).bytes
    assert not pool.float().any()


def test_reserve_is_never_touched() -> None:
    found = Memory(free=10 * GIB, total=128 * GIB, source="MemAvailable")
    reserve = default_reserve(torch.device("cpu"), found)
    assert reserve == 8 * GIB
    pages = pages_that_fit(SHAPE_120B, found, reserve, least=1)
    assert pages * SHAPE_120B.bytes <= 2 * GIB < (pages + 1) * SHAPE_120B.bytes
    assert pages_that_fit(SHAPE_120B, found, reserve, least=1, most=5) == 5


def test_refusal_has_the_numbers() -> None:
    with pytest.raises(MemoryError_, match=r"at least 4096 pages of 2\.2 MiB = 9\.00 GiB.*is 10\.00 GiB and 8\.00"):
        pages_that_fit(SHAPE_120B, Memory(10 * GIB, 128 * GIB, "MemAvailable"), 8 * GIB, least=4096)


def test_this_machine_has_memory() -> None:
    found = memory(torch.device("cpu"))
    assert 0 < found.free <= found.total
