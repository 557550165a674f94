"""Whole-step CUDA graphs: a step of few rows is captured once per number of rows and replayed.

Captured when first needed, at common batch sizes. Which sequence a row belongs to is read from a buffer, so one graph
decodes eight sequences and verifies the drafts of two. Steps with prompts and larger steps run eagerly through the same
plan, so both ways give the same tokens. A graph reads fixed buffers; the rows that pad a batch up to its graph's size
belong to the scratch page, and their results are not read.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.engine.sampling.device import DeviceSampler, choose_device_sampler
from halfbyte.engine.step_buffer import aligned
from halfbyte.model.gpt_oss import GptOss
from halfbyte.plan.record import GraphRun
from halfbyte.plan.step import Regime, RegimeLimits, Step

USUAL_SIZES = (1, 2, 4, 5, 8, 10, 16, 32, 64)  # common numbers of rows
SHORT = 4096  # tokens of the shorter of two captures: grids over the cache are sized by the longest it may hold
# The fields that change every step, in the order of the buffer.
FIELDS = ("tokens", "positions", "kv_lens", "source", "row_sequence", "query_start")

Tap = Callable[[Step], tuple[Tensor, Tensor]]  # runs a step: (logits, hidden states)


def graph_sizes(limits: RegimeLimits) -> tuple[int, ...]:
    """The usual sizes and the largest size of every regime: a step padded into another regime would run other kernels,
    which round differently from the eager step."""
    return tuple(sorted({s for s in USUAL_SIZES if s <= limits.batch} | {limits.decode, limits.batch}))


@functools.cache
def capture_stream(device: torch.device) -> Any:
    """The one stream on which graphs are captured. torch hands out 32 streams again and again: with one for each
    capture, another thread's copies would soon be on a stream that is capturing, which ends the capture."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python frees no cycles within the context: CUDA memory that is freed during a capture ends the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DecodeGraph:
    """One step of `rows` rows over fixed buffers: as many sequences of one row each, or fewer with drafts to verify.
    The logits of every row are used, unlike those of a prompt.

    With `feed_back` the graph also picks the highest logit, stores it as the next token and moves one position on: a
    greedy decode that needs the host only for the launch. With `memory` (int32, shared by all graphs of an engine; see
    `DeviceRunner`) a row's token is the word that its `source` names: one of this step's tokens, or one of `results`,
    which the previous step has left there and where `sampler` puts this step's highest logits. With `tap` the graph
    also keeps the step's hidden states.
    """

    def __init__(
        self, model: GptOss, rows: int, blocks: int, *, feed_back: bool = False, memory: Tensor | None = None,
        results: Tensor | None = None, tap: Tap | None = None, sampler: DeviceSampler | None = None,
        regime: Regime | None = None,
    ) -> None:  # fmt: skip
        device = model.device

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.width = aligned(rows + 1)
        self.memory = ints(len(FIELDS) * self.width) if memory is None else memory
        self.fields = {
            name: self.memory[i * self.width :][: rows + (name == "query_start")] for i, name in enumerate(FIELDS)
        }
        self.indices = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.model, self.feed_back, self.tap = model, feed_back, tap
        self.sources = results is not None
        self.results = ints(rows, 2) if results is None else results
        self.sampler = sampler or choose_device_sampler(device, rows, model.config.vocab)
        self.step = Step(
            tokens=self.fields["tokens"],
            positions=self.fields["positions"],
            query_start=self.fields["query_start"],
            kv_lens=self.fields["kv_lens"],
            row_sequence=self.fields["row_sequence"],
            block_tables={"sliding": ints(rows, blocks), "full": ints(rows, blocks)},
            logit_rows=self.indices[:rows].clone(),
            max_kv_len=blocks * model.spec.page_size,
            regime=regime,
        )
        self.host_tables: dict[str, NDArray[np.int32]] = {}  # contents of the tables on the device
        self.idle()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.captured = GraphRun()  # the kernels in the graph, for the plan's record
        self.logits = self.hidden = self.tokens = torch.empty(0)  # of the last replay

    def idle(self) -> None:
        """Make every row a sequence of its own, on the scratch page."""
        for name in FIELDS[:4]:
            self.fields[name].fill_(int(name == "kv_lens"))
        for name in FIELDS[4:]:
            self.fields[name].copy_(self.indices[: self.fields[name].shape[0]])

    def run(self) -> Tensor:
        """The work that is captured."""
        step = self.step
        if self.sources:
            step = replace(step, tokens=self.memory.index_select(0, self.fields["source"]))
        self.tokens = step.tokens
        if self.tap is None:
            logits = self.model.forward(step)
        else:
            logits, self.hidden = self.tap(step)
        if self.feed_back or self.sources:
            self.sampler.argmax(logits, self.results[: logits.shape[0]])
        if self.feed_back:
            self.step.tokens.copy_(self.results[: logits.shape[0], 0])
            self.memory[self.width : 3 * self.width].add_(1)  # positions and lengths, which lie side by side
        return logits

    def capture(self, pool: Any = None) -> None:
        """Warm up on the scratch page (kernels compile here), then record, in a memory pool that graphs may share."""
        device = self.model.device
        stream = capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.model.forward(self.step)
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # so that its nodes can be read
        plan = self.model.plan
        with (
            no_garbage_collection(),
            plan.record.capturing(plan.regime(self.step), self.step.rows) as self.captured,
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            self.logits = self.run()
        self.captured.read(graph.raw_cuda_graph())
        graph.instantiate()
        self.graph = graph

    def has_tables(self, sliding: NDArray[np.int32], full: NDArray[np.int32]) -> bool:
        return bool(self.host_tables) and all(
            self.host_tables[kind].shape == table.shape and np.array_equal(self.host_tables[kind], table)
            for kind, table in (("sliding", sliding), ("full", full))
        )

    def set_tables(self, sliding: Tensor, full: Tensor) -> None:
        """Set the tables of the first sequences; the others use the scratch page."""
        for kind, table in (("sliding", sliding), ("full", full)):
            tables = self.step.block_tables[kind]
            tables[: table.shape[0], : table.shape[1]].copy_(table)
            if table.shape[0] < tables.shape[0]:
                tables[table.shape[0] :].zero_()

    def replay(self) -> Tensor:
        assert self.graph is not None
        self.graph.replay()
        self.captured.replays += 1
        return self.logits


class Graphs:
    """The graphs of one engine, captured as they are needed. All read their inputs from the head of one buffer.

    `regime`: whose kernels they hold; None: by the rows of each."""

    def __init__(
        self, model: GptOss, blocks: int, sampler: DeviceSampler, tap: Tap | None = None, regime: Regime | None = None
    ) -> None:
        self.model, self.blocks, self.sampler, self.tap, self.regime = model, blocks, sampler, tap, regime
        self.sizes = graph_sizes(model.plan.limits)
        self.captured: dict[tuple[int, int], DecodeGraph] = {}
        self._pool: Any = None

    def shapes(self, rows: int, width: int, *, full: bool) -> list[tuple[int, int]]:
        """(rows, table width) of a step for each graph that steps of up to `rows` rows can use, the largest first;
        without `full` only the shorter of two captures."""
        most = next((s for s in self.sizes if s >= rows), self.sizes[-1])
        widths = {min(width, self.blocks, SHORT // self.model.spec.page_size)} | (
            {min(width, self.blocks)} if full else set()
        )
        return [(s, w) for w in sorted(widths) for s in reversed(self.sizes) if s <= most]

    def find(self, rows: int, width: int, memory: Tensor, results: Tensor) -> DecodeGraph | None:
        """The graph for a step of `rows` rows, all of them sampled, with tables `width` wide; None: run eagerly."""
        if rows > self.sizes[-1] or width > self.blocks:
            return None
        size = next(s for s in self.sizes if s >= rows)
        short = SHORT // self.model.spec.page_size
        blocks = short if width <= short < self.blocks else self.blocks
        key = (size, blocks)
        if key not in self.captured:
            graph = DecodeGraph(
                self.model, size, blocks, memory=memory, results=results, tap=self.tap, sampler=self.sampler,
                regime=self.regime,
            )  # fmt: skip
            graph.capture(self._pool)  # one for all: the graphs of an engine never run at the same time
            if graph.graph is not None:
                self._pool = graph.graph.pool()
            self.captured[key] = graph
        return self.captured[key]
