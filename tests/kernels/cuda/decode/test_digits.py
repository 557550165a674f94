"""Experts of the decode step by products of a warpgroup, with x in two E4M3 digits: what they hold, and the step."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.checks.decode_case import DecodeCase, random_weights
from bench.checks.decode_check import check_decode
from halfbyte.formats import MXTensor, dequantize, e2m1, layouts, tile16
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.launch import Program, compile_program, nvrtc_available
from tests.kernels.cuda.decode.decode_models import Case, relative, small
from tests.kernels.cuda.decode.test_broken import TENSORS, Model, at, tiny
from tests.kernels.cuda.decode.test_compile import LARGE, shape
from tests.kernels.cuda.emulator import Emulator, library, sizes
from tests.kernels.cuda.machine_code import freed_too_early

PROBE = Program(Path(__file__).parents[1] / "digits_probe.cu", "probe")
reason = nvrtc_available()
wgmma = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_nvrtc = pytest.mark.skipif(reason is not None, reason=reason or "")


# ---- digits ----------------------------------------------------------------------------------------------------------


def held(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups float32 [groups, 32] as the kernel makes them: high and low digits, float64, and scales."""
    digits, scales = [], []
    for part in x.view(-1, 4, 32):
        out, scale = torch.zeros((4, 2, 8), dtype=torch.int32), torch.zeros(4)
        args = (ctypes.c_void_p * 3)(part.contiguous().data_ptr(), out.data_ptr(), scale.data_ptr())
        library(PROBE).hb_run(b"probe", args, 1, 0)
        digits.append(out.view(torch.float8_e4m3fn).double().view(4, 2, 32))
        scales.append(scale.double())
    both = torch.cat(digits)
    return both[:, 0], both[:, 1], torch.cat(scales)


def value(x: Tensor) -> Tensor:
    high, low, scale = held(x)
    return (high + low / 16) * scale[:, None]


def spread(groups: int, octaves: int, seed: int) -> Tensor:
    """Random values whose magnitudes lie within so many octaves of 1."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(-torch.randint(0, octaves, (groups, 32), generator=g).float())
    return (
        (torch.rand((groups, 32), generator=g) + 1) * sizes * (torch.randint(0, 2, (groups, 32), generator=g) * 2 - 1)
    )


@pytest.mark.parametrize("exponent", [-60, 0, 100])
def test_a_bf16_number_is_held_exactly(exponent: int) -> None:
    """Within 14 octaves of the largest of its group, at any size of the group."""
    x = spread(256, 14, 1).bfloat16().float() * 2.0**exponent
    near = x.abs() >= x.abs().amax(-1, keepdim=True) * 2.0**-13
    assert near.double().mean() > 0.9
    assert torch.equal(value(x)[near], x.double()[near])


def test_any_number_is_held_as_well_as_by_bf16() -> None:
    x = spread(256, 30, 2)
    error = (value(x) - x.double()).abs()
    largest = x.double().abs().amax(-1, keepdim=True)
    assert bool((error <= torch.maximum(x.double().abs() * 2.0**-9, largest * 2.0**-21)).all())


def test_products_of_digits_add_up_exactly() -> None:
    """A group's products with E2M1 codes, digit by digit and scaled behind the sum, are the products with x itself."""
    x = spread(64, 14, 3).bfloat16().float()
    x = torch.where(x.abs() >= x.abs().amax(-1, keepdim=True) * 2.0**-13, x, torch.zeros(()))
    codes = torch.tensor(e2m1.VALUES, dtype=torch.float64)[torch.randint(0, 16, (16, 32))]
    high, low, scale = held(x)
    sums = (high @ codes.T + low @ codes.T / 16) * scale[:, None]
    assert torch.equal(sums, x.double() @ codes.T)


