"""Runs batches on a GPU: everything is queued on the stream and tokens stay on the device for the next step. Only a
handle's `result` waits, and only for its own step.

Rows whose drafts come with a distribution are copied to the host and sampled there at launch, which waits for the step.
An observer of hidden states needs the tokens on the host as well. Refuses steps with more sampled rows than it has room
for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.engine.batch import Batch, Ints
from halfbyte.engine.device_health import raise_if_dead
from halfbyte.engine.graphs import FIELDS, DecodeGraph, Graphs
from halfbyte.engine.page_memory import PageMemory
from halfbyte.engine.runner import HiddenStateObserver, RunnerModel
from halfbyte.engine.sampling.device import DeviceSampler
from halfbyte.engine.sampling.device_step import DeviceStepSampling, PendingResult
from halfbyte.engine.step_buffer import StepBuffer, padded_blocks
from halfbyte.errors import StepError
from halfbyte.model.diagnose import clear_pages, find_broken
from halfbyte.plan.step import Step

# Tokens and logits of a step, and its hidden states if there is an observer.
StepOutput = tuple[Tensor, Tensor, Tensor | None]


class DeviceRunner:
    """`rows`, `sequences` and `blocks` bound a step that fits in the buffers; a larger one that no graph replays gets
    buffers of its own. `sampler` serves steps of up to `rows` rows; `graphs` use the same sampler."""

    def __init__(
        self, model: RunnerModel, sampler: DeviceSampler, observer: HiddenStateObserver | None = None,
        graphs: Graphs | None = None, *, rows: int = 4096, sequences: int = 64, blocks: int = 64,
        memory: PageMemory | None = None,
    ) -> None:  # fmt: skip
        self.model, self.sampler, self.observer, self.graphs, self.memory = model, sampler, observer, graphs, memory
        # The last step's tokens lie behind what is sent, so the next step reads all of its tokens from one memory.
        self.buffer = StepBuffer(model.device, 12 * rows + 2 * sequences * padded_blocks(blocks) + 256, 2 * rows)
        self._results_at = self.buffer.num_words
        self._results = self.buffer.memory[self._results_at :].view(rows, 2)  # token, its logit's bits

    def launch(self, batch: Batch) -> PendingResult:
        if len(batch.samplers) > self._results.shape[0]:
            raise StepError(f"a step samples at most {self._results.shape[0]} rows, not {len(batch.samplers)}.")
        try:
            handle = self._launch(batch)
        except Exception as e:
            self._use_pages_longer()
            raise_if_dead(self.model.device, e)
            raise
        if not batch.samplers:  # there is no result to wait for, so it is committed before it has run
            self._use_pages_longer()
        return handle

    def _launch(self, batch: Batch) -> PendingResult:
        with torch.inference_mode():
            sampling = DeviceStepSampling(batch)
            graph = self._graph_for(batch)
            if graph is None:
                tokens, logits, hidden = self._run_eagerly(batch, sampling)
            else:
                tokens, logits, hidden = self._replay(graph, batch, sampling)
            handle = sampling.run(self.sampler, logits, self._results)
            if self.observer is not None and self.observer.suspended:
                self.observer.skip(batch)
            elif self.observer is not None and hidden is not None:
                self.observer.absorb(batch, tokens.cpu().numpy(), hidden, handle.result())
            return handle

    def close(self) -> None:
        self.graphs = None

    # ---- a sequence with NaN or Inf ------------------------------------------------------------

    def find_broken(self, full: list[int], sliding: list[int], length: int) -> str:
        with torch.inference_mode():
            return find_broken(self.model, full, sliding, length)

    def clear(self, pages: list[int]) -> None:
        with torch.inference_mode():
            clear_pages(self.model, pages)
        self._use_pages_longer()

    # ---- pages in host memory ------------------------------------------------------------------

    def _use_pages_longer(self) -> None:
        """Launched work may use pages that are given back before it has run."""
        if self.memory is not None:
            self.memory.wait_for_steps()

    def launched_steps(self) -> object:
        assert self.memory is not None
        return self.memory.launched_steps()

    def read_pages(self, pages: list[int], behind: object) -> tuple[list[memoryview], float]:
        assert self.memory is not None
        return self.memory.read(pages, behind)

    def stage_page(self, content: memoryview) -> memoryview:
        assert self.memory is not None
        return self.memory.stage(content)

    def page_buffer(self) -> memoryview:
        assert self.memory is not None
        return self.memory.buffer()

    def write_pages(self, pages: list[int], contents: list[memoryview]) -> list[tuple[int, float]]:
        assert self.memory is not None
        try:
            return self.memory.write(pages, contents)
        except Exception as e:
            raise_if_dead(self.model.device, e)
            raise

    # ---- before traffic -----------------------------------------------------------------------

    def run_idle(self, batch: Batch) -> None:
        """Run a step on the scratch page, so that kernels compile and buffers grow before the first request."""
        with torch.inference_mode():
            self._run_eagerly(batch, DeviceStepSampling(batch))
            if self.buffer.cuda:
                torch.cuda.synchronize(self.model.device)

    def graph_shapes(self, sequences: int, blocks: int, *, full: bool) -> list[tuple[int, int]]:
        """(rows, blocks of a table) of every graph that steps of `sequences` sequences, drafts included, can use;
        without `full` only of graphs for short contexts."""
        if self.graphs is None:
            return []
        return self.graphs.shapes(self._results.shape[0] if self.observer is not None else sequences, blocks, full=full)

    def capture(self, rows: int, blocks: int) -> None:
        assert self.graphs is not None
        with torch.inference_mode():
            self.graphs.find(rows, blocks, self.buffer.memory, self._results)

    # ---- by a captured graph ------------------------------------------------------------------

    def _graph_for(self, batch: Batch) -> DecodeGraph | None:
        rows = batch.rows
        if self.graphs is None or rows != len(batch.samplers) or batch.targets:  # it holds rows of a prompt
            return None
        if batch.regime not in (None, self.graphs.regime):
            return None
        return self.graphs.find(rows, batch.full_table.shape[1], self.buffer.memory, self._results)

    def _replay(self, graph: DecodeGraph, batch: Batch, sampling: DeviceStepSampling) -> StepOutput:
        rows = batch.rows
        arrays: list[NDArray[Any]] = [self._graph_inputs(graph, batch), *sampling.arrays]
        new_tables = not graph.has_tables(batch.sliding_table, batch.full_table)
        if new_tables:
            arrays.append(np.stack((batch.sliding_table, batch.full_table)))
        views = self.buffer.send(arrays)
        if views[0].data_ptr() != self.buffer.memory.data_ptr():  # the graph would not see it
            raise StepError(f"a step of {rows} rows has more block tables than this runner has room for.")
        sampling.take(views[1:])
        if new_tables:
            graph.set_tables(*views[-1])
            graph.host_tables = {"sliding": batch.sliding_table, "full": batch.full_table}
        logits = graph.replay()[:rows]
        return graph.tokens[:rows], logits, None if self.observer is None else graph.hidden[:rows]

    def _graph_inputs(self, graph: DecodeGraph, batch: Batch) -> Ints:
        """The inputs that a graph reads at the head of the buffer, one line per field, padding rows included."""
        rows, sequences, size = batch.rows, len(batch.slots), graph.step.rows
        inputs = np.zeros((len(FIELDS), graph.width), np.int32)
        tokens, positions, kv_lens, source, row_sequence, query_start = inputs
        index = np.arange(graph.width, dtype=np.int32)
        tokens[:rows], positions[:rows], row_sequence[:rows] = batch.tokens, batch.positions, batch.row_sequence
        kv_lens[:] = 1
        kv_lens[:sequences], query_start[: sequences + 1] = batch.kv_lens, batch.query_start
        # Every idle row is a sequence behind those of the batch; where drafts leave more sequences, they are empty.
        row_sequence[rows:size] = sequences + index[: size - rows]
        query_start[sequences + 1 : size + 1] = np.minimum(rows + 1 + index[: size - sequences], size)
        source[:] = index
        if batch.token_from is not None:
            source[:rows] = self._sources(batch.token_from)
        return inputs

    def _sources(self, token_from: Ints) -> Ints:
        """Index in memory of each row's token: its own word, or a result of the previous step."""
        own = np.arange(token_from.shape[0], dtype=np.int32)
        return np.where(token_from >= 0, self._results_at + 2 * token_from, own)

    # ---- phase by phase -----------------------------------------------------------------------

    def _run_eagerly(self, batch: Batch, sampling: DeviceStepSampling) -> StepOutput:
        step = self._send_step(batch, sampling)
        hidden: Tensor | None = None
        if self.observer is None:
            logits = self.model.forward(step)
        else:
            logits, hidden = self.observer.tap(step)
        if batch.samplers:
            self.sampler.argmax(logits, self._results[: logits.shape[0]])
        return step.tokens, logits, hidden

    def _send_step(self, batch: Batch, sampling: DeviceStepSampling) -> Step:
        blocks = batch.full_table.shape[1]
        tables = np.zeros((2, len(batch.slots), padded_blocks(blocks)), np.int32)
        tables[0, :, :blocks], tables[1, :, :blocks] = batch.sliding_table, batch.full_table
        fields = [
            batch.tokens, batch.positions, batch.query_start, batch.kv_lens, batch.row_sequence, batch.logit_rows,
            tables,
        ]  # fmt: skip
        arrays: list[NDArray[Any]] = [*fields, *sampling.arrays]
        if batch.token_from is not None:
            arrays.append(self._sources(batch.token_from))
        views = self.buffer.send(arrays)
        tokens, positions, query_start, kv_lens, row_sequence, logit_rows, block_tables = views[: len(fields)]
        sampling.take(views[len(fields) :])
        if batch.token_from is not None:
            memory = self.buffer.memory
            if tokens.data_ptr() != memory.data_ptr():  # too large to be sent there
                memory = torch.cat((tokens, memory[tokens.shape[0] :]))
            tokens = memory.index_select(0, views[-1])
        return Step(
            tokens=tokens, positions=positions, query_start=query_start, kv_lens=kv_lens, row_sequence=row_sequence,
            block_tables={"sliding": block_tables[0], "full": block_tables[1]}, logit_rows=logit_rows,
            max_kv_len=batch.max_kv_len, singles=batch.singles, regime=batch.regime,
        )  # fmt: skip
