"""The decode step, whole, against its torch oracle: on the emulator everywhere, on a GPU where there is one."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from bench.checks.decode_oracle import last_layer
from halfbyte.errors import PlanError
from halfbyte.kernels.cuda.decode.shape import LayerArgs, OtherFormat, StepArgs, StepShape, octaves_of
from halfbyte.kernels.cuda.decode.step import DecodeStep
from halfbyte.kernels.cuda.device.host import gpu
from tests.kernels.cuda.decode.decode_models import (
    LOOSE,
    TIGHT,
    Case,
    compare,
    make_cache,
    make_rope,
    make_weights,
    relative,
    small,
)
from tests.kernels.cuda.emulator import Emulator, sizes

CASES = {
    "window crossing, one page boundary": (1, [127, 128], None, 4),
    "first token": (1, [0, 1], None, 4),
    "long context, parts merged": (1, [700], None, 12),
    "verify three tokens beside another sequence": (4, [[100, 101, 102, 30]], [0, 0, 0, 1], 4),
    "three rows of four": (4, [[5, 200, 127]], [2, 0, 1], 4),
    "eight rows, long and short": (8, [[100, 700, 102, 30, 31, 32, 0, 64]], [0, 1, 2, 3, 3, 3, 4, 5], 12),
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str) -> None:
    rows, positions, row_seq, blocks = CASES[name]
    row_seq = row_seq or [0]
    shape = small(rows)
    case = Case(shape, Emulator(4), max(row_seq) + 1, blocks)
    for i, p in enumerate(positions):
        at = p if isinstance(p, list) else [p]
        tokens = [(37 * (r + 1) + 11 * i) % shape.vocab for r in range(len(at))]
        compare(case, tokens, at, row_seq, LOOSE if min(at) < 40 else TIGHT)


def test_scales_of_any_size() -> None:
    """A factor of 2^30 moved from the norms into MXFP4 matrices and the router is the same function, bit for bit."""
    shape = small(1)
    plain, moved = (Case(shape, Emulator(4), 1, 4) for _ in range(2))
    weights = moved.step.weights
    for layer in weights.layers:
        layer.attn_norm *= 2.0**-30
        layer.mlp_norm *= 2.0**-30
        layer.router.view(torch.bfloat16).mul_(2.0**30)
        for data in (layer.qkv, layer.gate_up):
            data[..., 512:] += 30
    weights.final_norm *= 2.0**-30
    weights.lm_head[..., 512:] += 30
    logits = []
    for case in (plain, moved):
        case.run([37], [100], [0])
        logits.append(case.step.logits[:1].clone())
    assert torch.isfinite(logits[0]).all()
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    "formats", [("q8", "bf16", "q8"), pytest.param(("bf16", "q8", "bf16"), marks=pytest.mark.slow)]
)
def test_formats(formats: tuple[str, str, str]) -> None:
    """With a ring so small that it goes round many times in every phase."""
    shape = replace(small(2, formats), ring=6)
    compare(Case(shape, Emulator(3), 2, 12), [17, 18], [150, 700], [0, 1], TIGHT)


@pytest.mark.parametrize(
    ("rows", "change"),
    [
        (1, {"other_qkv": OtherFormat("q8", frozenset({1}))}),
        pytest.param(
            2,
            {"other_qkv": OtherFormat("bf16", frozenset({0, 2})), "other_o": OtherFormat("q8", frozenset({1}))},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_of_several_formats(rows: int, change: dict[str, OtherFormat]) -> None:
    """Each layer is read in its own format."""
    shape = replace(small(rows), **change)  # type: ignore[arg-type]
    compare(Case(shape, Emulator(4), 2, 12), [17, 18][:rows], [700, 150][:rows], [0, 1][:rows], TIGHT)


@pytest.mark.parametrize(
    ("rows", "positions", "row_seq"),
    [(1, [700], [0]), pytest.param(4, [100, 101, 102, 700], [0, 0, 0, 1], marks=pytest.mark.slow)],
)
def test_cache_in_fp8(rows: int, positions: list[int], row_seq: list[int]) -> None:
    """E4M3 without scales: rounded once, when written, and read exactly."""
    shape = replace(small(rows), kv="fp8")
    case = Case(shape, Emulator(4), max(row_seq) + 1, 12)
    case.pool[1, 0, 0, 0, 0, 0] = case.theirs[1, 0, 0, 0, 0, 0] = 448.0
    compare(case, [17, 18, 19, 20][:rows], positions, row_seq, LOOSE)


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({"ahead": 3, "rest": 5, "ring": 7, "probe": 0}, 0.0),
        pytest.param({"shared": 101_376, "workers": 12}, 0.0, marks=pytest.mark.slow),
        pytest.param({"shared": 101_376}, 2**-14, marks=pytest.mark.slow),
    ],
)
def test_other_ways_through_the_ring(change: dict[str, int], bound: float) -> None:
    """A feeding warp that holds back, or a small ring, leaves the same bits. sm_12x has fewer warps that add in another
    order, and what differs in float32 may round the other way where a mailbox keeps 14 bits."""
    seen = []
    for s in (small(1), replace(small(1), **change)):  # type: ignore[arg-type]
        case = Case(s, Emulator(4), 1, 12)
        for at in (699, 700):  # twice: what a step leaves behind is what the next one needs
            pairs, _ = case.run([17], [at], [0])
            assert max(relative(v[0], v[1]) for v in pairs.values()) < TIGHT
        seen.append(pairs["logits"][0])
    assert relative(seen[1], seen[0]) <= bound


def test_more_blocks_than_tiles() -> None:
    """Feeding warps with nothing of o to ask for are far ahead: logits of two layers ago are not this layer's."""
    shape = replace(small(1), ring=6)
    compare(Case(shape, Emulator(30), 1, 4), [17], [150], [0], TIGHT)


