"""Our plan over another engine's pages: which unit is taken, the steps that vLLM's numbers become, and the same logits
as our own model's, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from halfbyte.errors import GateError, PlanError
from halfbyte.gates import Gates
from halfbyte.model import synthetic
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import GptOss
from halfbyte.ops.rope import yarn_frequencies
from halfbyte.plan.phase import ARCHES
from halfbyte.plan.record import Record
from halfbyte.plan.step import Step
from halfbyte.vllm_plugin import layers
from halfbyte.vllm_plugin.layers import Choice, LayerModel, VllmBatch, choose, idle_step, step_of
from halfbyte.vllm_plugin.selection import Shapes

BIG = Shapes(36, 2880, 2880, 128, 4, 64, 8, 64, 201088, 128)
GATES = Gates(moe_kernel="reference", linear_kernel="reference", attention="reference", activation="f32")  # type: ignore[arg-type]


def test_the_unit_is_the_largest_that_can_be_had() -> None:
    sm90, cpu = ARCHES["sm90"], ARCHES["cpu"]
    ours = choose(BIG, Gates(), sm90)
    assert (ours.unit, ours.why) == ("layers", "")
    assert ours.selection.chosen["decode"] == ("cuda.decode_layers", "cuda.batch_norm_lm_head")
    assert not [n for names in ours.selection.chosen.values() for n in names if n.startswith("vllm.")]
    ranks = choose(BIG, Gates(), sm90, obstacle="each rank holds a part of every layer")
    assert (ranks.unit, ranks.why) == ("operations", "each rank holds a part of every layer")
    for gates, why in (
        (Gates(moe_kernel="vllm"), "--moe-kernel asks for vllm, which is vLLM's"),  # type: ignore[arg-type]
        (Gates(attention="flashinfer"), "--attention asks for flashinfer, which is vLLM's"),
    ):
        found = choose(BIG, gates, sm90)
        assert (found.unit, found.why) == ("operations", why)
    assert choose(BIG, Gates(), cpu).unit == "operations"
    assert choose(BIG, Gates(), sm90, unit="operations").why == "the unit is set to operations"


def test_a_unit_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(PlanError, match="--moe-kernel asks for marlin"):
        choose(BIG, Gates(moe_kernel="marlin"), ARCHES["sm90"], unit="layers")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no kernel on sm90 can run"):
        choose(BIG, Gates(moe_kernel="cpu"), ARCHES["sm90"], unit="layers")  # type: ignore[arg-type]
    with pytest.raises(GateError, match="'step'; use one of auto, layers, operations"):
        choose(BIG, Gates(), ARCHES["sm90"], unit="step")


# ---- the same model, twice -------------------------------------------------------------------------------------------

CONFIG = ModelConfig(layers=3, hidden=64, intermediate=64, experts=4, top_k=2, heads=4, kv_heads=2, head_dim=16,
                     vocab=96, window=70)  # fmt: skip
BLOCKS = 4


def tables() -> dict[str, Tensor]:
    """Of two sequences, over pages in no order."""
    order = torch.randperm(4 * BLOCKS, generator=torch.Generator().manual_seed(3)).int() + 1
    sliding, full = order.view(2, 2, BLOCKS)
    return {"sliding": sliding.contiguous(), "full": full.contiguous()}


class Both:
    """Our own engine's model with its pool, and the layers over pages that are kept apart."""

    def __init__(self) -> None:
        weights = synthetic.make(CONFIG, 7)
        self.native = GptOss(weights, GATES)
        pool = self.native.allocate_kv(4 * BLOCKS + 1)
        self.pages = [torch.zeros_like(pool[:, :1]) for _ in range(CONFIG.layers)]
        y = CONFIG.yarn
        rope = yarn_frequencies(
            CONFIG.head_dim, CONFIG.rope_theta, y.factor, y.original_context, y.beta_fast, y.beta_slow, y.truncate
        )
        c = CONFIG
        shapes = Shapes(
            c.layers, c.hidden, c.intermediate, c.experts, c.top_k, c.heads, c.kv_heads, c.head_dim, c.vocab, c.window,
            dense="bf16",
        )  # fmt: skip
        choice = choose(shapes, GATES, ARCHES["cpu"], unit="layers")
        choice = Choice("layers", self.native.spec, choice.chosen, choice.selection)
        record = Record()
        self.ours = LayerModel(
            choice, GATES, ARCHES["cpu"], self.native.weights, rope, self.pages.__getitem__, record,
            lambda plan, rows: record.eager,
        )  # fmt: skip
        self.tables = tables()

    def step(self, rows: list[list[int]], at: list[int]) -> tuple[Tensor, Tensor]:
        """Tokens of each sequence from a position on: logits of the last row of each, ours and our own engine's."""
        counts = [len(r) for r in rows]
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int()
        tokens = torch.tensor([t for r in rows for t in r]).int()
        positions = torch.tensor([a + i for a, r in zip(at, rows) for i in range(len(r))])
        lengths = torch.tensor([a + n for a, n in zip(at, counts)]).int()
        batches = {
            kind: VllmBatch(table, starts, starts, lengths, len(tokens), max(counts), int(lengths.max()))
            for kind, table in self.tables.items()
        }
        step = step_of(self.ours, tokens, positions, batches)
        mine = self.ours.logits(self.ours.run(step)[starts[1:].long() - 1])
        native = Step(
            tokens, positions.int(), starts, lengths, step.row_sequence, self.tables, starts[1:] - 1, int(lengths.max())
        )
        return mine, self.native.forward(native)


