"""Attention of whole prompts, by wgmma and by mma.sync, through the emulator, against the specification: boundaries,
sinks, ragged batches, what is no number."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch

from halfbyte import formats, gates
from halfbyte.formats import layouts
from halfbyte.gates import Gates
from halfbyte.kernels import prove
from halfbyte.kernels.cuda.attention.flash import FULL, SLIDING, FlashAttention, FlashShape
from halfbyte.kernels.cuda.attention.flash_sync import SINGLE, TILED, SyncAttention, SyncAttentionShape
from halfbyte.kernels.cuda.attention.prompt import FlashArgs, PromptShape, attend
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.kernels.cuda.prefill.products import Dense
from halfbyte.kernels.launch import nvrtc_available
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import choose
from halfbyte.ops import attention as reference
from halfbyte.plan.phase import ARCHES
from halfbyte.plan.step import Step
from tests.kernels.cuda.emulator import Emulator, sizes

SHAPES: list[PromptShape] = [FULL, SLIDING, FlashShape(2, 2, 1), TILED, SINGLE]
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
    b: PromptShape, step: Step, pool: torch.Tensor, q: torch.Tensor, sinks: torch.Tensor | None, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    machine = Emulator(1, seed=6)
    got = attend(machine, b, q, pool, 1, step, "full", sinks, window, pages=b.pages(machine, pool)).float()
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


@pytest.mark.parametrize("b", SHAPES, ids=str)
def test_mirrored_structs(b: FlashShape | SyncAttentionShape) -> None:
    assert sizes(b.program(), 3) == [ctypes.sizeof(FlashArgs), b.shared_bytes, b.threads]
    # of a multiprocessor: a kilobyte of it is taken for each block
    assert (b.shared_bytes + 1024) * b.blocks <= (102_400 if isinstance(b, SyncAttentionShape) else 233_472)


CASES = [
    [(0, 1)],  # the first token of all
    [(0, 70)],
    [(0, 1), (126, 5), (40, 30), (250, 3)],  # ragged, chunks, single rows
    [(63, 2), (64, 9), (127, 25)],  # over page, window and tile boundaries
]


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("lengths", CASES, ids=str)
@pytest.mark.parametrize("b", SHAPES, ids=str)
def test_attention(b: PromptShape, lengths: Sequence[tuple[int, int]], window: int) -> None:
    step, pool, q, sinks = case(lengths)
    close(*run(b, step, pool, q, sinks, window))


@pytest.mark.parametrize("b", [SLIDING, TILED], ids=str)
@pytest.mark.parametrize("form", ["mxfp4", "q8"])  # q8 reads f16
def test_packed_rows_are_what_packing_rows_gives(form: Literal["mxfp4", "q8"], b: PromptShape) -> None:
    step, pool, q, sinks = case([(0, 1), (126, 5), (40, 30)])
    rows, machine = q.shape[0], Emulator(1, seed=6)
    pages = b.pages(machine, pool)
    plain = attend(machine, b, q, pool, 1, step, "full", sinks, 0, pages=pages)
    workspace = Workspace(machine, {}, torch.device("cpu"))
    weights = formats.quantize(torch.ones((64, HEADS * DIM)), form)
    o = Dense(workspace, layouts.convert(weights, "tile16"), None, "o")
    want, there = o.pack(plain).packed.clone(), o.inputs(rows)
    got = attend(
        machine, b, q, pool, 1, step, "full", sinks, 0, pages=pages,
        packed=there._replace(packed=torch.zeros_like(want)),
    )  # fmt: skip
    first, second = (
        x.view(torch.int16)[: there.slots * HEADS * DIM].view(HEADS, there.slots, DIM)[:, :rows] for x in (want, got)
    )
    assert torch.equal(first, second)


def test_results_that_stay_float() -> None:
    step, pool, q, sinks = case([(126, 5), (40, 30)])
    machine = Emulator(1, seed=6)
    wide, rounded = (
        attend(machine, TILED, q, pool, 1, step, "full", sinks, 128, pages=None, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), rounded)
    assert not torch.equal(wide, rounded.float())


EACH = pytest.mark.parametrize("b", [FULL, TILED], ids=str)


@EACH
@pytest.mark.parametrize("sink", [-1e4, -60.0, 60.0, 1e4, float("-inf")])
def test_extreme_sinks(sink: float, b: PromptShape) -> None:
    """A huge sink takes everything, a tiny one nothing; neither makes a NaN."""
    step, pool, q, sinks = case([(70, 2)])
    sinks[:8] = sink
    got, want = run(b, step, pool, q, sinks, 0)
    close(got, want)
    if sink > 0:
        assert float(got[:, : 8 * DIM].abs().max()) < 1e-6
    close(*run(b, step, pool, q, sinks.float(), 0))


@EACH
def test_dropping_the_sinks_is_noticed(b: PromptShape) -> None:
    step, pool, q, sinks = case([(70, 3)])
    sinks = sinks + 5
    without, _ = run(b, step, pool, q, None, 0)
    _, want = run(b, step, pool, q, sinks, 0)
    with pytest.raises(AssertionError):
        close(without, want, 10 * BOUND)
    close(without, run(b, step, pool, q, None, 0)[1])


@EACH
def test_maxima_that_grow_late_and_far(b: PromptShape) -> None:
    """Scores that rise from page to page move the reference maximum, and early sums must follow it."""
    step, pool, q, sinks = case([(0, 330)])
    for block, page in enumerate(step.block_tables["full"][0].tolist()):
        pool[page, 1, 0] *= 0.2 + 3 * block
    close(*run(b, step, pool, q, sinks, 0))


@pytest.mark.parametrize(
    ("b", "other"), [(FULL, SLIDING), (TILED, SINGLE), (TILED, SyncAttentionShape(1, 4, 2, 3))], ids=str
)
def test_a_row_does_not_depend_on_its_tile(b: PromptShape, other: PromptShape) -> None:
    """The same sequence in one chunk, in two, and beside others: the same bits."""
    step, pool, q, sinks = case([(0, 90)])
    whole, _ = run(b, step, pool, q, sinks, 128)
    for first in (1, 37, 64):
        part, _, _, _ = case([(first, 90 - first)])
        part = dataclasses.replace(part, block_tables=step.block_tables)
        got, _ = run(other, part, pool, q[first:].contiguous(), sinks, 128)
        assert torch.equal(got, whole[first:])


@pytest.mark.parametrize(
    "lengths", [[(40, 1), (126, 1), (250, 1), (30, 40), (0, 9)], [(i % 5, 1) for i in range(26)] + [(60, 30)]], ids=len
)
@EACH
def test_single_rows_in_front_have_the_same_bits_in_blocks_of_their_own(
    b: PromptShape, lengths: Sequence[tuple[int, int]]
) -> None:
    step, pool, q, sinks = case(lengths)
    together, want = run(b, step, pool, q, sinks, 0)
    for singles in (1, sum(n == 1 for _, n in lengths)):
        apart, _ = run(b, dataclasses.replace(step, singles=singles), pool, q, sinks, 0)
        assert torch.equal(apart, together)
    close(together, want)


@EACH
def test_what_is_no_number_stays_none(b: PromptShape) -> None:
    """In keys and values of the cache, queries and sinks: the rows that see it, and no row of another sequence."""
    step, pool, q, sinks = case([(70, 3), (40, 12)])
    clean, _ = run(b, step, pool, q, sinks, 0)
    page, nan, inf = int(step.block_tables["full"][0, 1]), float("nan"), float("inf")
    for which in range(2):
        for value in (nan, inf, -inf):
            word = pool[page, 1, which, 1, 2]  # position 66, which all three rows see
            before = word.clone()
            word[33] = value
            got, _ = run(b, step, pool, q, sinks, 0)
            word.copy_(before)
            broken = ~torch.isfinite(got.view(-1, HEADS, DIM)).all(-1)[:3, 8:]
            # wgmma's kernel gives an infinitely small score no weight; of eight heads' signs some differ
            assert broken.any(1).all() if b == FULL and which == 0 else broken.all(), (which, value)
            assert torch.equal(got[3:], clean[3:])
    for name, tensor, at in (("q", q, (1, 9, 5)), ("sinks", sinks, (9,))):
        for value in (nan, inf):
            before = tensor.clone()
            tensor[at] = value
            got, _ = run(b, step, pool, q, sinks, 0)
            tensor.copy_(before)
            assert not torch.isfinite(got[1].view(HEADS, DIM)[9]).any(), (name, value)
            assert torch.equal(got[1].view(HEADS, DIM)[8], clean[1].view(HEADS, DIM)[8])


def test_refuses_what_it_cannot_read() -> None:
    phase, auto = FlashAttention(), Gates()
    assert phase.refuse(prove.default_spec(), ARCHES["sm90"], auto) is None
    assert "sm90" in str(phase.refuse(prove.default_spec(), ARCHES["sm120"], auto))
    assert "fp8" in str(phase.refuse(prove.default_spec(kv="fp8"), ARCHES["sm90"], auto))
    floats = prove.default_spec(dense="mxfp4", activation="mxfp8")
    assert "another format" in str(phase.refuse(floats, ARCHES["sm90"], auto))
    sync = SyncAttention()
    for arch in ("sm120", "sm121"):
        assert sync.refuse(prove.default_spec(), ARCHES[arch], auto) is None
        assert sync.refuse(floats, ARCHES[arch], auto) is None
    assert "fp8" in str(sync.refuse(prove.default_spec(kv="fp8"), ARCHES["sm121"], auto))
    for arch in ("sm90", "sm100"):
        assert "--attention cuda" in str(sync.refuse(prove.default_spec(), ARCHES[arch], auto))
        assert sync.refuse(prove.default_spec(), ARCHES[arch], Gates(attention="cuda")) is None


@pytest.mark.parametrize(
    ("arch", "flags", "taken"),
    [
        ("sm121", {}, "cuda.attention_flash_sync"),
        ("sm120", {}, "cuda.attention_flash_sync"),
        ("sm121", {"kv_dtype": "fp8"}, "triton.attention_flash"),
        ("sm121", {"attention": "triton"}, "triton.attention_flash"),
        ("sm100", {}, "triton.attention_flash"),
        ("sm90", {}, "cuda.prefill_layer"),
    ],
)
def test_where_auto_takes_it(arch: str, flags: dict[str, str], taken: str) -> None:
    for activation in ("auto", "prefill=mxfp8") if arch.startswith("sm12") else ("auto",):
        asked = gates.parse(flags | {"activation": activation}, env={})
        found = choose(NAMED["120b"], asked, ARCHES[arch]).selection
        assert taken in found.chosen["prefill"]
        assert taken in found.chosen["long"]


@pytest.mark.skipif(nvrtc_available() is not None, reason="needs NVRTC")
@pytest.mark.parametrize(
    "arch", ["sm121", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sm90", "sm100", "sm120"))]
)
def test_machine_code(arch: str) -> None:
    """Products of a warp, copies past the registers, no spills, within a block's shared memory."""
    pytest.importorskip("triton")
    phase, target = SyncAttention(), ARCHES[arch]
    for build in phase.builds(prove.default_spec(), target):
        evidence = prove.prove_build(phase.name, build, target)
        assert evidence.ok, prove.show(evidence)
        assert set(evidence.instructions) == {"HMMA.16816.F32.BF16"}


