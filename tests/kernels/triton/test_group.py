"""Grouping by expert: a stable counting sort and a tile list that covers every slot exactly once."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels.triton import moe
from halfbyte.kernels.triton.moe import group, tiles_bound

CASES = {
    "one token": lambda g: torch.randperm(128, generator=g)[:4].view(1, 4),
    "spread": lambda g: torch.stack([torch.randperm(32, generator=g)[:4] for _ in range(70)]),
    "all on one expert": lambda g: torch.full((65, 1), 3),
    "two experts, one slot and many": lambda g: torch.tensor([[7]] + [[0]] * 64),
    "last expert": lambda g: torch.full((3, 4), 127),
}


@pytest.mark.parametrize("bm", [16, 128])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("many", [False, True])
def test_group(name: str, bm: int, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if many:  # the three-launch path, on few slots
        monkeypatch.setattr(moe, "ONE_PROGRAM", 0)
        monkeypatch.setattr(moe, "CHUNKS", 3)
    ids = CASES[name](torch.Generator().manual_seed(0)).int()
    experts = 128
    order, expert, begin, count = group(ids, experts, bm)
    flat = ids.flatten()
    assert order.long().equal(torch.sort(flat, stable=True).indices)
    covered = []
    for e, b, n in zip(expert.tolist(), begin.tolist(), count.tolist()):
        if e < 0:
            assert n == 0
            continue
        assert 1 <= n <= bm
        assert all(int(flat[int(s)]) == e for s in order[b : b + n])
        covered += list(range(b, b + n))
    assert covered == list(range(flat.numel()))


@pytest.mark.parametrize("slots", [1, 4, 100, 4096])
@pytest.mark.parametrize("bm", [16, 64, 128])
def test_tiles_bound_holds_for_the_worst_routing(slots: int, bm: int) -> None:
    """Worst: every expert but one holds a single slot over whole tiles."""
    experts = 32
    used = min(experts, slots)
    counts = [1] * used
    counts[0] += slots - used
    assert sum(-(-c // bm) for c in counts) <= tiles_bound(slots, experts, bm)
    even = [slots // used + (i < slots % used) for i in range(used)]
    assert sum(-(-c // bm) for c in even) <= tiles_bound(slots, experts, bm)