@pytest.mark.slow
def test_tiles_of_several_slots() -> None:
    shape = StepShape(1088, 1152, 1, 32, 8, 1, 256, ring=7, slot=8_704)  # 16 of a tile's 17 or 18 chunks fit in one
    compare(Case(shape, Emulator(3), 1, 4), [17], [150], [0], TIGHT)


def test_bits_depend_neither_on_schedule_nor_on_company() -> None:
    """Other schedules, another number of blocks, other rows beside it: the same logits to the last bit."""
    seen = []
    for rows, blocks, seed, others in ((4, 4, 0, 0), (4, 4, 99, 3), (4, 3, 5, 1), (4, 6, 7, 2)):
        shape = small(rows)
        case = Case(shape, Emulator(blocks, seed), 4, 12)
        pairs, _ = case.run([9, 100, 200, 300][: 1 + others], [650, 3, 131, 70][: 1 + others], list(range(1 + others)))
        seen.append(pairs["logits"][0][0])
    assert all(s.equal(seen[0]) for s in seen)


def test_tags_begin_anew_and_no_old_word_passes_for_new() -> None:
    """Rows and parts that were not in use for as long as tags last: every word that carries one is cleared before."""
    shape = small(2)
    case = Case(shape, Emulator(3), 2, 12)
    period = 0xFFFFF // (shape.layers + 1) & ~1
    case.step.control[0] = period - 1
    pairs, _ = case.run([17], [150], [0])
    assert max(relative(*pairs[name]) for name in ("mid", "x", "logits")) < TIGHT
    assert case.step.control.tolist() == [0, 0]
    tagged = [case.step.boxes[name] for name in ("qkv", "part", "h")]
    assert not any(box.any() for box in tagged)
    for at in (699, 700):
        compare(case, [17, 18], [at, 650], [0, 1], TIGHT)
    assert case.step.control.tolist() == [2, 0]
    assert (0xFFFFF // 37 & ~1) * 37 < 1 << 20, "no tag of 20 bits comes twice, and none is 0"


def test_more_blocks_than_a_logit_can_count() -> None:
    shape = small(1)
    pool, tables = make_cache(shape, 1, 4)
    with pytest.raises(PlanError, match="at most 682 multiprocessors, not 683"):
        DecodeStep(shape, make_weights(shape), Emulator(683), pool=pool, tables=tables, rope=make_rope(256))


def test_argument_structs_agree() -> None:
    for rows in (1, 8):
        shape = small(rows)
        step, shared, threads, layer = sizes(shape.program(), 4)
        assert (step, layer) == (ctypes.sizeof(StepArgs), ctypes.sizeof(LayerArgs))
        assert threads == shape.threads
        assert shape.shared_bytes - 512 < shared <= shape.shared_bytes <= shape.shared


def test_sinks_and_window_matter() -> None:
    """The comparison would notice a kernel that dropped them."""
    shape = small(1)
    case = Case(shape, Emulator(4), 1, 4)
    for layer in case.weights.layers:
        layer.sinks.fill_(-30.0)
    pairs, _ = case.run([5], [200], [0])
    assert relative(pairs["mid"][0], pairs["mid"][1]) > 5 * TIGHT  # of the residual, not of attention alone


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"heads": 12}, "8 query heads per kv head"),
        ({"hidden": 200}, "multiples of 64"),
        ({"experts": 40}, "multiples of 32"),
        ({"experts": 64}, "hidden of 4 times the experts"),
        ({"rows": 3}, "1, 2, 4 or 8 rows"),
        ({"qkv": "f16"}, "mxfp4, q8 and bf16"),
        ({"shared": 80_000}, "ring of 6 slots"),
    ],
)
def test_refusals(change: dict[str, object], reason: str) -> None:
    shape = StepShape(**{**vars(small(1)), **change})  # type: ignore[arg-type]
    assert reason in (shape.refuse() or "")


