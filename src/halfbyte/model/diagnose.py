"""Locates the layer in which a sequence's values stopped being finite, once its logits have NaN or Inf.

Every token leaves its keys and values in every layer, so the fault lies between the first layer whose keys and values
are not finite and the layer before it; then the weights in between are checked. This is slow and waits for the device:
it runs for a request that has failed already, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.model.config import ModelConfig
from halfbyte.model.weights import LAYER_ROLES, Weights, WeightTensor
from halfbyte.plan.phase import Spec

BEFORE_KV = ("attn_norm", "qkv", "qkv_bias")
AFTER_KV = tuple(role for role in LAYER_ROLES if role not in BEFORE_KV)


class StoredModel(Protocol):
    """The part of a model (`halfbyte.model.gpt_oss.GptOss`) that is used here."""

    @property
    def config(self) -> ModelConfig: ...

    weights: Weights
    spec: Spec

    def kv_pool(self) -> Tensor: ...


def find_broken(model: StoredModel, full: Sequence[int], sliding: Sequence[int], length: int) -> str:
    """The part of the network that produced a sequence's first NaN or Inf.

    `full` and `sliding` are the sequence's pages, 0 where one was given back; `length` counts its tokens in them."""
    layers = model.config.layers
    first = next((i for i in range(layers) if not _finite_kv(model, i, full, sliding, length)), layers)
    for part, role, weight in _suspects(model, first):
        if not finite_weight(weight):
            return f"{part}, whose {role} has values that are not finite"
    if first == 0:
        return "the embedding or layer 0's keys and values"
    if first == layers:
        return f"layer {layers - 1} behind its keys and values, or the output layer"
    return f"layer {first - 1} behind its keys and values, or layer {first} in front of them"


def clear_pages(model: StoredModel, pages: Sequence[int]) -> None:
    pool = model.kv_pool()
    pool.view(torch.uint8)[torch.tensor(pages, dtype=torch.int64, device=pool.device)] = 0


def _suspects(model: StoredModel, first: int) -> Iterator[tuple[str, str, WeightTensor]]:
    weights, layers = model.weights, model.config.layers
    if first == 0:
        yield "the embedding", "table", weights.embed
    else:
        yield from ((f"layer {first - 1}", role, getattr(weights.layers[first - 1], role)) for role in AFTER_KV)
    if first < layers:
        yield from ((f"layer {first}", role, getattr(weights.layers[first], role)) for role in BEFORE_KV)
    else:
        yield "the output layer", "norm", weights.final_norm
        yield "the output layer", "lm_head", weights.lm_head


def _finite_kv(model: StoredModel, layer: int, full: Sequence[int], sliding: Sequence[int], length: int) -> bool:
    pool, size = model.kv_pool(), model.spec.page_size
    table = sliding if model.config.layer_kinds[layer] == "sliding" else full
    blocks = [(i, page) for i, page in enumerate(table) if page and i * size < length]
    if not blocks:
        return True
    pages = torch.tensor([page for _, page in blocks], device=pool.device)
    block = torch.tensor([i for i, _ in blocks], device=pool.device)
    stored = pool[:, model.config.kind_index(layer)]
    values = stored.view(torch.uint8)[pages].view(pool.dtype).float()  # [pages, 2, heads, tokens, 64]
    written = (block[:, None] * size + torch.arange(size, device=pool.device))[:, None, None, :, None] < length
    return bool((torch.isfinite(values) | ~written).all())


def finite_weight(weight: WeightTensor) -> bool:
    if isinstance(weight, DenseTiles):
        return bool(torch.isfinite(weight.data.view(weight.dtype)).all())
    if isinstance(weight, MXTensor):
        scales = weight.scales
        if not scales.numel():
            return True  # kept among the values: the kernels' own layouts
        return bool((scales != 255).all() if scales.dtype == torch.uint8 else torch.isfinite(scales.float()).all())
    assert isinstance(weight, Tensor)
    return bool(torch.isfinite(weight).all())
