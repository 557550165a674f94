"""Runs batches on a GptOss model: arrays to a Step, forward, sample.

On a CPU one worker thread runs the steps, waiting inside torch with the GIL released; on a GPU they are queued on the
stream. Either way the engine schedules the next step meanwhile, and tokens that the step before has sampled are
filled in on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.engine.batch import Batch, Ints, StepResult
from halfbyte.engine.graphs import FIELDS, DecodeGraph, Graphs, note
from halfbyte.engine.request import Logprob
from halfbyte.engine.sampling.device import draw_rows, keys_of, settings_of
from halfbyte.engine.sampling.host import NOT_NUMBERS, sample
from halfbyte.engine.step_buffer import StepBuffer, padded_blocks
from halfbyte.errors import StepError
from halfbyte.model.config import ModelConfig
from halfbyte.plan.draw import drawer_for
from halfbyte.plan.step import Step


class Model(Protocol):
    """What is needed of `halfbyte.model.gpt_oss.GptOss`."""

    @property
    def device(self) -> torch.device: ...
    @property
    def config(self) -> ModelConfig: ...
    def forward(self, step: Step) -> Tensor: ...


def to_step(batch: Batch, tokens: Ints) -> Step:
    """On a CPU: the arrays themselves."""
    put = torch.from_numpy
    return Step(
        tokens=put(tokens), positions=put(batch.positions), query_start=put(batch.query_start),
        kv_lens=put(batch.kv_lens), row_sequence=put(batch.row_sequence),
        block_tables={"sliding": put(batch.sliding), "full": put(batch.full)}, logit_rows=put(batch.logit_rows),
        max_kv_len=batch.max_kv_len,
    )  # fmt: skip


def only_row(batch: Batch, row: int) -> Batch:
    """A batch that samples this row alone."""
    return replace(
        batch, samplers=[batch.samplers[row]], sample_positions=[batch.sample_positions[row]],
        histories={0: batch.histories[row]} if row in batch.histories else {},
        masks={0: batch.masks[row]} if row in batch.masks else {},
        proposals={0: batch.proposals[row]} if row in batch.proposals else {},
    )  # fmt: skip


class Observer(Protocol):
    """Whoever needs the hidden states of every step (`speculative.eagle3.Eagle3Proposer`)."""

    @property
    def tap(self) -> Callable[[Step], tuple[Tensor, Tensor]]: ...
    def absorb(self, batch: Batch, tokens: Ints, hidden: Tensor, result: StepResult) -> None: ...


class TorchRunner:
    """On a CPU: the step and its sampling on a worker thread."""

    sampler = "host"

    def __init__(self, model: Model, observer: Observer | None = None) -> None:
        self.model, self.observer = model, observer
        self._last: list[int] = []  # sampled by the last step that ran
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="halfbyte-step")

    def launch(self, batch: Batch) -> Future[StepResult]:
        return self._thread.submit(self._run, batch)

    def _run(self, batch: Batch) -> StepResult:
        tokens = batch.tokens
        if batch.token_from is not None:
            known = np.asarray([*self._last, 0], np.int32)  # -1 finds the 0, which is not used
            tokens = np.where(batch.token_from >= 0, known[batch.token_from], tokens)
        self._last = []
        with torch.inference_mode():
            step = to_step(batch, tokens)
            if self.observer is None:
                result = self._sample(self.model.forward(step), batch)
            else:
                logits, hidden = self.observer.tap(step)
                result = self._sample(logits, batch)
                self.observer.absorb(batch, tokens, hidden, result)
        self._last = result.tokens
        return result

    @staticmethod
    def _sample(logits: Tensor, batch: Batch) -> StepResult:
        return sample(logits, batch) if batch.samplers else StepResult([])

    def close(self) -> None:
        self._thread.shutdown(wait=True)


class DeviceRunner:
    """On a GPU: everything is queued on the stream and tokens stay there for the next step; nothing waits but `result`,
    and that for its own step only.

    Rows that need the host (penalties, bias, grammar, draft distributions) are fetched and sampled at launch, which
    waits for the step. An observer of hidden states needs the tokens on the host as well. `rows`, `sequences` and
    `blocks` are what a step may have; larger ones that no graph replays are served too, from buffers of their own.
    """

    def __init__(
        self, model: Model, observer: Observer | None = None, graphs: Graphs | None = None, *, rows: int = 4096,
        sequences: int = 64, blocks: int = 64,
    ) -> None:  # fmt: skip
        self.model, self.observer, self.graphs = model, observer, graphs
        # What the last step sampled lies behind what is sent: the next step finds its tokens in one memory.
        self._stage = StepBuffer(model.device, 12 * rows + 2 * sequences * padded_blocks(blocks) + 256, 2 * rows)
        self._behind = self._stage.buffer.shape[0]
        self._results = self._stage.memory[self._behind :].view(rows, 2)  # token, its logit's bits
        self._drawer, self.sampler = drawer_for(model.device, rows, model.config.vocab)
        if graphs is not None:
            graphs.drawer = self._drawer

    def launch(self, batch: Batch) -> DeviceHandle:
        with torch.inference_mode():
            if len(batch.samplers) > self._results.shape[0]:
                raise StepError(f"a step samples at most {self._results.shape[0]} rows, not {len(batch.samplers)}.")
            draw = _Draw.of(batch)
            graph = self._graph(batch)
            if graph is None:
                return self._eager(batch, draw)
            handle = self._sample(self._replay(graph, batch, draw), batch, draw)
            if self.observer is not None:
                rows = batch.rows
                self.observer.absorb(batch, graph.tokens[:rows].cpu().numpy(), graph.hidden[:rows], handle.result())
            return handle

    # ---- running ------------------------------------------------------------------------------

    def _graph(self, batch: Batch) -> DecodeGraph | None:
        rows = batch.rows
        if self.graphs is None or rows != len(batch.samplers):  # a prompt's rows are not all sampled
            return None
        return self.graphs.find(rows, batch.full.shape[1], self._stage.memory, self._results)

    def _sources(self, token_from: Ints) -> Ints:
        """Where in memory each row's token is: its own word, or what the step before sampled."""
        own = np.arange(token_from.shape[0], dtype=np.int32)
        return np.where(token_from >= 0, self._behind + 2 * token_from, own)

    def _replay(self, graph: DecodeGraph, batch: Batch, draw: _Draw) -> Tensor:
        rows, sequences, size = batch.rows, len(batch.slots), graph.step.rows
        inputs = np.zeros((len(FIELDS), graph.width), np.int32)
        tokens, positions, kv_lens, source, row_sequence, query_start = inputs
        each = np.arange(graph.width, dtype=np.int32)
        tokens[:rows], positions[:rows], row_sequence[:rows] = batch.tokens, batch.positions, batch.row_sequence
        kv_lens[:] = 1
        kv_lens[:sequences], query_start[: sequences + 1] = batch.kv_lens, batch.query_start
        # Every idle row is a sequence behind those of the batch; where drafts leave more sequences, they are empty.
        row_sequence[rows:size] = sequences + each[: size - rows]
        query_start[sequences + 1 : size + 1] = np.minimum(rows + 1 + each[: size - sequences], size)
        source[:] = each
        if batch.token_from is not None:
            source[:rows] = self._sources(batch.token_from)
        arrays: list[NDArray[Any]] = [inputs, *draw.arrays]
        held = graph.held
        moved = not all(
            kind in held and held[kind].shape == given.shape and np.array_equal(held[kind], given)
            for kind, given in (("sliding", batch.sliding), ("full", batch.full))
        )
        if moved:
            arrays.append(np.stack((batch.sliding, batch.full)))
        sent = self._stage.send(arrays)
        if sent[0].data_ptr() != self._stage.memory.data_ptr():  # the graph would not see it
            raise StepError(f"a step of {rows} rows has more block tables than this runner has room for.")
        draw.sent(sent[1:])
        if moved:
            graph.tables(sent[-1][0], sent[-1][1])
            graph.held = {"sliding": batch.sliding, "full": batch.full}
        return graph.replay()[:rows]

    def _eager(self, batch: Batch, draw: _Draw) -> DeviceHandle:
        blocks = padded_blocks(batch.full.shape[1])
        tables = np.zeros((2, len(batch.slots), blocks), np.int32)
        tables[0, :, : batch.full.shape[1]], tables[1, :, : batch.full.shape[1]] = batch.sliding, batch.full
        arrays: list[NDArray[Any]] = [
            batch.tokens, batch.positions, batch.query_start, batch.kv_lens, batch.row_sequence, batch.logit_rows,
            tables, *draw.arrays,
        ]  # fmt: skip
        if batch.token_from is not None:
            arrays.append(self._sources(batch.token_from))
        sent = self._stage.send(arrays)
        tokens, positions, query_start, kv_lens, row_sequence, logit_rows, held = sent[:7]
        draw.sent(sent[7:])
        if batch.token_from is not None:
            memory = self._stage.memory
            if tokens.data_ptr() != memory.data_ptr():  # too large to be sent there
                memory = torch.cat((tokens, memory[tokens.shape[0] :]))
            tokens = memory.index_select(0, sent[-1])
        step = Step(
            tokens=tokens, positions=positions, query_start=query_start, kv_lens=kv_lens, row_sequence=row_sequence,
            block_tables={"sliding": held[0], "full": held[1]}, logit_rows=logit_rows, max_kv_len=batch.max_kv_len,
        )  # fmt: skip
        hidden: Tensor | None = None
        if self.observer is None:
            logits = self.model.forward(step)
        else:
            logits, hidden = self.observer.tap(step)
        if batch.samplers:
            note(logits, self._results, self._drawer)
        handle = self._sample(logits, batch, draw)
        if self.observer is not None and hidden is not None:
            self.observer.absorb(batch, tokens.cpu().numpy(), hidden, handle.result())
        return handle

    # ---- sampling -----------------------------------------------------------------------------

    def _sample(self, logits: Tensor, batch: Batch, draw: _Draw) -> DeviceHandle:
        """`note` has put the highest logits down; rows that want something else are changed, and all sent back."""
        count = len(batch.samplers)
        if not count:
            return DeviceHandle(None, None, {}, {})
        here = self._results[:count]
        if draw.sampled and self._drawer is not None:
            self._drawer(logits, draw.settings, draw.keys, here, filtered=draw.filtered)
        elif draw.sampled:
            here[:, 0].copy_(draw_rows(logits, draw.settings, draw.keys, filtered=draw.filtered, sampled=True))
        shown: dict[int, Shown] = {}
        errors: dict[int, str] = {}
        for i in draw.special if not (batch.masks or batch.proposals) else range(count):
            sampler = batch.samplers[i]
            if sampler.needs_host or i in batch.masks or i in batch.proposals:
                one = sample(logits[i : i + 1], only_row(batch, i))
                here[i, 0].fill_(one.tokens[0])
                if one.errors:
                    errors[i] = one.errors[0]
            if sampler.params.logprobs is not None:
                shown[i] = Shown.of(logits[i], here[i, 0], sampler.params.logprobs)
        cuda = logits.device.type == "cuda"
        out = torch.empty((count, 2), dtype=torch.int32, pin_memory=cuda)
        out.copy_(here, non_blocking=cuda)
        done: torch.cuda.Event | None = None
        if cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return DeviceHandle(out, done, shown, errors)

    def close(self) -> None:
        self.graphs = None