def test_an_fp8_cache_must_be_asked_for() -> None:
    from halfbyte import gates
    from halfbyte.kernels.cuda.decode.phase import WholeStep, shape_of
    from halfbyte.model.config import NAMED
    from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, spec_of
    from halfbyte.plan.phase import ARCHES

    asked, sm90 = gates.parse({"moe_kernel": "decode=gemv", "kv_dtype": "fp8"}, env={}), ARCHES["sm90"]
    spec = spec_of(NAMED["120b"], asked, sm90, CHECKPOINT_FORMATS)
    assert "emulator only" in str(WholeStep().refuse(spec, sm90, gates.Gates(kv_dtype="fp8")))
    assert WholeStep().refuse(spec, sm90, asked) is None
    assert shape_of(spec, sm90, 1).kv == "fp8"


@pytest.mark.parametrize(
    ("largest", "octaves"),
    [
        (0.0, 0), (3.7, 0), (2.0**14, 0), (-(2.0**14) - 128, 7), (3.8e6, 14), (float("inf"), 0), (float("nan"), 0),
        (0.25, 0), (-0.2, -2), (2.0**-12, -12), (1e-30, -60),
    ],
)  # fmt: skip
def test_the_unit_of_the_residual_follows_the_embeddings(largest: float, octaves: int) -> None:
    embed = torch.zeros(4, 8, dtype=torch.bfloat16)
    embed[1, 3] = largest
    assert octaves_of(embed) == octaves


@pytest.mark.parametrize(("rows", "octaves"), [(1, 18), (4, 18), (1, -16), (4, -16)])
def test_loud_and_faint_streams(rows: int, octaves: int) -> None:
    """The build is the same; the unit of the residual is an argument."""
    case = Case(small(rows), Emulator(4), rows, 4, octaves=octaves)
    assert (case.step.args.unit > 1) == (octaves > 0)
    pairs, _ = case.run([37, 12, 5, 77][:rows], [100, 30, 128, 64][:rows], list(range(rows)))
    assert relative(*pairs["logits"]) < TIGHT


def test_wrong_layout_is_refused() -> None:
    shape = small(1)
    weights = make_weights(shape)
    weights.layers[1].qkv = weights.layers[1].qkv[:-1]
    pool, tables = make_cache(shape, 1, 4)
    with pytest.raises(PlanError, match="layer 1 qkv"):
        DecodeStep(shape, weights, Emulator(1), pool=pool, tables=tables, rope=make_rope(256))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, kv: str) -> None:
    rows, positions, row_seq, blocks = CASES[name]
    row_seq = row_seq or [0]
    shape = replace(small(rows), kv=kv)
    case = Case(shape, gpu(), max(row_seq) + 1, blocks, "cuda")
    for i, p in enumerate(positions):
        at = p if isinstance(p, list) else [p]
        compare(case, [(37 * (r + 1) + 11 * i) % shape.vocab for r in range(len(at))], at, row_seq, LOOSE)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 4), (2, 11)])
def test_hidden_states_that_were_asked_for(rows: int, blocks: int) -> None:
    """In the order that was asked, with an embedding's and the last layer's: what enters a layer is what left the one
    before it, by the build that ends there. More blocks than tiles of qkv must not leave gaps."""
    shape = replace(small(rows), taps=True)
    case = Case(shape, Emulator(blocks), rows, 4)
    tokens, positions = [3, 77][:rows], [100, 5][:rows]
    plain = Case(small(rows), Emulator(blocks), rows, 4)
    for step in (case.step, plain.step):
        step.tokens.copy_(torch.tensor(tokens, dtype=torch.int32))
        step.positions.copy_(torch.tensor(positions, dtype=torch.int32))
    plain.step.run()
    last = shape.layers
    found = case.step.run(taps=(last, 1, 0))
    assert found.shape == (3, rows, shape.hidden)
    assert torch.equal(case.step.logits, plain.step.logits)
    assert torch.equal(found[2], case.step.weights.embed[torch.tensor(tokens)].float())
    assert torch.equal(found[0], last_layer(plain.step)["x"])
    one = replace(shape, layers=1, ring=shape.slots, taps=False)
    weights = replace(plain.step.weights, layers=list(plain.step.weights.layers)[:1])
    first = DecodeStep(one, weights, Emulator(blocks), pool=plain.pool.clone(), tables=plain.tables, rope=plain.rope)
    first.tokens.copy_(case.step.tokens)
    first.positions.copy_(case.step.positions)
    first.run()
    assert torch.equal(found[1], last_layer(first)["x"])
    assert case.step.run().shape == (0, rows, shape.hidden)
    with pytest.raises(PlanError, match="at 8 places, not at 9"):
        case.step.run(taps=range(9))
