"""The grouped products against the specification, through the emulator: addressing, widening, grouping, epilogues."""

from __future__ import annotations

import ctypes

import pytest
import torch

from halfbyte import formats, ops
from halfbyte.errors import PlanError
from halfbyte.formats import MXTensor, layouts, tile16
from halfbyte.kernels.cuda.device.host import Workspace
from halfbyte.kernels.cuda.prefill.builds import (
    FP8_TILE,
    TILES,
    GroupedProductArgs,
    GroupedRowsArgs,
    GroupedShape,
    rows_build,
)
from halfbyte.kernels.cuda.prefill.experts import GroupedExperts
from halfbyte.kernels.cuda.prefill.fp8 import Fp8Dense, Fp8Experts
from halfbyte.kernels.cuda.prefill.products import Dense, Rotation, columns_cap
from halfbyte.ops.linear import round_activation
from halfbyte.ops.moe import moe
from halfbyte.ops.norm import rms_norm
from halfbyte.ops.rope import rope, rope_table, yarn_frequencies
from tests.kernels.cuda.emulator import Emulator, sizes

assert ops


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(got).all()
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    assert error <= bound, error


def mxfp4(shape: tuple[int, ...], seed: int) -> tuple[MXTensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    plain = formats.quantize(torch.randn(shape, generator=g) / shape[-1] ** 0.5, "mxfp4")
    return layouts.convert(plain, "tile16"), formats.dequantize(plain, torch.float32)


@pytest.mark.parametrize(
    ("form", "shape", "swiglu"),
    [("mxfp4", shape, swiglu) for shape in TILES if shape != FP8_TILE for swiglu in (False, True)]
    + [(form, shape, False) for form in ("q8", "bf16") for shape in ("m256n64", "m256n128")],
)
def test_mirrored_structs(form: str, shape: str, swiglu: bool) -> None:
    v = GroupedShape(form, shape, swiglu)
    assert sizes(v.program(), 3) == [ctypes.sizeof(GroupedProductArgs), v.shared_bytes, v.threads]
    assert v.shared_bytes <= 232_448
    assert sizes(rows_build("pack_rows").program, 1) == [ctypes.sizeof(GroupedRowsArgs)]


def made(w: torch.Tensor, form: str) -> tuple[torch.Tensor | MXTensor, torch.Tensor]:
    """A matrix as the products read it, and as float32 what they should make of it."""
    if form == "bf16":
        return tile16.pack_dense(w.bfloat16()), w.bfloat16().float()
    plain = formats.quantize(w, "mxfp4" if form == "mxfp4" else "q8")
    return layouts.convert(plain, "tile16"), formats.dequantize(plain, torch.float32)


CASES = [
    ("mxfp4", 1, 64, 64, None), ("mxfp4", 9, 192, 192, None), ("mxfp4", 64, 320, 128, None),
    ("mxfp4", 70, 448, 128, None), ("mxfp4", 150, 64, 192, None), ("mxfp4", 100, 448, 192, "m384n88"),
    ("q8", 9, 192, 192, None), ("q8", 70, 320, 128, None), ("q8", 90, 448, 64, "m384n88"), ("bf16", 9, 192, 192, None),
    ("bf16", 70, 320, 128, None),
]  # fmt: skip


@pytest.mark.parametrize(("form", "rows", "n", "k", "shape"), CASES)
def test_dense(form: str, rows: int, n: int, k: int, shape: str | None) -> None:
    g = torch.Generator().manual_seed(rows)
    w = torch.randn((n, k), generator=g) / k**0.5
    weights, dense = made(w, form)
    bias = torch.randn(n, generator=g)
    x, residual = torch.randn((rows + 3, k), generator=g), torch.randn((rows, n), generator=g)
    norm = torch.rand(k, generator=g).to(torch.bfloat16)
    workspace = Workspace(Emulator(5), {}, torch.device("cpu"))
    h = round_activation(rms_norm(x, norm, 1e-5), "bf16")
    select = torch.randperm(rows + 3, generator=g)[:rows].to(torch.int32)
    layer = Dense(workspace, weights, bias, "qkv", shape)
    got = layer.run(x, norm=norm, eps=1e-5, select=select, residual=residual)
    want = h[select.long()].double() @ dense.double().T + bias + residual
    close(got, want, 1e-3)  # a bf16 rounding of h may fall either way
    got = Dense(workspace, weights, None, "lm_head", shape).run(h[:rows].to(torch.bfloat16))
    close(got, h[:rows].double() @ dense.double().T, 3e-4 if form == "q8" else 1e-6)  # q8 * scale keeps 11 bits


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "hidden", "inner", "skew", "shape"),
    [(9, 8, 4, 128, 64, 0.0, "m256n64"), (33, 4, 2, 128, 192, 2.0, "m256n64"), (64, 8, 4, 192, 128, 3.0, "m256n64"),
     (110, 4, 4, 128, 192, 0.0, "m256n128"), (150, 2, 1, 64, 320, 1.0, "m256n128"),
     (20, 4, 3, 128, 192, 0.0, "m256n128"), (120, 4, 2, 128, 576, 1.0, "m384n88"),
     (60, 4, 2, 128, 320, 1.0, "m384n88"), (75, 2, 2, 192, 64, 0.0, "m256n128"), (10, 8, 4, 64, 448, 0.0, "m384n88"),
     (150, 2, 2, 64, 576, 1.0, "m256n128"), (60, 4, 2, 192, 448, 1.0, "m384n48"), (90, 2, 2, 128, 192, 0.0, "m384n48"),
     (70, 4, 2, 64, 192, 0.3, "m384n48")],
)  # fmt: skip
@pytest.mark.parametrize("wide_ids", [False, True])
def test_experts(
    rows: int, experts: int, top_k: int, hidden: int, inner: int, skew: float, shape: str, wide_ids: bool
) -> None:
    g = torch.Generator().manual_seed(rows)
    gate_up, gate_up_dense = mxfp4((experts, 2 * inner, hidden), 1)
    down, down_dense = mxfp4((experts, hidden, inner), 2)
    gate_up_bias = torch.randn((experts, 2 * inner), generator=g).to(torch.bfloat16)
    down_bias = torch.randn((experts, hidden), generator=g).to(torch.bfloat16)
    logits = torch.randn((rows, experts), generator=g) + skew * torch.arange(experts)
    weights, ids = logits.softmax(-1).topk(top_k)
    h = torch.randn((rows, hidden), generator=g)
    h = (h if wide_ids else h.to(torch.bfloat16)) * 3
    x = torch.randn((rows, hidden), generator=g)
    workspace = Workspace(Emulator(5, seed=rows), {}, torch.device("cpu"))
    layer = GroupedExperts(workspace, gate_up, gate_up_bias, down, down_bias, limit=7.0, alpha=1.702, tile=shape)
    got = layer.run(h, ids if wide_ids else ids.to(torch.int32), weights.contiguous(), x)

    def project(dense: torch.Tensor, bias: torch.Tensor, e: int, y: torch.Tensor) -> torch.Tensor:
        return round_activation(y, "bf16") @ dense[e].T + bias[e].float()

    want = x + moe(
        h.float(), ids, weights,
        lambda e, y: project(gate_up_dense, gate_up_bias, e, y), lambda e, y: project(down_dense, down_bias, e, y),
        7.0, 1.702,
    )  # fmt: skip
    close(got - x, want - x, 2e-3)


