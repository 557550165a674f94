"""A made-up trace whose times are known comes out as those times."""

from __future__ import annotations

import pytest
import torch

from halfbyte.lab.measure import decode_trace

GHZ = 1.5
KINDS = ("sliding", "full") * 3
# microseconds into a layer at which each phase's marks stand, the same in every block but for a delay
SLIDING = {"qkv": (0, 1, 2, 3), "attention": (3, 4, 5, None), "o": (5, 6, 7, 8), "gate_up": (8, 10, 18, 19),
           "down": (19, 20, 23, 24)}  # fmt: skip
FULL = SLIDING | {"attention": (3, 4, 5, 7)}


def make(blocks: int, delay: float, drift: float = 0.0) -> torch.Tensor:
    """Layers of 24 microseconds; block b is late by b * delay; every block has a clock that began elsewhere, and runs
    faster by b * drift."""
    layers = len(KINDS)
    out = torch.zeros((blocks, layers + 1, 32), dtype=torch.int64)
    for b in range(blocks):
        for layer in range(layers + 1):
            begin = 1000 + 24 * layer + b * delay

            def clock(us: float, b: int = b) -> int:
                return round(us * 1000 * GHZ * (1 + b * drift)) + 7_000_000 * (b + 1)

            if layer == layers:
                out[b, layer, 20:23] = torch.tensor([clock(begin + m) for m in (0, 2, 70)])
                continue
            for i, phase in enumerate(decode_trace.PHASES[:5]):
                for j, at in enumerate((SLIDING if KINDS[layer] == "sliding" else FULL)[phase]):
                    if at is not None:
                        out[b, layer, 4 * i + j] = clock(begin + at)
            out[b, layer, 31] = round(begin * 1000)
    return out


def test_a_known_trace_comes_out() -> None:
    found = decode_trace.digest(make(4, 0.0), 24.0 * 6 + 70 + 10)
    assert found["clock_ghz"] == pytest.approx(GHZ, rel=1e-6)
    assert found["layers"]["sliding"]["layer"] == pytest.approx(24, abs=0.02)
    assert found["layers"]["full"]["attention done"] == pytest.approx([7, 7, 7], abs=0.02)
    assert found["head"]["sums"] == pytest.approx(70, abs=0.02)
    cut = decode_trace.shares(found, KINDS)
    assert cut["qkv + rope/KV"] == pytest.approx(6 * 3, abs=0.2)
    assert cut["attention"] == pytest.approx(3 * 2 + 3 * 4, abs=0.2)
    assert cut["o"] == pytest.approx(3 * 3 + 3 * 1, abs=0.2)
    assert cut["router"] == pytest.approx(6 * 2, abs=0.2)
    assert cut["MoE"] == pytest.approx(6 * 14, abs=0.2)
    assert cut["lm_head"] == pytest.approx(70, abs=0.1)
    assert sum(cut.values()) == pytest.approx(found["us"])


def test_the_last_block_counts() -> None:
    """Blocks that run late move first and last apart, not the length of a layer."""
    found = decode_trace.digest(make(4, 0.5), 300.0)
    first, mean, last = found["layers"]["full"]["o done"]
    assert last - first == pytest.approx(1.5, abs=0.02)
    assert last - mean == pytest.approx(0.75, abs=0.02)
    assert found["layers"]["full"]["layer"] == pytest.approx(24, abs=0.02)


def test_blocks_with_clocks_of_their_own_do_not_drift_apart() -> None:
    found = decode_trace.digest(make(4, 0.5, drift=0.01), 300.0)
    first, mean, last = found["layers"]["full"]["o done"]
    assert (last - first, last - mean) == pytest.approx((1.5, 0.75), abs=0.02)
    assert found["layers"]["full"]["layer"] == pytest.approx(24, abs=0.02)
    assert found["clocks_ghz"] == pytest.approx([GHZ, GHZ * 1.03], rel=1e-5)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(AssertionError, match="empty"):
        decode_trace.digest(torch.zeros((2, 7, 32), dtype=torch.int64), 1.0)


def test_lines_show_every_mark() -> None:
    text = "\n".join(decode_trace.lines(decode_trace.digest(make(2, 0.1), 200.0)))
    assert all(f"{p} {m}" in text for p in decode_trace.PHASES[:5] for m in decode_trace.MARKS)
