"""Triton's kernels as A100, RTX 30 and RTX 40 have them: SM8x's tiles, and E4M3 made of integers where it must be.

The cases of the other files again, with the architecture that tiles and formats are chosen for.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from halfbyte.architectures import GPU_ARCHES
from halfbyte.formats import e4m3
from halfbyte.gates import Gates
from halfbyte.kernels.triton import attention, linear, moe, rope, router
from halfbyte.kernels.triton.attention import DecodeAttention, PrefillAttention
from halfbyte.kernels.triton.jit.numbers import plain_e4m3_bits, plain_e4m3_to_bf16
from halfbyte.kernels.triton.linear import TritonQkv
from halfbyte.kernels.triton.moe import TritonMoe
from halfbyte.kernels.triton.rope import RopeAndWrite, cache_format
from tests.kernels.triton import test_attention, test_linear, test_moe, test_rows
from tests.kernels.triton.triton_cases import make_spec

SLOW = [("int8", 1), ("bf16", 40)]
OLD = [arch.name for arch in GPU_ARCHES.values() if arch.family == "sm8x"]


@pytest.fixture(params=["sm86", *(pytest.param(n, marks=pytest.mark.slow) for n in OLD if n != "sm86")])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for module in (attention, linear, moe, rope, router):
        monkeypatch.setattr(module, "arch_of", lambda device: GPU_ARCHES[request.param])
    return str(request.param)


@pytest.mark.parametrize(
    ("activation", "rows"), [("bf16", 1), *(pytest.param(a, r, marks=pytest.mark.slow) for a, r in SLOW)]
)
def test_experts(arch: str, activation: str, rows: int) -> None:
    test_moe.check(TritonMoe(), activation, rows, experts=4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "activation"), [("bf16", "bf16"), ("q8", "bf16"), ("mxfp4", "bf16"), ("q8", "int8")])
def test_projections(arch: str, kind: str, activation: str) -> None:
    test_linear.test_qkv(kind, activation, 33)


@pytest.mark.parametrize("kv", ["fp8", pytest.param("bf16", marks=pytest.mark.slow)])
def test_cache_and_attention(arch: str, kv: str) -> None:
    assert cache_format(make_spec(kv_dtype=kv), GPU_ARCHES[arch]) == (
        "bf16" if kv == "bf16" else "fp8" if arch == "sm89" else "fp8_bits"
    )
    test_rows.test_rope_and_kv_write(kv, "full")
    test_attention.test_attention(DecodeAttention(), [(62, 4), (200, 3)], "sliding", kv)
    test_attention.test_attention(PrefillAttention(), [(0, 1), (126, 5)], "full", kv)


@pytest.mark.parametrize("activation", ["fp8", "mxfp8", "mxfp4"])
def test_what_would_only_be_rounded_is_refused(activation: str) -> None:
    for name in OLD:
        spec = make_spec(activation=activation, formats=make_spec().formats | {"qkv": "mxfp4"})
        for phase in (TritonMoe(), TritonQkv()):
            reason = phase.refuse(spec, GPU_ARCHES[name], Gates())
            assert reason is not None
            assert f"{activation} would only round what is multiplied" in reason
        assert RopeAndWrite().refuse(spec, GPU_ARCHES[name], Gates()) is None


@triton.jit
def both(bits, values, x, codes, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(values + i, plain_e4m3_to_bf16(tl.load(bits + i)))
    tl.store(codes + i, plain_e4m3_bits(tl.load(x + i)))


def test_every_e4m3_code_through_integers() -> None:
    """All codes to bf16 and back, and the edges between them, ties to even: the bits of formats.e4m3."""
    bits = torch.arange(256, dtype=torch.uint8)
    want = e4m3.decode(bits)
    finite = want[want.isfinite() & (want >= 0)].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    near = torch.cat((middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9)), finite))
    special = torch.tensor([460.0, 1e9, float("inf"), float("nan"), -0.0])
    x = torch.cat((near, -near, special))
    x = torch.cat((x, torch.zeros(1024 - len(x))))
    values = torch.empty(1024, dtype=torch.bfloat16)
    codes = torch.empty(1024, dtype=torch.uint8)
    both[(1,)](torch.cat((bits, bits.new_zeros(768))), values, x, codes, N=1024)
    assert torch.equal(values[:256].float().nan_to_num(7e7), want.nan_to_num(7e7))
    assert torch.equal(codes, e4m3.encode(x))
