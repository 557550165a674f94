"""Who samples a step's tokens on a device: a CUDA sampler, found by module name and imported when asked for as kernels
of phases are, or torch, with the reason why in its name, which the engine shows.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.engine.sampling.race import sample_rows

PROVIDER = "halfbyte.kernels.cuda.sampling.sampler"


class DeviceSampler(Protocol):
    """`results` is int32 [L, 2]: for each row its token and the bits of its highest logit."""

    @property
    def name(self) -> str: ...

    def argmax(self, logits: Tensor, results: Tensor, *, barred: bool = False) -> None:
        """Token and bits of the highest logit of each row, into `results`. Where a logit is not finite, infinite either
        way included, the bits are those of a NaN, of one in the row where there is one. With `barred` tokens that may
        not be chosen are -infinity."""
        ...

    def sample(self, logits: Tensor, settings: Tensor, keys: Tensor, results: Tensor, *, filtered: bool) -> None:
        """Replaces the tokens of rows that are not greedy; `results` is as `argmax` left it.

        `settings` and `keys` are those of `halfbyte.engine.sampling.race`; `filtered`: some row has a filter.
        """
        ...


class TorchSampler:
    def __init__(self, reason: str | None = None) -> None:
        """`reason`: why torch samples where a kernel would be expected."""
        self.name = "torch" if reason is None else f"torch ({reason})"

    def argmax(self, logits: Tensor, results: Tensor, *, barred: bool = False) -> None:
        value, token = logits.max(-1)  # NaN counts as the highest
        infinite = torch.isposinf(logits) if barred else torch.isinf(logits)
        value = value.masked_fill(infinite.any(-1) & ~torch.isnan(value), torch.nan)
        results[:, 0].copy_(token)
        results.view(torch.float32)[:, 1].copy_(value)

    def sample(self, logits: Tensor, settings: Tensor, keys: Tensor, results: Tensor, *, filtered: bool) -> None:
        results[:, 0].copy_(sample_rows(logits, settings, keys, filtered=filtered))


def choose_device_sampler(device: torch.device, rows: int, vocab: int) -> DeviceSampler:
    """For steps that sample at most `rows` rows."""
    if device.type != "cuda":
        return TorchSampler()
    provider = importlib.import_module(PROVIDER)
    reason: str | None = provider.refuse(vocab)
    if reason is not None:
        return TorchSampler(reason)
    sampler: DeviceSampler = provider.make(rows, vocab, device)
    return sampler
