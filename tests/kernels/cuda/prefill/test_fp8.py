"""Grouped products with fp8 activations against the specification, through the emulator; widening, scales, refusals."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from halfbyte import formats
from halfbyte.errors import PlanError
from halfbyte.formats import MXTensor, layouts, tile16
from halfbyte.gates import Gates, Layers, PerRegime
from halfbyte.kernels.cuda.device.host import Workspace
from halfbyte.kernels.cuda.prefill.builds import FP8_TILE, GroupedProductArgs, GroupedShape
from halfbyte.kernels.cuda.prefill.fp8 import PHASES, Fp8Dense, Fp8Experts, row_max_scale
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import choose
from halfbyte.ops.linear import round_activation
from halfbyte.ops.moe import moe
from halfbyte.ops.norm import rms_norm
from halfbyte.plan.phase import ARCHES
from tests.kernels.cuda.emulator import Emulator, sizes


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(got).all()
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    assert error <= bound, error


def mxfp4(shape: tuple[int, ...], seed: int, octaves: float = 4.0) -> tuple[MXTensor, torch.Tensor]:
    """Weights whose groups differ in size, as real ones do."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g) / shape[-1] ** 0.5
    size = torch.exp2(-octaves * torch.rand((*shape[:-1], shape[-1] // 32, 1), generator=g))
    plain = formats.quantize((w.view(*shape[:-1], -1, 32) * size).view(shape), "mxfp4")
    return layouts.convert(plain, "tile16"), formats.dequantize(plain, torch.float32)


@pytest.mark.parametrize("swiglu", [False, True])
def test_mirrored_structs(swiglu: bool) -> None:
    v = GroupedShape("mxfp4", FP8_TILE, swiglu)
    assert sizes(v.program(), 3) == [ctypes.sizeof(GroupedProductArgs), v.shared_bytes, v.threads]
    assert v.shared_bytes <= 232_448


@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 64, 64), (9, 192, 192), (70, 320, 128), (150, 64, 320), (300, 192, 64)]
)
def test_dense(rows: int, n: int, k: int) -> None:
    g = torch.Generator().manual_seed(rows)
    weights, dense = mxfp4((n, k), rows, octaves=12.0)
    bias = torch.randn(n, generator=g)
    x, residual = torch.randn((rows + 3, k), generator=g), torch.randn((rows, n), generator=g)
    workspace = Workspace(Emulator(5), {}, torch.device("cpu"))
    got = Fp8Dense(workspace, weights, None, "o").run(x[:rows])
    close(got, round_activation(x[:rows], "fp8").double() @ dense.double().T, 1e-6)  # nothing else rounds
    norm = torch.rand(k, generator=g).to(torch.bfloat16)
    select = torch.randperm(rows + 3, generator=g)[:rows].to(torch.int32)
    got = Fp8Dense(workspace, weights, bias, "qkv").run(x, norm=norm, eps=1e-5, select=select, residual=residual)
    h = round_activation(rms_norm(x, norm, 1e-5), "fp8")[select.long()]
    close(got, h.double() @ dense.double().T + bias + residual, 5e-3)  # a norm on an edge may fall either way


def test_a_row_of_zeros_and_a_row_of_one_value() -> None:
    weights, dense = mxfp4((64, 64), 1)
    x = torch.zeros((3, 64))
    x[1, 5] = 1e-30
    x[2] = -3e4
    got = Fp8Dense(Workspace(Emulator(2), {}, torch.device("cpu")), weights, None, "o").run(x)
    want = round_activation(x, "fp8").double() @ dense.double().T
    assert (got[0] == 0).all()
    for row in (1, 2):
        close(got[row], want[row], 1e-6)


