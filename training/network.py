"""gpt-oss as a trainable torch module: packed training with tree masks, and batched greedy decoding for evaluation.

It computes what transformers' GptOssForCausalLM computes (a test compares them in float32). Two things are laid out for
speed: gate and up are kept apart (the export interleaves them), and in training all experts run as one wide MLP whose
unchosen experts are multiplied by zero, because at this size that beats sorting tokens on a GPU. It refuses nothing:
switches that break the architecture on purpose (`Ablation`) exist for the evaluation only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import fakequant
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from halfbyte.model.config import ModelConfig
from halfbyte.ops.rope import yarn_frequencies


@dataclass(frozen=True)
class Ablation:
    """What to break, to see that it matters."""

    sinks: bool = True
    yarn: bool = True
    window: bool = True
    swap_experts: tuple[int, int] | None = None  # in every layer, the router left as it is
    swap_gate_up: bool = False
    rope_base: float = 1.0  # times what it should be


WHOLE = Ablation()
Mask = BlockMask | Tensor  # a Tensor is the dense mask [B, 1, S, S]


@dataclass(frozen=True)
class Packed:
    """Rows of packed conversations, all [rows, length].

    A document is a trunk (branch 0) and branches that leave it, each stored where it leaves; `position` counts along
    the branch's own path. A token sees the trunk as far as it is stored before it and its own branch, nothing else.
    """

    token: Tensor
    target: Tensor
    weight: Tensor  # 0: not scored, 1: prompt, 2: reply
    position: Tensor
    document: Tensor
    branch: Tensor


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        return (self.weight * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))


class Layer(nn.Module):
    def __init__(self, c: ModelConfig, index: int) -> None:
        super().__init__()
        self.c, self.sliding = c, c.layer_kinds[index] == "sliding"
        E, I, H = c.experts, c.intermediate, c.hidden
        deep = 1 / math.sqrt(2 * c.layers)
        self.attn_norm, self.mlp_norm = RMSNorm(H, c.norm_eps), RMSNorm(H, c.norm_eps)
        self.q = nn.Parameter(torch.randn(c.q_dim, H) / math.sqrt(H))
        self.k = nn.Parameter(torch.randn(c.kv_dim, H) / math.sqrt(H))
        self.v = nn.Parameter(torch.randn(c.kv_dim, H) / math.sqrt(H))
        self.o = nn.Parameter(torch.randn(H, c.q_dim) * deep / math.sqrt(c.q_dim))
        self.q_bias, self.k_bias = nn.Parameter(torch.zeros(c.q_dim)), nn.Parameter(torch.zeros(c.kv_dim))
        self.v_bias, self.o_bias = nn.Parameter(torch.zeros(c.kv_dim)), nn.Parameter(torch.zeros(H))
        # Sinks start where they hold a good part of the mass, so that heads learn to rest on them.
        self.sinks = nn.Parameter(torch.linspace(2.0, 7.0, c.heads))
        self.router = nn.Parameter(torch.randn(E, H) / math.sqrt(H))
        self.router_bias = nn.Parameter(torch.zeros(E))
        self.gate = nn.Parameter(torch.randn(E, I, H) / math.sqrt(H))
        self.up = nn.Parameter(torch.randn(E, I, H) / math.sqrt(H))
        self.down = nn.Parameter(torch.randn(E, H, I) * deep / math.sqrt(I))
        self.gate_bias, self.up_bias = nn.Parameter(torch.zeros(E, I)), nn.Parameter(torch.zeros(E, I))
        self.down_bias = nn.Parameter(torch.zeros(E, H))

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, heads, T, D] each, rotated. cos and sin are [B, 1, T, D/2]."""
        B, T, _ = x.shape
        h, D = self.attn_norm(x), self.c.head_dim
        q = linear(h, self.q, self.q_bias).view(B, T, self.c.heads, D).transpose(1, 2)
        k = linear(h, self.k, self.k_bias).view(B, T, self.c.kv_heads, D).transpose(1, 2)
        v = linear(h, self.v, self.v_bias).view(B, T, self.c.kv_heads, D).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def attend_out(self, x: Tensor, heads: Tensor) -> Tensor:
        """Add the attention output [B, heads, T, D] to the residual."""
        B, _, T, _ = heads.shape
        return x + linear(heads.transpose(1, 2).reshape(B, T, self.c.q_dim), self.o, self.o_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, quantized: bool | Tensor
    ) -> tuple[Tensor, Tensor]:
        """One packed layer: (residual, load-balancing loss). Compiled once, it serves every layer."""
        q, k, v = self.qkv(x, cos, sin)
        return self.mlp(self.attend_out(x, packed_attention(q, k, v, mask, self.sinks)), quantized)

    def mlp(self, x: Tensor, quantized: bool | Tensor, ablation: Ablation = WHOLE) -> tuple[Tensor, Tensor]:
        """(residual after the experts, load-balancing loss)."""
        B, T, H = x.shape
        E, I, limit = self.c.experts, self.c.intermediate, self.c.swiglu_limit
        h = self.mlp_norm(x).view(B * T, H)
        logits = linear(h, self.router, self.router_bias)
        chosen = rank(logits) < self.c.top_k
        share = logits.masked_fill(~chosen, float("-inf")).softmax(-1)
        balance = E * chosen.float().mean(0).dot(logits.float().softmax(-1).mean(0)) / self.c.top_k
        gate_w, up_w, down_w = self.gate, self.up, self.down
        gate_b, up_b, down_b = self.gate_bias, self.up_bias, self.down_bias
        if quantized is not False:
            gate_w, up_w, down_w = (fakequant.straight(w, quantized) for w in (gate_w, up_w, down_w))
        if ablation.swap_gate_up:
            gate_w, up_w, gate_b, up_b = up_w, gate_w, up_b, gate_b
        if swap := ablation.swap_experts:
            order = list(range(E))
            order[swap[0]], order[swap[1]] = swap[1], swap[0]
            gate_w, up_w, down_w, gate_b, up_b, down_b = (
                w[order] for w in (gate_w, up_w, down_w, gate_b, up_b, down_b)
            )
        if not (h.is_cuda or torch.is_grad_enabled()):
            out = torch.zeros_like(h)
            for e in range(E):  # on a CPU only what was chosen: a quarter of the work
                rows = chosen[:, e].nonzero().squeeze(1)
                if len(rows):
                    gate = linear(h[rows], gate_w[e], gate_b[e]).clamp(max=limit)
                    up = linear(h[rows], up_w[e], up_b[e]).clamp(-limit, limit)
                    act = (up + 1) * gate * torch.sigmoid(gate * self.c.swiglu_alpha)
                    out.index_add_(0, rows, share[rows, e, None] * linear(act, down_w[e], down_b[e]))
            return x + out.view(B, T, H), balance
        gate = linear(h, gate_w.reshape(E * I, H), gate_b.reshape(E * I)).clamp(max=limit)
        up = linear(h, up_w.reshape(E * I, H), up_b.reshape(E * I)).clamp(-limit, limit)
        act = (up + 1) * gate * torch.sigmoid(gate * self.c.swiglu_alpha)
        act = (act.view(-1, E, I) * share[:, :, None]).view(-1, E * I)
        wide = down_w.transpose(1, 2).reshape(E * I, H).to(h.dtype)
        out = act @ wide + share @ down_b.to(h.dtype)
        return x + out.view(B, T, H), balance


