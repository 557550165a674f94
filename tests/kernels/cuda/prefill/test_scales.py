"""MXFP4 scales of every size through every grouped product, in the emulator: exact, whatever the checkpoint holds."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte import formats
from halfbyte.errors import PlanError
from halfbyte.formats import MXTensor, layouts, tile16
from halfbyte.gates import Gates, Layers
from halfbyte.kernels.cuda.device.host import Workspace
from halfbyte.kernels.cuda.prefill import phases
from halfbyte.kernels.cuda.prefill.experts import GroupedExperts
from halfbyte.kernels.cuda.prefill.fp8 import SPREAD, Fp8Dense, Fp8Experts, Fp8Moe, Fp8Qkv
from halfbyte.kernels.cuda.prefill.layer import Fp8PrefillLayer, PrefillLayer
from halfbyte.kernels.cuda.prefill.mx import Mxfp4Dense, Mxfp4Experts, Mxfp8Dense, Mxfp8Experts
from halfbyte.kernels.cuda.prefill.phases import GroupedMoe, GroupedQkv
from halfbyte.kernels.cuda.prefill.products import BELOW, Dense, Rotation
from halfbyte.kernels.cuda.prefill.sync import SyncDense, SyncExperts
from halfbyte.model import checkpoint, load
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, formats_after, spec_of
from halfbyte.model.weights import LayerWeights, join_rows
from halfbyte.plan.phase import ARCHES, Binding, Spec
from tests.kernels.cuda.emulator import Emulator

CPU = torch.device("cpu")
BF16: list[tuple[type[Dense], str]] = [
    (Dense, "m256n64"), (Dense, "m256n128"), (SyncDense, "64x128"), (SyncDense, "128x128")
]  # fmt: skip
DENSE: dict[str, type[Dense]] = {
    "wgmma": Dense, "sync": SyncDense, "mxfp8": Mxfp8Dense, "mxfp4": Mxfp4Dense, "fp8": Fp8Dense
}  # fmt: skip
EXPERTS: dict[str, type[GroupedExperts]] = {
    "wgmma": GroupedExperts, "sync": SyncExperts, "mxfp8": Mxfp8Experts, "mxfp4": Mxfp4Experts, "fp8": Fp8Experts
}  # fmt: skip


def every_code(scales: torch.Tensor) -> MXTensor:
    """All E2M1 codes under these scales, another one for the same k in every row."""
    rows, groups = scales.shape
    codes = torch.arange(16, dtype=torch.uint8)
    data = torch.stack([(codes.roll(r)[0::2] | codes.roll(r)[1::2] << 4).repeat(2 * groups) for r in range(rows)])
    return MXTensor(data, scales.to(torch.uint8), (rows, 32 * groups), "mxfp4", "plain")


def workspace(blocks: int = 2) -> Workspace:
    return Workspace(Emulator(blocks), {}, CPU)


def values(plain: MXTensor) -> torch.Tensor:
    """In float64: 6 times 2^127 is no float32."""
    units = formats.dequantize(replace(plain, scales=torch.full_like(plain.scales, 127)), torch.float32).double()
    return units * torch.exp2(plain.scales.double() - 127).repeat_interleave(32, -1)


def exact_products(layer: Dense, plain: MXTensor, x: torch.Tensor) -> None:
    """x has one value in each row, so that nothing is summed and everything must be equal."""
    want = x.double() @ values(plain).T
    assert want.abs().max() < torch.finfo(torch.float32).max
    assert torch.equal(layer.run(x), want.float())


def at_places(k: int, places: range, sizes: torch.Tensor) -> torch.Tensor:
    x = torch.zeros((len(places), k))
    for row, place in enumerate(places):
        x[row, place] = sizes[place]
    return x


@pytest.mark.parametrize(("kind", "tile"), BF16)
@pytest.mark.parametrize("largest", [100, 127, 128, 129, 137, 192, 254])
def test_every_code_of_the_window_is_exact(kind: type[Dense], tile: str, largest: int) -> None:
    """From a matrix's largest scale down to 133 octaves below it; together, all codes from 0 to 254."""
    base = max(largest - 1, 127)
    lowest, groups = max(0, base - BELOW), 20
    centre = torch.linspace(lowest, largest, groups).round()
    spread = torch.arange(64) % 9 - 4
    scales = (centre + spread[:, None]).clamp(lowest, largest)
    plain = every_code(scales)
    # so that neither the sums, which are relative to 2^base, nor the results leave float32's range
    sizes = torch.exp2((base - centre - 20).clamp(max=100)).repeat_interleave(32)
    layer = kind(workspace(), layouts.convert(plain, "tile16"), None, "o", tile)
    exact_products(layer, plain, at_places(32 * groups, range(0, 32 * groups, 7), sizes))


