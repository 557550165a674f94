"""The grouped products against the specification, through the emulator: addressing, widening, grouping, epilogues."""

from __future__ import annotations

import pytest
import torch
from grouped_emulator import Emulator, build

from halfbyte import formats, ops
from halfbyte.errors import PlanError
from halfbyte.formats import MXTensor, layouts, tile16
from halfbyte.kernels.cuda.grouped import (
    ROWS_PROGRAM,
    SHAPES,
    Dense,
    Experts,
    ProductArgs,
    Room,
    RowsArgs,
    Variant,
    columns_cap,
)  # fmt: skip
from halfbyte.kernels.launch import Program
from halfbyte.ops.linear import round_activation
from halfbyte.ops.moe import moe
from halfbyte.ops.norm import rms_norm

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
    [("mxfp4", shape, swiglu) for shape in SHAPES if shape != "vast" for swiglu in (False, True)]
    + [(form, shape, False) for form in ("q8", "bf16") for shape in ("narrow", "wide")],
)
def test_mirrored_structs(form: str, shape: str, swiglu: bool) -> None:
    import ctypes

    v = Variant(form, shape, swiglu)
    sizes = [build(v.program()).hb_grouped_size(i) for i in range(3)]
    assert sizes == [ctypes.sizeof(ProductArgs), v.shared_bytes, v.threads]
    assert v.shared_bytes <= 232_448
    assert build(Program(ROWS_PROGRAM, "rows")).hb_rows_size() == ctypes.sizeof(RowsArgs)


CASES = [
    ("mxfp4", 1, 64, 64, None), ("mxfp4", 9, 192, 192, None), ("mxfp4", 64, 320, 128, None),
    ("mxfp4", 70, 448, 128, None), ("mxfp4", 150, 64, 192, None), ("mxfp4", 100, 448, 192, "broad"),
    ("q8", 9, 192, 192, None), ("q8", 70, 320, 128, None), ("q8", 90, 448, 64, "broad"), ("bf16", 9, 192, 192, None),
    ("bf16", 70, 320, 128, None),
]  # fmt: skip


@pytest.mark.parametrize(("form", "rows", "n", "k", "shape"), CASES)
def test_dense(form: str, rows: int, n: int, k: int, shape: str | None) -> None:
    g = torch.Generator().manual_seed(rows)
    w = torch.randn((n, k), generator=g) / k**0.5
    if form == "bf16":
        weights, dense = tile16.pack_dense(w.bfloat16()), w.bfloat16().float()
    else:
        plain = formats.quantize(w, "mxfp4" if form == "mxfp4" else "q8")
        weights, dense = layouts.convert(plain, "tile16"), formats.dequantize(plain, torch.float32)
    bias = torch.randn(n, generator=g)
    x, residual = torch.randn((rows + 3, k), generator=g), torch.randn((rows, n), generator=g)
    norm = torch.rand(k, generator=g).to(torch.bfloat16)
    room = Room(Emulator(5), {}, torch.device("cpu"))
    h = round_activation(rms_norm(x, norm, 1e-5), "bf16")
    select = torch.randperm(rows + 3, generator=g)[:rows].to(torch.int32)
    layer = Dense(room, weights, bias, "qkv", shape)
    got = layer.run(x, norm=norm, eps=1e-5, select=select, residual=residual)
    want = h[select.long()].double() @ dense.double().T + bias + residual
    close(got, want, 1e-3)  # a bf16 rounding of h may fall either way
    got = Dense(room, weights, None, "lm_head", shape).run(h[:rows].to(torch.bfloat16))
    close(got, h[:rows].double() @ dense.double().T, 3e-4 if form == "q8" else 1e-6)  # q8 * scale keeps 11 bits


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "hidden", "inner", "skew", "shape"),
    [(9, 8, 4, 128, 64, 0.0, "narrow"), (33, 4, 2, 128, 192, 2.0, "narrow"), (64, 8, 4, 192, 128, 3.0, "narrow"),
     (110, 4, 4, 128, 192, 0.0, "wide"), (150, 2, 1, 64, 320, 1.0, "wide"), (20, 4, 3, 128, 192, 0.0, "wide"),
     (120, 4, 2, 128, 576, 1.0, "broad"),
     (60, 4, 2, 128, 320, 1.0, "broad"), (75, 2, 2, 192, 64, 0.0, "wide"), (10, 8, 4, 64, 448, 0.0, "broad"),
     (150, 2, 2, 64, 576, 1.0, "wide")],
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
    room = Room(Emulator(5, seed=rows), {}, torch.device("cpu"))
    layer = Experts(room, gate_up, gate_up_bias, down, down_bias, limit=7.0, alpha=1.702, shape=shape)
    got = layer.run(h, ids if wide_ids else ids.to(torch.int32), weights.contiguous(), x)

    def project(dense: torch.Tensor, bias: torch.Tensor, e: int, y: torch.Tensor) -> torch.Tensor:
        return round_activation(y, "bf16") @ dense[e].T + bias[e].float()

    want = x + moe(
        h.float(), ids, weights,
        lambda e, y: project(gate_up_dense, gate_up_bias, e, y), lambda e, y: project(down_dense, down_bias, e, y),
        7.0, 1.702,
    )  # fmt: skip
    close(got - x, want - x, 2e-3)


def test_columns_cap_is_a_width_the_kernel_has() -> None:
    for rows in (65, 100, 512, 2048, 8192):
        for m_tiles in (45, 80, 90):
            for shape in SHAPES.values():
                assert columns_cap(rows, m_tiles, 132, shape) <= shape.columns


def test_refuses_other_layouts_and_scales() -> None:
    room = Room(Emulator(1), {}, torch.device("cpu"))
    plain = formats.quantize(torch.randn(64, 64), "mxfp4")
    with pytest.raises(PlanError, match="tile16"):
        Dense(room, plain, None, "qkv")
    plain.scales[3, 1] = 129
    with pytest.raises(PlanError, match="scales"):
        Dense(room, layouts.convert(plain, "tile16"), None, "qkv")