@pytest.mark.exact
def test_logits_are_our_own_engines_to_the_bit() -> None:
    """A prompt in two pieces beside another's single tokens, then both a token at a time, through pages and windows."""
    both, g = Both(), torch.Generator().manual_seed(1)

    def some(n: int) -> list[int]:
        return torch.randint(0, CONFIG.vocab, (n,), generator=g).tolist()

    at = [0, 0]
    for counts in ((66, 3), (8, 1), (1, 1)):
        mine, native = both.step([some(n) for n in counts], at)
        assert torch.equal(mine, native)
        at = [a + n for a, n in zip(at, counts)]


def test_padding_rows_are_sequences_of_no_length() -> None:
    model = SimpleNamespace(indices=lambda n: torch.arange(n, dtype=torch.int32))
    table = torch.zeros((4, 2), dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    lengths = torch.tensor([7, 130, 0, 0], dtype=torch.int32)
    batch = VllmBatch(table, starts, starts, lengths, 4, 1, 512)
    step = step_of(model, torch.arange(9), torch.full((9,), 99), {"sliding": batch, "full": batch})  # type: ignore[arg-type]
    assert step.positions.tolist() == [6, 129, 0, 0]
    assert step.query_start.tolist() == [0, 1, 2, 3, 4]
    assert step.row_sequence.tolist() == [0, 1, 2, 3]
    assert (step.rows, step.sequences, step.max_kv_len, step.singles) == (4, 4, 512, 4)


def test_sequences_of_one_row_stand_in_front() -> None:
    model = SimpleNamespace(indices=lambda n: torch.arange(n, dtype=torch.int32))
    starts = torch.tensor([0, 1, 2, 6], dtype=torch.int32)
    batch = VllmBatch(torch.zeros((3, 2), dtype=torch.int32), starts, starts, torch.tensor([5, 9, 4]).int(), 6, 4, 9)
    step = step_of(model, torch.arange(8), torch.arange(8), {"sliding": batch, "full": batch})  # type: ignore[arg-type]
    assert step.row_sequence.tolist() == [0, 1, 2, 2, 2, 2]
    assert (step.rows, step.singles) == (6, 2)


def test_an_idle_step_is_prompts_on_the_first_page() -> None:
    model = SimpleNamespace(indices=lambda n: torch.arange(n, dtype=torch.int32))
    step = idle_step(model, 130, 100)  # type: ignore[arg-type]
    assert step.query_start.tolist() == [0, 100, 130]
    assert int(step.positions.max()) == 99
    assert not step.block_tables["full"].any()
    assert step.block_tables["full"].shape == (2, 2)


def test_kinds_alternate() -> None:
    assert [layers.kind_of(i) for i in range(3)] == ["sliding", "full", "sliding"]
