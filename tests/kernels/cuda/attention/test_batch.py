"""Attention of a batch against the specification, through the emulator: rope, the cache, windows, parts, sinks."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from halfbyte.kernels.cuda.attention.batch import (
    PART_WIDTH,
    PARTS_MAX,
    SHARED,
    AttentionArgs,
    AttentionShape,
    BatchAttention,
    parts_bound,
)
from halfbyte.kernels.cuda.device.host import KernelMachine, Workspace, gpu
from halfbyte.ops.attention import attend, gather_kv, write_kv
from halfbyte.ops.rope import rope, rope_table, yarn_frequencies
from halfbyte.plan.step import Step
from tests.kernels.cuda.emulator import Emulator, sizes


def test_mirrored_structs() -> None:
    assert sizes(AttentionShape(8, 2).program(), 3) == [ctypes.sizeof(AttentionArgs), SHARED, PART_WIDTH]


def a_step(sequences: list[tuple[int, int]], blocks: int, kind: str) -> Step:
    """(tokens in the cache, new tokens) of each sequence; pages in no order."""
    positions, rows_of, starts = [], [], [0]
    for s, (cached, new) in enumerate(sequences):
        positions += range(cached, cached + new)
        rows_of += [s] * new
        starts.append(len(positions))
    tables = 1 + torch.randperm(len(sequences) * blocks).view(len(sequences), blocks)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return Step(
        ints([0] * len(positions)), ints(positions), ints(starts), ints([c + n for c, n in sequences]), ints(rows_of),
        {kind: tables.int().contiguous()}, ints([0]), blocks * 64,
    )  # fmt: skip


CASES = [([(0, 1), (130, 1), (63, 1), (64, 1)], 8), ([(100, 5), (0, 3), (190, 1)], 4), ([(700, 2), (1200, 1)], 8)]


@pytest.mark.parametrize("window", [0, 128, 20])
@pytest.mark.parametrize(("sequences", "group"), CASES)
def test_against_the_reference(sequences: list[tuple[int, int]], group: int, window: int) -> None:
    check(Emulator(4), "cpu", sequences, group, window)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for sequences, group in (*CASES, ([(5000, 1), (300, 1), (33000, 3), (0, 1)], 8)):
        for window in (0, 128):
            check(gpu(), "cuda", sequences, group, window)


def check(machine: KernelMachine, device: str, sequences: list[tuple[int, int]], group: int, window: int) -> None:
    torch.manual_seed(len(sequences) + group)
    kv_heads, layers, layer = 2, 3, 1
    heads = group * kv_heads
    blocks = max(c + n for c, n in sequences) // 64 + 2
    step = a_step(sequences, blocks, "full")
    rows = step.rows
    pool = torch.full((1 + len(sequences) * blocks, layers, 2, kv_heads, 64, 64), float("nan"), dtype=torch.bfloat16)
    for s, (cached, _) in enumerate(sequences):
        at = torch.arange(cached, dtype=torch.int32)
        past = torch.randn((2, cached, kv_heads, 64)).bfloat16()
        table = step.block_tables["full"][s : s + 1].expand(cached, -1)
        write_kv(pool, layer, past[0], past[1], at, table)
    qkv = torch.randn((rows, heads + 2 * kv_heads, 64)) * 2
    sinks = torch.randn(heads).bfloat16() if group == 8 else torch.randn(heads)
    inverse, temperature = yarn_frequencies(64, 150000.0, 32.0, 4096, 32.0, 1.0, False)
    cos, sin = (t.float().contiguous() for t in rope_table(inverse, temperature, step.positions))

    theirs = pool.clone()
    q, k = rope(qkv[:, :heads], cos, sin), rope(qkv[:, heads : heads + kv_heads], cos, sin)
    row_tables = step.block_tables["full"][step.row_sequence.long()]
    write_kv(theirs, layer, k, qkv[:, heads + kv_heads :], step.positions, row_tables)
    want = torch.empty((rows, heads, 64))
    for s, (cached, new) in enumerate(sequences):
        mine = slice(int(step.query_start[s]), int(step.query_start[s + 1]))
        keys, values = gather_kv(theirs, layer, step.block_tables["full"][s], cached + new)
        query = q[mine].bfloat16().float()
        want[mine] = attend(query, keys, values, step.positions[mine], sinks, window or None, 0.125)

    attention = BatchAttention(
        Workspace(machine, {}, torch.device(device)), AttentionShape(group, kv_heads), window=window,
        sinks=sinks.to(device), scale=0.125,
    )  # fmt: skip
    whole, pool = qkv.flatten(1).contiguous().to(device), pool.to(device)
    there = replace(
        step,
        positions=step.positions.to(device),
        query_start=step.query_start.to(device),
        row_sequence=step.row_sequence.to(device),
        block_tables={"full": step.block_tables["full"].to(device)},
    )
    turn = (cos.to(device), sin.to(device))
    got = attention.run(there, "full", whole, pool, layer, *turn)[:rows].float()
    again = attention.run(there, "full", whole, pool, layer, *turn)[:rows].float()
    assert torch.equal(got, again), "other order of events, same bits"
    got, pool = got.cpu(), pool.cpu()
    assert torch.isfinite(got).all()
    assert float((got - want.flatten(1)).norm() / want.norm()) < 4e-3
    far = 0.0 if device == "cpu" else 2**-7  # a GPU joins the multiply and the add of rope: the last bit may differ
    torch.testing.assert_close(pool, theirs, rtol=far, atol=far / 8, equal_nan=True)
    assert int(attention.arrivals.abs().sum()) == 0


def test_without_sinks() -> None:
    step = a_step([(5, 1)], 1, "full")
    pool = torch.zeros((2, 1, 2, 2, 64, 64), dtype=torch.bfloat16)
    qkv = torch.zeros((1, 12 * 64))
    qkv[:, 10 * 64 :] = 6.0  # the row's own value; the five before it are zero, and all keys are alike
    attention = BatchAttention(
        Workspace(Emulator(1), {}, torch.device("cpu")), AttentionShape(4, 2), window=0, sinks=None, scale=1.0
    )
    none = torch.zeros((1, 32))
    assert attention.run(step, "full", qkv, pool, 0, none, none)[0].tolist() == [1.0] * 512


def test_parts_are_bounded() -> None:
    for tokens in (1, 512, 513, 4096, 4097, 32768, 32769, 131072):
        for length in range(1, tokens + 1, 97):
            pages = -(-length // 64)
            each = 8 if pages <= 64 else 32 if pages <= 512 else 128
            assert -(-pages // each) <= parts_bound(tokens, 0) <= PARTS_MAX
    assert parts_bound(131072, 128) == 1
