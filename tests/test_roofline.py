"""The ceilings against the arithmetic done by hand."""

from __future__ import annotations

import math

import pytest

from halfbyte.formats.matrices import Formats
from halfbyte.model.config import NAMED
from halfbyte.plan.phase import OPERATIONS
from halfbyte.roofline import (
    GPUS,
    decode_ceiling,
    decode_traffic,
    doubling_depth,
    flops_per_token,
    prefill_ceiling,
    step_work,
    unique_experts,
)

CHECKPOINT = {"qkv": "bf16", "o": "bf16", "lm_head": "bf16", "gate_up": "mxfp4", "down": "mxfp4"}
MXFP4 = dict.fromkeys(CHECKPOINT, "mxfp4")


@pytest.mark.parametrize(
    ("shape", "formats", "context", "gigabytes"),
    [
        ("120b", CHECKPOINT, 0, 5.00),
        ("120b", CHECKPOINT, 2048, 5.08),
        ("120b", CHECKPOINT, 32768, 6.22),
        ("120b", MXFP4, 0, 2.75),
        ("120b", MXFP4, 2048, 2.83),
        ("20b", CHECKPOINT, 0, 3.71),
        ("20b", MXFP4, 2048, 1.98),
    ],
)
def test_bytes_of_a_token(shape: str, formats: dict[str, str], context: int, gigabytes: float) -> None:
    assert decode_traffic(NAMED[shape], formats, context).total / 1e9 == pytest.approx(gigabytes, abs=0.015)


def test_formats_that_differ_from_layer_to_layer_count_by_layer() -> None:
    mixed = Formats(MXFP4, {"qkv": ["mxfp4", "q8"] * 18})
    more = decode_traffic(NAMED["120b"], mixed, 2048).total - decode_traffic(NAMED["120b"], MXFP4, 2048).total
    assert more == pytest.approx(18 * 5120 * 2880 * (8.5 - 4.25) / 8)


def test_parts_by_hand() -> None:
    c, t = NAMED["120b"], decode_traffic(NAMED["120b"], CHECKPOINT, 2048)
    assert t.experts == 36 * 4 * 3 * 2880 * 2880 * 4.25 / 8
    assert t.lm_head == 201088 * 2880 * 2
    assert t.attention == 36 * (5120 * 2880 + 2880 * 4096) * 2
    assert t.kv == 18 * (128 + 2048) * 2 * 8 * 64 * 2
    assert c.q_dim == 4096


def test_unique_experts_under_uniform_routing() -> None:
    found = [unique_experts(NAMED["120b"], n) for n in (1, 4, 8, 16)]
    assert found == pytest.approx([4, 15.3, 28.7, 51.0], abs=0.1)


def test_ceilings() -> None:
    h200, c = GPUS["h200"], NAMED["120b"]
    assert decode_ceiling(h200, c, MXFP4, 2048).tokens_per_second == pytest.approx(1590, rel=0.01)
    assert decode_ceiling(h200, c, CHECKPOINT, 2048).tokens_per_second == pytest.approx(886, rel=0.01)
    assert decode_ceiling(h200, c, MXFP4, 128, 32).tokens_per_second == pytest.approx(3630, rel=0.02)
    assert decode_ceiling(GPUS["gb10"], c, MXFP4, 0).tokens_per_second == pytest.approx(84, rel=0.01)
    assert flops_per_token(c, 2048) / 1e9 == pytest.approx(9.10 + 0.34, rel=0.01)
    assert prefill_ceiling(h200, c, MXFP4, 2048).bound == "compute"
    assert prefill_ceiling(h200, c, MXFP4, 64).bound == "memory"


def test_work_of_a_step_adds_up_to_the_traffic() -> None:
    """Operation by operation, decode reads what the ceiling counts, but for vectors and activations."""
    for batch in (1, 8):
        c = NAMED["120b"]
        work = step_work(c, CHECKPOINT, batch, 2048)
        traffic = decode_traffic(c, CHECKPOINT, 2048, batch)
        assert sum(w.bytes for w in work.values()) == pytest.approx(traffic.total, rel=0.01)
        assert work["moe"].bytes == pytest.approx(traffic.experts, rel=0.01)
        assert work["attention"].bytes == pytest.approx(traffic.kv, rel=0.05)
    assert tuple(work) == OPERATIONS


def test_work_of_a_prompt_adds_up_to_its_operations() -> None:
    c = NAMED["120b"]
    work = step_work(c, MXFP4, 1, 2048, new=2048, logits=0)
    assert sum(w.flops for w in work.values()) == pytest.approx(flops_per_token(c, 2048) * 2048, rel=1e-6)
    assert work["moe"].bound(GPUS["h200"]) == "compute"
    # with a prefix in the cache every new row sees it, in full layers only
    deep = step_work(c, MXFP4, 1, 6144, new=2048, logits=0)
    extra = deep["attention"].flops - work["attention"].flops
    window = 128 * 127 / 2  # rows at the start of a prompt see less than a window
    assert extra == pytest.approx(18 * 4.0 * 4096 * (4096 * 2048 + window), rel=1e-6)


def test_a_row_deep_in_a_prompt_takes_twice_the_operations() -> None:
    config = NAMED["120b"]
    depth = doubling_depth(config)
    full = sum(4.0 * config.q_dim for kind in config.layer_kinds if kind == "full")
    assert depth * full == flops_per_token(config, 1)
    assert 25_000 < depth < 40_000
    assert doubling_depth(config.with_(layer_kinds=("sliding",) * config.layers)) == math.inf