@dataclass
class _Draw:
    """How a batch's rows are drawn, and the numbers the device needs for it."""

    sampled: bool
    filtered: bool
    special: list[int]  # rows that need more than a token from the device
    arrays: list[NDArray[Any]]
    settings: Tensor = field(default_factory=lambda: torch.empty(0))
    keys: Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def of(cls, batch: Batch) -> _Draw:
        samplers = batch.samplers
        special = [i for i, p in enumerate(samplers) if p.needs_host or p.params.logprobs is not None]
        if all(p.greedy for p in samplers):
            return cls(False, False, special, [])
        settings = settings_of(samplers)
        filtered = bool(((settings[:, 1] > 0) | (settings[:, 2] < 1) | (settings[:, 3] > 0)).any())
        return cls(True, filtered, special, [settings, keys_of(samplers, batch.sample_positions)])

    def sent(self, views: list[Tensor]) -> None:
        if self.sampled:
            self.settings, self.keys = views[:2]


@dataclass
class Shown:
    """The logprobs of one row, on their way to the host."""

    chosen: Tensor  # float64 scalar
    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, logits: Tensor, token: Tensor, top: int) -> Shown:
        """Computed now: the next step may overwrite the logits."""
        x = logits.double()
        x = x - torch.logsumexp(x, -1)
        values, ids = x.topk(top) if top else (x[:0], torch.zeros(0, dtype=torch.int64, device=x.device))
        chosen = x.index_select(0, token.reshape(1))  # x[token] would wait for the token
        return cls(*(_to_host(t) for t in (chosen, ids, values)))

    def logprob(self, token: int) -> Logprob:
        return Logprob(token, float(self.chosen[0]), tuple(zip(self.ids.tolist(), self.values.tolist())))