@pytest.mark.parametrize("kind", [Mxfp8Dense, Mxfp4Dense])
@pytest.mark.parametrize("lowest", [0, 64, 128, 191])
def test_every_code_is_exact_with_block_scaled_activations(kind: type[Dense], lowest: int) -> None:
    plain = every_code((torch.arange(64 * 6).view(64, 6) % 64 + lowest).clamp(max=254))
    x = at_places(192, range(0, 192, 5), torch.full((192,), 2.0 ** (127 - lowest - 30)))
    exact_products(kind(workspace(), layouts.convert(plain, "tile16"), None, "o"), plain, x)


@pytest.mark.parametrize("lowest", [2, 40, 80, 120, 160, 200, 239])
def test_every_code_is_exact_with_fp8_activations(lowest: int) -> None:
    """Each row within 16 octaves, rows up to 55 apart."""
    row, group = torch.arange(64)[:, None], torch.arange(6)[None, :]
    plain = every_code((lowest + row % 40 + (row + 3 * group) % (SPREAD + 1)).clamp(max=254))
    x = at_places(192, range(0, 192, 5), torch.full((192,), 448 * 2.0 ** max(87 - lowest, -100)))
    exact_products(Fp8Dense(workspace(), layouts.convert(plain, "tile16"), None, "o"), plain, x)


@pytest.mark.parametrize("kind", DENSE.values(), ids=DENSE)
@pytest.mark.parametrize("code", [0, 129, 130, 131, 254])
def test_groups_of_zeros_do_not_count(kind: type[Dense], code: int) -> None:
    """Whatever scale they carry: the results are those of the same weights under ordinary scales, bit for bit."""
    g = torch.Generator().manual_seed(code)
    w = torch.randn((64, 192), generator=g)
    w[:, 32:64], w[7], w[12, 96:128] = 0.0, 0.0, 0.0
    plain = formats.quantize(w, "mxfp4")
    plain.data[5, 16:32] = 0x88  # minus zeros
    zeros = (plain.data.view(64, 6, 16) & 0x77).eq(0).all(-1)
    x = torch.randn((9, 192), generator=g)
    results = []
    for scale in (126, code):
        plain.scales[zeros] = scale
        tiles = layouts.convert(plain, "tile16")
        layer = kind(workspace(), tiles, None, "o")
        results.append(layer.run(x))
        assert torch.equal(values(tile16.unpack(tiles)), values(plain))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)


def test_groups_that_bf16_cannot_hold_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    plain = every_code(torch.full((64, 6), 200))
    plain.scales[3, 1] = plain.scales[20, 5] = 199 - BELOW - 1
    plain.scales[9, 2], plain.data[9, 32:48] = 0, 0  # zeros are not
    with caplog.at_level(logging.WARNING, "halfbyte"):
        layer = Dense(workspace(), layouts.convert(plain, "tile16"), None, "layer 3 down")
    assert [r.args[:2] for r in caplog.records if isinstance(r.args, tuple)] == [("layer 3 down", 2)]
    x = torch.zeros((1, 192))
    x[0, 0] = 1.0
    assert torch.equal(layer.run(x)[0], formats.dequantize(plain, torch.float32)[:, 0])
    caplog.clear()
    plain.scales[3, 1] = plain.scales[20, 5] = 199 - BELOW
    Dense(workspace(), layouts.convert(plain, "tile16"), None, "layer 3 down")
    assert not caplog.records


