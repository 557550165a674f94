"""Small specs, weights and steps for the interpreter, and the comparison every test makes.

A phase is bound beside the reference phases of the operations it covers; both run the same step on copies of the same
activations and the same cache. The interpreter takes a millisecond per program and operation: shapes are small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.ops.attention import STORE_DTYPES
from halfbyte.ops.rope import yarn_frequencies
from halfbyte.plan import reference
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Binding, Phase, Spec
from halfbyte.plan.step import Step

FEATURES = {
    "attention": frozenset({"sinks", "window", "gqa"}), "rope": frozenset({"yarn"}), "qkv": frozenset({"bias"}),
    "o": frozenset({"bias"}), "router": frozenset({"bias"}),
    "moe": frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"}),
}  # fmt: skip


def make_spec(**changes: Any) -> Spec:
    """hidden and intermediate are odd multiples of 32, as 2880 is of 64: no K tile of 64 or 128 fits them."""
    values: dict[str, Any] = {
        "layers": 1, "hidden": 160, "intermediate": 96, "experts": 8, "top_k": 4, "heads": 8, "kv_heads": 2,
        "head_dim": 32, "vocab": 96, "window": 128, "norm_eps": 1e-5, "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
        "formats": {
            "qkv": "bf16", "o": "bf16", "gate_up": "mxfp4", "down": "mxfp4", "lm_head": "bf16", "embed": "bf16",
        },
        "features": FEATURES, "dtype": "bf16", "activation": "bf16", "kv_dtype": "bf16", "page_size": 64,
    }  # fmt: skip
    return Spec(**(values | changes))


def matrix(shape: Sequence[int], kind: str, generator: torch.Generator, layout: str = "plain") -> Any:
    dense = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
    if kind == "bf16":
        return dense.bfloat16()
    return formats.convert(formats.quantize(dense, kind), layout)


def make_weights(spec: Spec, seed: int = 0, layout: str = "plain") -> SimpleNamespace:
    """One layer's roles and the model's, in one namespace; the reference reads any layout."""
    g = torch.Generator().manual_seed(seed)
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    e, h, i = spec.experts, spec.hidden, spec.intermediate

    def normal(*shape: int, std: float = 0.1, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * std + mean).bfloat16()

    def held(role: str, *shape: int) -> Any:
        kind = spec.formats[role]
        return matrix(shape, kind, g, layout if kind == "mxfp4" else "plain")

    return SimpleNamespace(
        attn_norm=normal(h, mean=1.0), mlp_norm=normal(h, mean=1.0), final_norm=normal(h, mean=1.0),
        qkv=held("qkv", q + 2 * kv, h), qkv_bias=normal(q + 2 * kv), sinks=normal(spec.heads, std=1.5, mean=1.0),
        o=held("o", h, q), o_bias=normal(h), router=normal(e, h, std=h**-0.5), router_bias=normal(e, std=0.05),
        gate_up=held("gate_up", e, 2 * i, h), gate_up_bias=normal(e, 2 * i, std=1.0),
        down=held("down", e, h, i), down_bias=normal(e, h), embed=normal(spec.vocab, h, std=1.0),
        lm_head=held("lm_head", spec.vocab, h),
    )  # fmt: skip


def make_step(spec: Spec, lengths: Sequence[tuple[int, int]], *, seed: int = 0, logit_rows: Sequence[int] = ()) -> Step:
    """A ragged step: (tokens already in the cache, new tokens) of each sequence, on scattered pages from 1 up."""
    g = torch.Generator().manual_seed(seed)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    rows = [(s, past + i) for s, (past, new) in enumerate(lengths) for i in range(new)]
    blocks = max(-(-(past + new) // spec.page_size) for past, new in lengths) + 1
    pages = torch.randperm(2 * len(lengths) * blocks, generator=g).int().view(2, len(lengths), blocks) + 1
    starts = [0]
    for _, new in lengths:
        starts.append(starts[-1] + new)
    return Step(
        tokens=torch.randint(0, spec.vocab, (len(rows),), generator=g, dtype=torch.int32),
        positions=ints([p for _, p in rows]), query_start=ints(starts), kv_lens=ints([a + b for a, b in lengths]),
        row_sequence=ints([s for s, _ in rows]), block_tables={"full": pages[0], "sliding": pages[1]},
        logit_rows=ints(logit_rows or [len(rows) - 1]), max_kv_len=max(a + b for a, b in lengths),
    )  # fmt: skip


def make_pool(spec: Spec, step: Step, seed: int = 0, layers: int = 2) -> Tensor:
    """A cache full of numbers: what a position holds is whatever its page holds."""
    pages = int(max(t.max() for t in step.block_tables.values())) + 1
    g = torch.Generator().manual_seed(seed)
    shape = (pages, layers, 2, spec.kv_heads, spec.page_size, spec.head_dim)
    return torch.randn(shape, generator=g).to(STORE_DTYPES[spec.kv_dtype])


def bind_all(
    phases: Sequence[Phase], spec: Spec, weights: Any, pool: Tensor | None, kind: str, index: int
) -> list[Any]:
    rope = yarn_frequencies(spec.head_dim, 150000.0, 32.0, 4096, 32.0, 1.0, False)
    return [
        p.bind(Binding(spec, weights, kind, index, rope, lambda: pool, {}, 0))  # type: ignore[arg-type,return-value]
        for p in phases
    ]


def run_both(
    phase: Phase, spec: Spec, weights: Any, step: Step, inputs: Mapping[str, Tensor], *,
    pool: Tensor | None = None, kind: str = "full", index: int = 1,
) -> tuple[Activations, Activations, Tensor | None, Tensor | None]:  # fmt: skip
    """(activations of the phase, of the reference, pool of the phase, pool of the reference)."""
    mine, theirs = Activations(**inputs), Activations(**inputs)
    pool_a = None if pool is None else pool.clone()
    pool_b = None if pool is None else pool.clone()
    for launch in bind_all([phase], spec, weights, pool_a, kind, index):
        launch(step, mine)
    oracle = [p for op in phase.covers for p in reference.PHASES if p.covers == (op,)]
    for launch in bind_all(oracle, spec, weights, pool_b, kind, index):
        launch(step, theirs)
    return mine, theirs, pool_a, pool_b


def error(out: Tensor, expected: Tensor) -> float:
    out, expected = out.double(), expected.double()
    assert out.shape == expected.shape, (out.shape, expected.shape)
    assert torch.isfinite(out).all(), f"not finite at {(~torch.isfinite(out)).nonzero()[0].tolist()}"
    return float((out - expected).norm() / expected.norm().clamp_min(1e-30))


def close(out: Tensor, expected: Tensor, bound: float) -> None:
    """Relative error of the whole, and the worst element with its place in the message."""
    found = error(out, expected)
    worst = (out.double() - expected.double()).abs()
    at = [int(i) for i in torch.unravel_index(worst.argmax(), worst.shape)]
    assert found <= bound, f"error {found:.2e} > {bound:.0e}; worst {float(worst.max()):.2e} at {at}"
