"""The block-scaled products of SM12x, whose operands no machine here can check: the emulator's lanes, registers and
scales against the layouts that are published for `mma.sync.m16n8k32` (kind::mxf8f6f4) and `m16n8k64` (kind::mxf4).

A published layout is a shape and strides: thread and value -> place in the matrix, counted along its rows first (the
facts are those of CUTLASS, include/cute/atom/mma_traits_sm120.hpp and mma_traits_sm80.hpp). Operands are put into
registers by it, and the product must be that of the matrices; so a kernel that is right in the emulator is right by the
published layout. The source that is compiled for a GPU names the same selectors (the last test).
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halfbyte.formats import e2m1
from halfbyte.kernels.launch import INCLUDES, Program
from tests.kernels.cuda.emulator import library

PROBE = Program(Path(__file__).parent / "mma_probe.cu", "probe")
Mode = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides, the fastest first


class Layout:
    """(thread, value) -> (row, column) of a matrix of `rows` rows."""

    def __init__(self, rows: int, threads: Mode, values: Mode) -> None:
        self.rows, self.threads, self.values = rows, threads, values

    @staticmethod
    def _offsets(mode: Mode) -> list[int]:
        sizes, strides = mode
        places = itertools.product(*(range(n) for n in reversed(sizes)))
        return [sum(i * s for i, s in zip(reversed(place), strides)) for place in places]

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        for thread, t in enumerate(self._offsets(self.threads)):
            for value, v in enumerate(self._offsets(self.values)):
                yield thread, value, (t + v) % self.rows, (t + v) // self.rows


C = Layout(16, ((4, 8), (32, 1)), ((2, 2), (16, 8)))
A32 = Layout(16, ((4, 8), (64, 1)), ((4, 2, 2), (16, 8, 256)))
B32 = Layout(8, ((4, 8), (32, 1)), ((4, 2), (8, 128)))
A64 = Layout(16, ((4, 8), (128, 1)), ((8, 2, 2), (16, 8, 512)))
B64 = Layout(8, ((4, 8), (64, 1)), ((8, 2), (8, 256)))


def scale_rows(k: int) -> Layout:
    """Of A: threads (2, 2, 8) with strides (8, 0, 1). Stride 0: the second pair of a quad says nothing new."""
    return Layout(16, ((2, 2, 8), (8, 0, 1)), ((k,), (16,)))


def scale_columns(k: int) -> Layout:
    return Layout(8, ((4, 8), (0, 1)), ((k,), (8,)))


class Args(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "sa", "sb", "d")),
        *((name, ctypes.c_int) for name in ("kind", "byte")),
    ]


def registers(layout: Layout, codes: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Values in the order of the layout, so many bits each, the first lowest."""
    each = 32 // bits
    words = torch.zeros((32, count), dtype=torch.int64)
    for thread, value, row, column in layout:
        words[thread, value // each] |= int(codes[row, column]) << bits * (value % each)
    return words.to(torch.int32)


def scale_words(layout: Layout, scales: torch.Tensor, byte: int, poison: int) -> torch.Tensor:
    """A byte for each group of 32 columns, from byte `byte` on. The other bytes, and lanes that the selector (thread 0
    of those that could) leaves out, hold something else."""
    words = torch.full((32,), poison * 0x01010101, dtype=torch.int64)
    given: set[tuple[int, int]] = set()
    for thread, _, row, column in layout:
        if (row, column) in given:
            continue  # an earlier thread of the quad has it
        given.add((row, column))
        shift = 8 * (byte + column // 32)
        words[thread] = (int(words[thread]) & ~(0xFF << shift)) | int(scales[row, column // 32]) << shift
    return words.to(torch.int32)


@pytest.mark.parametrize(("kind", "byte"), [(1, 0), (1, 3), (2, 0), (2, 2)])
def test_operands_by_the_published_layout(kind: int, byte: int) -> None:
    k, bits = (32, 8) if kind == 1 else (64, 4)
    a_layout, b_layout = (A32, B32) if kind == 1 else (A64, B64)
    g = torch.Generator().manual_seed(10 * kind + byte)
    weights = torch.randint(0, 16, (16, k), generator=g)
    scales_a = torch.randint(120, 134, (16, k // 32), generator=g)
    scales_b = torch.randint(120, 134, (8, k // 32), generator=g)
    if kind == 1:  # E2M1 stands in the middle of a byte: 0b00ABCD00
        a_codes = weights << 2
        b_codes = torch.randint(0, 256, (8, k), generator=g)
        b_codes[(b_codes & 0x7F) == 0x7F] = 0x38  # no NaN
        b_values = b_codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    else:
        a_codes, b_codes = weights, torch.randint(0, 16, (8, k), generator=g)
        b_values = e2m1.decode(b_codes.to(torch.uint8)).double()
    given = {
        "a": registers(a_layout, a_codes, bits, 4), "b": registers(b_layout, b_codes, bits, 2),
        "sa": scale_words(scale_rows(k), scales_a, byte, 200), "sb": scale_words(scale_columns(k), scales_b, byte, 201),
        "d": torch.zeros((32, 4)),
    }  # fmt: skip
    args = Args(**{name: t.data_ptr() for name, t in given.items()}, kind=kind, byte=byte)
    library(PROBE).hb_run(b"probe", ctypes.byref(args), 1, 3)

    def scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return values * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)

    want = scaled(e2m1.decode(weights.to(torch.uint8)).double(), scales_a) @ scaled(b_values, scales_b).T
    got = torch.full((16, 8), float("nan"), dtype=torch.float64)
    for thread, value, row, column in C:
        got[row, column] = given["d"][thread, value]
    assert torch.allclose(got, want, rtol=1e-6, atol=0.0)


def test_a_layout_that_is_another_is_noticed() -> None:
    """Every place once, and all of them: else the comparison above would prove less than it says."""
    for layout, shape in ((A32, (16, 32)), (B32, (8, 32)), (A64, (16, 64)), (B64, (8, 64)), (C, (16, 8))):
        seen = sorted((row, column) for _, _, row, column in layout)
        assert seen == sorted(itertools.product(range(shape[0]), range(shape[1])))


def test_the_source_asks_for_these_selectors() -> None:
    """Scales come from thread 0 of those that could give them: lanes 4 r and 4 r + 1 of A, lane 4 c of B."""
    text = (INCLUDES / "device" / "warp_products.cuh").read_text(encoding="utf-8")
    found = re.findall(r"%10,\{%12,(\d)\},%11,\{%13,(\d)\}", text)
    assert found == [("0", "0"), ("0", "0")]
    for shape, kind, vector in (("m16n8k32", "mxf8f6f4", "1X"), ("m16n8k64", "mxf4", "2X")):
        assert f"{shape}.row.col.kind::{kind}.block_scale.scale_vec::{vector}." in text
