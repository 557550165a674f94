"""The record between phases: named tensors, and a residual stream that is complete or pending."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from halfbyte.plan.activations import Activations


class Pending(NamedTuple):
    x: torch.Tensor
    rest: torch.Tensor

    def complete(self) -> torch.Tensor:
        return self.x + self.rest


class AnotherPending(Pending):
    pass


def test_what_no_phase_has_left_is_an_error_that_names_it() -> None:
    acts = Activations(x=torch.zeros(2, 3))
    assert acts.has("x")
    assert not acts.has("h")
    with pytest.raises(AttributeError, match="no phase has left h yet"):
        _ = acts.h
    with pytest.raises(AttributeError, match="activations have no hidden"):
        _ = acts.hidden  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="left"):
        Activations(left=torch.zeros(1))
    assert list(acts.tensors()) == ["x"]


def test_a_pending_residual_stands_instead_of_x() -> None:
    acts = Activations(x=torch.ones(2, 3))
    kept = acts.complete_x()
    acts.x += 1  # phases may write in place
    assert torch.equal(kept, torch.ones(2, 3))
    acts.leave(Pending(acts.x, torch.full((2, 3), 5.0)))
    with pytest.raises(AttributeError, match="x lacks what the next layer adds"):
        _ = acts.x
    for _ in range(2):  # looking on changes nothing
        assert torch.equal(acts.complete_x(), torch.full((2, 3), 7.0))
    pending = acts.take(Pending)
    assert pending is not None
    assert acts.take(Pending) is None
    with pytest.raises(AttributeError, match="no phase has left x yet"):
        _ = acts.x


def test_only_who_knows_how_may_add_what_is_pending() -> None:
    acts = Activations()
    acts.leave(Pending(torch.zeros(1), torch.zeros(1)))
    with pytest.raises(AssertionError, match="left Pending to one that adds AnotherPending"):
        acts.take(AnotherPending)


def test_a_copy_is_independent() -> None:
    acts = Activations(x=torch.zeros(1))
    acts.kv_cells["full"] = torch.zeros(1)
    other = acts.copy()
    other.leave(Pending(torch.zeros(1), torch.zeros(1)))
    other.kv_cells["sliding"] = torch.zeros(1)
    assert acts.has("x")
    assert acts.residual is None
    assert list(acts.kv_cells) == ["full"]
