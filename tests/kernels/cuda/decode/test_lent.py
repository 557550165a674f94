"""All layers over another engine's pages: the decode step's kernel with the pages of every layer by themselves, in the
emulator, beside the step that it is compiled from and beside the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.decode.step import DecodeStep
from halfbyte.kernels.cuda.device.host import gpu
from tests.kernels.cuda.decode.decode_models import TIGHT, Case, relative, small
from tests.kernels.cuda.emulator import Emulator


def apart(pool: Tensor, layers: int) -> list[Tensor]:
    """The pages of each layer in a tensor of its own, as vLLM holds them."""
    return [pool[:, i // 2].unsqueeze(1).clone() for i in range(layers)]


def lent_step(case: Case, shape: StepShape, machine: Emulator) -> tuple[DecodeStep, list[Tensor]]:
    pages = apart(case.pool, shape.layers)
    weights = replace(case.step.weights, lm_head=None)
    return DecodeStep(shape, weights, machine, pool=pages, tables=case.tables, rope=case.rope), pages


@pytest.mark.exact
@pytest.mark.parametrize(
    ("rows", "positions", "row_seq"),
    [
        (4, [5, 200, 127], [2, 0, 1]),
        pytest.param(1, [700], [0], marks=pytest.mark.slow),
        pytest.param(1, [127], [0], marks=pytest.mark.slow),
        pytest.param(4, [100, 101, 102, 700], [0, 0, 0, 1], marks=pytest.mark.slow),
    ],
    ids=["three sequences", "long", "window", "three tokens of one"],
)
def test_the_residual_is_the_whole_steps_to_the_bit(rows: int, positions: list[int], row_seq: list[int]) -> None:
    """Twice in a row: what a step leaves behind is what the next one needs."""
    shape = small(rows)
    case = Case(shape, Emulator(4), max(row_seq) + 1, 12)
    lent, pages = lent_step(case, replace(shape, lent=True), Emulator(4))
    before = [p.clone() for p in pages]
    n = len(positions)
    for later in (0, 1):
        tokens, at = [(37 * (r + 1) + later) % shape.vocab for r in range(n)], [p + later for p in positions]
        for name, values in (("tokens", tokens), ("positions", at), ("row_seq", row_seq)):
            getattr(lent, name)[:n] = torch.tensor(values, dtype=torch.int32)
        lent.run(n)
        pairs, _ = case.run(tokens, at, row_seq)
        assert relative(pairs["x"][0], pairs["x"][1]) < TIGHT
        assert torch.equal(lent.residual[:n].double(), pairs["x"][0])
    for i, mine in enumerate(pages):
        table = case.tables[i % 2].flatten().long()
        assert torch.equal(mine[table, 0], case.theirs[table, i // 2])  # sliding layers first
        rest = torch.ones(mine.shape[0], dtype=torch.bool).index_fill(0, table, False)
        assert torch.equal(*(torch.nan_to_num(p[rest].float()) for p in (mine, before[i])))


def test_a_row_that_broke_is_no_number() -> None:
    """And says so: a NaN in the embedding does not become a hidden state."""
    shape = small(4)
    case = Case(shape, Emulator(4), 4, 4)
    case.step.weights.embed[17] = float("nan")
    lent, _ = lent_step(case, replace(shape, lent=True), Emulator(4))
    lent.tokens[:2] = torch.tensor([17, 18], dtype=torch.int32)
    lent.positions[:2] = torch.tensor([3, 4], dtype=torch.int32)
    lent.run(2)
    assert lent.residual[0].isnan().all()
    assert lent.residual[1].isfinite().all()


def test_pages_in_another_form_are_refused() -> None:
    shape = small(4)
    case = Case(shape, Emulator(4), 4, 4)
    pages = apart(case.pool, shape.layers)
    weights = replace(case.step.weights, lm_head=None)
    for wrong in (pages[0].transpose(3, 4), pages[0].float(), pages[0][:, 0]):
        with pytest.raises(PlanError, match="pages of layer 0"):
            DecodeStep(
                replace(shape, lent=True), weights, Emulator(4), pool=[wrong, *pages[1:]], tables=case.tables,
                rope=case.rope,
            )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.exact
@pytest.mark.parametrize(("rows", "positions"), [(1, [700]), (2, [127, 640]), (4, [5, 200, 127])])
def test_on_a_gpu(rows: int, positions: list[int]) -> None:
    shape, n = small(rows), len(positions)
    case = Case(shape, gpu(), n, 12, "cuda")
    pages = [p.cuda() for p in apart(case.pool, shape.layers)]
    weights = replace(case.step.weights, lm_head=None)
    tables = case.tables[0].cuda(), case.tables[1].cuda()
    lent = DecodeStep(replace(shape, lent=True), weights, gpu(), pool=pages, tables=tables, rope=case.rope.cuda())
    tokens, row_seq = [37 * (r + 1) for r in range(n)], list(range(n))
    for name, values in (("tokens", tokens), ("positions", positions), ("row_seq", row_seq)):
        getattr(lent, name)[:n] = torch.tensor(values, dtype=torch.int32, device="cuda")
    lent.run(n)
    pairs, _ = case.run(tokens, positions, row_seq)
    assert torch.equal(lent.residual[:n].double().cpu(), pairs["x"][0])
