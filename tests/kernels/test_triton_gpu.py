"""Triton's expert MLP on this GPU against the reference, in every tile that a flag can ask for.

The interpreter sees a kernel's arithmetic, not what a compiler makes of its copies: products that were right there were
wrong on an H200 in one tile only, and only with K as long as a model's.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from halfbyte import gates
from halfbyte.gates import Gates
from halfbyte.kernels.triton.moe import TritonMoe
from halfbyte.model import checkpoint, synthetic
from halfbyte.model.gpt_oss import GptOss, arch_of, choose
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.model.weights import LAYER_ROLES
from halfbyte.plan import reference
from halfbyte.plan.activations import Activations
from tests.kernels.test_on_gpu import SMALL, TRITON
from tests.kernels.triton.triton_cases import bind_all, close, make_spec, make_step, make_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

# Between the two products values are rounded again, and one that lies at a boundary may fall on either side. With sums
# off by 3e-6, as adding 2880 products in another order makes them, the reference moves from itself by 1.1e-4, 2.3e-4,
# 2.8e-4 and 1.6e-3.
BOUNDS = {"bf16": 4e-4, "int8": 1e-3, "mxfp8": 1e-3, "mxfp4": 4e-3}
HIDDEN, INNER, EXPERTS = 2880, 1440, 6


@pytest.mark.parametrize("rows", [1, 40, 400])
@pytest.mark.parametrize("tile", ["auto", "64x128", "128x128"])
@pytest.mark.parametrize("activation", list(BOUNDS))
def test_experts(activation: str, tile: str, rows: int) -> None:
    phase = TritonMoe()
    spec = make_spec(activation=activation, tile=tile, hidden=HIDDEN, intermediate=INNER, experts=EXPERTS)
    if reason := phase.refuse(spec, arch_of("cuda"), Gates()):
        pytest.skip(reason)
    g = torch.Generator().manual_seed(rows)
    acts = {
        "x": torch.randn(rows, HIDDEN, generator=g), "h": torch.randn(rows, HIDDEN, generator=g),
        "topk_ids": torch.stack([torch.randperm(EXPERTS, generator=g)[:4] for _ in range(rows)]).int(),
        "topk_weights": torch.softmax(torch.randn(rows, 4, generator=g), 1),
    }  # fmt: skip
    acts = {name: value.cuda() for name, value in acts.items()}
    held = make_weights(spec, layout=phase.layouts(spec)["gate_up"])
    weights = SimpleNamespace(
        **{name: getattr(held, name).to("cuda") for name in ("gate_up", "gate_up_bias", "down", "down_bias")}
    )
    step = make_step(spec, [(0, rows)])
    outs = []
    for phases in ([phase], [p for p in reference.PHASES if p.covers == ("moe",)]):
        mine = Activations(**acts)
        for launch in bind_all(phases, spec, weights, None, "full", 1):
            launch(step, mine)
        outs.append((mine.x - acts["x"]).cpu())
    close(outs[0], outs[1], BOUNDS[activation])


# ---- what is no number ----------------------------------------------------------------------------------------------


def planted(role: str, value: float, preset: str) -> list[torch.Tensor]:
    """Logits of a prompt, a batch and a decode step of a small model of Triton's, with `value` in one tensor."""
    g = gates.parse(TRITON, env={}, preset=preset)
    choice = choose(SMALL, g, arch_of("cuda"))
    weights = synthetic.make(SMALL, 3, layer_formats=g.layer_formats)
    owner = weights if hasattr(weights, role) else weights.layers[1]
    tensor = getattr(owner, role)
    if isinstance(tensor, torch.Tensor):
        tensor[..., 5 if tensor.ndim == 1 or role == "lm_head" else slice(None, None, 16)] = value
    elif tensor.format == "mxfp4":
        tensor.scales[...] = 255
    else:
        tensor.scales[...] = value
    for layer, name, held in list(weights.items()):
        setattr(weights if layer is None else weights.layers[layer], name, held.to("cuda"))  # type: ignore[union-attr]
    model = GptOss(
        checkpoint.assemble(checkpoint.MemorySource(weights), layouts=choice.selection.layouts), g, choice=choice
    )
    sequence = SingleSequence(model, 128)
    with torch.inference_mode():
        return [sequence.feed(list(range(n)), all_logits=True).cpu() for n in (70, 20, 1)]


@pytest.mark.parametrize("preset", ["exact", "balanced", "fast"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_visible(preset: str, value: float) -> None:
    """In every tensor: every row of every regime ends in logits that are not all finite."""
    for role in (*LAYER_ROLES, "embed", "final_norm", "lm_head"):
        if role == "sinks" and value == float("-inf"):
            continue  # a head without a sink
        for logits in planted(role, value, preset):
            assert not torch.isfinite(logits).all(1).any(), (role, len(logits))
