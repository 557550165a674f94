"""The batch products against the specification, through the emulator: grouping, widening, sums, epilogues, routing."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from halfbyte import formats
from halfbyte.errors import PlanError
from halfbyte.formats import DenseTiles, MXTensor, layouts, tile16
from halfbyte.kernels.cuda.batch.builds import ROW_THREADS, BatchProductArgs, BatchRowsArgs, ProductShape, RowShape
from halfbyte.kernels.cuda.batch.layer import BatchBuffers, Head, LayerKernels
from halfbyte.kernels.cuda.batch.products import BatchMatrix
from halfbyte.kernels.cuda.device.host import KernelMachine, Workspace, gpu
from halfbyte.ops.linear import round_activation
from halfbyte.ops.moe import moe
from halfbyte.ops.norm import rms_norm
from halfbyte.ops.router import route
from tests.kernels.cuda.emulator import Emulator, sizes


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got.double() - want.double()).norm() / want.double().norm())


def weights(form: str, shape: tuple[int, ...], seed: int) -> tuple[MXTensor | DenseTiles, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g) / shape[-1] ** 0.5
    if form == "bf16":
        return DenseTiles.of(w.bfloat16(), "tile16"), w.bfloat16().float()
    plain = formats.quantize(w, "mxfp4" if form == "mxfp4" else "q8")
    return layouts.convert(plain, "tile16"), formats.dequantize(plain, torch.float32)


@pytest.mark.parametrize("shape", [ProductShape("mxfp4", 2880, True), ProductShape("q8", 1088)])
def test_mirrored_structs(shape: ProductShape) -> None:
    assert sizes(shape.program(), 3) == [ctypes.sizeof(BatchProductArgs), shape.shared_bytes, shape.threads]
    assert shape.shared_bytes <= 232_448
    assert shape.threads <= 640


@pytest.mark.parametrize("shape", [RowShape(2880, 128, 4)])
def test_mirrored_rows(shape: RowShape) -> None:
    assert sizes(shape.program("rows"), 4) == [ctypes.sizeof(BatchRowsArgs), shape.parts, *ROW_THREADS.values()]


@pytest.mark.parametrize(
    ("form", "rows", "n", "k", "blocks"),
    [("mxfp4", 37, 80, 1088, 5), ("q8", 9, 80, 1088, 2), ("bf16", 20, 48, 1088, 3), ("mxfp4", 1, 16, 64, 3)],
)
def test_dense(form: str, rows: int, n: int, k: int, blocks: int) -> None:
    g = torch.Generator().manual_seed(rows)
    w, dense = weights(form, (n, k), rows)
    x = (torch.randn((rows, k), generator=g) * 3).bfloat16()
    bias = torch.randn(n, generator=g)
    residual = torch.randn((rows, n), generator=g)
    want = x.double() @ dense.double().T
    out = torch.full((rows, n), float("nan"))
    BatchMatrix(w, None, "qkv").run(Emulator(blocks), x, out, rows)
    assert error(out, want) < 1e-6
    again = residual.clone()  # in place, another order of events, a ring of one tile
    matrix = BatchMatrix(w, bias.bfloat16(), "o")
    if form == "mxfp4":
        matrix.shape = ProductShape(form, k, ring=matrix.shape.slots[0] * matrix.shape.slots[1])
    matrix.run(Emulator(blocks + 1, seed=7), x, again, rows, residual=again)
    assert error(again, want + bias.bfloat16() + residual) < 1e-6
    assert torch.equal(again, out + bias.bfloat16() + residual)


@pytest.mark.parametrize("octaves", [-60, 12, 40])
def test_scales_of_any_size(octaves: int) -> None:
    """Weights times a power of two give sums times that, to the last bit; groups of zeros may carry any scale."""
    g = torch.Generator().manual_seed(octaves)
    w = torch.randn((48, 1088), generator=g) / 33
    w[:, 64:96], w[5] = 0.0, 0.0
    plain = formats.quantize(w, "mxfp4")
    zeros = (plain.data.view(48, 34, 16) & 0x77).eq(0).all(-1)
    x = torch.randn((20, 1088), generator=g).bfloat16()
    sums = []
    for up, scale in ((0, 120), (octaves, 0), (octaves, 254)):
        scales = torch.where(zeros, scale, plain.scales + up).to(torch.uint8)
        out = torch.full((20, 48), float("nan"))
        BatchMatrix(layouts.convert(replace(plain, scales=scales), "tile16"), None, "qkv").run(Emulator(3), x, out, 20)
        sums.append(out * 2.0**-up)
    assert torch.isfinite(sums[0]).all()
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_a_column_does_not_depend_on_the_others() -> None:
    w, _ = weights("mxfp4", (48, 1088), 0)
    x = torch.randn((20, 1088)).bfloat16()
    together, alone = torch.empty((20, 48)), torch.empty((20, 48))
    matrix = BatchMatrix(w, None, "qkv")
    matrix.run(Emulator(3), x, together, 20)
    for i in range(20):
        matrix.run(Emulator(2), x[i : i + 1].contiguous(), alone[i : i + 1], 1)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("k", [64, 1088, 2880])
def test_an_experts_column_does_not_depend_on_how_many_share_it(k: int) -> None:
    """Up to four columns are multiplied two groups at a time, five to eight one by one: to the same bits."""
    w, dense = weights("mxfp4", (2, 32, k), k)
    x = torch.randn((13, k)).bfloat16()
    matrix = BatchMatrix(w, None, "down")
    found = {}
    for parts in ((13,), (7, 6), (1, 4, 2, 3, 3), (5, 8)):
        out, at = torch.full((13, 32), float("nan")), 0
        for size in parts:
            ids = torch.full((size,), 1, dtype=torch.int32)
            matrix.run(Emulator(2), x[at : at + size].contiguous(), out[at : at + size], size, ids=ids)
            at += size
        assert error(out, x.double() @ dense[1].double().T) < 1e-6
        found[parts] = out
    first = found[(13,)]
    assert all(torch.equal(first, out) for out in found.values())


@pytest.mark.parametrize("experts", [1, 2, 33, 40])
def test_columns_of_crowded_experts(experts: int) -> None:
    """Most columns on few experts, others beside them: each is multiplied once, to the bits that it has alone."""
    columns = 230
    g = torch.Generator().manual_seed(experts)
    w, dense = weights("mxfp4", (experts, 32, 64), 1)
    few = torch.randint(0, min(3, experts), (columns,), generator=g)
    ids = torch.where(torch.rand(columns, generator=g) < 0.8, few, torch.randint(0, experts, (columns,), generator=g))
    assert int(torch.bincount(ids, minlength=experts).max()) > 4 * 8
    x = torch.randn((columns, 64), generator=g).bfloat16()
    matrix = BatchMatrix(w, None, "down")
    out, again = torch.full((columns, 32), float("nan")), torch.full((columns, 32), float("nan"))
    matrix.run(Emulator(5), x, out, columns, ids=ids.int())
    assert error(out, torch.stack([row.double() @ dense[e].double().T for row, e in zip(x, ids)])) < 1e-6
    matrix.run(Emulator(3, seed=9), x, again, columns, ids=ids.int())
    assert torch.equal(out, again)
    one = torch.full((1, 32), float("nan"))
    for i in range(0, columns, 37):
        matrix.run(Emulator(2), x[i : i + 1].contiguous(), one, 1, ids=ids[i : i + 1].int())
        assert torch.equal(out[i], one[0])


def make_layer(
    hidden: int, inner: int, experts: int, top_k: int, dense: str, machine: KernelMachine, device: str = "cpu"
) -> tuple[LayerKernels, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(hidden)

    def vector(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    shapes = {
        "qkv": (dense, (96, hidden)), "o": (dense, (hidden, 128)), "gate_up": ("mxfp4", (experts, 2 * inner, hidden)),
        "down": ("mxfp4", (experts, hidden, inner)),
    }  # fmt: skip
    made = {name: weights(form, shape, i) for i, (name, (form, shape)) in enumerate(shapes.items())}
    plain = {name: w for name, (_, w) in made.items()}
    plain |= {f"{name}_bias": vector(*shape[:-1]).bfloat16() for name, (_, shape) in shapes.items()}
    plain |= {"attn_norm": vector(hidden).bfloat16(), "mlp_norm": vector(hidden)}
    plain |= {"router": vector(experts, hidden).bfloat16(), "router_bias": vector(experts)}
    plain = {name: w.to(device) for name, w in plain.items()}
    more = {"gate_up": {"swiglu": True}, "o": {"router": experts}}
    matrices = {n: BatchMatrix(w.to(device), plain[f"{n}_bias"], n, **more.get(n, {})) for n, (w, _) in made.items()}
    workspace = Workspace(machine, {}, torch.device(device))
    layer = LayerKernels(
        BatchBuffers(workspace, RowShape(hidden, experts, top_k), inner), **matrices, eps=1e-5,
        limit=7.0, alpha=1.702, **{n: plain[n] for n in ("attn_norm", "mlp_norm", "router", "router_bias")},
    )  # fmt: skip
    return layer, plain


@pytest.mark.parametrize(
    ("rows", "hidden", "inner", "experts", "top_k", "dense", "skew"),
    [(2, 128, 64, 16, 4, "mxfp4", 0.0), (21, 192, 64, 48, 2, "mxfp4", 0.4), (21, 128, 128, 48, 2, "mxfp4", 0.4)],
)
def test_a_layer(rows: int, hidden: int, inner: int, experts: int, top_k: int, dense: str, skew: float) -> None:
    check_layer(*make_layer(hidden, inner, experts, top_k, dense, Emulator(4)), rows, skew)


def check_layer(layer: LayerKernels, w: dict[str, torch.Tensor], rows: int, skew: float) -> None:
    experts, hidden = w["router"].shape
    device, top_k = w["router"].device, layer.buffers.shape.top_k
    w["router_bias"] += skew * torch.arange(experts, device=device)  # some experts of more than eight rows
    g = torch.Generator().manual_seed(rows)
    x = torch.randn((rows, hidden), generator=g).to(device)
    residual, qkv = x.clone(), torch.full((rows, 96), float("nan"), device=device)
    layer.enter(residual, qkv, pending=False)
    h = round_activation(rms_norm(x, w["attn_norm"], 1e-5), "bf16")
    assert error(qkv, h @ w["qkv"].T + w["qkv_bias"]) < 1e-3  # a norm on the edge of a rounding may fall either way
    attn = torch.randn((rows, 128), generator=g).bfloat16().to(device)
    layer.leave(residual, attn)
    mid = x + attn.float() @ w["o"].T + w["o_bias"]
    assert error(residual, mid) < 1e-6
    h = rms_norm(residual, w["mlp_norm"], 1e-5)
    ids, shares = route(h, w["router"], w["router_bias"], top_k)
    assert torch.equal(layer.buffers.ids[:rows].long(), ids)
    assert error(layer.buffers.weights[:rows], shares) < 1e-4
    counts = torch.bincount(ids.flatten(), minlength=experts)
    assert skew == 0 or int(counts.max()) > 8

    def project(name: str, e: int, y: torch.Tensor) -> torch.Tensor:
        return round_activation(y, "bf16") @ w[name][e].T + w[f"{name}_bias"][e].float()

    want = moe(h, ids, shares, lambda e, y: project("gate_up", e, y), lambda e, y: project("down", e, y), 7.0, 1.702)
    before = residual.clone()
    layer.enter(residual, qkv, pending=True)
    assert error(residual - before, want) < 2e-3
    h = round_activation(rms_norm(residual, w["attn_norm"], 1e-5), "bf16")
    assert error(qkv, h @ w["qkv"].T + w["qkv_bias"]) < 1e-3
    layer.finish(before)
    assert torch.equal(before, residual)


@pytest.mark.parametrize("blocks", [1, 5, 7])
def test_every_tile_is_somebodys(blocks: int) -> None:
    experts, columns = 5, 30
    w, dense = weights("mxfp4", (experts, 112, 64), 0)
    ids = torch.randint(0, experts, (columns,), dtype=torch.int32)
    x = torch.randn((columns // 2, 64)).bfloat16()
    matrix = BatchMatrix(w, None, "down")
    want = torch.stack([dense[e].double() @ x[c // 2].double() for c, e in enumerate(ids.tolist())])
    for tickets in (None, torch.zeros(1, dtype=torch.int32)):
        out = torch.full((columns, 112), float("nan"))
        given = None if tickets is None else tickets.data_ptr()
        matrix.run(Emulator(blocks), x, out, columns, ids=ids, tickets=given, share=2)
        assert error(out, want) < 1e-6


def test_the_head_norms_the_rows_it_is_asked_for() -> None:
    w, dense = weights("q8", (272, 128), 3)
    buffers = BatchBuffers(Workspace(Emulator(3), {}, torch.device("cpu")), RowShape(128, 16, 4), 64)
    buffers.tickets.fill_(5)
    x, norm, rows = torch.randn((9, 128)), torch.randn(128), torch.tensor([7, 2, 2], dtype=torch.int32)
    logits = Head(buffers, BatchMatrix(w, None, "lm_head"), norm, 1e-5).run(x, rows)
    h = round_activation(rms_norm(x[rows.long()], norm, 1e-5), "bf16")
    assert error(logits, h @ dense.T) < 1e-3


def test_ties_go_to_the_lower_expert() -> None:
    layer, w = make_layer(128, 64, 16, 4, "mxfp4", Emulator(2))
    layer.router.weight.zero_()
    w["router_bias"].copy_(torch.tensor([0.0, 2, 2, 1, 1, 1, 3, 0] * 2))
    x = torch.randn((3, 128))
    layer.leave(x, torch.zeros((3, 128)).bfloat16())
    assert layer.buffers.ids[:3].tolist() == [[6, 14, 1, 2]] * 3


def test_refuses_what_it_cannot_read() -> None:
    plain = formats.quantize(torch.randn(64, 64), "mxfp4")
    with pytest.raises(PlanError, match="tile16"):
        BatchMatrix(plain, None, "qkv")
    with pytest.raises(PlanError, match="multiples"):
        BatchMatrix(layouts.convert(formats.quantize(torch.randn(72, 64), "mxfp4"), "tile16"), None, "qkv")


@pytest.mark.gpu
def test_a_layer_on_a_gpu() -> None:
    layer, w = make_layer(192, 64, 48, 2, "mxfp4", gpu(), "cuda")
    check_layer(layer, w, 21, 0.4)


@pytest.mark.gpu
def test_experts_on_a_gpu_again_and_again() -> None:
    """Experts of one to sixty columns at the true K, where other warps' loads of x delay a warp's loads of weights."""
    experts, n, rows, top_k, k = 24, 2880, 64, 4, 2880
    torch.manual_seed(0)
    data = torch.randint(0, 256, (experts, *tile16.tile_shape(n, k, "mxfp4")), dtype=torch.uint8, device="cuda")
    data[..., 512:] = torch.randint(119, 122, data[..., 512:].shape, dtype=torch.uint8, device="cuda")
    w = MXTensor(data, torch.empty(0, dtype=torch.uint8, device="cuda"), (experts, n, k), "mxfp4", "tile16")
    matrix = BatchMatrix(w, None, "down")
    logits = torch.randn((rows, experts), device="cuda") + 1.5 * torch.randn(experts, device="cuda")
    ids = logits.topk(top_k).indices.int().flatten()
    assert int(ids.bincount().max()) > 24
    x = torch.randn((rows * top_k, k), device="cuda").bfloat16()
    want = torch.empty((rows * top_k, n), dtype=torch.float64, device="cuda")
    for e in ids.unique().tolist():
        want[ids == e] = x[ids == e].double() @ formats.dequantize(tile16.unpack(w.select(e)), torch.float32).double().T
    first: torch.Tensor | None = None
    for _ in range(20):
        out = torch.full((rows * top_k, n), float("nan"), device="cuda")
        tickets = torch.zeros(1, dtype=torch.int32, device="cuda")
        matrix.run(gpu(), x, out, rows * top_k, ids=ids, tickets=tickets.data_ptr())
        first = out if first is None else first
        assert torch.equal(out, first)
    assert error(out, want) < 1e-5
