"""Single operations against the reference, with and without a residual; wrong calls are refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte import formats
from halfbyte.errors import EngineError
from halfbyte.formats import DenseTiles
from halfbyte.gates import Gates
from halfbyte.kernels.cpu.operations import PHASES
from halfbyte.model.gpt_oss import GptOss
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, Binding, Phase
from halfbyte.plan.reference import PHASES as REFERENCE
from tests.kernels.cpu.native import random_weights, reference_model
from tests.kernels.cpu.step_cases import QUANTISED, SMALL

BY_NAME = {phase.name: phase for phase in PHASES}


@pytest.fixture(scope="module")
def model() -> GptOss:
    return reference_model(random_weights(SMALL, QUANTISED, 6))


class Packed:
    """One layer's weights, those of an operation in rows16."""

    def __init__(self, weights: Any, roles: tuple[str, ...]) -> None:
        self.__dict__.update(vars(weights))
        for role in roles:
            m = getattr(weights, role)
            packed = DenseTiles.of(m, "rows16") if isinstance(m, torch.Tensor) else formats.convert(m, "rows16")
            setattr(self, role, packed)


def binding(model: GptOss, phase: Phase, activation: str) -> Binding:
    b = model.binding(None if phase.covers == ("lm_head",) else 0)
    b.weights = Packed(b.weights, tuple(phase.layouts(model.spec)))
    b.spec = replace(model.spec, activation=activation)
    return b


def inputs(model: GptOss, rows: int) -> Activations:
    s, g = model.spec, torch.Generator().manual_seed(rows)
    acts = Activations(
        h=torch.randn((rows, s.hidden), generator=g), attn=torch.randn((rows, s.heads * s.head_dim), generator=g),
        x=torch.randn((rows, s.hidden), generator=g),
    )  # fmt: skip
    order = torch.stack([torch.randperm(s.experts, generator=g)[: s.top_k] for _ in range(rows)])
    acts.topk_ids = order.int()
    acts.topk_weights = torch.rand((rows, s.top_k), generator=g).softmax(-1)
    return acts


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("activation", ["f32", "int8"])
@pytest.mark.parametrize("name", BY_NAME)
def test_an_operation_is_the_references(model: GptOss, name: str, activation: str, rows: int) -> None:
    phase = BY_NAME[name]
    assert phase.refuse(model.spec, ARCHES["cpu"], Gates()) is None
    b, acts = binding(model, phase, activation), inputs(model, rows)
    result = {"qkv": "q", "o": "x", "moe": "x", "lm_head": "logits"}[phase.covers[0]]
    reference = next(p for p in REFERENCE if p.covers == phase.covers)
    plain = model.binding(b.layer)
    plain.spec = b.spec
    wanted, got = acts.copy(), acts.copy()
    step: Any = SimpleNamespace(rows=rows)
    reference.bind(plain)(step, wanted)
    phase.bind(b)(step, got)
    a, r = getattr(got, result), getattr(wanted, result)
    # Between the experts' two products a sum that ends on the other side of a half becomes another int8.
    bound = 2e-4 if (name, activation) == ("cpu.moe", "int8") else 2e-6
    assert (a - r).norm() <= bound * r.norm()


def test_without_a_residual_and_without_rows(model: GptOss) -> None:
    phase = BY_NAME["cpu.moe"]
    launch, acts = phase.bind(binding(model, phase, "f32")), inputs(model, 5)
    step: Any = None
    whole = acts.copy()
    launch(step, whole)
    alone = acts.copy()
    alone.x = None  # type: ignore[assignment]
    launch(step, alone)
    assert torch.equal(acts.x + alone.x, whole.x)
    empty = inputs(model, 5)
    for name, tensor in empty.tensors().items():
        setattr(empty, name, tensor[:0])
    launch(step, empty)
    assert empty.x.shape == (0, model.spec.hidden)


def test_an_expert_that_is_not_there_is_refused(model: GptOss) -> None:
    phase = BY_NAME["cpu.moe"]
    launch, acts = phase.bind(binding(model, phase, "f32")), inputs(model, 2)
    acts.topk_ids[1, 0] = model.spec.experts
    with pytest.raises(EngineError, match=f"row 1 asks for expert {model.spec.experts} of {model.spec.experts}"):
        launch(None, acts)  # type: ignore[arg-type]


def test_refusals(model: GptOss) -> None:
    phase = BY_NAME["cpu.qkv"]
    assert phase.refuse(model.spec, ARCHES["sm90"], Gates()) == "runs on a CPU"
    said = phase.refuse(replace(model.spec, activation="bf16"), ARCHES["cpu"], Gates())
    assert said == "multiplies int8 or f32 activations, not bf16"
