"""The grouped products of SM12x against the specification, through the emulator: bf16, MXFP8 and MXFP4 activations."""

from __future__ import annotations

import ctypes

import pytest
import torch

from halfbyte import formats
from halfbyte.formats import MXTensor, layouts, tile16
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.kernels.cuda.prefill.builds import GroupedProductArgs, GroupedRowsArgs, rows_build
from halfbyte.kernels.cuda.prefill.experts import GroupedExperts
from halfbyte.kernels.cuda.prefill.mx import BYTES, KINDS, Mxfp4Dense, Mxfp4Experts, Mxfp8Dense, Mxfp8Experts, padded
from halfbyte.kernels.cuda.prefill.products import Dense
from halfbyte.kernels.cuda.prefill.sync import COLUMNS, MX, SHARED, SyncDense, SyncExperts, SyncProductShape, tile_for
from halfbyte.ops.linear import round_activation
from halfbyte.ops.moe import moe
from halfbyte.ops.norm import rms_norm
from tests.kernels.cuda.emulator import Emulator, sizes

DENSE: dict[str, type[Dense]] = {"bf16": SyncDense, "mxfp8": Mxfp8Dense, "mxfp4": Mxfp4Dense}
EXPERTS: dict[str, type[GroupedExperts]] = {"bf16": SyncExperts, "mxfp8": Mxfp8Experts, "mxfp4": Mxfp4Experts}
FORMATS = ("mxfp4", "q8", "bf16")


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(got).all()
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    assert error <= bound, error


