"""Our operations as torch custom operations, which vLLM's compiled graph calls and does not trace into.

A layer is identified by its name in vLLM's model, so that the graph holds a string and no object. Output shapes for
tracing follow from the arguments alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfbyte.plan.activations import Activations
from halfbyte.vllm_plugin.inside import BoundOperation, rejoined

_bound: dict[str, BoundOperation] = {}
_library: Any = torch.library.Library("halfbyte", "DEF")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor x, str layer, int width) -> Tensor")
_library.define("experts(Tensor x, Tensor ids, Tensor shares, str layer) -> Tensor")


def keep(layer: str, bound: BoundOperation) -> None:
    """Register the operation of a vLLM layer."""
    _bound[layer] = bound


def linear(x: Tensor, layer: str, width: int) -> Tensor:
    """qkv, o or lm_head of a layer; logits stay float32."""
    bound = _bound[layer]
    rows = x.shape[0]
    if bound.operation == "qkv":
        return rejoined(bound.run(rows, Activations(h=x)), width).to(x.dtype)
    if bound.operation == "o":
        return bound.run(rows, bound.without_residual(Activations(attn=x), width)).x.to(x.dtype)
    return bound.run(rows, Activations(h=x)).logits


def experts(x: Tensor, ids: Tensor, shares: Tensor, layer: str) -> Tensor:
    bound = _bound[layer]
    acts = Activations(h=x, topk_ids=ids, topk_weights=shares.float().contiguous())
    return bound.run(x.shape[0], bound.without_residual(acts, x.shape[1])).x.to(x.dtype)


def _linear_shape(x: Tensor, layer: str, width: int) -> Tensor:
    logits = layer.endswith("lm_head")
    return x.new_empty((x.shape[0], width), dtype=torch.float32 if logits else x.dtype)


def _experts_shape(x: Tensor, ids: Tensor, shares: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)


for _key in ("CPU", "CUDA"):
    _library.impl("linear", linear, _key)
    _library.impl("experts", experts, _key)
torch.library.register_fake("halfbyte::linear", _linear_shape, lib=_library)
torch.library.register_fake("halfbyte::experts", _experts_shape, lib=_library)