OTHER: dict[PromptShape, PromptShape] = {FULL: SLIDING, SLIDING: FULL, TILED: SINGLE, SINGLE: TILED}


def on_gpu(step: Step) -> Step:
    return dataclasses.replace(
        step,
        positions=step.positions.cuda(),
        query_start=step.query_start.cuda(),
        block_tables={k: v.cuda() for k, v in step.block_tables.items()},
    )


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("b", SHAPES, ids=str)
def test_on_a_gpu(b: PromptShape, window: int) -> None:
    if isinstance(b, FlashShape) and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is SM90's")
    for lengths in (*CASES, [(0, 1000), (700, 333)], [(900 + 40 * i, 1) for i in range(30)] + [(5, 300)]):
        step, pool, q, sinks = case(lengths)
        want = wanted(step, pool, q, sinks, window)
        there, pool, q, sinks = on_gpu(step), pool.cuda(), q.cuda(), sinks.cuda()
        pages = b.pages(gpu(), pool)

        def attended(
            shape: PromptShape, step: Step, q: torch.Tensor = q, cache: tuple[Any, ...] = (pool, sinks, pages)
        ) -> torch.Tensor:
            return attend(gpu(), shape, q, cache[0], 1, step, "full", cache[1], window, pages=cache[2])

        together = attended(b, there)
        close(together.float().cpu(), want)
        singles = next((i for i, (_, n) in enumerate(lengths) if n > 1), len(lengths))
        assert torch.equal(attended(b, dataclasses.replace(there, singles=singles)), together)
        assert torch.equal(attended(OTHER.get(b, b), there), together)
        if len(lengths) == 1 and lengths[0][1] > 64:  # the same prompt in two chunks
            for first in (1, 13, 64):
                part, _, _, _ = case([(first, lengths[0][1] - first)])
                part = dataclasses.replace(on_gpu(part), block_tables=there.block_tables)
                assert torch.equal(attended(b, part, q[first:].contiguous()), together[first:])