@pytest.mark.parametrize("kind", [Dense, SyncDense, Fp8Dense])
def test_a_scale_that_is_no_number_is_not_made_one(kind: type[Dense]) -> None:
    plain = formats.quantize(torch.randn(64, 64), "mxfp4")
    plain.scales[3, 1], plain.data[3, 16:32] = 255, 0  # as a group with a NaN is stored
    with pytest.raises(PlanError, match="layer 2 o"):
        kind(workspace(), layouts.convert(plain, "tile16"), None, "layer 2 o")


# ---- the embedded model, in other units -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> LayerWeights:
    """The experts of one layer of the embedded model, plain, and its o as MXFP4."""
    source = checkpoint.open_model(load.EMBEDDED)
    try:
        roles = ("gate_up", "gate_up_bias", "down", "down_bias", "o", "o_bias")
        weights: Any = SimpleNamespace(**{role: join_rows(source.parts(5, role)) for role in roles})
    finally:
        source.close()
    weights.o = formats.quantize(weights.o.float(), "mxfp4")
    return weights  # type: ignore[no-any-return]


def octaves_up(w: MXTensor, octaves: int) -> MXTensor:
    return replace(w, scales=w.scales + octaves)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("octaves", [12, 20])
def test_a_larger_residual_is_the_same_function(trained: LayerWeights, name: str, octaves: int) -> None:
    """o, down, their biases and the residual times 2^n: the results are 2^n times as large, to the last bit."""
    g, w = torch.Generator().manual_seed(octaves), trained
    rows, hidden = 9, w.o.shape[0]
    attended, x = torch.randn((rows, w.o.shape[1]), generator=g).bfloat16(), torch.randn((rows, hidden), generator=g)
    h = torch.randn((rows, hidden), generator=g).bfloat16()
    chosen, ids = torch.randn((rows, w.down.shape[0]), generator=g).softmax(-1).topk(4)

    def run(up: int) -> tuple[torch.Tensor, torch.Tensor]:
        o, down = (layouts.convert(octaves_up(m, up), "tile16") for m in (w.o, w.down))
        times = 2.0**up
        dense = DENSE[name](workspace(), o, w.o_bias * times, "o")
        experts = EXPERTS[name](
            workspace(), layouts.convert(w.gate_up, "tile16"), w.gate_up_bias, down, w.down_bias * times, limit=7.0,
            alpha=1.702,
        )  # fmt: skip
        return (
            dense.run(attended, residual=x * times) / times,
            experts.run(h, ids.int(), chosen.contiguous(), x * times) / times,
        )

    for got, want in zip(run(octaves), run(0)):
        assert torch.isfinite(want).all()
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "tile"),
    [(name, None) for name in EXPERTS]
    + [("wgmma", "m384n48"), ("wgmma", "m384n88"), ("wgmma", "m256n128"), ("sync", "128x128")],
)
def test_a_factor_between_norm_and_experts_changes_nothing(trained: LayerWeights, name: str, tile: str | None) -> None:
    g, w = torch.Generator().manual_seed(3), trained
    h, x = torch.randn((9, 256), generator=g).bfloat16(), torch.zeros((9, 256))
    chosen, ids = torch.randn((9, 16), generator=g).softmax(-1).topk(4)
    results = []
    for up in (0, 30):
        experts = EXPERTS[name](
            workspace(), layouts.convert(octaves_up(w.gate_up, up), "tile16"), w.gate_up_bias,
            layouts.convert(w.down, "tile16"), w.down_bias, limit=7.0, alpha=1.702, tile=tile,
        )  # fmt: skip
        results.append(experts.run(h * 2.0**-up, ids.int(), chosen.contiguous(), x))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", [Dense, Fp8Dense])
