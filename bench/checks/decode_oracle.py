"""The decode step in plain torch, float32, on the very bytes the kernel reads: the oracle of tests and checks.

It rounds where the kernel rounds by contract (what goes into the KV cache) and nowhere else. Two experts whose logits
are a rounding apart may change places in the kernel, and everything behind that differs; so the oracle can be told
which experts to take (`experts`), and says what its own router thinks of each (`LayerValues.router`).
`last_layer` reads what a kernel left in its mailboxes: the values of its last layer, under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.formats import MXTensor, tile16
from halfbyte.kernels.cuda.decode.shape import HEAD_DIM, PAGE, TOP_K, StepShape
from halfbyte.kernels.cuda.decode.step import DecodeStep, StepLayer, StepWeights

SCALE_IN = 2.0**100  # of what is multiplied by MXFP4
RESIDUAL_FRACTION, ROUTER_FRACTION = 23, 21  # bits behind the point of sums in mailboxes (mailbox.cuh)
COMPARED = ("qkv", "mid", "router", "h", "x")  # what a kernel's last layer and the oracle both have


@dataclass
class LayerValues:
    """What one layer computes, for all rows, in float32."""

    qkv: Tensor  # [rows, qkv_dim], before rope
    key: Tensor  # [rows, kv_heads, 64], after rope, before it is rounded for the cache
    value: Tensor
    mid: Tensor  # [rows, hidden]: the residual before the experts
    router: Tensor  # [rows, experts]: logits
    experts: Tensor  # [rows, TOP_K]: those that were taken
    h: Tensor  # [rows, TOP_K, intermediate]: the middle of each expert
    x: Tensor  # [rows, hidden]: the residual after the experts


@dataclass
class StepValues:
    layers: list[LayerValues]
    logits: Tensor  # [rows, vocab]


@dataclass(frozen=True)
class Constants:
    norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702


GPT_OSS = Constants()


def step(
    shape: StepShape,
    weights: StepWeights,
    pool: Tensor,
    tables: tuple[Tensor, Tensor],
    rope: Tensor,
    tokens: Tensor,
    positions: Tensor,
    row_seq: Tensor,
    *,
    experts: Sequence[Tensor] | None = None,
    constants: Constants = GPT_OSS,
) -> StepValues:
    """Runs the step, writing into `pool`. `experts`: those of every layer, [rows, TOP_K], instead of the router's."""
    x = weights.embed[tokens.long()].float()
    layers: list[LayerValues] = []
    for index, layer in enumerate(weights.layers):
        sliding = index % 2 == 0
        page_layer = pool[:, index // 2]
        qkv, key, value, attention = _attention(
            shape, layer, x, page_layer, tables[0 if sliding else 1], rope, positions, row_seq, index, constants
        )
        mid = (
            x
            + attention @ matrix(layer.o, shape.hidden, shape.q_dim, shape.format_of("o", index)).T
            + layer.o_bias.float()
        )
        normed = _norm(mid, layer.mlp_norm, constants)
        router = normed @ _plain_router(shape, layer).T + layer.router_bias.float()
        chosen = top_experts(router) if experts is None else experts[index].long()
        h, y = _experts(shape, layer, normed, router, chosen, constants)
        x = mid + y
        layers.append(LayerValues(qkv, key, value, mid, router, chosen, h, x))
    assert weights.lm_head is not None, "the oracle runs whole steps"
    head = matrix(weights.lm_head, shape.vocab, shape.hidden, shape.lm_head)
    return StepValues(layers, _norm(x, weights.final_norm, constants) @ head.T)


def matrix(data: Tensor, n: int, k: int, format: str, layout: str = "tile16") -> Tensor:
    """A matrix in tile16, or of MXFP4 in another layout, as float32."""
    if format == "bf16":
        return tile16.unpack_dense(data, n, k).float()
    none = torch.empty(0, dtype=torch.uint8, device=data.device)
    assert format in ("mxfp4", "q8")
    return formats.dequantize(MXTensor(data, none, (n, k), format, layout), torch.float32)  # type: ignore[arg-type]


def top_experts(logits: Tensor) -> Tensor:
    """[rows, TOP_K] by falling logit; ties go to the lower expert."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :TOP_K]


def store(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A value as the cache holds it: FP8 has no scale, so large values saturate."""
    return (x.clamp(-448.0, 448.0) if dtype == torch.float8_e4m3fn else x).to(dtype)


def _norm(x: Tensor, weight: Tensor, constants: Constants) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + constants.norm_eps) * weight.float()


def _plain_router(s: StepShape, layer: StepLayer) -> Tensor:
    return layer.router.float().transpose(0, 1).reshape(s.experts, s.hidden)


