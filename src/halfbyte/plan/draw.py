"""Who draws a step's tokens on a device. Found by module name and imported when asked for, as kernels of phases are.

A CPU's, and a GPU's without a compiler for CUDA, are drawn by torch (`halfbyte.engine.sampling.device`); the reason is
kept and shown by the engine.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch
from torch import Tensor

PROVIDER = "halfbyte.kernels.cuda.sampling.sampler"


class Drawer(Protocol):
    @property
    def name(self) -> str: ...

    def note(self, logits: Tensor, results: Tensor) -> None:
        """Place and bits of the highest logit of each row, into `results`. NaN counts as the highest."""
        ...

    def __call__(self, logits: Tensor, settings: Tensor, keys: Tensor, results: Tensor, *, filtered: bool) -> None:
        """Replaces the tokens in `results` int32 [L, 2] (as `note` left it) of rows that are sampled."""
        ...


def drawer_for(device: torch.device, rows: int, vocab: int) -> tuple[Drawer | None, str]:
    """(None: torch draws; what draws, or why torch does)."""
    if device.type != "cuda":
        return None, "torch"
    provider = importlib.import_module(PROVIDER)
    reason: str | None = provider.refuse(vocab)
    if reason is not None:
        return None, f"torch ({reason})"
    made: Drawer = provider.make(rows, vocab, device)
    return made, made.name