def test_what_is_no_number_stays_none() -> None:
    x = torch.ones(4, 32)
    x[0, 3], x[1, 5], x[2] = float("nan"), float("inf"), 0.0
    high, low, scale = held(x)
    assert torch.isnan(scale[:2]).all()
    assert not high[2].any()
    assert not low[2].any()
    assert torch.isfinite(scale[2])
    assert torch.equal(value(x)[3], torch.ones(32, dtype=torch.float64))


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_a_word_widens_by_masks() -> None:
    """Bytes of the two registers of every word, as E5M2, are the values of their columns times 2^-14."""
    codes = torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    plain = MXTensor(codes, torch.full((16, 2), 127, dtype=torch.uint8), (16, 64), "mxfp4")
    word = tile16.pack_e5m2(plain).data[0, 0, :512].view(torch.int32).to(torch.int64).view(8, 4, 2, 2) & 0xFFFFFFFF
    first = word & 0x8E8E8E8E
    second = ((word >> 3) & 0x0E0E0E0E) + (word & 0x01010101) * 128
    want = dequantize(plain, torch.float32).double().view(2, 8, 2, 2, 4, 4)  # r, g, group, half, t, byte
    for half, register in enumerate((first, second)):
        for byte in range(4):
            bits = (register >> 8 * byte & 255).to(torch.uint8)
            seen = bits.contiguous().view(torch.float8_e5m2).double() * 2.0**14  # g, t, group, r
            assert torch.equal(seen, want[:, :, :, half, :, byte].permute(1, 3, 2, 0))


def test_four_tiles_lie_side_by_side() -> None:
    """Six chunks of each of four tiles, then the next six; the last quad and the last atom have what is left."""
    tiles, chunks = 6, 15
    size = (tiles * 16, chunks * 64)
    codes = torch.randint(0, 256, (size[0], size[1] // 2), dtype=torch.uint8)
    scales = torch.randint(0, 255, (size[0], chunks * 2), dtype=torch.uint8)
    packed = layouts.convert(MXTensor(codes, scales, size, "mxfp4"), "tile16_e5m2").data
    assert packed.shape == layouts.convert(MXTensor(codes, scales, size, "mxfp4"), "tile16").data.shape
    order = [
        (t, c) for q in (range(4), range(4, 6)) for a in (range(6), range(6, 12), range(12, 15)) for t in q for c in a
    ]
    for got, (t, c) in zip(packed.view(-1, 544), order, strict=True):
        rows = slice(16 * t, 16 * t + 16)
        alone = MXTensor(codes[rows, 32 * c : 32 * c + 32], scales[rows, 2 * c : 2 * c + 2], (16, 64), "mxfp4")
        assert torch.equal(got, tile16.pack_e5m2(alone).data.view(-1)), (t, c)


def test_scales_lie_where_tile16_has_them() -> None:
    """In a chunk; and chunks of one atom's width follow each other as there."""
    t = MXTensor(
        torch.randint(0, 256, (48, 64), dtype=torch.uint8),
        torch.randint(0, 255, (48, 4), dtype=torch.uint8),
        (48, 128),
        "mxfp4",
    )
    ours, theirs = layouts.convert(t, "tile16_e5m2").data, layouts.convert(t, "tile16").data
    assert ours.shape == theirs.shape
    assert torch.equal(ours[..., 512:], theirs[..., 512:])
    assert not torch.equal(ours[..., :512], theirs[..., :512])


# ---- the step --------------------------------------------------------------------------------------------------------

WIDE = StepShape(1088, 1152, 1, 32, 8, 1, 256)  # three atoms; chunks that come out even for one matrix alone


def by_digits(s: StepShape, rows: int, **changes: int) -> StepShape:
    return replace(s, rows=rows, digits=True, **changes)  # type: ignore[arg-type]


STEPS = {
    "one row": (by_digits(small(1), 1), None),
    "two rows": (by_digits(small(1), 2), None),
    "four rows": (by_digits(small(1), 4), None),
    "eight rows": (by_digits(small(1), 8), None),
    "four rows of one sequence": (by_digits(small(1), 4), [0, 0, 0, 0]),
    "several slots": (by_digits(WIDE, 1), None),
    "several slots, eight rows": (by_digits(WIDE, 8), None),
    "one atom to a slot": (by_digits(WIDE, 1, slot=13_056), None),
    "one atom to a slot, four rows": (by_digits(WIDE, 4, slot=13_056), None),
    "a small ring": (by_digits(WIDE, 2, ring=6), None),
}
USUAL = ("one row", "four rows", "several slots")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in USUAL else pytest.mark.slow) for n in STEPS])
def test_against_the_oracle(name: str) -> None:
    """Every value within the bound of a GPU; a choice of experts may fall the other way within a tie."""
    s, sequences = STEPS[name]
    torch.manual_seed(5)
    case = DecodeCase.make(s, random_weights(s, "cpu"), 256, s.rows)
    verdict = check_decode(s, case, 100, sequences, machine=Emulator(4, seed=3))
    assert verdict.ok, "; ".join(verdict.wrong)


