"""The decode step in plain torch, float32, on the very bytes the kernel reads: the oracle of tests and benchmarks.

It rounds where the kernel rounds by contract (the KV cache is bf16) and nowhere else. `boxes` reads what a kernel left
in its mailboxes after a step, that is the last layer's intermediate values, so that each phase can be judged alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.formats import MXTensor, tile16
from halfbyte.kernels.cuda.decode.step import TOP_K, DecodeStep, StepShape, StepWeights

SCALE_IN = 2.0**100  # of what is multiplied by MXFP4


def matrix(data: Tensor, n: int, k: int, format: str) -> Tensor:
    """A tile16 matrix as float32."""
    if format == "bf16":
        return tile16.unpack_dense(data, n, k).float()
    none = torch.empty(0, dtype=torch.uint8, device=data.device)
    assert format in ("mxfp4", "q8")
    return formats.dequantize(MXTensor(data, none, (n, k), format, "tile16"), torch.float32)  # type: ignore[arg-type]


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
    norm_eps: float = 1e-5,
    swiglu_limit: float = 7.0,
    swiglu_alpha: float = 1.702,
) -> dict[str, Tensor]:
    """Runs the step, writing into `pool`.

    Returns the last layer's values, the logits, every layer's experts, and the smallest gap between neighbours in an
    order of experts, four and the next: rounding may turn round a small one."""
    s = shape
    rows = tokens.shape[0]
    x = weights.embed[tokens.long()].float()
    out: dict[str, Tensor] = {}
    chosen, gaps = [], []

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return v * torch.rsqrt((v * v).mean(-1, keepdim=True) + norm_eps) * weight.float()

    for index, w in enumerate(weights.layers):
        qkv = norm(x, w.attn_norm) @ matrix(w.qkv, s.qkv_dim, s.hidden, s.qkv).T + w.qkv_bias.float()
        out["qkv"] = qkv
        q, k, v = torch.split(qkv, [s.q_dim, s.kv_heads * 64, s.kv_heads * 64], -1)
        angle = rope[positions.long()]
        q, k = _rotate(q.view(rows, s.heads, 64), angle), _rotate(k.view(rows, s.kv_heads, 64), angle)
        v = v.view(rows, s.kv_heads, 64)
        sliding = index % 2 == 0
        table = tables[0 if sliding else 1]
        for r in range(rows):
            at = int(positions[r])
            page = int(table[int(row_seq[r]), at // 64])
            pool[page, index // 2, 0, :, at % 64] = store(k[r], pool.dtype)
            pool[page, index // 2, 1, :, at % 64] = store(v[r], pool.dtype)
        attn = torch.stack([
            _attend(s, q[r], pool[:, index // 2], table[int(row_seq[r])], int(positions[r]), w.sinks, sliding)
            for r in range(rows)
        ])  # fmt: skip
        x = x + attn @ matrix(w.o, s.hidden, s.q_dim, s.o).T + w.o_bias.float()
        out["mid"] = x
        h = norm(x, w.mlp_norm)
        router = w.router.float().transpose(0, 1).reshape(s.experts, s.hidden)
        logits = h @ router.T + w.router_bias.float()
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        gaps.append((values[:, :TOP_K] - values[:, 1 : TOP_K + 1]).min())
        values, ids = values[:, :TOP_K], ids[:, :TOP_K]
        share = torch.softmax(values, -1)
        chosen.append(ids)
        hidden = torch.zeros(rows, TOP_K, s.intermediate, device=x.device)
        total = torch.zeros_like(x)
        for expert in sorted(set(ids.flatten().tolist())):
            row, slot = (ids == expert).nonzero(as_tuple=True)
            up = h[row] @ matrix(w.gate_up[expert], 2 * s.intermediate, s.hidden, "mxfp4").T
            up = up + w.gate_up_bias[expert].float()
            gate, up = up[:, 0::2].clamp(max=swiglu_limit), up[:, 1::2].clamp(-swiglu_limit, swiglu_limit)
            act = (up + 1) * gate * torch.sigmoid(swiglu_alpha * gate)
            hidden[row, slot] = act
            down = act @ matrix(w.down[expert], s.hidden, s.intermediate, "mxfp4").T + w.down_bias[expert].float()
            total.index_add_(0, row, down * share[row, slot, None])
        out["h"] = hidden
        x = x + total
        out["x"] = x
    out["experts"], out["gap"] = torch.stack(chosen), torch.stack(gaps).min()
    out["logits"] = norm(x, weights.final_norm) @ matrix(weights.lm_head, s.vocab, s.hidden, s.lm_head).T
    return out


def store(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As the cache holds it: FP8 has no scale, so what is too large saturates."""
    return (x.clamp(-448.0, 448.0) if dtype == torch.float8_e4m3fn else x).to(dtype)


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angle[:, None, :32], angle[:, None, 32:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _attend(s: StepShape, q: Tensor, pages: Tensor, table: Tensor, at: int, sinks: Tensor, sliding: bool) -> Tensor:
    """q [heads, 64] at position `at`; pages [pages, 2, kv_heads, 64, 64] of this layer."""
    first = max(0, at - s.window + 1) if sliding else 0
    blocks = table[first // 64 : at // 64 + 1].long()
    stored = pages.view(torch.uint8)[blocks].view(pages.dtype)  # as bytes: torch cannot index every dtype
    both = stored.float().permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, kv_heads, tokens, 64]
    both = both[:, :, first % 64 : at + 1 - first // 64 * 64].repeat_interleave(s.heads // s.kv_heads, 1)
    scores = torch.einsum("hd,htd->ht", q, both[0]) / math.sqrt(64)
    weights = torch.softmax(torch.cat((scores, sinks.float()[:, None]), -1), -1)[:, :-1]
    return torch.einsum("ht,htd->hd", weights, both[1]).flatten()


def boxes(step: DecodeStep) -> dict[str, Tensor]:
    """The last layer's values as the kernel left them."""
    b, s = step.boxes, step.shape
    half = int(step.control[0]) * s.layers - 1 & 1  # layers take halves in turn, counted through the steps
    return {
        "qkv": _payload(b["qkv"]).view(torch.float32),
        "mid": _summed(b["mid"][half]),
        "h": _pairs(b["h"]) / SCALE_IN,
        "x": _summed(b["x"][half]),
        "logits": step.logits,
    }


def _summed(box: Tensor) -> Tensor:
    return (box >> 9).double().mul(2.0**-23).float()


def _payload(box: Tensor) -> Tensor:
    return (box >> 32).to(torch.int32)


def _pairs(box: Tensor) -> Tensor:
    """Two floats of 22 bits in every word, as the last dimension."""
    first, second = (box >> 32) & 0xFFFFFC00, (box >> 10) & 0xFFFFFC00
    both = torch.stack((first, second), -1).flatten(-2)
    return torch.where(both >= 1 << 31, both - (1 << 32), both).to(torch.int32).view(torch.float32)
