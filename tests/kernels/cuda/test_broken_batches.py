"""What is no number stays none in the kernels of batches and of prompts: no clamp, maximum, choice or root hides it.

Between their launches values are floats, so it travels by itself to the logits; here is every place where it could be
dropped. Rows that do not have it keep their bits.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.cuda.attention.batch import AttentionShape, BatchAttention
from halfbyte.kernels.cuda.device.host import KernelMachine, Workspace, gpu
from halfbyte.kernels.cuda.prefill.experts import GroupedExperts
from halfbyte.kernels.cuda.prefill.fp8 import Fp8Experts
from halfbyte.kernels.cuda.prefill.mx import Mxfp4Experts, Mxfp8Experts
from tests.kernels.cuda.attention.test_batch import a_step
from tests.kernels.cuda.batch.test_products import make_layer
from tests.kernels.cuda.emulator import Emulator
from tests.kernels.cuda.prefill.test_products import mxfp4

NAN, INF = float("nan"), float("inf")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
WHERE = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def machine_on(device: str) -> KernelMachine:
    return gpu() if device == "cuda" else Emulator(3)


def negative_nan() -> float:
    return -torch.tensor(NAN).item()


@pytest.mark.parametrize("device", WHERE)
def test_a_layer_of_a_batch(device: str) -> None:
    layer, w = make_layer(128, 128, 16, 4, "mxfp4", machine_on(device), device)
    rows = 3
    g = torch.Generator().manual_seed(0)
    x = torch.randn((rows, 128), generator=g).to(device)
    attn = torch.randn((rows, 128), generator=g).bfloat16().to(device)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        residual, qkv = x.clone(), torch.zeros((rows, 96), device=device)
        layer.enter(residual, qkv, pending=False)
        first = qkv.clone()
        layer.leave(residual, attn)
        layer.enter(residual, qkv, pending=True)
        return first.cpu(), torch.cat((residual, qkv), 1).cpu()

    clean = run(x)
    assert all(torch.isfinite(t).all() for t in clean)
    shared = {"mlp_norm": layer.router.norm, "router": layer.router.weight, "router_bias": layer.router_bias}
    for name in ("attn_norm", "qkv_bias", "o_bias", "mlp_norm", "router", "router_bias", "gate_up_bias", "down_bias"):
        tensor = shared.get(name, w[name])
        for value in (NAN, -INF) if device == "cpu" else (NAN, negative_nan(), INF, -INF):
            before = tensor.clone()
            tensor.view(-1)[:: max(1, tensor.numel() // 128)] = value  # of every expert
            first, second = run(x)
            tensor.copy_(before)
            broken = ~torch.isfinite(first).all(1) | ~torch.isfinite(second).all(1)
            assert broken.all(), (name, value)
    for matrix in (layer.qkv, layer.o, layer.experts.gate_up, layer.experts.down):
        before = matrix.data.clone()
        matrix.data.view(-1, 544)[:, 512:] = 255  # the scales of MXFP4
        first, second = run(x)
        matrix.data.copy_(before)
        assert (~torch.isfinite(first).all(1) | ~torch.isfinite(second).all(1)).all()
    for value in (NAN, INF, 1e30):  # of one row; the square of the last is infinite
        wrong = x.clone()
        wrong[1, 5] = value
        for got, want in zip(run(wrong), clean):
            assert not torch.isfinite(got[1]).all()
            assert torch.equal(got[[0, 2]], want[[0, 2]])
    for got, want in zip(run(x), clean):
        assert torch.equal(got, want)


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("cached", [(90, 70), pytest.param((1200, 900), marks=pytest.mark.slow)])
def test_keys_and_values_of_a_batch(device: str, cached: tuple[int, int]) -> None:
    torch.manual_seed(0)
    step = a_step([(cached[0], 1), (cached[1], 1)], 20, "full")
    pool = torch.randn((41, 1, 2, 2, 64, 64)).bfloat16().to(device)
    qkv = torch.randn((2, 20 * 64)).to(device)
    sinks = torch.randn(16).to(device)
    there = type(step)(
        **{
            name: {k: t.to(device) for k, t in value.items()} if isinstance(value, dict) else value.to(device)
            if isinstance(value, Tensor) else value for name, value in vars(step).items()
        }
    )  # fmt: skip
    workspace = Workspace(machine_on(device), {}, torch.device(device))
    attention = BatchAttention(workspace, AttentionShape(8, 2), window=0, sinks=sinks, scale=0.125)
    turn = torch.ones((2, 32), device=device), torch.zeros((2, 32), device=device)

    def run() -> Tensor:
        return attention.run(there, "full", qkv.clone(), pool.clone(), 0, *turn)[:2].float().cpu()

    clean = run()
    page = int(step.block_tables["full"][0, 1])
    for which in range(2):
        for value in (NAN, INF, -INF):
            word = pool[page, 0, which, 1, 7]
            before = word.clone()
            word[33] = value
            got = run()
            word.copy_(before)
            assert not torch.isfinite(got[0]).all(), (which, value)
            assert torch.equal(got[1], clean[1])
    for value in (NAN, INF):
        before = sinks.clone()
        sinks[3] = value
        assert not torch.isfinite(run()).all(1).any()
        sinks.copy_(before)


@pytest.mark.parametrize(
    "kind",
    [GroupedExperts, Fp8Experts, *(pytest.param(k, marks=pytest.mark.slow) for k in (Mxfp8Experts, Mxfp4Experts))],
)
@pytest.mark.parametrize("device", WHERE)
def test_experts_of_a_prompt(device: str, kind: type[GroupedExperts]) -> None:
    if device == "cuda" and kind in (Mxfp8Experts, Mxfp4Experts) and torch.cuda.get_device_capability()[0] != 12:
        pytest.skip("block-scaled products need SM12x")
    rows, experts, hidden, inner = 40, 4, 128, 128
    g = torch.Generator().manual_seed(0)
    gate_up, down = mxfp4((experts, 2 * inner, hidden), 1)[0], mxfp4((experts, hidden, inner), 2)[0]
    gate_up_bias = torch.randn((experts, 2 * inner), generator=g).bfloat16().to(device)
    down_bias = torch.randn((experts, hidden), generator=g).bfloat16().to(device)
    weights, ids = torch.randn((rows, experts), generator=g).softmax(-1).topk(2)
    h, x = (torch.randn((rows, hidden), generator=g).bfloat16().to(device) for _ in range(2))
    workspace = Workspace(machine_on(device), {}, torch.device(device))
    layer = kind(workspace, gate_up.to(device), gate_up_bias, down.to(device), down_bias, limit=7.0, alpha=1.702)

    def run(h: Tensor) -> Tensor:
        return layer.run(h, ids.int().to(device), weights.contiguous().to(device), x.float()).cpu()

    clean = run(h)
    assert torch.isfinite(clean).all()
    chosen = (ids == 2).any(1)
    for bias, value in ((b, v) for b in (gate_up_bias, down_bias) for v in (NAN, INF, -INF)):
        before = bias.clone()
        bias[2, 6:8] = value
        got = run(h)
        bias.copy_(before)
        assert (torch.isfinite(got).all(1) == ~chosen).all(), value
        assert torch.equal(got[~chosen], clean[~chosen])
    for value in (NAN, INF):
        wrong = h.clone()
        wrong[5, 9] = value
        got = run(wrong)
        assert torch.isfinite(got).all(1).tolist() == [r != 5 for r in range(rows)]
