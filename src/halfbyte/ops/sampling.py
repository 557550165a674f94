"""Sampling: what temperature, top-n-sigma, top-k, top-p and min-p mean, and how one uniform number picks a token.

The order is that of Hugging Face and vLLM: temperature, then top-k, top-p, min-p on what is left. Top-n-sigma comes
before top-k, as in llama.cpp: it keeps the logits within n standard deviations of the highest one. Tokens that may
not be chosen (-infinity) do not count towards the deviation. A row is filtered on
its own, so a batch never changes its tokens. Greedy is temperature 0: the highest logit, ties to the lower id.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfbyte.ops.sampling_settings import SamplingSettings


def greedy(logits: Tensor) -> Tensor:
    """[.., vocab] -> the lowest id among the maxima."""
    best = logits == logits.amax(-1, keepdim=True)
    return best.int().argmax(-1)


def best_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, vocab] -> (int32 [rows], the lowest id among the maxima, -1 where a logit is NaN; that logit [rows])."""
    ids = torch.where(logits.isnan().any(-1), -1, greedy(logits))
    return ids.int(), logits.amax(-1)


def penalise(
    logits: Tensor, counts: Tensor, seen: Tensor, repetition: float, presence: float, frequency: float
) -> Tensor:
    """One row [vocab]. `counts`: times generated; `seen`: in the prompt or generated (repetition looks at both)."""
    if repetition != 1.0:
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, scaled, logits)
    if presence or frequency:
        logits = logits - frequency * counts - presence * (counts > 0)
    return logits


def distribution(logits: Tensor, s: SamplingSettings) -> tuple[Tensor, Tensor]:
    """One row [vocab] -> (probabilities float64 in falling order, their ids). Only the tokens that may be sampled."""
    values, ids = (logits.double() / s.temperature).sort(descending=True, stable=True)
    if s.top_n_sigma > 0.0:
        deviation = values[values > -math.inf].std(correction=0)
        keep = values >= values[0] - s.top_n_sigma * deviation
        keep[0] = True
        values, ids = values[keep], ids[keep]
    if 0 < s.top_k < values.shape[0]:
        values, ids = values[: s.top_k], ids[: s.top_k]
    p = torch.softmax(values, -1)
    keep = p > 0
    if s.top_p < 1.0:
        keep &= (p.cumsum(-1) - p) < s.top_p
    if s.min_p > 0.0:
        keep &= p >= s.min_p * p[0]
    keep[0] = True
    p, ids = p[keep], ids[keep]
    return p / p.sum(), ids


def sample(p: Tensor, ids: Tensor, uniform: float) -> int:
    """Inverse transform: the first token whose cumulated probability exceeds `uniform` in [0, 1)."""
    if math.isnan(float(p[0])):
        raise ValueError("the logits of this row are not numbers")
    at = int(torch.searchsorted(p.cumsum(-1), uniform, right=True))
    return int(ids[min(at, ids.shape[0] - 1)])
