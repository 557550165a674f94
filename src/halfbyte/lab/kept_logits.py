"""Logits of one model kept on disk, so that another one can be compared with it after the first has left memory.

Of every position the `BEST` highest log probabilities stay, with their tokens, and the mass of all others. The KL
divergence from these is that of distributions in which the others are one token: never above the true one, and short of
it by at most what the others contribute.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from halfbyte.errors import UsageError

BEST = 256


@dataclass(frozen=True)
class KeptLogits:
    """`tokens` and `best` are [positions, at most BEST]; `rest` is the log of the others' mass, `next` the log
    probability of the token that follows."""

    tokens: Tensor
    best: Tensor
    rest: Tensor
    next: Tensor

    def rows(self, start: int, end: int) -> KeptLogits:
        return KeptLogits(*(t[start:end] for t in (self.tokens, self.best, self.rest, self.next)))

    def write(self, path: Path) -> None:
        """Replace the file as a whole."""
        part = path.with_name(f"{path.name}.part")
        try:
            save_file({name: t.contiguous() for name, t in vars(self).items()}, part)
            part.replace(path)
        except (OSError, SafetensorError) as e:
            with contextlib.suppress(OSError):
                part.unlink()
            raise UsageError(f"{path} cannot be written ({e}); set HALFBYTE_CACHE_DIR to a folder with room.") from None

    @classmethod
    def read(cls, path: Path) -> KeptLogits | None:
        """None where there is no such file, or it is damaged."""
        try:
            return cls(**load_file(path))
        except (OSError, SafetensorError, TypeError):
            return None


@dataclass(frozen=True)
class Divergence:
    """One value for each position."""

    kl: Tensor  # nats
    same: Tensor  # 1 where both prefer the same token
    loss: Tensor  # by how many nats the token that follows became less likely


def keep(logits: Tensor, following: Tensor) -> KeptLogits:
    """`logits` are [positions, vocabulary]; `following` is the token after each position."""
    log_p = torch.log_softmax(logits.float(), -1)
    best, tokens = log_p.topk(min(BEST, log_p.shape[-1]), -1)
    after = log_p.gather(1, following[:, None].to(log_p.device).long())[:, 0]
    return KeptLogits(tokens.int().cpu(), best.cpu(), _rest(log_p, tokens).cpu(), after.cpu())


def join(parts: list[KeptLogits]) -> KeptLogits:
    return KeptLogits(*(torch.cat([getattr(p, name) for p in parts]) for name in ("tokens", "best", "rest", "next")))


def compare(reference: KeptLogits, logits: Tensor, following: Tensor) -> Divergence:
    """The reference model against one whose logits for the same positions are here."""
    log_q = torch.log_softmax(logits.float(), -1)
    tokens, best, rest = (t.to(log_q.device) for t in (reference.tokens.long(), reference.best, reference.rest))
    other = log_q.gather(1, tokens)
    other_rest = _rest(log_q, tokens)
    terms = (best.double().exp() * (best.double() - other.double())).sum(-1)
    others = torch.where(rest.isinf(), 0.0, rest.double().exp() * (rest.double() - other_rest.double()))
    after = log_q.gather(1, following[:, None].to(log_q.device).long())[:, 0]
    same = (log_q.argmax(-1) == tokens[:, 0]).double()
    return Divergence((terms + others).cpu(), same.cpu(), (reference.next.to(log_q.device) - after).double().cpu())


def _rest(log_p: Tensor, tokens: Tensor) -> Tensor:
    """The log of the mass of all other tokens; minus infinity where there is none."""
    if tokens.shape[-1] == log_p.shape[-1]:
        return torch.full_like(log_p[:, 0], -torch.inf)
    return log_p.scatter(1, tokens.long(), -torch.inf).logsumexp(-1)
