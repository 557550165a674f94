"""Small random models in the kernel's own layouts, for the emulator and for GPU tests alike."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.formats import tile16
from halfbyte.kernels.cuda.decode.step import KV_DTYPES, StepLayer, StepShape, StepWeights, tile_router
from halfbyte.ops.rope import rope_table, yarn_frequencies


def make_matrix(g: torch.Generator, *size: int, format: str) -> Tensor:
    """Random weights of a scale that keeps activations near one, as tile16 bytes."""
    w = torch.randn(size, generator=g) / size[-1] ** 0.5
    if format == "bf16":
        return tile16.pack_dense(w.bfloat16())
    return tile16.pack(formats.quantize(w, format)).data  # type: ignore[arg-type]


def make_weights(s: StepShape, seed: int = 0) -> StepWeights:
    g = torch.Generator().manual_seed(seed)

    def vector(*size: int, scale: float = 0.3, shift: float = 0.0) -> Tensor:
        return (torch.randn(size, generator=g) * scale + shift).bfloat16()

    layers = [
        StepLayer(
            qkv=make_matrix(g, s.qkv_dim, s.hidden, format=s.qkv),
            o=make_matrix(g, s.hidden, s.q_dim, format=s.o),
            gate_up=make_matrix(g, s.experts, 2 * s.intermediate, s.hidden, format="mxfp4"),
            down=make_matrix(g, s.experts, s.hidden, s.intermediate, format="mxfp4"),
            qkv_bias=vector(s.qkv_dim), o_bias=vector(s.hidden), gate_up_bias=vector(s.experts, 2 * s.intermediate),
            down_bias=vector(s.experts, s.hidden), attn_norm=vector(s.hidden, shift=1.0),
            mlp_norm=vector(s.hidden, shift=1.0), router=tile_router(vector(s.experts, s.hidden, scale=s.hidden**-0.5)),
            router_bias=vector(s.experts), sinks=vector(s.heads, scale=1.0),
        )
        for _ in range(s.layers)
    ]  # fmt: skip
    return StepWeights(
        layers, vector(s.vocab, s.hidden, scale=1.0), vector(s.hidden, shift=1.0),
        make_matrix(g, s.vocab, s.hidden, format=s.lm_head),
    )  # fmt: skip


def make_rope(positions: int) -> Tensor:
    inverse, temperature = yarn_frequencies(64, 150000.0, 32.0, 4096, 32.0, 1.0, False)
    return torch.cat(rope_table(inverse, temperature, torch.arange(positions)), -1).contiguous()


def make_cache(s: StepShape, sequences: int, blocks: int, seed: int = 1) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A pool full of random keys and values, with NaN in every page no table names, and two shuffled tables."""
    g = torch.Generator().manual_seed(seed)
    count = 2 * sequences * blocks
    pool = torch.randn((count + 3, (s.layers + 1) // 2, 2, s.kv_heads, 64, 64), generator=g)
    order = torch.randperm(count, generator=g).int() + 1
    pool[count + 1 :] = float("nan")
    return pool.to(KV_DTYPES[s.kv]), (
        order[: count // 2].view(sequences, blocks).contiguous(),
        order[count // 2 :].view(sequences, blocks),
    )


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())