def weights(form: str, shape: tuple[int, ...], seed: int) -> tuple[MXTensor | torch.Tensor, torch.Tensor]:
    """Groups differ in size, as those of real weights do."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g) / shape[-1] ** 0.5
    sizes = torch.exp2(-6 * torch.rand((*shape[:-1], shape[-1] // 32, 1), generator=g))
    w = (w.view(*shape[:-1], -1, 32) * sizes).view(shape)
    if form == "bf16":
        return tile16.pack_dense(w.bfloat16()), w.bfloat16().float()
    plain = formats.quantize(w, "mxfp4" if form == "mxfp4" else "q8")
    return layouts.convert(plain, "tile16"), formats.dequantize(plain, torch.float32)


VARIANTS = [SyncProductShape(f, s, False) for f in FORMATS for s in COLUMNS]
VARIANTS += [SyncProductShape("mxfp4", s, w, mx) for s in COLUMNS for w in (False, True) for mx in MX]


@pytest.mark.parametrize(
    "v", [v if v.mx and v.columns == 64 else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS], ids=str
)
def test_mirrored_structs(v: SyncProductShape) -> None:
    assert sizes(v.program(), 3) == [ctypes.sizeof(GroupedProductArgs), v.shared_bytes, v.threads]
    assert v.shared_bytes <= SHARED
    assert v.stage[1] >= 3
    assert sizes(rows_build("pack_rows").program, 1) == [ctypes.sizeof(GroupedRowsArgs)]


@pytest.mark.parametrize(
    ("activation", "form", "rows", "n", "k", "shape"),
    [("bf16", "mxfp4", 1, 64, 64, None), ("bf16", "mxfp4", 70, 192, 192, "64x128"),
     ("bf16", "mxfp4", 140, 320, 128, "128x128"), ("bf16", "q8", 9, 192, 192, None),
     pytest.param("bf16", "q8", 90, 128, 64, "128x128", marks=pytest.mark.slow), ("bf16", "bf16", 20, 192, 192, None),
     pytest.param("bf16", "bf16", 90, 64, 128, "128x128", marks=pytest.mark.slow), ("mxfp8", "mxfp4", 1, 64, 64, None),
     ("mxfp8", "mxfp4", 70, 192, 192, "64x128"),
     pytest.param("mxfp8", "mxfp4", 140, 320, 320, "128x128", marks=pytest.mark.slow),
     ("mxfp4", "mxfp4", 9, 64, 64, None), ("mxfp4", "mxfp4", 70, 192, 192, "64x128"),
     pytest.param("mxfp4", "mxfp4", 140, 320, 320, "128x128", marks=pytest.mark.slow)],
)  # fmt: skip
def test_dense(activation: str, form: str, rows: int, n: int, k: int, shape: str | None) -> None:
    g = torch.Generator().manual_seed(rows)
    w, dense = weights(form, (n, k), rows)
    bias = torch.randn(n, generator=g)
    x, residual = torch.randn((rows + 3, k), generator=g), torch.randn((rows, n), generator=g)
    x *= torch.exp2(-4 * torch.rand((1, k), generator=g))
    workspace, kind = Workspace(Emulator(5), {}, torch.device("cpu")), DENSE[activation]
    got = kind(workspace, w, None, "o", shape).run(x[:rows])
    want = round_activation(x[:rows], activation).double() @ dense.double().T
    close(got, want, 3e-4 if form == "q8" else 1e-6)  # nothing else rounds, but that q8 * scale keeps 11 bits
    norm = torch.rand(k, generator=g).to(torch.bfloat16)
    select = torch.randperm(rows + 3, generator=g)[:rows].to(torch.int32)
    got = kind(workspace, w, bias, "qkv", shape).run(x, norm=norm, eps=1e-5, select=select, residual=residual)
    h = round_activation(rms_norm(x, norm, 1e-5), activation)[select.long()]
    # a norm on an edge may fall either way
    close(
        got, h.double() @ dense.double().T + bias + residual, {"bf16": 1e-3, "mxfp8": 1e-2, "mxfp4": 3e-2}[activation]
    )


@pytest.mark.parametrize("activation", ["mxfp8", "mxfp4"])
def test_every_code_and_scale_is_exact(activation: str) -> None:
    """Every E2M1 code under scales from 2^-79 to 2; one activation at a time, a power of two."""
    codes = torch.arange(16, dtype=torch.uint8)
    data = torch.stack([(codes.roll(r)[0::2] | codes.roll(r)[1::2] << 4).repeat(12) for r in range(64)])
    scales = (torch.arange(64 * 6, dtype=torch.int64).view(64, 6) % 81 + 48).to(torch.uint8)
    plain = MXTensor(data, scales, (64, 192), "mxfp4", "plain")
    dense = formats.dequantize(plain, torch.float32)
    layer = DENSE[activation](
        Workspace(Emulator(2), {}, torch.device("cpu")), layouts.convert(plain, "tile16"), None, "o"
    )
    x = torch.eye(192) * torch.exp2(torch.arange(192) % 60 - 30.0)[:, None]
    assert torch.equal(layer.run(x), (x.double() @ dense.double().T).float())


@pytest.mark.parametrize("activation", ["mxfp8", "mxfp4"])
def test_packing_is_the_format(activation: str) -> None:
    """The bits that pack_rows and mx_requantize leave, against the formats' own, undone by the layout's description."""
    g = torch.Generator().manual_seed(1)
    rows, k = 11, 192
    x = torch.randn((rows, k), generator=g) * torch.exp2(
        20 * torch.rand((rows, k // 32), generator=g) - 10
    ).repeat_interleave(32, 1)
    x[0, :32], x[1, 3], x[2, 64:96] = 0.0, 1e-40, 2.0 ** torch.arange(-20, 12)
    x = x.bfloat16().float()
    slots, parts = padded(rows), 2
    each = BYTES[activation]
    plain = formats.quantize(x, "mxfp8" if activation == "mxfp8" else "mxfp4")
    machine = Emulator(1)

    def fresh() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(parts * slots * each, dtype=torch.uint8), torch.zeros(parts * slots, dtype=torch.int32)

    packed, scales = fresh()
    args = GroupedRowsArgs(
        source=x.data_ptr(), packed=packed.data_ptr(), scales=scales.data_ptr(), stride=k, rows=rows, width=k,
        slots=slots, source_float=1, kind=KINDS[activation],
    )  # fmt: skip
    machine.run(rows_build("pack_rows"), rows, args)
    check(packed, scales, plain, activation, slots)
    wide = torch.zeros((3, slots, 8, 8), dtype=torch.bfloat16)  # [k / 64][slot][unit][value]: as gate_up leaves it
    for row in range(rows):
        for group in range(k // 32):
            words = x[row, group * 32 : group * 32 + 32].bfloat16().view(4, 4, 2).transpose(0, 1).reshape(4, 8)
            for i in range(4):
                wide[group // 2, row, (group % 2 * 4 + i) ^ (row & 7)] = words[i]
    packed, scales = fresh()
    args = GroupedRowsArgs(
        hidden=wide.data_ptr(), packed=packed.data_ptr(), scales=scales.data_ptr(), width=k, slots=slots,
        kind=KINDS[activation],
    )  # fmt: skip
    machine.run(rows_build("mx_requantize"), 2, args)
    check(packed, scales, plain, activation, slots)


def check(packed: torch.Tensor, scales: torch.Tensor, plain: MXTensor, activation: str, slots: int) -> None:
    rows, k = plain.shape
    order = torch.tensor([0, 2, 1, 3])
    for row in range(rows):
        for group in range(k // 32):
            part, place = group // 4, group % 4
            assert int(scales.view(torch.uint8).view(-1, slots, 4)[part, row, place]) == int(plain.scales[row, group])
            if activation == "mxfp8":
                column = packed.view(-1, slots, 8, 16)[part, row]
                units = [column[(2 * place + h) ^ (row & 7)].view(4, 4)[:, order.argsort()] for h in (0, 1)]
                got = torch.stack(units, 1).reshape(32)  # [t][half][value]
                want = plain.data[row, group * 32 : group * 32 + 32]
            else:
                unit = packed.view(-1, slots, 4, 16)[part, row, place ^ (row >> 1 & 3)].view(4, 4)[:, order.argsort()]
                got = torch.stack((unit & 15, unit >> 4), 1).reshape(32)
                codes = plain.data[row, group * 16 : group * 16 + 16]
                want = torch.stack((codes & 15, codes >> 4), 1).reshape(32)
            zero = 128 if activation == "mxfp8" else 8  # a zero may lose its sign
            got, want = (torch.where(c == zero, 0, c) for c in (got.clone(), want.clone()))
            assert torch.equal(got, want), (row, group)


@pytest.mark.parametrize("activation", list(EXPERTS))
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "hidden", "inner", "skew", "shape"),
    [
        (9, 8, 4, 128, 64, 0.0, None),
        (33, 4, 2, 192, 192, 2.0, "64x128"),
        pytest.param(150, 2, 1, 64, 320, 1.0, None, marks=pytest.mark.slow),
    ],
)
def test_experts(
    activation: str, rows: int, experts: int, top_k: int, hidden: int, inner: int, skew: float, shape: str | None
) -> None:
    g = torch.Generator().manual_seed(rows)
    gate_up, gate_up_dense = weights("mxfp4", (experts, 2 * inner, hidden), 1)
    down, down_dense = weights("mxfp4", (experts, hidden, inner), 2)
    gate_up_bias = torch.randn((experts, 2 * inner), generator=g).to(torch.bfloat16)
    down_bias = torch.randn((experts, hidden), generator=g).to(torch.bfloat16)
    logits = torch.randn((rows, experts), generator=g) + skew * torch.arange(experts)
    chosen, ids = logits.softmax(-1).topk(top_k)
    h, x = torch.randn((rows, hidden), generator=g) * 3, torch.randn((rows, hidden), generator=g)
    workspace = Workspace(Emulator(5, seed=rows), {}, torch.device("cpu"))
    layer = EXPERTS[activation](workspace, gate_up, gate_up_bias, down, down_bias, limit=7.0, alpha=1.702, tile=shape)
    got = layer.run(h, ids.to(torch.int32), chosen.contiguous(), x)

    def result(middle: str) -> torch.Tensor:
        def first(e: int, y: torch.Tensor) -> torch.Tensor:
            return round_activation(y, activation) @ gate_up_dense[e].T + gate_up_bias[e].float()

        def second(e: int, y: torch.Tensor) -> torch.Tensor:
            y = round_activation(round_activation(y, middle), activation)
            return y @ down_dense[e].T + down_bias[e].float()

        return moe(h, ids, chosen, first, second, 7.0, 1.702)

    close(got - x, result("bf16"), 2e-3)  # as it is done: a value on an edge may fall either way, seen 6e-8
    # As it is defined: a group whose largest value bf16 moves to a power of two gets the next scale, seen 3e-2.
    close(got - x, result("f32"), 2e-3 if activation == "bf16" else 4e-2)


def test_tiles_by_rows() -> None:
    for rows in (1, 64, 65, 500, 2048, 8192):
        for m_tiles in (45, 80, 3142):
            for blocks in (48, 170):
                shape, cap = tile_for(rows, m_tiles, blocks)
                assert cap <= COLUMNS[shape] or rows <= COLUMNS[shape]
    assert tile_for(16, 80, 48)[0] == "64x128"
    assert tile_for(2048, 80, 48)[0] == "128x128"


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("activation", list(DENSE))
@pytest.mark.parametrize("rows", [1, 40, 65, 300])
def test_on_a_gpu(rows: int, activation: str) -> None:
    """bf16 on any GPU from SM90 on; the others where the instruction exists, with a bound that is to be measured."""
    if activation != "bf16" and torch.cuda.get_device_capability()[0] != 12:
        pytest.skip("block-scaled mma.sync is SM12x's")
    g = torch.Generator().manual_seed(rows)
    workspace = Workspace(gpu(), {}, torch.device("cuda"))
    w, dense = weights("mxfp4", (320, 192), 1)
    x = torch.randn((rows, 192), generator=g).bfloat16()
    want = round_activation(x, activation).double() @ dense.double().T
    got = DENSE[activation](workspace, w.to("cuda"), None, "o").run(x.cuda())
    close(got.cpu(), want, 1e-6 if activation == "bf16" else 1e-3)
    gate_up, gate_up_dense = weights("mxfp4", (8, 640, 192), 2)
    down, down_dense = weights("mxfp4", (8, 192, 320), 3)
    biases = torch.randn((8, 640), generator=g), torch.randn((8, 192), generator=g)
    chosen, ids = torch.randn((rows, 8), generator=g).softmax(-1).topk(4)
    residual = torch.randn((rows, 192), generator=g)
    layer = EXPERTS[activation](
        workspace, gate_up.to("cuda"), biases[0].cuda(), down.to("cuda"), biases[1].cuda(), limit=7.0, alpha=1.702
    )
    got = layer.run(x.cuda(), ids.int().cuda(), chosen.contiguous().cuda(), residual.cuda()).cpu() - residual

    def project(dense: torch.Tensor, bias: torch.Tensor, e: int, y: torch.Tensor) -> torch.Tensor:
        return round_activation(y, activation) @ dense[e].T + bias[e]

    want = moe(
        x.float(), ids, chosen, lambda e, y: project(gate_up_dense, biases[0], e, y),
        lambda e, y: project(down_dense, biases[1], e, y.bfloat16().float()), 7.0, 1.702,
    )  # fmt: skip
    close(got, want, {"bf16": 2e-3, "mxfp8": 1e-2, "mxfp4": 3e-2}[activation])
