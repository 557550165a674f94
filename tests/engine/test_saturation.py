"""What saturates in an fp8 cache is counted, once for each page that a sequence fills."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from halfbyte.engine import saturation
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.saturation import SaturationCount
from halfbyte.gates import Gates
from halfbyte.model import synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.tokenizer import Tokenizer

SMALL, PAGE = NAMED["small"], 16
FP8 = Gates(kv_dtype="fp8", activation="f32")
PAGE_VALUES = SMALL.layers // 2 * 2 * SMALL.kv_heads * PAGE * SMALL.head_dim


def core_with(values: float, gates: Gates = FP8) -> EngineCore:
    """A core whose model's values are so many times as large, and not scaled for the cache."""
    weights = synthetic.make(SMALL, 0)
    for layer in weights.layers:
        layer.qkv[-SMALL.kv_dim :] *= values  # type: ignore[index]
        layer.o = layer.o / values  # type: ignore[operator]
    options = EngineOptions(gates=gates, device="cpu", page_size=PAGE, max_context=256, kv_gib=0.01, reserve_gib=0.0)
    model = GptOss(weights, gates, page_size=PAGE)
    return core_for(model, Tokenizer.gpt_oss(), options)[0]


def run(core: EngineCore, prompt: list[int], tokens: int) -> None:
    core.submit(Request(prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True), id="r"))
    while core.has_work:
        core.step()


@pytest.mark.parametrize(("values", "some"), [(1.0, False), (2.0**12, True)])
def test_what_saturates_is_counted_once(values: float, some: bool) -> None:
    core = core_with(values)
    prompt = torch.randint(0, SMALL.vocab, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    run(core, prompt, 10)  # 49 tokens have keys and values: three pages of each kind
    stats = core.stats()
    assert stats.kv_checked_values == 6 * PAGE_VALUES
    pool = core.saturation.pool.view(torch.uint8)  # type: ignore[union-attr]
    by_hand = int(((pool[1:] & 0x7F) == 0x7E).sum())  # pages are reused last, so that all of them still hold it
    assert 0 <= by_hand - stats.kv_saturated_values <= by_hand / 8  # the last token's page is not full
    assert (stats.kv_saturated_values > 0) == some
    run(core, prompt, 10)  # two pages of each kind are found; the third is filled again
    assert core.stats().kv_checked_values == 8 * PAGE_VALUES


def test_other_caches_count_nothing() -> None:
    core = core_with(2.0**12, replace(FP8, kv_dtype="bf16"))
    run(core, list(range(40)), 10)
    assert core.saturation is None
    assert (core.stats().kv_checked_values, core.stats().kv_saturated_values) == (0, 0)


def test_many_are_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saturation, "FEWEST", 4)
    pool = torch.tensor([[0.0, 448.0], [-448.0, 1.0], [2.0, 447.0]]).to(torch.float8_e4m3fn)
    count = SaturationCount(pool)
    with caplog.at_level(logging.WARNING, "halfbyte"):
        count.add([2, 0])
        assert (count.values, count.saturated) == (4, 2)  # 447 rounds to 448
        count.add([1])
        assert (count.values, count.saturated) == (6, 3)
    assert [r.message for r in caplog.records] == [
        "50.0 % of the keys and values in the fp8 cache are at its largest number, 448, and may have been larger; "
        "--kv-dtype bf16 holds them."
    ]