def test_a_factor_between_norm_and_qkv_changes_nothing(kind: type[Dense]) -> None:
    """Queries as rotated rows; keys and values in their page."""
    g, rows = torch.Generator().manual_seed(5), 70
    plain = formats.quantize(torch.randn((192, 128), generator=g) / 11, "mxfp4")
    h, bias = torch.randn((rows, 128), generator=g).bfloat16(), torch.randn(192, generator=g)
    turns = torch.randn((rows, 32, 2), generator=g)
    results = []
    for up in (0, 30):
        pool = torch.zeros((2, 2, 1, 64, 64), dtype=torch.bfloat16)  # page, side, head, position, value
        cells = torch.arange(rows) // 64 * pool.stride(0) + torch.arange(rows) % 64 * 64
        layer = kind(workspace(), layouts.convert(octaves_up(plain, up), "tile16"), bias, "qkv")
        to = Rotation(turns, cells, pool.data_ptr(), pool.stride(1), 1, 1)
        results.append((layer.rotate(layer.pack(h * 2.0**-up), rows, to), pool))
    (q, pool), (other_q, other_pool) = results
    assert q.any()
    assert pool[0].any()
    assert torch.equal(q, other_q)
    assert torch.equal(pool, other_pool)


# ---- what a plan does ------------------------------------------------------------------------------------------------

FP8 = Gates(layers=Layers("mxfp4", "mxfp4", "mxfp4", "mxfp4"), activation="prefill=fp8")


def fp8_spec() -> Spec:
    formats_now = formats_after(NAMED["120b"], FP8, CHECKPOINT_FORMATS)
    return spec_of(NAMED["120b"], FP8, ARCHES["sm90"], formats_now).at("prefill")


def test_rows_too_wide_for_fp8_are_multiplied_in_bf16(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one matrix, or of one layer's experts; the others stay, and the log says which."""
    monkeypatch.setattr(phases, "workspace_of", lambda b: workspace())
    monkeypatch.setattr("halfbyte.kernels.cuda.prefill.fp8.layer_name", lambda b: f"layer {b.layer} ")
    g = torch.Generator().manual_seed(1)
    plain = {
        role: formats.quantize(torch.randn(shape, generator=g), "mxfp4")
        for role, shape in {"qkv": (64, 64), "o": (64, 64), "gate_up": (2, 128, 64), "down": (2, 64, 64)}.items()
    }
    plain["qkv"].scales[3, 1] -= SPREAD + 5
    plain["down"].scales[1, 30, 0] += SPREAD + 5
    tiles: dict[str, Any] = {role: layouts.convert(w, "tile16") for role, w in plain.items()}
    tiles |= {f"{role}_bias": torch.zeros(w.shape[:-1]) for role, w in plain.items()}
    b = Binding(
        fp8_spec(), SimpleNamespace(**tiles), "full", 0, (torch.zeros(32), 1.0), lambda: torch.zeros(0), layer=7
    )
    layer = Fp8PrefillLayer()
    with caplog.at_level(logging.WARNING, "halfbyte"):
        qkv, o, experts = layer.bind_dense(b, "qkv"), layer.bind_dense(b, "o"), layer.bind_experts(b)
    assert [type(t) for t in (qkv, o, experts)] == [Dense, Fp8Dense, GroupedExperts]
    text = [r.getMessage() for r in caplog.records]
    assert ["layer 7 qkv" in text[0], "layer 7 down" in text[1], len(text)] == [True, True, 2]
    x = torch.randn((70, 64), generator=g).bfloat16()
    want = x.double() @ formats.dequantize(plain["qkv"], torch.float32).double().T
    assert float((qkv.run(x).double() - want).norm() / want.norm()) < 1e-6
    assert isinstance(Fp8Qkv().bind_dense(b, "qkv"), Dense)
    assert not isinstance(Fp8Qkv().bind_dense(b, "qkv"), Fp8Dense)
    assert not isinstance(Fp8Moe().bind_experts(b), Fp8Experts)


def test_what_may_run_instead_of_fp8_is_declared() -> None:
    """So that it is compiled before it is needed, and the record of what ran agrees with the plan."""
    spec, arch = fp8_spec(), ARCHES["sm90"]
    for phase, plain in ((Fp8PrefillLayer(), PrefillLayer()), (Fp8Qkv(), GroupedQkv()), (Fp8Moe(), GroupedMoe())):
        programs = {build.program for build in phase.builds(spec, arch)}
        assert {build.program for build in plain.builds(spec, arch)} < programs