def rank(logits: Tensor) -> Tensor:
    """How many of a row's entries come before each; of equal ones the first. Written so that it fuses, unlike topk."""
    mine, theirs = logits[:, :, None], logits[:, None, :]
    index = torch.arange(logits.shape[1], device=logits.device)
    earlier = index[None, :] < index[:, None]
    return ((theirs > mine) | ((theirs == mine) & earlier)).sum(-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class GptOss(nn.Module):
    inverse: Tensor

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.randn(c.vocab, c.hidden) * 0.5)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        self.norm = RMSNorm(c.hidden, c.norm_eps)
        self.lm_head = nn.Parameter(torch.randn(c.vocab, c.hidden) * 0.02)
        inverse, self.temperature = self._frequencies(WHOLE)
        self.register_buffer("inverse", inverse, persistent=False)

    def _frequencies(self, ablation: Ablation) -> tuple[Tensor, float]:
        c, y, base = self.c, self.c.yarn, self.c.rope_theta * ablation.rope_base
        if not ablation.yarn:
            return yarn_frequencies(c.head_dim, base, 1.0, 1, 1, 1, False)[0], 1.0
        return yarn_frequencies(c.head_dim, base, y.factor, y.original_context, y.beta_fast, y.beta_slow, y.truncate)

    def angles(self, position: Tensor, ablation: Ablation = WHOLE) -> tuple[Tensor, Tensor]:
        """cos, sin [B, 1, T, D/2]."""
        inverse, scale = self.inverse, self.temperature
        if (ablation.yarn, ablation.rope_base) != (True, 1.0):
            inverse, scale = self._frequencies(ablation)
        angle = position.float()[:, None, :, None] * inverse.to(position.device)
        return angle.cos() * scale, angle.sin() * scale

    # ---- training -------------------------------------------------------------------------------

    def hidden(
        self, token: Tensor, position: Tensor, full: Mask, sliding: Mask, *,
        dtype: torch.dtype, quantized: bool | Tensor, taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
        """(normalised hidden states, mean balance loss, the residual after each layer of `taps`)."""
        cos, sin = self.angles(position)
        x = F.embedding(token, self.embed).to(dtype)
        balance, tapped = torch.zeros((), device=x.device), []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            x, b = layer(x, cos, sin, sliding if layer.sliding else full, quantized)
            balance = balance + b
            if i in taps:
                tapped.append(x)
        return self.norm(x), balance / len(self.layers), tapped

    # ---- evaluation -----------------------------------------------------------------------------

    def step(self, token: Tensor, position: Tensor, cache: list[tuple[Tensor, Tensor]], *, dtype: torch.dtype,
             quantized: bool = True, ablation: Ablation = WHOLE, taps: Sequence[int] = (), span: int | None = None,
             ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Residual states [B, T, H] before the final norm for tokens at `position`, through a cache of slots.

        Slot = position, so what lies beyond a row's own position is masked by causality alone. `span` is how many
        slots to look at.
        """
        c = self.c
        cos, sin = self.angles(position, ablation)
        x, tapped = F.embedding(token, self.embed).to(dtype), []
        slots = torch.arange(span or cache[0][0].shape[2], device=token.device)
        seen = slots[None, None, :] <= position[:, :, None]
        near = seen & (position[:, :, None] - slots[None, None, :] < c.window)
        rows = torch.arange(token.shape[0], device=token.device)[:, None]
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            q, k, v = layer.qkv(x, cos, sin)
            keys, values = cache[i]
            keys[rows, :, position], values[rows, :, position] = k.transpose(1, 2), v.transpose(1, 2)
            K, V = keys[:, :, : len(slots)], values[:, :, : len(slots)]
            mask = near if layer.sliding and ablation.window else seen
            sinks = layer.sinks if ablation.sinks else None
            x = layer.attend_out(x, attend(q, K, V, mask[:, None], sinks))
            x, _ = layer.mlp(x, quantized, ablation)
            if i in taps:
                tapped.append(x)
        return x, tapped

    @torch.no_grad()
    def round_experts(self) -> None:
        """Make the experts in place what the checkpoint will hold."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            for w in (layer.gate, layer.up, layer.down):
                w.copy_(fakequant.rounded(w))

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.lm_head.to(x.dtype)).float()

    def new_cache(self, rows: int, slots: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        shape = (rows, self.c.kv_heads, slots, self.c.head_dim)
        device = self.embed.device
        return [(torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
                for _ in self.layers]  # fmt: skip

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, dtype: torch.dtype | None = None,
        quantized: bool = True, ablation: Ablation = WHOLE, chunk: int = 512,
    ) -> list[list[int]]:  # fmt: skip
        """Greedy completions, the end token included."""
        device = self.embed.device
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        longest = max(map(len, prompts))
        total = longest + max_tokens
        tokens = torch.zeros(len(prompts), total, dtype=torch.long)
        for row, p in enumerate(prompts):
            tokens[row, : len(p)] = torch.tensor(list(p))
        tokens = tokens.to(device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        cache = self.new_cache(len(prompts), total, dtype)
        last = torch.zeros(len(prompts), self.c.hidden, device=device, dtype=dtype)
        for start in range(0, longest, chunk):
            stop = min(start + chunk, longest)
            position = torch.arange(start, stop, device=device)[None].expand(len(prompts), -1)
            x, _ = self.step(tokens[:, start:stop], position, cache, dtype=dtype, quantized=quantized,
                             ablation=ablation, span=stop)  # fmt: skip
            inside = (lengths > start) & (lengths <= stop)
            last[inside] = x[inside, lengths[inside] - 1 - start]
        ends = torch.tensor(self.c.eos_tokens, device=device)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        generated: list[Tensor] = []
        at = lengths.clone()
        while len(generated) < max_tokens:
            chosen = self.logits(last).argmax(-1)
            chosen = torch.where(done, ends[0], chosen)
            generated.append(chosen)
            done |= torch.isin(chosen, ends)
            if len(generated) % 8 == 0 and bool(done.all()):
                break
            if len(generated) < max_tokens:
                x, _ = self.step(chosen[:, None], at[:, None], cache, dtype=dtype, quantized=quantized,
                                 ablation=ablation, span=longest + len(generated))  # fmt: skip
                last, at = x[:, 0], at + 1
        stops = set(self.c.eos_tokens)
        out = []
        for row in torch.stack(generated, 1).tolist():
            end = next((i for i, t in enumerate(row) if t in stops), len(row) - 1)
            out.append(row[: end + 1])
        return out


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """Plain attention with sinks; q [B, Hq, T, D], k and v [B, Hkv, S, D], mask [B, 1, T, S]."""
    group = q.shape[1] // k.shape[1]
    B, Hq, T, D = q.shape
    grouped = q.view(B, k.shape[1], group * T, D)
    scores = (grouped @ k.transpose(-1, -2)).view(B, Hq, T, -1).float() / math.sqrt(D)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(B, -1, T, 1)
        scores = torch.cat((scores, column), dim=-1)
    share = scores.softmax(-1)
    if sinks is not None:
        share = share[..., :-1]
    return (share.to(v.dtype).view(B, k.shape[1], group * T, -1) @ v).view(B, Hq, T, D)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor) -> Tensor:
    if isinstance(mask, Tensor):
        return attend(q, k, v, mask, sinks)
    heads, aux = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    # softmax with a sink = softmax without it, times the share that the sink leaves
    return heads * torch.sigmoid(aux.lse - sinks[None, :, None])[..., None].to(heads.dtype)


def losses(h: Tensor, lm_head: Tensor, batch: Packed, prompt_weight: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted mean over all scored tokens, mean over reply tokens)."""
    logits = F.linear(h, lm_head.to(h.dtype)).float()
    each = F.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), reduction="none")
    kind = batch.weight.flatten()
    reply = (kind == 2).float()
    weight = reply + (kind == 1).float() * prompt_weight
    return (each * weight).sum() / weight.sum(), (each * reply).sum() / reply.sum()


def dense_masks(batch: Packed, window: int) -> tuple[Tensor, Tensor]:
    """(full, sliding), each [B, 1, S, S]: for small machines, where flex attention has no backward."""
    document, branch, position = batch.document, batch.branch, batch.position
    S = document.shape[1]
    same = document[:, :, None] == document[:, None, :]
    path = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    full = same & path & torch.ones(S, S, dtype=torch.bool, device=document.device).tril()
    sliding = full & (position[:, :, None] - position[:, None, :] < window)
    return full[:, None], sliding[:, None]


def block_masks(batch: Packed, window: int, block: int = 128) -> tuple[BlockMask, BlockMask]:
    """(full, sliding) for flex attention, from the ranges of documents and positions in each block.

    Which blocks are looked at is decided generously, what is seen inside one exactly. Documents must be numbered
    upwards along a row. Both masks run the same code, so that one compilation serves both.
    """
    document, branch, position = batch.document.int(), batch.branch.int(), batch.position.int()
    B, S = document.shape
    cut = (B, S // block, block)
    d, p = document.view(cut), position.view(cut)
    low, high, near, far = d.amin(-1), d.amax(-1), p.amin(-1), p.amax(-1)
    shared = branch.view(cut).amax(-1) == 0
    lower = torch.ones(cut[1], cut[1], dtype=torch.bool, device=d.device).tril()
    overlap = (low[:, :, None] <= high[:, None, :]) & (high[:, :, None] >= low[:, None, :]) & lower
    single = (low == high)[:, :, None] & (low == high)[:, None, :] & (low[:, :, None] == low[:, None, :])
    whole = single & shared[:, None, :] & lower.tril(-1)

    def build(reach: int) -> BlockMask:
        wide = torch.tensor(reach, dtype=torch.int32, device=document.device)

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            same = document[b, q] == document[b, k]
            path = (branch[b, k] == 0) | (branch[b, k] == branch[b, q])
            return same & path & (q >= k) & (position[b, q] - position[b, k] < wide)

        touched = overlap & (near[:, :, None] - far[:, None, :] < reach)
        entire = whole & (far[:, :, None] - near[:, None, :] < reach)
        return BlockMask.from_kv_blocks(*_table(touched & ~entire), *_table(entire), BLOCK_SIZE=block, mask_mod=sees)

    return build(1 << 30), build(window)


def _table(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(how many, which first) of a [B, n, n] choice of blocks."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True).int()
    return chosen.sum(-1).int()[:, None].contiguous(), order[:, None].contiguous()
