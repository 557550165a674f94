"""Attention over pages against a plain float64 softmax, whatever the pages, chunks, window and sinks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from halfbyte.ops.attention import attend, gather_kv, write_kv

HEADS, KV_HEADS, DIM = 6, 2, 16


def oracle(q: Tensor, k: Tensor, v: Tensor, at: Tensor, sinks: Tensor | None, window: int | None) -> Tensor:
    out = torch.empty(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        p = int(at[t])
        first = max(0, p - window + 1) if window else 0
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = (k[kv, first : p + 1].double() @ q[t, head].double()) / math.sqrt(DIM)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = torch.softmax(scores, 0)[: p + 1 - first]
            out[t, head] = weights @ v[kv, first : p + 1].double()
    return out


@pytest.mark.exact
@pytest.mark.parametrize("sinks", [True, False], ids=["sinks", "no-sinks"])
@pytest.mark.parametrize("window", [None, 5, 64, 128])
@pytest.mark.parametrize("start", [0, 3, 63, 64, 200])
def test_against_plain_softmax(window: int | None, start: int, sinks: bool) -> None:
    g = torch.Generator().manual_seed(start)
    length = start + 70
    k, v = torch.randn(2, KV_HEADS, length, DIM, generator=g) * 2
    q = torch.randn(70, HEADS, DIM, generator=g) * 2
    sink = torch.randn(HEADS, generator=g) * 3 if sinks else None
    at = torch.arange(start, length)
    got = attend(q, k, v, at, sink, window, DIM**-0.5)
    expected = oracle(q, k, v, at, sink, window)
    assert (got - expected).norm() / expected.norm() < 1e-6
    alone = attend(q[41:42], k[:, : start + 42], v[:, : start + 42], at[41:42], sink, window, DIM**-0.5)
    assert torch.equal(alone[0], got[41]), "bitwise: the cache may grow and others may join"


def test_extreme_scores_stay_finite() -> None:
    k = torch.full((KV_HEADS, 100, DIM), 30.0)
    v = torch.ones(KV_HEADS, 100, DIM)
    q = torch.full((1, HEADS, DIM), 30.0)
    at = torch.tensor([99])
    for sink in (torch.full((HEADS,), -1e4), torch.full((HEADS,), 1e4)):
        assert attend(q, k, v, at, sink, None, DIM**-0.5).isfinite().all()
    assert attend(q, k, v, at, torch.full((HEADS,), 1e4), None, DIM**-0.5).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_pages_give_back_what_was_written(dtype: torch.dtype, page_size: int) -> None:
    g = torch.Generator().manual_seed(0)
    blocks = -(-50 // page_size)
    pool = torch.zeros(2 + blocks, 3, 2, KV_HEADS, page_size, DIM).to(dtype)
    table = 1 + torch.randperm(1 + blocks, generator=g)[:blocks].int()
    k, v = torch.randn(2, 50, KV_HEADS, DIM, generator=g)
    for first, last in ((0, 7), (7, 8), (8, 50)):
        rows = slice(first, last)
        at = torch.arange(first, last)
        write_kv(pool, 1, k[rows], v[rows], at, table.expand(last - first, -1))
    got_k, got_v = gather_kv(pool, 1, table, 50)
    assert torch.equal(got_k, k.to(dtype).float().transpose(0, 1))
    assert torch.equal(got_v, v.to(dtype).float().transpose(0, 1))
    untouched = pool.float()[:, [0, 2]]
    assert untouched.abs().max() == 0


def test_fp8_cache_saturates() -> None:
    pool = torch.zeros(2, 1, 2, 1, 4, 2).to(torch.float8_e4m3fn)
    write_kv(pool, 0, torch.full((1, 1, 2), 1e6), torch.full((1, 1, 2), -1e6), torch.tensor([0]), torch.tensor([[1]]))
    k, v = gather_kv(pool, 0, torch.tensor([1]), 1)
    assert k.max() == 448
    assert v.min() == -448
