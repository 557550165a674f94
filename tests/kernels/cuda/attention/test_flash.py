"""Attention of whole prompts, through the emulator, against the specification: boundaries, sinks, ragged batches."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Literal

import pytest
import torch

from halfbyte import formats
from halfbyte.formats import layouts
from halfbyte.kernels.cuda.attention.flash import (
    FULL,
    SLIDING,
    FlashArgs,
    FlashAttention,
    FlashShape,
    attend,
    map_pages,
)
from halfbyte.kernels.cuda.device.emulator import Emulator, sizes
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.kernels.cuda.prefill.products import Dense
from halfbyte.ops import attention as reference
from halfbyte.plan.step import Step

HEADS, KV_HEADS, DIM, PAGE = 16, 2, 64, 64
BOUND = 4e-3  # weights are rounded to bf16 for the product


def case(lengths: Sequence[tuple[int, int]], seed: int = 0) -> tuple[Step, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(cached, new) tokens of each sequence; the pool has NaN wherever nothing was written."""
    g = torch.Generator().manual_seed(seed)
    rows = sum(n for _, n in lengths)
    blocks = max(-(-(c + n) // PAGE) for c, n in lengths)
    pages = torch.randperm(len(lengths) * blocks, generator=g).view(len(lengths), blocks).to(torch.int32) + 1
    pool = torch.full((len(lengths) * blocks + 1, 3, 2, KV_HEADS, PAGE, DIM), torch.nan).bfloat16()
    for s, (c, n) in enumerate(lengths):
        for at in range(c + n):
            pool[pages[s, at // PAGE], 1, :, :, at % PAGE] = torch.randn((2, KV_HEADS, DIM), generator=g).bfloat16()
    starts = torch.tensor([0, *torch.tensor([n for _, n in lengths]).cumsum(0)], dtype=torch.int32)
    step = Step(
        tokens=torch.zeros(rows, dtype=torch.int32),
        positions=torch.cat([torch.arange(c, c + n, dtype=torch.int32) for c, n in lengths]),
        query_start=starts,
        kv_lens=torch.tensor([c + n for c, n in lengths], dtype=torch.int32),
        row_sequence=torch.cat([torch.full((n,), i, dtype=torch.int32) for i, (_, n) in enumerate(lengths)]),
        block_tables={"full": pages, "sliding": pages},
        logit_rows=starts[1:] - 1,
        max_kv_len=max(c + n for c, n in lengths),
    )
    q = (torch.randn((rows, HEADS, DIM), generator=g) * 2).bfloat16()
    return step, pool, q, torch.randn(HEADS, generator=g).bfloat16()


def run(
    b: FlashShape, step: Step, pool: torch.Tensor, q: torch.Tensor, sinks: torch.Tensor | None, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    machine = Emulator(1, seed=6)
    got = attend(machine, b, q, pool, 1, step, "full", sinks, window, pages=map_pages(machine, pool)).float()
    return got, wanted(step, pool, q, sinks, window)


def wanted(step: Step, pool: torch.Tensor, q: torch.Tensor, sinks: torch.Tensor | None, window: int) -> torch.Tensor:
    want = torch.empty(q.shape)
    for s in range(step.sequences):
        mine = slice(int(step.query_start[s]), int(step.query_start[s + 1]))
        k, v = reference.gather_kv(pool, 1, step.block_tables["full"][s], int(step.kv_lens[s]))
        positions = step.positions[mine]
        want[mine] = reference.attend(
            q[mine].float(), k, v, positions, None if sinks is None else sinks.float(), window or None, DIM**-0.5
        )
    return want.flatten(1)


def close(got: torch.Tensor, want: torch.Tensor, bound: float = BOUND) -> None:
    assert torch.isfinite(got).all()
    assert float((got - want).norm() / want.norm()) < bound


@pytest.mark.parametrize("b", [FULL, SLIDING, FlashShape(2, 2, 1)], ids=str)
def test_mirrored_structs(b: FlashShape) -> None:
    assert sizes(b.program(), 3) == [ctypes.sizeof(FlashArgs), b.shared_bytes, b.threads]
    assert b.shared_bytes * b.blocks <= 232_448 - 1024 * b.blocks


CASES = [
    [(0, 1)],  # the first token of all
    [(0, 70)],
    [(0, 1), (126, 5), (40, 30), (250, 3)],  # ragged, chunks, single rows
    [(63, 2), (64, 9), (127, 25)],  # over page, window and tile boundaries
]


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("lengths", CASES, ids=str)
@pytest.mark.parametrize("b", [FULL, SLIDING, FlashShape(2, 2, 1)], ids=str)
def test_attention(b: FlashShape, lengths: Sequence[tuple[int, int]], window: int) -> None:
    step, pool, q, sinks = case(lengths)
    close(*run(b, step, pool, q, sinks, window))


@pytest.mark.parametrize("form", ["mxfp4", "q8"])  # q8 reads f16
def test_packed_rows_are_what_packing_rows_gives(form: Literal["mxfp4", "q8"]) -> None:
    step, pool, q, sinks = case([(0, 1), (126, 5), (40, 30)])
    rows, machine = q.shape[0], Emulator(1, seed=6)
    pages = map_pages(machine, pool)
    plain = attend(machine, SLIDING, q, pool, 1, step, "full", sinks, 0, pages=pages)
    workspace = Workspace(machine, {}, torch.device("cpu"))
    weights = formats.quantize(torch.ones((64, HEADS * DIM)), form)
    o = Dense(workspace, layouts.convert(weights, "tile16"), None, "o")
    want, there = o.pack(plain).packed.clone(), o.inputs(rows)
    got = attend(
        machine, SLIDING, q, pool, 1, step, "full", sinks, 0, pages=pages,
        packed=there._replace(packed=torch.zeros_like(want)),
    )  # fmt: skip
    first, second = (
        x.view(torch.int16)[: there.slots * HEADS * DIM].view(HEADS, there.slots, DIM)[:, :rows] for x in (want, got)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("sink", [-1e4, -60.0, 60.0, 1e4, float("-inf")])
def test_extreme_sinks(sink: float) -> None:
    """A huge sink takes everything, a tiny one nothing; neither makes a NaN."""
    step, pool, q, sinks = case([(70, 2)])
    sinks[:8] = sink
    got, want = run(FULL, step, pool, q, sinks, 0)
    close(got, want)
    if sink > 0:
        assert float(got[:, : 8 * DIM].abs().max()) < 1e-6
    close(*run(FULL, step, pool, q, sinks.float(), 0))


def test_dropping_the_sinks_is_noticed() -> None:
    step, pool, q, sinks = case([(70, 3)])
    sinks = sinks + 5
    without, _ = run(FULL, step, pool, q, None, 0)
    _, want = run(FULL, step, pool, q, sinks, 0)
    with pytest.raises(AssertionError):
        close(without, want, 10 * BOUND)
    close(without, run(FULL, step, pool, q, None, 0)[1])


def test_maxima_that_grow_late_and_far() -> None:
    """Scores that rise from page to page move the reference maximum, and early sums must follow it."""
    step, pool, q, sinks = case([(0, 330)])
    for block, page in enumerate(step.block_tables["full"][0].tolist()):
        pool[page, 1, 0] *= 0.2 + 3 * block
    close(*run(FULL, step, pool, q, sinks, 0))


def test_a_row_does_not_depend_on_its_tile() -> None:
    """The same sequence in one chunk, in two, and beside others: the same bits."""
    step, pool, q, sinks = case([(0, 90)])
    whole, _ = run(FULL, step, pool, q, sinks, 128)
    for first in (1, 37, 64):
        part, _, _, _ = case([(first, 90 - first)])
        part = dataclasses.replace(part, block_tables=step.block_tables)
        got, _ = run(SLIDING, part, pool, q[first:].contiguous(), sinks, 128)
        assert torch.equal(got, whole[first:])


@pytest.mark.parametrize(
    "lengths", [[(40, 1), (126, 1), (250, 1), (30, 40), (0, 9)], [(i % 5, 1) for i in range(26)] + [(60, 30)]], ids=len
)
def test_single_rows_in_front_have_the_same_bits_in_blocks_of_their_own(lengths: Sequence[tuple[int, int]]) -> None:
    step, pool, q, sinks = case(lengths)
    together, want = run(FULL, step, pool, q, sinks, 0)
    for singles in (1, sum(n == 1 for _, n in lengths)):
        apart, _ = run(FULL, dataclasses.replace(step, singles=singles), pool, q, sinks, 0)
        assert torch.equal(apart, together)
    close(together, want)


def test_refuses_what_it_cannot_read() -> None:
    from halfbyte.gates import Gates
    from halfbyte.kernels.prove import default_spec
    from halfbyte.plan.phase import ARCHES

    phase, gates = FlashAttention(), Gates()
    assert phase.refuse(default_spec(), ARCHES["sm90"], gates) is None
    assert "sm90" in str(phase.refuse(default_spec(), ARCHES["sm120"], gates))
    assert "fp8" in str(phase.refuse(default_spec(kv="fp8"), ARCHES["sm90"], gates))
    assert "another format" in str(phase.refuse(default_spec(dense="mxfp4", activation="mxfp8"), ARCHES["sm90"], gates))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 128])
def test_on_a_gpu(window: int) -> None:
    for lengths in (*CASES, [(0, 1000), (700, 333)], [(900 + 40 * i, 1) for i in range(30)] + [(5, 300)]):
        step, pool, q, sinks = case(lengths)
        want = wanted(step, pool, q, sinks, window)
        there = dataclasses.replace(
            step,
            positions=step.positions.cuda(),
            query_start=step.query_start.cuda(),
            block_tables={k: v.cuda() for k, v in step.block_tables.items()},
        )
        pool = pool.cuda()
        for b in (FULL, SLIDING):
            pages = map_pages(gpu(), pool)
            got = attend(gpu(), b, q.cuda(), pool, 1, there, "full", sinks.cuda(), window, pages=pages)
            close(got.float().cpu(), want)
        singles = next((i for i, (_, n) in enumerate(lengths) if n > 1), len(lengths))
        apart = dataclasses.replace(there, singles=singles)
        again = attend(gpu(), FULL, q.cuda(), pool, 1, apart, "full", sinks.cuda(), window, pages=pages)
        assert torch.equal(
            again, attend(gpu(), FULL, q.cuda(), pool, 1, there, "full", sinks.cuda(), window, pages=pages)
        )
