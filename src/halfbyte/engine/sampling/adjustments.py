"""Penalties, bias, minimum length and grammar on a device: what changes some rows' logits before a token is chosen.

The numbers are those of `host.adjust`, operation by operation, so a greedy row has the same token wherever it is
chosen. What is sent is small (the tokens a penalty touches, a bit for each token of a grammar's mask), nothing is
waited for and no row of logits leaves the device: a request that asks for penalties must not cost its neighbours
milliseconds. Draft distributions stay with the host.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.engine.batch import Batch


class Adjustments:
    """Penalties, bias and masks for the rows that need them."""

    def __init__(self, batch: Batch, rows: list[int], vocab: int, device: torch.device) -> None:
        self.rows, self.vocab, self.device = rows, vocab, device
        penalised: list[NDArray[np.float64]] = []
        biased: list[tuple[int, float]] = []
        for at, row in enumerate(rows):
            sampler, base = batch.samplers[row], at * vocab
            if sampler.penalised:
                penalised.append(_penalties(batch.histories[row], sampler.prompt, sampler.params, base))
            biased += [(base + token, bias) for token, bias in sampler.bias]
            if batch.sample_positions[row] < sampler.forced_until:
                biased += [(base + token, -math.inf) for token in sampler.stops]
        self._index = self._send(np.array(rows, np.int64))
        self._penalties = self._send(np.concatenate(penalised, 1)) if penalised else None
        self._bias = self._send(np.array(biased, np.float64).T.copy()) if biased else None
        masked = [(at, batch.masks[row]) for at, row in enumerate(rows) if row in batch.masks]
        self._masked = self._send(np.array([at for at, _ in masked], np.int64)) if masked else None
        self._masks = self._send(np.stack([m for _, m in masked])) if masked else None

    def _send(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def apply(self, logits: Tensor) -> Tensor:
        """The rows as float32 [n, vocab], changed; `logits` [L, vocab] stay as they are."""
        out = logits.index_select(0, self._index).float()
        flat = out.view(-1)
        if self._penalties is not None:
            index, (repetition, frequency, presence) = self._penalties[0].long(), self._penalties[1:].float()
            x = flat.index_select(0, index)
            x = torch.where(x > 0, x / repetition, x * repetition)
            flat.index_copy_(0, index, x - frequency - presence)
        if self._bias is not None:
            flat.index_add_(0, self._bias[0].long(), self._bias[1].float())
        if self._masked is not None:
            assert self._masks is not None
            allowed = bits_of(self._masks)[:, : self.vocab]
            barred = torch.ones((allowed.shape[0], self.vocab), dtype=torch.bool, device=out.device)
            barred[:, : allowed.shape[1]] = ~allowed  # the output layer may be padded past the vocabulary
            out.index_copy_(0, self._masked, out.index_select(0, self._masked).masked_fill(barred, -math.inf))
        return out


def _penalties(history: list[int], prompt: int, params: Any, base: int) -> NDArray[np.float64]:
    """[4, m], for every token seen so far: its place, the repetition penalty, what frequency and presence take away."""
    tokens = np.unique(np.asarray(history, np.int64))
    generated, times = np.unique(np.asarray(history[prompt:], np.int64), return_counts=True)
    counts = np.zeros(tokens.shape[0], np.float32)
    counts[np.searchsorted(tokens, generated)] = times
    frequency = np.float32(params.frequency_penalty) * counts
    presence = np.float32(params.presence_penalty) * (counts > 0)
    return np.stack((tokens + base, np.full(tokens.shape, params.repetition_penalty), frequency, presence))


def bits_of(masks: Tensor) -> Tensor:
    """int32 [n, words] -> bool [n, 32 * words], the lowest bit first."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks[:, :, None] >> bits) & 1).bool().flatten(1)