def _attention(
    s: StepShape,
    layer: StepLayer,
    x: Tensor,
    pages: Tensor,
    table: Tensor,
    rope: Tensor,
    positions: Tensor,
    row_seq: Tensor,
    index: int,
    constants: Constants,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv, key, value and the attention of all rows; every row's key and value are written before any row reads."""
    rows, kv_dim = x.shape[0], s.kv_heads * HEAD_DIM
    qkv = _norm(x, layer.attn_norm, constants) @ matrix(layer.qkv, s.qkv_dim, s.hidden, s.format_of("qkv", index)).T
    qkv = qkv + layer.qkv_bias.float()
    query, key, value = torch.split(qkv, [s.q_dim, kv_dim, kv_dim], -1)
    angle = rope[positions.long()]
    query = _rotate(query.view(rows, s.heads, HEAD_DIM), angle)
    key = _rotate(key.view(rows, s.kv_heads, HEAD_DIM), angle)
    value = value.view(rows, s.kv_heads, HEAD_DIM)
    for row in range(rows):
        position = int(positions[row])
        page = int(table[int(row_seq[row]), position // PAGE])
        pages[page, 0, :, position % PAGE] = store(key[row], pages.dtype)
        pages[page, 1, :, position % PAGE] = store(value[row], pages.dtype)
    attention = [
        _attend(s, query[row], pages, table[int(row_seq[row])], int(positions[row]), layer.sinks, index % 2 == 0)
        for row in range(rows)
    ]
    return qkv, key, value, torch.stack(attention)


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angle[:, None, :32], angle[:, None, 32:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _attend(
    s: StepShape, query: Tensor, pages: Tensor, table: Tensor, position: int, sinks: Tensor, sliding: bool
) -> Tensor:
    """query [heads, 64]; pages [pages, 2, kv_heads, 64, 64] of this layer; table [blocks] of this sequence."""
    first = max(0, position - s.window + 1) if sliding else 0
    blocks = table[first // PAGE : position // PAGE + 1].long()
    stored = pages.view(torch.uint8)[blocks].view(pages.dtype)  # as bytes: torch cannot index every dtype
    both = stored.float().permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, kv_heads, tokens, 64]
    both = both[:, :, first % PAGE : position + 1 - first // PAGE * PAGE]
    both = both.repeat_interleave(s.heads // s.kv_heads, 1)
    scores = torch.einsum("hd,htd->ht", query, both[0]) / math.sqrt(HEAD_DIM)
    weights = torch.softmax(torch.cat((scores, sinks.float()[:, None]), -1), -1)[:, :-1]
    return torch.einsum("ht,htd->hd", weights, both[1]).flatten()


def _experts(
    s: StepShape, layer: StepLayer, normed: Tensor, router: Tensor, chosen: Tensor, constants: Constants
) -> tuple[Tensor, Tensor]:
    """The middle of every chosen expert, and their weighted sum."""
    rows = normed.shape[0]
    share = torch.softmax(router.gather(1, chosen), -1)
    middle = torch.zeros(rows, TOP_K, s.intermediate, device=normed.device)
    total = torch.zeros_like(normed)
    for expert in sorted(set(chosen.flatten().tolist())):
        row, slot = (chosen == expert).nonzero(as_tuple=True)
        up = normed[row] @ matrix(layer.gate_up[expert], 2 * s.intermediate, s.hidden, "mxfp4", s.expert_layout).T
        up = up + layer.gate_up_bias[expert].float()
        gate = up[:, 0::2].clamp(max=constants.swiglu_limit)
        up = up[:, 1::2].clamp(-constants.swiglu_limit, constants.swiglu_limit)
        middle[row, slot] = (up + 1) * gate * torch.sigmoid(constants.swiglu_alpha * gate)
        down = middle[row, slot] @ matrix(layer.down[expert], s.hidden, s.intermediate, "mxfp4", s.expert_layout).T
        total.index_add_(0, row, (down + layer.down_bias[expert].float()) * share[row, slot, None])
    return middle, total


# ---- what a kernel leaves in its mailboxes --------------------------------------------------------------------------


def last_layer(step: DecodeStep, constants: Constants = GPT_OSS) -> dict[str, Tensor]:
    """The values of the kernel's last layer, by the names in COMPARED, as its mailboxes hold them after a step."""
    box, s = step.boxes, step.shape
    half = int(step.control[0]) * s.layers - 1 & 1  # layers take halves in turn, counted through the steps
    mid = _fixed_point(box["mid"][half], RESIDUAL_FRACTION)
    # The kernel sums products with the norm's weight in them, and divides by the norm's root behind the sum.
    sums = _fixed_point(box["logits"][half].sum(1), ROUTER_FRACTION)
    root = torch.rsqrt(mid.double().square().mean(-1, keepdim=True) + constants.norm_eps)
    bias = list(step.weights.layers)[-1].router_bias
    return {
        "qkv": _upper_half(box["qkv"]).view(torch.float32),
        "mid": mid,
        "router": (sums.double() * root + bias.double()).float(),
        "h": _pairs(box["h"]) / SCALE_IN,
        "x": _fixed_point(box["x"][half], RESIDUAL_FRACTION),
    }


def _fixed_point(box: Tensor, fraction: int) -> Tensor:
    """Below the point of 32 bits, a sum keeps `fraction` bits and counts contributions in the others."""
    return (box >> (32 - fraction)).double().mul(2.0**-fraction).float()


def _upper_half(box: Tensor) -> Tensor:
    return (box >> 32).to(torch.int32)


def _pairs(box: Tensor) -> Tensor:
    """Two floats of 22 bits in every word, as the last dimension."""
    first, second = (box >> 32) & 0xFFFFFC00, (box >> 10) & 0xFFFFFC00
    both = torch.stack((first, second), -1).flatten(-2)
    return torch.where(both >= 1 << 31, both - (1 << 32), both).to(torch.int32).view(torch.float32)