def test_every_code_and_scale_is_exact() -> None:
    """Every E2M1 code at every distance from its row's largest scale; a row that holds 448 has the scale one."""
    codes = torch.arange(16, dtype=torch.uint8)
    data = torch.zeros((64, 32 * 18 // 2), dtype=torch.uint8)
    for row in range(64):  # another code for the same k in every row
        mine = codes.roll(row)
        data[row] = (mine[0::2] | mine[1::2] << 4).repeat(data.shape[1] // 8)
    scales = torch.full((64, 18), 120, dtype=torch.uint8)
    for group in range(18):
        scales[:, group] = 120 - min(group, 16)
    plain = MXTensor(data, scales, (64, 32 * 18), "mxfp4", "plain")
    dense = formats.dequantize(plain, torch.float32)
    layer = Fp8Dense(Workspace(Emulator(2), {}, torch.device("cpu")), layouts.convert(plain, "tile16"), None, "o")
    for k in (0, 7, 33, 64, 100, 300, 530, 575):
        x = torch.zeros((1, 32 * 18))
        x[0, k] = 448.0
        assert torch.equal(layer.run(x)[0], 448.0 * dense[:, k])


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "hidden", "inner", "skew"),
    [(9, 8, 4, 128, 64, 0.0), (33, 4, 2, 192, 192, 2.0), (150, 2, 1, 64, 320, 1.0), (262, 1, 1, 64, 64, 0.0),
     (280, 2, 2, 128, 64, 0.0), (300, 1, 1, 64, 128, 0.0)],
)  # fmt: skip
def test_experts(rows: int, experts: int, top_k: int, hidden: int, inner: int, skew: float) -> None:
    g = torch.Generator().manual_seed(rows)
    gate_up, gate_up_dense = mxfp4((experts, 2 * inner, hidden), 1)
    down, down_dense = mxfp4((experts, hidden, inner), 2)
    gate_up_bias = torch.randn((experts, 2 * inner), generator=g).to(torch.bfloat16)
    down_bias = torch.randn((experts, hidden), generator=g)
    logits = torch.randn((rows, experts), generator=g) + skew * torch.arange(experts)
    weights, ids = logits.softmax(-1).topk(top_k)
    h, x = torch.randn((rows, hidden), generator=g) * 3, torch.randn((rows, hidden), generator=g)
    workspace = Workspace(Emulator(4, seed=rows), {}, torch.device("cpu"))
    layer = Fp8Experts(workspace, gate_up, gate_up_bias, down, down_bias, limit=7.0, alpha=1.702)
    got = layer.run(h, ids.to(torch.int32), weights.contiguous(), x)

    def result(middle: str) -> torch.Tensor:
        def first(e: int, y: torch.Tensor) -> torch.Tensor:
            return round_activation(y, "fp8") @ gate_up_dense[e].T + gate_up_bias[e].float()

        def second(e: int, y: torch.Tensor) -> torch.Tensor:
            y = round_activation(round_activation(y, middle), "fp8") @ down_dense[e].T + down_bias[e].float()
            return round_activation(y, middle)

        return moe(h, ids, weights, first, second, 7.0, 1.702)

    close(got - x, result("bf16"), 4e-3)  # as it is done: a value on an edge may fall either way
    close(got - x, result("f32"), 2e-2)  # as it is defined


def test_refuses_scales_that_do_not_fit() -> None:
    workspace = Workspace(Emulator(1), {}, torch.device("cpu"))
    plain = formats.quantize(torch.ones(64, 64), "mxfp4")
    plain.scales[3, 1] -= 17
    with pytest.raises(PlanError, match="17 octaves"):
        Fp8Dense(workspace, layouts.convert(plain, "tile16"), None, "qkv")
    with pytest.raises(PlanError, match="q8"):
        Fp8Dense(workspace, layouts.convert(formats.quantize(torch.ones(64, 64), "q8"), "tile16"), None, "qkv")
    plain.scales[3, 1] += 1
    tops = row_max_scale(layouts.convert(plain, "tile16").data)
    assert torch.equal(tops, plain.scales.amax(1))


def test_groups_of_zeros_may_have_any_scale() -> None:
    """A dead head's columns, a dead row, a group of minus zeros with a large scale: all served, all values kept."""
    g = torch.Generator().manual_seed(4)
    w = torch.randn((128, 192), generator=g)
    w[:, 64:128] = 0.0
    w[17] = 0.0
    plain = formats.quantize(w, "mxfp4")
    plain.scales[:, 2:4] = 0  # as far as it goes
    plain.data[5, 16:32], plain.scales[5, 1] = 0x88, 128
    plain.scales[17] = torch.tensor([0, 128, 3, 90, 1, 7])
    dense = formats.dequantize(plain, torch.float32)
    tiles = layouts.convert(plain, "tile16")
    before = tiles.data.clone()
    layer = Fp8Dense(Workspace(Emulator(3), {}, torch.device("cpu")), tiles, None, "o")
    assert torch.equal(formats.dequantize(tile16.unpack(tiles), torch.float32), dense)
    assert torch.equal(tiles.data[..., :512], before[..., :512])
    x = torch.randn((9, 192), generator=g)
    close(layer.run(x), round_activation(x, "fp8").double() @ dense.double().T, 1e-6)
    for row, value in ((3, 1), (12, 8 << 4 | 1)):  # one code that is not zero, in a row g and a row g + 8
        plain.data[row, 40] = value
        with pytest.raises(PlanError, match="octaves"):
            Fp8Dense(Workspace(Emulator(1), {}, torch.device("cpu")), layouts.convert(plain, "tile16"), None, "o")
        plain.data[row, 40] = 0


def test_fp8_in_prefill_takes_them_and_leaves_the_rest_alone() -> None:
    all_mxfp4 = Gates(layers=Layers("mxfp4", "mxfp4", "mxfp4", "mxfp4"))
    for kernels in (PerRegime(), PerRegime(prefill="cuda")):
        gates = replace(all_mxfp4, activation="prefill=fp8", moe_kernel=kernels, linear_kernel=kernels)
        choice = choose(NAMED["120b"], gates, ARCHES["sm90"])
        spec, found = choice.spec, choice.selection
        assert {"cuda.prefill_layer_fp8", "cuda.grouped_fp8_norm_lm_head"} <= set(found.chosen["prefill"])
        plain = choose(NAMED["120b"], all_mxfp4, ARCHES["sm90"]).selection
        assert [found.chosen[r] for r in ("decode", "batch")] == [plain.chosen[r] for r in ("decode", "batch")]
    for phase in PHASES:
        assert "sm90" in str(phase.refuse(spec.at("prefill"), ARCHES["sm100"], gates))
        assert "fp8" in str(phase.refuse(spec.at("decode"), ARCHES["sm90"], gates))
    exact = choose(NAMED["120b"], Gates(activation="prefill=fp8"), ARCHES["sm90"]).selection  # dense matrices take bf16
    assert {"cuda.grouped_fp8_moe", "cuda.grouped_norm_qkv", "cuda.grouped_o"} <= set(exact.chosen["prefill"])


def test_fp8_everywhere_goes_to_triton() -> None:
    gates = Gates(layers=Layers("mxfp4", "mxfp4", "mxfp4", "mxfp4"), activation="fp8")
    found = choose(NAMED["120b"], gates, ARCHES["sm90"]).selection
    assert {p.name for p in PHASES}.isdisjoint(found.chosen["prefill"])
    assert "triton.moe" in found.chosen["decode"]