# One row has 16 quads of gate_up, and 24 halves of down, six of an expert. 1, 3: whole experts, a part of one; 5, 7:
# three to five halves, from the middle of a quad and across experts; 13: one or two of each; 24: a half each, and
# no gate_up for some; 40: neither for some.
@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("blocks", [1, 3, 5, 7, 13, 24, 40])
def test_any_number_of_blocks(blocks: int, rows: int) -> None:
    """Blocks own whole quads of gate_up and half quads of down, as it comes out."""
    s = replace(by_digits(small(1), rows), layers=1)
    torch.manual_seed(5)
    case = DecodeCase.make(s, random_weights(s, "cpu"), 256, s.rows)
    verdict = check_decode(s, case, 100, machine=Emulator(blocks, seed=3))
    assert verdict.ok, "; ".join(verdict.wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not wgmma, reason="needs a GPU of SM90")
@pytest.mark.parametrize("name", STEPS)
def test_on_a_gpu(name: str) -> None:
    s, sequences = STEPS[name]
    torch.manual_seed(5)
    case = DecodeCase.make(s, random_weights(s), 256, s.rows)
    verdict = check_decode(s, case, 100, sequences)
    assert verdict.ok, "; ".join(verdict.wrong)


@pytest.mark.parametrize("kind", ["nan", pytest.param("-inf", marks=pytest.mark.slow)])
def test_what_is_no_number_is_named(kind: str) -> None:
    """As by the other body: a maximum, a power of two and E4M3 hide neither NaN nor infinity."""
    model = Model(replace(tiny(), digits=True, workers=0), Emulator(3))
    assert model.places() == [None, None]
    for name in ("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias"):
        assert model.plant(name, kind) == at(TENSORS[name]), name
    assert model.places() == [None, None]


def test_scales_of_any_size() -> None:
    """A factor of 2^30 moved from the norm into the weights' scales leaves every bit as it was."""
    logits = []
    for octaves in (0, 30):
        case = Case(by_digits(small(1), 1), Emulator(4), 1, 4)
        for layer in case.step.weights.layers:
            layer.mlp_norm *= 2.0**-octaves
            layer.router.view(torch.bfloat16).mul_(2.0**octaves)
            layer.gate_up[..., 512:] += octaves
        case.run([37], [100], [0])
        logits.append(case.step.logits[:1].clone())
    assert torch.isfinite(logits[0]).all()
    assert torch.equal(*logits)


def test_both_bodies_are_the_same_function() -> None:
    """Of one model in both layouts; the first layer's residual before the experts is the same to the bit."""
    seen = []
    for s in (small(1), by_digits(small(1), 1)):
        case = Case(replace(s, layers=1), Emulator(4), 1, 4)
        pairs, token = case.run([17], [100], [0])
        seen.append(({name: pair[0] for name, pair in pairs.items()}, token))
    (today, token), (digits, other) = seen
    assert torch.equal(today["mid"], digits["mid"])
    assert torch.equal(today["router"], digits["router"])
    assert 0 < relative(digits["h"], today["h"]) < 2e-3
    assert relative(digits["logits"], today["logits"]) < 2e-3
    assert torch.equal(token, other)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_sizes_are_those_of_the_compiler(rows: int) -> None:
    for s in (by_digits(small(1), rows), replace(shape(rows), digits=True)):
        _, shared, threads, _ = sizes(s.program(), 4)
        assert threads == s.threads
        assert shared <= s.shared_bytes <= LARGE
        assert s.refuse() is None


def test_other_machines_are_refused() -> None:
    assert "SM90" in str(replace(shape(1, shared=101_376), digits=True).refuse())
    assert "SM90" in str(replace(shape(1), digits=True, workers=15).refuse())


def test_other_builds_know_nothing_of_it() -> None:
    assert not any("TILE_BODY" in option for option in shape(1).options())


@needs_nvrtc
@pytest.mark.parametrize("rows", [1, *(pytest.param(r, marks=pytest.mark.slow) for r in (2, 4, 8))])
def test_machine_code(rows: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from halfbyte.kernels.machine_code import disassemble

    s = replace(shape(rows), digits=True)
    sass = disassemble(compile_program(s.program(), "sm_90a", cache=tmp_path))
    assert len(re.findall("QGMMA", sass)) == 2 * 30  # of 15 chunks a third, for gate_up and down
    # products of the next step are on their way while sums of this one are scaled
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", sass)
    assert waits.count("0") == 2
    assert waits.count("1") >= 14
    assert freed_too_early(sass, slot_bytes=s.slot_bytes) == []
