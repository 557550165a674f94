"""Logprobs: of the model's own distribution, before penalties, bias, grammar and temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.engine.request import Logprob


def logprob_of(logits: NDArray[np.float32], token: int, top: int) -> Logprob:
    x = logits.astype(np.float64)
    base = float(x.max())
    base += math.log(float(np.exp(x - base).sum()))
    best: tuple[tuple[int, float], ...] = ()
    if top:
        cut = np.partition(x, max(0, x.shape[0] - top))[max(0, x.shape[0] - top)]
        ids = np.nonzero(x >= cut)[0]
        ids = ids[np.argsort(-x[ids], kind="stable")][:top]
        best = tuple((int(i), float(x[i]) - base) for i in ids)
    return Logprob(token, float(x[token]) - base, best)


@dataclass
class PendingLogprob:
    """The logprobs of one row of the device, on their way to the host."""

    chosen: Tensor  # float64 [1]
    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, logits: Tensor, token: Tensor, top: int) -> PendingLogprob:
        """Computed now: the next step may overwrite the logits."""
        x = logits.double()
        x = x - torch.logsumexp(x, -1)
        values, ids = x.topk(top) if top else (x[:0], torch.zeros(0, dtype=torch.int64, device=x.device))
        chosen = x.index_select(0, token.reshape(1))  # x[token] would wait for the token
        return cls(*(_to_host(t) for t in (chosen, ids, values)))

    def logprob(self, token: int) -> Logprob:
        return Logprob(token, float(self.chosen[0]), tuple(zip(self.ids.tolist(), self.values.tolist())))


def _to_host(t: Tensor) -> Tensor:
    if t.device.type == "cpu":
        return t
    out = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    out.copy_(t, non_blocking=True)
    return out
