"""What is wrong with a step is said before anything is written; what is no number stays visible."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import pytest
import torch

from halfbyte.model.gpt_oss import GptOss
from tests.kernels.cpu.native import Native, make_step, random_weights, reference_model
from tests.kernels.cpu.step_cases import QUANTISED, SMALL, tables


@pytest.fixture(scope="module")
def model() -> GptOss:
    return reference_model(random_weights(SMALL, QUANTISED, 6))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG = {
    "token": ({"tokens": ints(1, 200, 3, 4)}, "row 1 has token 200, but the vocabulary has 200."),
    "negative token": ({"tokens": ints(1, -1, 3, 4)}, "row 1 has token -1, but the vocabulary has 200."),
    "position": ({"positions": ints(0, 1, 5, 0)}, "row 2 is at position 5 of a sequence of 3."),
    "negative position": ({"positions": ints(-1, 1, 2, 0)}, "row 0 is at position -1 of a sequence of 3."),
    "order": ({"positions": ints(1, 0, 2, 0)}, "row 1 is at position 0, not behind the row before it."),
    "sequence": ({"row_sequence": ints(0, 1, 0, 1)}, "row 1 says it belongs to sequence 1, but lies in 0."),
    "cover": ({"query_start": ints(0, 3, 5)}, "the sequences' rows do not cover the step's 4 rows."),
    "starts": ({"query_start": ints(0, 9, 4)}, "the rows of sequence 0 are out of order."),
    "length": ({"kv_lens": ints(3, 999)}, "sequence 1 has 999 tokens, but its block table has room for 64."),
    "empty": ({"kv_lens": ints(0, 1)}, "sequence 0 has 0 tokens, but its block table has room for 64."),
    "logit row": ({"logit_rows": ints(4)}, "logits are wanted of row 4, but the step has 4 rows."),
    "full page": (
        {"block_tables": {"sliding": ints(1, 2).view(2, 1), "full": ints(3, 99).view(2, 1)}},
        "block 0 of sequence 1 is page 99 in the full table, but the pool has 5 pages.",
    ),
    "sliding page": (
        {"block_tables": {"sliding": ints(-1, 2).view(2, 1), "full": ints(3, 4).view(2, 1)}},
        "block 0 of sequence 0 is page -1 in the sliding table, but the pool has 5 pages.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals(step_library: ctypes.CDLL, model: GptOss, name: str) -> None:
    changes, sentence = WRONG[name]
    good = make_step([([1, 2, 3], 0), ([4], 0)], tables(2, 1))
    pool = model.allocate_kv(5)
    with Native(step_library, model) as native:
        code, said, result = native.attempt(replace(good, **changes), pool)
        assert (code, said) == (1, sentence)
        assert (result.logits == 7.0).all()
        assert not pool.any()
        assert native.attempt(good, pool)[0] == 0


def test_given_back_sliding_pages_are_not_looked_at(step_library: ctypes.CDLL, model: GptOss) -> None:
    """A sliding table names scratch, or anything, where the window has passed."""
    pages = tables(1, 4)
    pool = model.allocate_kv(9)
    with Native(step_library, model, most_rows=256) as native:
        native.run(make_step([(list(range(190)), 0)], pages), pool)
        step = make_step([([7], 190)], pages)
        want = native.run(step, pool.clone()).logits
        pages["sliding"][0, :2] = 12345
        assert torch.equal(native.run(step, pool.clone()).logits, want)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "role", ["embed", "qkv_bias", "o_bias", "router_bias", "gate_up_bias", "down_bias", "attn_norm"]
)
def test_what_is_no_number_ends_in_no_token(step_library: ctypes.CDLL, role: str, value: float) -> None:
    """One value of a weight; every row that it reaches has NaN or infinity in its logits, and no best token."""
    weights = random_weights(SMALL, QUANTISED, 6)
    target = weights.embed if role == "embed" else getattr(weights.layers[0], role)
    target.view(-1)[3 if role != "embed" else 2 * SMALL.hidden + 3] = value
    if role in ("gate_up_bias", "down_bias"):
        target[:, 2] = value  # of every expert; an up or gate row
    model = reference_model(weights)
    pool = model.allocate_kv(5)
    with Native(step_library, model) as native:
        result = native.run(make_step([([2, 1], 0), ([1], 0)], tables(2, 1)), pool)
    reached = [True, True, role != "embed"]  # the second row sees the first one's key
    clamped = role == "gate_up_bias" and not math.isnan(value)  # swiglu's limits make numbers of infinities
    lost_to_choice = role == "router_bias" and value == -math.inf  # an expert that is never chosen
    for row, hit in enumerate(reached):
        if hit and not clamped and not lost_to_choice:
            assert not result.logits[row].isfinite().all()
            assert result.best[row] == -1
            assert math.isnan(result.best_logit[row])
        elif not hit or lost_to_choice:
            assert result.logits[row].isfinite().all()
            assert result.best[row] == int(result.logits[row].argmax())


def test_fp8_saturates(step_library: ctypes.CDLL) -> None:
    weights = random_weights(SMALL, {}, 6)
    weights.layers[0].qkv_bias[-1] = 1e6
    weights.layers[0].qkv_bias[-2] = -1e6
    model = reference_model(weights, kv_dtype="fp8")
    pool = model.allocate_kv(5)
    with Native(step_library, model) as native:
        result = native.run(make_step([([2, 1], 0), ([1], 0)], tables(2, 1)), pool)
    assert result.logits.isfinite().all()
    assert pool.float().abs().max() == 448.0


def test_every_fp8_value(step_library: ctypes.CDLL) -> None:
    """What is stored is what torch stores: values on, between and beside the representable ones."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].unique() + 0.0  # the zero of a sum is positive
    middle = (values[1:] + values[:-1]) / 2
    tried = torch.cat((values, middle, middle.nextafter(values[1:]), middle.nextafter(values[:-1])))
    config = SMALL.with_(layers=1, layer_kinds=("full",), heads=2, kv_heads=2, head_dim=512, hidden=32)
    for part in tried.split(1024):
        weights = random_weights(config, {"qkv": "f32"}, 6)
        layer = weights.layers[0]
        assert isinstance(layer.qkv, torch.Tensor)
        layer.qkv.zero_()
        layer.qkv_bias.zero_()
        layer.qkv_bias[-1024 : -1024 + part.numel()] = part
        model = reference_model(weights, activation="auto", kv_dtype="fp8")
        pool = model.allocate_kv(3)
        with Native(step_library, model, int8=False) as native:
            native.run(make_step([([1], 0)], tables(1, 1)), pool)
        page = int(tables(1, 1)["full"][0, 0])
        stored = pool[page, 0, 1, :, 0].reshape(-1)[: part.numel()]
        want = part.to(torch.float8_e4m3fn)
        different = stored.view(torch.uint8) != want.view(torch.uint8)
        assert not different.any(), (part[different], stored[different].float(), want[different].float())
