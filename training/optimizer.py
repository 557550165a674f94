"""Muon for the matrices (attention and experts, each expert on its own), AdamW for everything else.

Muon (Keller Jordan) replaces the momentum of a matrix by the nearest orthogonal one, found by five Newton-Schulz steps;
here all matrices of one shape take those steps together.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

_MATRICES = ("q", "k", "v", "o", "gate", "up", "down", "fc", "gate_proj", "up_proj", "down_proj")


def orthogonal(g: Tensor) -> Tensor:
    """The orthogonal factor of each matrix of [N, rows, columns], roughly."""
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Optimizer:
    def __init__(self, model: nn.Module, *, muon: float, adam: float, decay: float, momentum: float = 0.95) -> None:
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        rest: list[nn.Parameter] = []
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            if name.rsplit(".", 1)[-1] in _MATRICES and p.ndim >= 2:
                by_shape[p.shape[-2], p.shape[-1]].append(p)
            else:
                rest.append(p)
        self.groups = list(by_shape.items())
        self.momenta = {p: torch.zeros_like(p) for _, ps in self.groups for p in ps}
        self.rest = rest
        self.muon, self.decay, self.momentum = muon, decay, momentum
        fused = next(model.parameters()).is_cuda
        self.adam_rate = adam
        self.adam = torch.optim.AdamW(rest, lr=adam, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One step at `scale` times the full rates."""
        for g in self.adam.param_groups:
            g["lr"] = self.adam_rate * scale
        nn.utils.clip_grad_norm_(self.rest, 1.0)
        self.adam.step()
        rate = self.muon * scale
        for (rows, columns), ps in self.groups:
            grads = [p.grad for p in ps if p.grad is not None]
            momenta = [self.momenta[p] for p in ps]
            torch._foreach_lerp_(momenta, grads, 1 - self.momentum)
            ahead = torch._foreach_lerp(grads, momenta, self.momentum)
            flat = torch.cat([u.reshape(-1, rows, columns) for u in ahead])
            update = orthogonal(flat).to(torch.float32)
            sizes = [p.numel() // (rows * columns) for p in ps]
            parts = [u.view_as(p) for u, p in zip(update.split(sizes), ps, strict=True)]
            torch._foreach_mul_(ps, 1 - rate * self.decay)
            torch._foreach_add_(ps, parts, alpha=-rate * max(1.0, rows / columns) ** 0.5)

    def zero(self) -> None:
        for p in (*self.rest, *self.momenta):
            p.grad = None