def _to_host(t: Tensor) -> Tensor:
    if t.device.type == "cpu":
        return t
    out = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    out.copy_(t, non_blocking=True)
    return out


@dataclass
class DeviceHandle:
    out: Tensor | None  # int32 [L, 2] on the host: token, the bits of the row's highest logit
    done: torch.cuda.Event | None
    shown: dict[int, Shown]  # rows whose logprobs are wanted
    errors: dict[int, str]

    def result(self) -> StepResult:
        if self.out is None:
            return StepResult([])
        if self.done is not None:
            self.done.synchronize()
        found = self.out.numpy()
        tokens = found[:, 0].tolist()
        errors = dict(self.errors)
        numbers = np.isfinite(found.view(np.float32)[:, 1])
        if not numbers.all():
            errors |= dict.fromkeys(np.nonzero(~numbers)[0].tolist(), NOT_NUMBERS)
        logprobs = {i: s.logprob(tokens[i]) for i, s in self.shown.items() if i not in errors}
        return StepResult(tokens, logprobs, errors)


def make_runner(
    model: Model, observer: Observer | None = None, graphs: Graphs | None = None, **room: int
) -> TorchRunner | DeviceRunner:
    """`room`: rows, sequences and blocks of the largest step (see DeviceRunner)."""
    if model.device.type == "cpu":
        return TorchRunner(model, observer)
    return DeviceRunner(model, observer, graphs, **room)
