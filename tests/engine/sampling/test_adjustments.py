"""Penalties, bias, minimum length and grammar on a device, held against the host's row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from halfbyte.engine.batch import Batch
from halfbyte.engine.request import SamplingParams
from halfbyte.engine.sampling.adjustments import Adjustments
from halfbyte.engine.sampling.device import TorchSampler
from halfbyte.engine.sampling.device_step import DeviceStepSampling
from halfbyte.engine.sampling.host import NO_TOKEN, adjust, not_numbers, sample_on_host
from halfbyte.engine.sampling.row import RowSampler

VOCAB = 1000
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, presence_penalty=0.7, frequency_penalty=-0.4),
    SamplingParams(temperature=0.0, repetition_penalty=0.8, frequency_penalty=1.1, logit_bias={5: 3.0, 7: -np.inf}),
    SamplingParams(temperature=0.0, min_tokens=40),
    SamplingParams(temperature=0.0, logit_bias={999: 50.0}, logprobs=2),
)


def batch_of(kinds: list[SamplingParams], rng: np.random.Generator, masked: frozenset[int] = frozenset()) -> Batch:
    prompt, stops = 12, frozenset({3, 4})
    samplers = [RowSampler(p, 0, prompt, i, stops) for i, p in enumerate(kinds)]
    count = len(kinds)
    one = np.zeros(count, np.int32)
    masks = {i: rng.integers(-(2**31), 2**31, -(-VOCAB // 32), np.int32) for i in masked}
    histories = {i: rng.integers(0, 60, 30).tolist() for i, s in enumerate(samplers) if s.penalised}
    return Batch(
        tokens=one, positions=one, query_start=np.arange(count + 1, dtype=np.int32), kv_lens=one + 1, row_sequence=one,
        full_table=one[:, None], sliding_table=one[:, None],
        logit_rows=np.arange(count, dtype=np.int32), token_from=None,
        max_kv_len=1, samplers=samplers, sample_positions=[30] * count, slots=list(range(count)), masks=masks,
        histories=histories,
    )  # fmt: skip


@pytest.mark.exact
@pytest.mark.parametrize("seed", range(8))
def test_rows_are_changed_as_the_host_changes_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = [KINDS[i] for i in rng.integers(0, len(KINDS), 9)]
    batch = batch_of(kinds, rng, frozenset({1, 4, 8}))
    logits = torch.from_numpy(rng.normal(0, 4, (9, VOCAB)).astype(np.float32))
    raw = logits.clone()
    rows = [i for i in range(9) if batch.samplers[i].adjusted or i in batch.masks]
    changed = Adjustments(batch, rows, VOCAB, logits.device).apply(logits)
    for at, i in enumerate(rows):
        mask = batch.masks.get(i)
        expected = adjust(raw[i].numpy(), batch.samplers[i], 30, batch.histories.get(i), mask)
        assert np.array_equal(changed[at].numpy(), expected), kinds[i]
    assert torch.equal(logits, raw)
    results = torch.zeros((9, 2), dtype=torch.int32)
    TorchSampler().argmax(logits, results)
    device = DeviceStepSampling(batch).run(TorchSampler(), logits, results).result()
    assert device.tokens == sample_on_host(raw, batch).tokens
    assert device.errors == {}


def test_a_sampled_row_keeps_to_what_is_allowed() -> None:
    rng = np.random.default_rng(0)
    kinds = [SamplingParams(temperature=2.0, top_k=50, repetition_penalty=1.2)] * 4
    batch = batch_of(kinds, rng, frozenset(range(4)))
    logits = torch.from_numpy(rng.normal(0, 4, (4, VOCAB)).astype(np.float32))
    for position in range(30, 60):
        batch.sample_positions = [position] * 4
        sampling = DeviceStepSampling(batch)
        sampling.take([torch.from_numpy(a.copy()) for a in sampling.arrays])
        results = torch.zeros((4, 2), dtype=torch.int32)
        TorchSampler().argmax(logits, results)
        for i, token in enumerate(sampling.run(TorchSampler(), logits, results).result().tokens):
            assert batch.masks[i][token // 32] >> (token % 32) & 1


def test_a_row_without_a_token_and_a_row_without_numbers_fail_alone() -> None:
    rng = np.random.default_rng(1)
    batch = batch_of([KINDS[0], KINDS[1], KINDS[2]], rng, frozenset({0}))
    batch.masks[0] = np.zeros_like(batch.masks[0])
    logits = torch.from_numpy(rng.normal(0, 4, (3, VOCAB)).astype(np.float32))
    logits[1, 17] = float("nan")
    results = torch.zeros((3, 2), dtype=torch.int32)
    TorchSampler().argmax(logits, results)
    result = DeviceStepSampling(batch).run(TorchSampler(), logits, results).result()
    assert result.errors == {0: NO_TOKEN, 1: not_numbers(0)}
