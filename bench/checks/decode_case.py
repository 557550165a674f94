"""The decode step over random weights of a model's true shapes, with a cache full of random pages.

Weights are random bytes straight in the kernel's layout, of the full size, so nothing sits in an L2 cache and routing
is spread. Tests build the same case with tiny shapes on a CPU. Nothing here compares or measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats import tile16
from halfbyte.kernels.cuda.decode.shape import KV_DTYPES, PAGE, StepShape
from halfbyte.kernels.cuda.decode.step import DecodeStep, StepLayer, StepWeights, tile_router
from halfbyte.kernels.cuda.device.host import KernelMachine, gpu
from halfbyte.model.config import NAMED
from halfbyte.ops.rope import rope_table, yarn_frequencies

DENSE = {"mxfp4": "mxfp4", "q8": "q8", "checkpoint": "bf16"}  # label of a receipt -> format of qkv, o and lm_head


def shape_of(model: str, formats: str, rows: int = 1, **changes: Any) -> StepShape:
    """The step of a named model with its dense layers in `formats`; `changes` are fields of StepShape."""
    c, dense = NAMED[model], DENSE[formats]
    shape = StepShape(
        c.hidden, c.intermediate, c.layers, c.experts, c.heads, c.kv_heads, c.vocab, c.window, rows,
        qkv=dense, o=dense, lm_head=dense,
    )  # fmt: skip
    return replace(shape, **changes)


def random_matrix(*size: int, format: str, device: str | torch.device = "cuda") -> Tensor:
    """tile16 bytes of a matrix [..., N, K] whose values are about normal with variance 1/K."""
    *lead, n, k = size
    out = torch.empty((*lead, *tile16.tile_shape(n, k, format)), dtype=torch.uint8, device=device)
    if format == "bf16":
        out.view(torch.bfloat16).normal_(0, k**-0.5)
        return out
    flat = out.view(-1)
    flat[: flat.numel() // 8 * 8].view(torch.int64).random_(-(2**63), None)
    if format == "mxfp4":  # the root mean square of a random code is 2.93
        out[..., 512:] = torch.randint(119, 121, out[..., 512:].shape, dtype=torch.uint8, device=device)
    else:
        scale = (torch.rand((*out.shape[:-1], 32), device=device) + 0.5) * (k**-0.5 / 74)
        out[..., 1024:] = scale.half().view(torch.uint8)
    return out


def random_weights(s: StepShape, device: str | torch.device = "cuda") -> StepWeights:
    def vector(*size: int, scale: float = 0.1, shift: float = 0.0) -> Tensor:
        return torch.empty(size, device=device).normal_(shift, scale).bfloat16()

    def matrix(*size: int, format: str) -> Tensor:
        return random_matrix(*size, format=format, device=device)

    layers = [
        StepLayer(
            qkv=matrix(s.qkv_dim, s.hidden, format=s.qkv),
            o=matrix(s.hidden, s.q_dim, format=s.o),
            gate_up=matrix(s.experts, 2 * s.intermediate, s.hidden, format="mxfp4"),
            down=matrix(s.experts, s.hidden, s.intermediate, format="mxfp4"),
            qkv_bias=vector(s.qkv_dim), o_bias=vector(s.hidden), gate_up_bias=vector(s.experts, 2 * s.intermediate),
            down_bias=vector(s.experts, s.hidden), attn_norm=vector(s.hidden, shift=1.0),
            mlp_norm=vector(s.hidden, shift=1.0),
            router=tile_router(vector(s.experts, s.hidden, scale=2 * s.hidden**-0.5)),
            router_bias=vector(s.experts), sinks=vector(s.heads, scale=1.0),
        )
        for _ in range(s.layers)
    ]  # fmt: skip
    return StepWeights(
        layers, vector(s.vocab, s.hidden, scale=1.0), vector(s.hidden, shift=1.0),
        matrix(s.vocab, s.hidden, format=s.lm_head),
    )  # fmt: skip


def with_dense_formats(weights: StepWeights, s: StepShape) -> StepWeights:
    """The weights with other dense layers; their experts are generated once."""
    device = weights.embed.device
    layers = [
        replace(
            layer,
            qkv=random_matrix(s.qkv_dim, s.hidden, format=s.qkv, device=device),
            o=random_matrix(s.hidden, s.q_dim, format=s.o, device=device),
        )
        for layer in weights.layers
    ]
    head = random_matrix(s.vocab, s.hidden, format=s.lm_head, device=device)
    return replace(weights, layers=layers, lm_head=head)


def rope_of(positions: int, device: str | torch.device = "cuda") -> Tensor:
    inverse, temperature = yarn_frequencies(64, 150000.0, 32.0, 4096, 32.0, 1.0, False)
    return torch.cat(rope_table(inverse, temperature, torch.arange(positions)), -1).contiguous().to(device)


@dataclass
class DecodeCase:
    """One set of weights and one cache, for several kernels and contexts."""

    weights: StepWeights
    pool: Tensor
    tables: tuple[Tensor, Tensor]  # sliding, full
    rope: Tensor

    @classmethod
    def make(cls, s: StepShape, weights: StepWeights, context: int, sequences: int) -> DecodeCase:
        """Pages in random order, full of random keys and values, for `sequences` of up to `context` tokens."""
        device = weights.embed.device
        blocks = context // PAGE + 4
        count = 2 * sequences * blocks
        size = (count + 1, (s.layers + 1) // 2, 2, s.kv_heads, PAGE, 64)
        pool = torch.empty(size, dtype=torch.bfloat16, device=device).normal_().to(KV_DTYPES[s.kv])
        order = torch.randperm(count, device=device).int() + 1
        tables = order[: count // 2].view(sequences, blocks), order[count // 2 :].view(sequences, blocks)
        return cls(weights, pool, tables, rope_of(blocks * PAGE, device))

    def first_layers(self, layers: int) -> DecodeCase:
        """The model cut after so many layers, over this case's cache."""
        return replace(self, weights=replace(self.weights, layers=list(self.weights.layers)[:layers]))

    def step(self, s: StepShape, machine: KernelMachine | None = None) -> DecodeStep:
        return DecodeStep(
            s, self.weights, machine or gpu(), pool=self.pool, tables=self.tables, rope=self.rope, advance=True
        )


def place_rows(step: DecodeStep, context: int, row_sequences: Sequence[int] | None = None) -> None:
    """Random tokens at the end of their contexts; rows of one sequence stand one after the other."""
    rows = step.shape.rows
    row_sequences = list(row_sequences or range(rows))
    count: dict[int, int] = {}
    positions = []
    for sequence in row_sequences:
        positions.append(context + count.get(sequence, 0))
        count[sequence] = count.get(sequence, 0) + 1
    step.tokens.copy_(torch.randint(0, step.shape.vocab, (rows,), dtype=torch.int32))
    step.positions.copy_(torch.tensor(positions, dtype=torch.int32))
    step.row_seq.copy_(torch.tensor(row_sequences, dtype=torch.int32))
