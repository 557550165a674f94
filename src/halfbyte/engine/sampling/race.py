"""The race: how a device samples a token. No row leaves it, nothing waits, so the next step can be launched on top.

A token is sampled by an exponential race: token t wins if its -log(u_t) / p_t is the smallest, where u_t is a hash of
(seed, choice, position, t). That is an exact sample of p, needs no sort and no sum over the vocabulary in any order,
and depends on nothing but the row itself. It uses its randomness otherwise than the host does (inverse transform), so
the two give different tokens for the same seed, from the same distribution.

Covers temperature, top-n-sigma, top-k, top-p and min-p; greedy is temperature 0. Ties at a filter's edge are all kept.
Knows nothing of penalties, bias and grammar, which have changed the logits before (`adjustments.py`), nor of draft
distributions: those rows are the host's (`host.py`).

Written in torch, which reads the logits some fifteen times. On a GPU `halfbyte.kernels.cuda.sampling.sampler` does the
same in one or two launches; this is what it is compared with.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.engine.sampling.row import RowSampler
from halfbyte.ops.sampling_settings import COLUMNS

_GOLDEN, _MIX1, _MIX2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64's, signed


def random_keys(samplers: list[RowSampler], positions: list[int]) -> NDArray[np.int64]:
    """One number per row, from seed, choice and position."""
    digests = b"".join(
        blake2b(p.key + position.to_bytes(8, "little") + b"race", digest_size=8).digest()
        for p, position in zip(samplers, positions)
    )
    return np.frombuffer(digests, np.int64)


def row_settings(samplers: list[RowSampler]) -> NDArray[np.float32]:
    """[L, len(COLUMNS)]: a row of `ops/sampling_settings.py` for each."""
    return np.array([sampler.settings for sampler in samplers], np.float32).reshape(-1, len(COLUMNS))


def column(settings: Tensor, name: str) -> Tensor:
    """[L, 1]: one setting of every row."""
    at = COLUMNS.index(name)
    return settings[:, at : at + 1]


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, which torch only shifts arithmetically."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def log_exponentials(keys: Tensor, vocab: int) -> Tensor:
    """log of exponential variates, float32 [L, vocab], fixed by key and token."""
    z = keys[:, None] + torch.arange(1, vocab + 1, device=keys.device, dtype=torch.int64)[None, :] * _GOLDEN
    z = (z ^ _shifted(z, 30)) * _MIX1
    z = (z ^ _shifted(z, 27)) * _MIX2
    z = z ^ _shifted(z, 31)
    # 32 bits in (0, 1): small values are what decides the race, and float32 is finest there.
    u = (_shifted(z, 32).float() + 0.5) * 2.0**-32
    return torch.log(-torch.log1p(-u))


def edges(x: Tensor, settings: Tensor) -> Tensor:
    """Per row, the smallest scaled logit that may still be drawn, [L, 1]."""
    top_k, top_p, min_p, sigmas = (column(settings, name) for name in ("top_k", "top_p", "min_p", "top_n_sigma"))
    values = x.sort(dim=-1, descending=True).values
    rank = torch.arange(values.shape[1], device=x.device)[None, :]
    inside = (top_k == 0) | (rank < top_k)
    inside &= (sigmas == 0) | (values >= values[:, :1] - sigmas * _deviation(values))
    p = torch.softmax(values.masked_fill(~inside, float("-inf")), -1)
    keep = inside & (p.cumsum(-1) - p < top_p) & (p >= min_p * p[:, :1])
    keep = keep | (rank == 0)
    return values.masked_fill(~keep, float("inf")).amin(-1, keepdim=True)


def _deviation(x: Tensor) -> Tensor:
    """[L, 1]: the standard deviation of the logits of each row, without those at -infinity."""
    finite, wide = x > float("-inf"), x.double()
    count = finite.sum(-1, keepdim=True)
    mean = wide.where(finite, 0.0).sum(-1, keepdim=True) / count
    return ((wide - mean).where(finite, 0.0).square().sum(-1, keepdim=True) / count).sqrt()


def sample_rows(logits: Tensor, settings: Tensor, keys: Tensor, *, filtered: bool) -> Tensor:
    """int64 [L]. `filtered` says whether any row has a filter: the host knows."""
    temperature = column(settings, "temperature")
    x = logits.float() / torch.where(temperature > 0, temperature, 1.0)
    if filtered:
        x = x.masked_fill(x < edges(x, settings), float("-inf"))
    winner = (x - log_exponentials(keys, x.shape[1])).argmax(-1)
    return torch.where(temperature[:, 0] > 0, winner, logits.argmax(-1))
