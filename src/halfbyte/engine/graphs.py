"""Whole-step CUDA graphs: a step of few rows is captured once per batch size and replayed.

Captured only when first needed, at the batch sizes people run. Steps that mix prompts in, or that are larger, run
eagerly through the same plan, so both ways give the same tokens. A graph reads fixed buffers; rows that pad a batch up
to its graph's size belong to the scratch page and nobody reads what they produce.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.model.gpt_oss import GptOss
from halfbyte.ops.sampling import greedy
from halfbyte.plan.step import Step

SIZES = (1, 2, 4, 5, 8, 10, 16, 32, 64)


class DecodeGraph:
    """One step of `rows` sequences, one row each, over fixed buffers.

    With `feed_back` the graph also picks the highest logit, puts it in as the next token and moves one position on: a
    greedy decode that needs the host for nothing but the launch.
    """

    def __init__(self, model: GptOss, rows: int, blocks: int, *, feed_back: bool = False) -> None:
        device = model.device

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        each = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.model, self.feed_back = model, feed_back
        self.step = Step(
            tokens=ints(rows),
            positions=ints(rows),
            query_start=each,
            kv_lens=torch.ones(rows, dtype=torch.int32, device=device),
            row_sequence=each[:rows].clone(),
            block_tables={"sliding": ints(rows, blocks), "full": ints(rows, blocks)},
            logit_rows=each[:rows].clone(),
            max_kv_len=blocks * model.spec.page_size,
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)

    def capture(self) -> None:
        """Warm up on the scratch page (kernels compile here), then record."""
        side = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self.model.forward(self.step)
        torch.cuda.current_stream(self.model.device).wait_stream(side)
        torch.cuda.synchronize(self.model.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self.model.forward(self.step)
            if self.feed_back:
                self.step.tokens.copy_(greedy(self.logits))
                self.step.positions.add_(1)
                self.step.kv_lens.add_(1)
        self.graph = graph

    def replay(self) -> Tensor:
        assert self.graph is not None
        self.graph.replay()
        return self.logits


class Graphed:
    """A model that replays graphs where it can. What the engine's runner runs when CUDA graphs are on."""

    def __init__(self, model: GptOss, blocks: int) -> None:
        self.model, self.blocks = model, blocks
        self.graphs: dict[int, DecodeGraph] = {}

    @property
    def device(self) -> torch.device:
        return self.model.device

    def forward(self, step: Step) -> Tensor:
        rows = step.rows
        width = step.block_tables["full"].shape[1]
        if rows != step.sequences or step.logit_rows.shape[0] != rows or rows > SIZES[-1] or width > self.blocks:
            return self.model.forward(step)
        size = next(s for s in SIZES if s >= rows)
        if size not in self.graphs:
            self.graphs[size] = DecodeGraph(self.model, size, self.blocks)
            self.graphs[size].capture()
        graph = self.graphs[size]
        mine = graph.step
        for buffer, value, idle in (
            (mine.tokens, step.tokens, 0),
            (mine.positions, step.positions, 0),
            (mine.kv_lens, step.kv_lens, 1),
        ):
            buffer[:rows].copy_(value)
            buffer[rows:].fill_(idle)
        for kind, table in mine.block_tables.items():
            table[:rows, :width].copy_(step.block_tables[kind])
            table[rows:].fill_(0)
        return graph.replay()[:rows]
