"""Activations: what the phases of one step leave to each other, by name.

Names are those of `halfbyte.ops`. A field exists once a phase has written it; reading one before is an error that names
it. The residual stream is complete or pending, never both: a phase that leaves work to the next layer hands over a
`PendingResidual` (`leave`), and `x` cannot be read until the next phase of its kind has taken it (`take`). An
observer, such as the tap of EAGLE-3, reads `complete_x`, which is right whichever phases ran. Nothing here computes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor


class PendingResidual(Protocol):
    """The residual stream with experts' results that are not added yet."""

    def complete(self) -> Tensor:
        """The complete x in a new tensor. Nothing changes, so the next layer may still add the pending part."""
        ...


P = TypeVar("P", bound=PendingResidual)


@dataclass(init=False, eq=False)
class Activations:
    x: Tensor  # [rows, hidden]: the residual stream, complete
    h: Tensor  # [rows, hidden]: behind a norm; [logit rows, hidden] behind the last one
    q: Tensor  # [rows, heads, head_dim]
    k: Tensor  # [rows, kv_heads, head_dim]
    v: Tensor
    attn: Tensor  # [rows, heads * head_dim]
    topk_ids: Tensor  # [rows, top_k]
    topk_weights: Tensor
    logits: Tensor  # float32 [logit rows, vocab]
    best: Tensor  # int32 [logit rows]: the highest logit's token, -1 where a logit is NaN; instead of logits
    best_logit: Tensor  # float32 [logit rows]
    choices: Tensor  # int32 [layers, rows, top_k]: the router's of every layer, from a phase that runs all of them
    taps: Tensor  # float32 [taps of the step, rows, hidden], from a phase that runs all layers
    # Made once a step, for every layer.
    rope_cos: Tensor  # float32 [rows, head_dim / 2]
    rope_sin: Tensor
    rope_pairs: Tensor  # float32 [rows, head_dim / 2, 2]: both side by side
    kv_cells: dict[str, Tensor]  # kind of layer -> int64 [rows]: where each row's first key goes
    residual: PendingResidual | None  # instead of x

    def __init__(self, **tensors: Tensor) -> None:
        unknown = tensors.keys() - TENSORS
        if unknown:
            raise TypeError(f"activations have no {', '.join(sorted(unknown))}")
        self.__dict__.update(tensors)
        self.kv_cells = {}
        self.residual = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # only for what is not there
            if name == "x" and self.__dict__.get("residual") is not None:
                raise AttributeError("x lacks what the next layer adds to it: take the residual, or ask for complete_x")
            if name in TENSORS:
                raise AttributeError(f"no phase has left {name} yet")
            raise AttributeError(f"activations have no {name}")

    def has(self, name: str) -> bool:
        assert name in TENSORS, f"activations have no {name}"
        return name in self.__dict__

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that exist, by name."""
        return {name: self.__dict__[name] for name in TENSORS if name in self.__dict__}

    def copy(self) -> Activations:
        """A shallow copy: another record with these tensors."""
        other = copy.copy(self)
        other.kv_cells = dict(self.kv_cells)
        return other

    def leave(self, pending: PendingResidual) -> None:
        """Hand `pending` to the next layer in place of x."""
        self.residual = pending
        self.__dict__.pop("x", None)

    def take(self, kind: type[P]) -> P | None:
        """The residual that the previous layer left pending, or None where x is complete."""
        pending, self.residual = self.residual, None
        if pending is None:
            return None
        assert isinstance(pending, kind), f"a layer left {type(pending).__name__} to one that adds {kind.__name__}"
        return pending

    def complete_x(self) -> Tensor:
        """The residual stream with everything added, in a tensor of its own: phases may write x in place."""
        return self.x.clone() if self.residual is None else self.residual.complete()


TENSORS = tuple(f.name for f in fields(Activations) if f.name not in ("kv_cells", "residual"))
