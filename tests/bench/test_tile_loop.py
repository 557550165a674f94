"""The probe of the decode step's loop: every body multiplies what it says, and its inputs are what the kernel reads."""

from __future__ import annotations

import pytest
import torch

from bench.checks.decode_case import shape_of
from bench.experiments import tile_loop
from bench.experiments.tile_loop import BODIES, LoopBody, LoopCase
from halfbyte.formats import e2m1
from halfbyte.lab.result import Cell
from tests.kernels.cuda.emulator import Emulator, mirror_fields, sizes, struct_fields

STEP = shape_of("120b", "mxfp4")


@pytest.mark.parametrize("name", BODIES)
def test_sums_are_those_of_float64(name: str) -> None:
    torch.manual_seed(3)
    case = LoopCase(LoopBody(name, STEP), Emulator(blocks=1), "cpu")
    verdict, error = case.check()
    assert verdict.as_check().ok, verdict.as_check().note
    assert error < 3e-5  # the emulator's products are exact: what is left is x in 16 bits, and float's sums


def test_a_wrong_digit_is_seen() -> None:
    case = LoopCase(LoopBody("A: masks, two digits", STEP), Emulator(blocks=1), "cpu")
    digits = case.keep[1]
    digits[0, 0, :16] ^= 0x80
    assert not case.check()[0].as_check().ok


def test_a_measured_body_becomes_a_result() -> None:
    body = LoopBody("today", STEP)
    cell = Cell("kernel", "120b", path="tile loop", shape={"body": body.name})
    result = tile_loop.measure(cell, LoopCase(body, Emulator(blocks=1), "cpu"), tiles=16, repeats=1)
    assert result.state == "measured"


@pytest.mark.parametrize("name", BODIES)
def test_what_the_host_says_is_what_is_compiled(name: str) -> None:
    body = LoopBody(name, STEP)
    build = body.build()
    assert struct_fields(build.program, "Probe") == mirror_fields(tile_loop.ProbeArgs)
    _, shared, threads, slots = sizes(build.program, 4)
    assert threads == build.threads
    assert shared <= build.shared <= 232_448
    assert slots == body.slots


def test_two_digits_hold_a_bf16_number() -> None:
    """Exactly, within 14 octaves of the largest of its group."""
    x = torch.randn(tile_loop.WIDTH) * torch.exp2(-torch.randint(0, 13, (tile_loop.WIDTH,)).float())
    x = x.bfloat16()
    digits, scales = tile_loop.digits_of(x)
    units = digits.view(3, 8, 8, 8, 16)
    place = torch.arange(8)
    rows = torch.stack([units[:, :, row, place ^ row] for row in range(8)], 2).reshape(3, 8, 8, 4, 32)
    value = rows.view(torch.float8_e4m3fn).double()
    found = torch.stack([value[:, :, 2 * q, q] + value[:, :, 2 * q + 1, q] / 16 for q in range(4)], 2)
    found = (found.reshape(3, 32, 32) * scales.double()[..., None])[:, :30].reshape(-1)
    groups = x.double().view(-1, 32)
    near = (groups.abs() >= groups.abs().amax(-1, keepdim=True) * 2.0**-13).reshape(-1)
    assert near.double().mean() > 0.8
    assert torch.equal(found[near], x.double()[near])


def test_every_code_of_b_has_its_place() -> None:
    codes = torch.randint(0, 16, (64, 8))
    word = tile_loop.table_words(codes).to(torch.int64) & 0xFFFFFFFF
    values = torch.tensor(e2m1.VALUES)
    for byte in range(4):
        first = (word >> 4 * byte & 7) | (word >> 8 * byte + 4 & 8)
        second = (word >> 16 + 4 * byte & 7) | (word >> 8 * byte & 8)
        assert torch.equal(values[first], values[codes[:, byte]])
        assert torch.equal(values[second], values[codes[:, 4 + byte]])