@pytest.mark.parametrize(
    ("form", "rows", "k", "activation"),
    [("mxfp4", 150, 192, "bf16"), ("q8", 70, 64, "bf16"), ("bf16", 70, 128, "bf16"), ("mxfp4", 150, 128, "fp8"),
     ("mxfp4", 70, 64, "fp8"), ("mxfp4", 9, 64, "bf16")],
)  # fmt: skip
def test_rotation_and_pages(form: str, rows: int, k: int, activation: str) -> None:
    """Queries as rotated rows, keys and values in their pages, and nothing else in the pool touched."""
    g, heads, kv_heads, page = torch.Generator().manual_seed(rows), 3, 2, 64
    n = (heads + 2 * kv_heads) * 64
    w = torch.randn((n, k), generator=g) / k**0.5
    weights, dense = made(w, form)
    bias, h = torch.randn(n, generator=g), torch.randn((rows, k), generator=g).bfloat16()
    positions = torch.arange(30, 30 + rows)
    cos, sin = rope_table(*yarn_frequencies(64, 150000.0, 32.0, 4096, 32.0, 1.0, False), positions)
    pool = torch.zeros((5, 3, 2, kv_heads, page, 64), dtype=torch.bfloat16)
    table = torch.tensor([4, 1, 3])
    kind = Fp8Dense if activation == "fp8" else Dense
    layer = kind(Workspace(Emulator(5), {}, torch.device("cpu")), weights, bias, "qkv")
    to = Rotation(
        torch.stack((cos, sin), -1), table[positions // page] * pool.stride(0) + positions % page * 64,
        pool[0, 1].data_ptr(), pool.stride(2), heads, kv_heads,
    )  # fmt: skip
    q = layer.rotate(layer.pack(h), rows, to)
    want = (round_activation(h, activation) @ dense.T + bias).view(rows, -1, 64)
    close(q.float(), rope(want[:, :heads], cos, sin), 4e-3)
    found = pool[table[positions // page], 1, :, :, positions % page].float()
    close(found[:, 0], rope(want[:, heads : heads + kv_heads], cos, sin), 4e-3)
    close(found[:, 1], want[:, heads + kv_heads :], 4e-3)
    pool[table[positions // page], 1, :, :, positions % page] = 0
    assert not pool.any()


@pytest.mark.parametrize("fp8", [False, True])
def test_sums_packed_in_one_pass_are_those_of_two(fp8: bool) -> None:
    g, rows, experts, hidden, inner = torch.Generator().manual_seed(1), 70, 4, 192, 128
    workspace = Workspace(Emulator(4), {}, torch.device("cpu"))
    gate_up, down, qkv = (
        mxfp4(size, 3)[0] for size in ((experts, 2 * inner, hidden), (experts, hidden, inner), (192, hidden))
    )
    bias = torch.randn((experts, 2 * inner), generator=g), torch.randn((experts, hidden), generator=g)
    moe = (Fp8Experts if fp8 else GroupedExperts)(workspace, gate_up, bias[0], down, bias[1], limit=7.0, alpha=1.702)
    dense = (Fp8Dense if fp8 else Dense)(workspace, qkv, None, "qkv")
    weights, ids = torch.randn((rows, experts), generator=g).softmax(-1).topk(3)
    h, x = torch.randn((rows, hidden), generator=g).bfloat16(), torch.randn((rows, hidden), generator=g)
    norm = torch.rand(hidden, generator=g).to(torch.bfloat16)
    pending = moe.leave(h, ids.to(torch.int32), weights.contiguous(), x)
    want = pending.complete()
    once = dense.run(want, norm=norm, eps=1e-5)
    got, packed = dense.sum_and_pack(pending, norm=norm, eps=1e-5)
    assert torch.equal(got, want)
    assert torch.equal(dense.multiply(packed, rows), once)


def test_experts_are_taken_by_their_rows() -> None:
    """Those with the most first, ties in their own order; slots stay where they were."""
    gate_up, _ = mxfp4((6, 128, 64), 1)
    down, _ = mxfp4((6, 64, 64), 2)
    ids = torch.tensor([[2, 5], [5, 1], [2, 5], [4, 1], [5, 0]], dtype=torch.int32)
    buffers: dict[str, torch.Tensor] = {}
    layer = GroupedExperts(
        Workspace(Emulator(2), buffers, torch.device("cpu")), gate_up, torch.zeros(6, 128), down, torch.zeros(6, 64),
        limit=7.0, alpha=1.702,
    )  # fmt: skip
    layer.run(torch.ones(5, 64), ids, torch.ones(5, 2), torch.zeros(5, 64))
    starts, counts, order = buffers["grouped.table.small"].view(3, 6).tolist()
    assert order == [5, 1, 2, 0, 4, 3]
    assert counts == [4, 2, 2, 1, 1, 0]
    assert starts == [32, 8, 16, 0, 24, 24]


def test_columns_cap_is_a_width_the_kernel_has() -> None:
    for rows in (65, 100, 512, 2048, 8192):
        for m_tiles in (45, 80, 90):
            for shape in TILES.values():
                assert columns_cap(rows, m_tiles, 132, shape) <= shape.columns


def test_refuses_other_layouts() -> None:
    workspace = Workspace(Emulator(1), {}, torch.device("cpu"))
    plain = formats.quantize(torch.randn(64, 64), "mxfp4")
    with pytest.raises(PlanError, match="tile16"):
        Dense(workspace, plain, None, "qkv")
