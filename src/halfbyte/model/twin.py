"""A small known model embedded in a large one's shapes (all other layers and experts are zero), so that the production
kernels can be checked against known answers.

`enlarge` puts a small model (some layers, some experts, the first rows of the vocabulary) where the large one has its
own: further layers leave the residual as it is, further experts are never chosen. Binaries are those of the large
model, because its shapes are. `probes` are small models in which a column of one matrix reaches the logits alone, so
that a wrong one names the code and the scale it was made from. Reads no checkpoint and runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from halfbyte.formats import DenseTiles, MXTensor, dequantize, e2m1, quantize
from halfbyte.formats.layouts import interleave
from halfbyte.formats.matrices import Formats
from halfbyte.model.checkpoint import lay_out
from halfbyte.model.config import ModelConfig
from halfbyte.model.synthetic import LOUD_FROM_LAYER, Character, SyntheticSource
from halfbyte.model.weights import (
    DTYPES,
    LAYER_ROLES,
    LayerWeights,
    Matrix,
    WeightFormat,
    Weights,
    WeightTensor,
    format_of,
)

MATRICES = ("qkv", "o", "gate_up", "down")
T = TypeVar("T", Tensor, MXTensor, DenseTiles, WeightTensor)
EXPERTS = 8  # of the random twin
NEVER = -30_000.0  # the router's bias of an expert that is not there
AMPLITUDE = 16.0  # of a token's one value: large enough that the norm's epsilon does not matter
SHUT = 10_000.0  # a sink that takes all of a head's attention; negative: none of it


# ---- from small to large --------------------------------------------------------------------------------------------


def in_format(m: Matrix, format: str) -> Matrix:
    if format_of(m) == format:
        return m
    dense = dequantize(m) if isinstance(m, MXTensor) else m.float()
    return quantize(dense, format) if format in ("mxfp4", "q8") else dense.to(DTYPES[cast(WeightFormat, format)])


def enlarge(small: Weights, config: ModelConfig, layouts: Mapping[str, str], formats: Formats) -> Weights:
    """`small` in the shapes of `config`, in these layouts, its further layers in these formats."""
    experts, vocab = config.experts, config.vocab
    laid = lay_out(small, layouts)
    layers = [_with_experts(layer, experts) for layer in laid.layers]
    still: dict[tuple[str, ...], LayerWeights] = {}  # by the formats of a layer
    for index in range(len(layers), config.layers):
        kinds = tuple(formats.of(role, index) for role in MATRICES)
        if kinds not in still:
            still[kinds] = _still(small, kinds, layouts, experts)
        layers.append(still[kinds])
    return Weights(
        config, _enlarged(laid.embed, vocab, laid.config.vocab), layers, laid.final_norm,
        _enlarged(laid.lm_head, vocab, laid.config.vocab),
    )  # fmt: skip


def _still(small: Weights, kinds: tuple[str, ...], layouts: Mapping[str, str], experts: int) -> LayerWeights:
    """A layer in these formats that leaves the residual as it is."""
    first = small.layers[0]
    matrices: dict[str, Any] = {role: in_format(getattr(first, role), kind) for role, kind in zip(MATRICES, kinds)}
    config = shrunk(small.config, 1, small.config.experts, small.config.vocab)
    one = lay_out(replace(small, config=config, layers=[replace(first, **matrices)]), layouts).layers[0]
    still = {role: _zero(getattr(one, role)) for role in ("o", "o_bias", "down", "down_bias")}
    return _with_experts(replace(one, **still), experts)


def _with_experts(layer: LayerWeights, experts: int) -> LayerWeights:
    have = layer.router.shape[0]
    grown = {
        role: _enlarged(getattr(layer, role), experts, have)
        for role in ("router", "gate_up", "gate_up_bias", "down", "down_bias")
    }
    bias = torch.full((experts,), NEVER, dtype=layer.router_bias.dtype, device=layer.router_bias.device)
    bias[:have] = layer.router_bias
    return replace(layer, **grown, router_bias=bias)


def _enlarged(m: T, size: int, have: int) -> T:
    """`m` with its first dimension enlarged from `have` to `size`, filled with zeros."""
    if size == have:
        return m
    if isinstance(m, Tensor):
        return _padded(m, size, have)
    shape = (size, *m.shape[1:])
    if isinstance(m, DenseTiles):
        return replace(m, data=_padded(m.data, size, have), shape=shape)
    scales = _padded(m.scales, size, have) if m.scales.ndim > 1 else m.scales
    return replace(m, data=_padded(m.data, size, have), scales=scales, shape=shape)


def _padded(t: Tensor, size: int, have: int) -> Tensor:
    assert t.shape[0] * size % have == 0, "whole tiles"
    out = torch.zeros((t.shape[0] * size // have, *t.shape[1:]), dtype=t.dtype, device=t.device)
    out[: t.shape[0]] = t
    return out


def _zero(m: T) -> T:
    if isinstance(m, Tensor):
        return torch.zeros_like(m)
    return replace(m, data=torch.zeros_like(m.data))


def shrunk(config: ModelConfig, layers: int, experts: int, vocab: int) -> ModelConfig:
    return config.with_(layers=layers, layer_kinds=config.layer_kinds[:layers], experts=experts, vocab=vocab)


def random_twin(config: ModelConfig, formats: Formats, device: torch.device, vocab: int) -> Weights:
    """Two layers, one of each kind of attention, random numbers like those of real checkpoints, in these formats."""
    small = shrunk(config, min(2, config.layers), min(EXPERTS, config.experts), min(vocab, config.vocab))
    source = SyntheticSource(small, 1, device, Character(real=True))

    def make(layer: int | None, role: str) -> Matrix:
        drawn = source.make(None if layer is None else layer + LOUD_FROM_LAYER, role)
        return in_format(drawn, formats.of(role, layer)) if role in formats else drawn

    layers = [LayerWeights(*(make(i, role) for role in LAYER_ROLES)) for i in range(small.layers)]  # type: ignore[arg-type]
    return Weights(small, cast(Tensor, make(None, "embed")), layers, cast(Tensor, make(None, "final_norm")),
                   make(None, "lm_head"))  # fmt: skip


# ---- known numbers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A matrix [N, K] of all the codes that its format has."""

    matrix: Matrix

    def column(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """(values, units) float64 [C, N] of some columns: a unit is one of the group's scale."""
        m = self.matrix
        if isinstance(m, Tensor):
            values = m[:, columns].T.double()
            return values, torch.full_like(values, 2.0**-3)
        scales = m.scales[:, columns // 32].T
        if m.format == "mxfp4":
            units = torch.exp2(scales.double() - 127)
            return e2m1.decode(self.codes(columns)).double() * units, units
        return m.data[:, columns].T.double() * scales.double(), scales.double() * 8

    def codes(self, columns: Tensor) -> Tensor:
        """[C, N]: the codes of MXFP4, or the stored integers."""
        m = self.matrix
        if isinstance(m, Tensor):
            return torch.zeros((len(columns), m.shape[0]), dtype=torch.int64, device=m.device)
        if m.format == "mxfp4":
            return (m.data[:, columns // 2] >> (4 * (columns % 2)).to(torch.uint8)).T & 15
        return m.data[:, columns].T.long()

    def say(self, row: int, column: int) -> str:
        m = self.matrix
        at = torch.tensor([column], device=m.device)
        value, unit = (float(t[0, row]) for t in self.column(at))
        if isinstance(m, Tensor):
            return f"{value:.6g}"
        code = int(self.codes(at)[0, row])
        if m.format == "mxfp4":
            return f"code {code:04b} ({e2m1.VALUES[code]:g}) x 2^{int(m.scales[row, column // 32]) - 127}"
        return f"{code} x {unit / 8:.6g}"


def draw(format: str, n: int, k: int, low: int, high: int, device: torch.device, seed: int) -> Drawn:
    """Every code equally often; scales are powers of two from 2^low to 2^high."""
    g = torch.Generator(device).manual_seed(seed)
    if format not in ("mxfp4", "q8"):
        values = torch.randn((n, k), generator=g, device=device).to(DTYPES[cast(WeightFormat, format)])
        return Drawn(values)
    groups = (n, -(-k // 32))
    exponents = torch.randint(low, high + 1, groups, generator=g, device=device)
    if format == "mxfp4":
        data = torch.randint(0, 256, (n, groups[1] * 16), generator=g, device=device, dtype=torch.uint8)
        return Drawn(MXTensor(data, (exponents + 127).to(torch.uint8), (n, k), "mxfp4"))
    data = torch.randint(-127, 128, (n, groups[1] * 32), generator=g, device=device, dtype=torch.int8)
    return Drawn(MXTensor(data, torch.exp2(exponents - 5.0).half(), (n, k), "q8"))  # 32 of 127 are 1


def diagonal(format: str, n: int, k: int, value: float, device: torch.device) -> Matrix:
    return in_format(torch.eye(n, k, device=device).bfloat16() * value, format)


@dataclass(frozen=True)
class Probe:
    """A small model and its expected logits, [tokens, outputs], with a unit for each."""

    name: str  # the matrix under test
    small: Weights
    tokens: Tensor  # int64
    want: Tensor
    unit: Tensor
    element: Callable[[int, int], tuple[int, int]]  # (token, output) -> row and column of the matrix
    drawn: Drawn


def probes(config: ModelConfig, formats: Mapping[str, str], device: torch.device, columns: int = 64) -> Iterator[Probe]:
    """One after the other: lm_head, gate and up, down, o, and the values of qkv."""
    c = config
    at = torch.tensor(_spread(min(c.hidden, c.intermediate), columns), device=device)
    near = torch.tensor(_spread(min(c.hidden, c.kv_dim), columns), device=device)  # those that a value can have
    count = min(len(at), len(near))
    at, near = at[:count], near[:count]
    rms = (AMPLITUDE**2 / c.hidden + c.norm_eps) ** 0.5
    scale = torch.tensor(rms / AMPLITUDE).bfloat16()  # the norm's weight: what enters a product is 1
    h = AMPLITUDE / rms * float(scale)
    vocab = max(-(-c.hidden // 16) * 16, 3 * count)
    if vocab > c.vocab or c.vocab % 16:
        return  # a toy: its vocabulary cannot name every row

    def eye(role: str, n: int, k: int, value: float = 1.0) -> Matrix:
        return diagonal(formats[role], n, k, value, device)

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.bfloat16, device=device)

    embed = zeros(vocab, c.hidden)
    for first, (places, sign) in enumerate(((at, 1), (at, -1), (near, 1))):
        embed[torch.arange(first * count, (first + 1) * count), places] = sign * AMPLITUDE
    norms = torch.full((c.hidden,), float(scale), dtype=torch.bfloat16, device=device)

    def still(**changes: WeightTensor) -> LayerWeights:
        """A layer that adds nothing except through the changes."""
        empty = {role: in_format(zeros(*size), formats[role]) for role, size in (
            ("qkv", (c.qkv_dim, c.hidden)), ("o", (c.hidden, c.q_dim)), ("gate_up", (2 * c.intermediate, c.hidden)),
            ("down", (c.hidden, c.intermediate)),
        )} | changes  # fmt: skip
        stacks = {role: _stacked(empty[role], c.top_k) for role in ("gate_up", "down")}
        return LayerWeights(
            attn_norm=norms, qkv=empty["qkv"], qkv_bias=zeros(c.qkv_dim), sinks=cast(Tensor, empty.get("sinks", zeros(
                c.heads) - SHUT)), o=empty["o"], o_bias=zeros(c.hidden), mlp_norm=norms,
            router=zeros(c.top_k, c.hidden), router_bias=zeros(c.top_k), gate_up=stacks["gate_up"],
            gate_up_bias=zeros(c.top_k, 2 * c.intermediate), down=stacks["down"], down_bias=zeros(c.top_k, c.hidden),
        )  # fmt: skip

    ones = torch.ones(c.hidden, dtype=torch.bfloat16, device=device)

    def model(layer: LayerWeights, lm_head: Matrix, rows: int) -> Weights:
        table = embed if rows == vocab else _enlarged(embed, rows, vocab)
        return Weights(shrunk(c, 1, c.top_k, rows), table, [layer], ones, lm_head)

    def behind(name: str, layer: LayerWeights, added: Tensor, element: Callable[[int, int], tuple[int, int]],
               drawn: Drawn, first: int = 0) -> Probe:  # fmt: skip
        """A probe of what a layer adds, through the last norm and a diagonal head; `added` is [tokens, hidden]."""
        tokens = torch.arange(first, first + len(added))
        total = embed[tokens].double() + added
        want = total / (total.square().mean(1, keepdim=True) + c.norm_eps).sqrt()
        unit = want.square().mean(1, keepdim=True).sqrt().expand_as(want)
        head = eye("lm_head", vocab, c.hidden)
        return Probe(name, model(layer, head, vocab), tokens, want, unit, element, drawn)

    both = torch.cat((torch.ones(count), -torch.ones(count))).to(device).double()[:, None]
    col = at.tolist()

    # Within the 16 octaves that fp8 products hold in a row, and past 2^1, where grouped products shift every scale. Of
    # q8 down to float16's smallest number, because a quarter of the scales of gpt-oss-20b's `o` are subnormal.
    wide = (-4, 11) if formats["lm_head"] == "mxfp4" else (-19, 1)
    drawn = draw(formats["lm_head"], c.vocab, c.hidden, *wide, device, 1)
    value, unit = drawn.column(at)
    raw = AMPLITUDE / rms
    yield Probe("lm_head", model(still(), drawn.matrix, c.vocab), torch.arange(count), raw * value, raw * unit,
                lambda token, out: (out, col[token]), drawn)  # fmt: skip

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=c.swiglu_limit), up.clamp(-c.swiglu_limit, c.swiglu_limit)
        return gate * torch.sigmoid(c.swiglu_alpha * gate) * (up + 1)

    def through_down(act: Tensor) -> Tensor:
        out = torch.zeros((act.shape[0], c.hidden), dtype=torch.float64, device=device)
        width = min(c.hidden, c.intermediate)
        out[:, :width] = act[:, :width]
        return out

    kind = formats["gate_up"]
    none = in_format(zeros(c.intermediate, c.hidden), kind)
    down = eye("down", c.hidden, c.intermediate)
    drawn = draw(kind, c.intermediate, c.hidden, -2, 0, device, 2)
    value = torch.cat((drawn.column(at)[0],) * 2)
    yield behind("gate", still(gate_up=_alternating(drawn.matrix, none), down=down),
                 through_down(swiglu(both * h * value, torch.zeros_like(value))),
                 lambda token, out: (out, col[token % count]), drawn)  # fmt: skip
    level = in_format(zeros(c.intermediate, c.hidden) + 2.0, kind)
    drawn = draw(kind, c.intermediate, c.hidden, -2, 0, device, 3)
    value = drawn.column(at)[0]
    yield behind("up", still(gate_up=_alternating(level, drawn.matrix), down=down),
                 through_down(swiglu(torch.full_like(value, 2 * h), h * value)),
                 lambda token, out: (out, col[token]), drawn)  # fmt: skip

    single = eye("gate_up", c.intermediate, c.hidden, 4.0)
    drawn = draw(formats["down"], c.hidden, c.intermediate, -2, 0, device, 4)
    yield behind("down", still(gate_up=_alternating(single, none), down=drawn.matrix),
                 float(swiglu(torch.tensor(4 * h).double(), torch.tensor(0.0).double())) * drawn.column(at)[0],
                 lambda token, out: (out, col[token]), drawn)  # fmt: skip

    # values: one token to a sequence, so attention gives its value back, through the heads that are open
    group = c.heads // c.kv_heads
    value_rows = torch.zeros((c.qkv_dim, c.hidden), dtype=torch.bfloat16, device=device)
    value_rows[c.q_dim + c.kv_dim :] = torch.eye(c.kv_dim, c.hidden, device=device).bfloat16()
    qkv = in_format(value_rows, formats["qkv"])
    sinks = zeros(c.heads) + SHUT
    sinks[[kv * group + kv % group for kv in range(c.kv_heads)]] = -SHUT
    reached = [(k // c.head_dim * group + k // c.head_dim % group) * c.head_dim + k % c.head_dim for k in near.tolist()]
    drawn = draw(formats["o"], c.hidden, c.q_dim, -2, 0, device, 5)
    yield behind("o", still(qkv=qkv, o=drawn.matrix, sinks=sinks),
                 h * drawn.column(torch.tensor(reached, device=device))[0],
                 lambda token, out: (out, reached[token - 2 * count]), drawn, 2 * count)  # fmt: skip

    drawn = draw(formats["qkv"], c.qkv_dim, c.hidden, -2, 0, device, 6)
    # One query head of each group after the other, so that a stream narrower than all heads sees every value.
    heads = torch.arange(c.heads, device=device).reshape(c.kv_heads, group).T.reshape(-1, 1)
    value_columns = (heads * c.head_dim + torch.arange(c.head_dim, device=device)).reshape(-1)[: c.hidden]
    chosen = torch.zeros((c.hidden, c.q_dim), dtype=torch.bfloat16, device=device)
    chosen[torch.arange(len(value_columns), device=device), value_columns] = 1
    rows = c.q_dim + c.kv_dim + value_columns // c.head_dim // group * c.head_dim + value_columns % c.head_dim
    added = torch.zeros((count, c.hidden), dtype=torch.float64, device=device)
    added[:, : len(rows)] = h * drawn.column(at)[0][:, rows]
    row_list = rows.tolist()
    yield behind("values of qkv", still(qkv=drawn.matrix, o=in_format(chosen, formats["o"])), added,
                 lambda token, out: (row_list[min(out, len(row_list) - 1)], col[token]), drawn)  # fmt: skip


def _spread(width: int, columns: int) -> list[int]:
    """Places below `width`: another one of a chunk of 64 each, over many chunks."""
    width_in_chunks = width // 64 * 64 or width
    return sorted({(i * 7 * 64 + i) % width_in_chunks for i in range(columns)})


def _stacked(m: WeightTensor, count: int) -> WeightTensor:
    """A stack with a copy of the matrix for each of `count` experts."""
    if isinstance(m, Tensor):
        return m.expand(count, *m.shape).contiguous()
    assert isinstance(m, MXTensor)
    return replace(
        m, data=m.data.expand(count, *m.data.shape).contiguous(),
        scales=m.scales.expand(count, *m.scales.shape).contiguous(), shape=(count, *m.shape),
    )  # fmt: skip


def _alternating(gate: Matrix, up: Matrix) -> Matrix:
    if isinstance(gate, MXTensor) and isinstance(up, MXTensor):
        return interleave(gate, up)
    assert isinstance(gate, Tensor)
    assert isinstance(up, Tensor)
    return torch.stack((gate, up), 1).flatten(0, 1)
