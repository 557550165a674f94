"""Runs batches on a GptOss model: arrays to a Step, forward, sample.

On a CPU one worker thread runs the steps, waiting inside torch with the GIL released; on a GPU they are queued on the
stream. Either way the engine schedules the next step meanwhile, and tokens that the step before has sampled are
filled in on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.engine.batch import Batch, Ints, StepResult
from halfbyte.engine.device_sampler import draw_rows, keys_of, settings_of
from halfbyte.engine.sampler import NOT_NUMBERS, logprob_of, sample
from halfbyte.plan.step import Step


class Model(Protocol):
    """What is needed of `halfbyte.model.gpt_oss.GptOss`."""

    @property
    def device(self) -> torch.device: ...
    def forward(self, step: Step) -> Tensor: ...


def put(values: NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def to_step(batch: Batch, tokens: Tensor, device: torch.device) -> Step:
    return Step(
        tokens=tokens, positions=put(batch.positions, device), query_start=put(batch.query_start, device),
        kv_lens=put(batch.kv_lens, device), row_sequence=put(batch.row_sequence, device),
        block_tables={"sliding": put(batch.sliding, device), "full": put(batch.full, device)},
        logit_rows=put(batch.logit_rows, device), max_kv_len=batch.max_kv_len,
    )  # fmt: skip


def only_row(batch: Batch, row: int) -> Batch:
    """A batch that samples this row alone."""
    return replace(
        batch, pickers=[batch.pickers[row]], places=[batch.places[row]],
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
            step = to_step(batch, torch.from_numpy(tokens), self.model.device)
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
        return sample(logits, batch) if batch.pickers else StepResult([])

    def close(self) -> None:
        self._thread.shutdown(wait=True)


class DeviceRunner:
    """On a GPU: everything is queued on the stream and tokens stay there for the next step; only `result` waits.

    Rows that need the host (penalties, bias, grammar, draft distributions) are fetched and sampled at launch, which
    waits for the step. An observer of hidden states needs the tokens on the host as well.
    """

    def __init__(self, model: Model, observer: Observer | None = None) -> None:
        self.model, self.observer = model, observer
        self._last: Tensor | None = None

    def launch(self, batch: Batch) -> DeviceHandle:
        device = self.model.device
        with torch.inference_mode():
            tokens = put(batch.tokens, device)
            if batch.token_from is not None:
                assert self._last is not None
                source = put(batch.token_from, device)
                tokens = torch.where(source >= 0, self._last[source.clamp_min(0).long()].int(), tokens)
            step = to_step(batch, tokens, device)
            hidden: Tensor | None = None
            if self.observer is None:
                logits = self.model.forward(step)
            else:
                logits, hidden = self.observer.tap(step)
            handle = self._sample(logits, batch)
            self._last = handle.tokens
            if self.observer is not None and hidden is not None:
                self.observer.absorb(batch, tokens.cpu().numpy(), hidden, handle.result())
        return handle

    def _sample(self, logits: Tensor, batch: Batch) -> DeviceHandle:
        pickers = batch.pickers
        if not pickers:
            return DeviceHandle(torch.zeros(0, dtype=torch.int64), None, {}, {})
        settings = settings_of(pickers)
        sampled = bool((settings[:, 0] > 0).any())
        filtered = bool(((settings[:, 1] > 0) | (settings[:, 2] < 1) | (settings[:, 3] > 0)).any())
        keys = keys_of(pickers, batch.places) if sampled else np.zeros(len(pickers), np.int64)
        tokens = draw_rows(
            logits, put(settings, logits.device), put(keys, logits.device), filtered=filtered, sampled=sampled
        )
        fine = torch.isfinite(logits.gather(1, logits.argmax(-1, keepdim=True))[:, 0])
        shown: dict[int, tuple[Tensor, int]] = {}
        errors: dict[int, str] = {}
        for i, picker in enumerate(pickers):
            if picker.needs_host or i in batch.masks or i in batch.proposals:
                one = sample(logits[i : i + 1], only_row(batch, i))
                tokens[i] = one.tokens[0]
                if one.errors:
                    errors[i] = one.errors[0]
            if picker.params.logprobs is not None:
                shown[i] = (logits[i], picker.params.logprobs)
        return DeviceHandle(tokens, fine, shown, errors)

    def close(self) -> None:
        self._last = None


@dataclass
class DeviceHandle:
    tokens: Tensor
    fine: Tensor | None  # rows whose logits are numbers
    shown: dict[int, tuple[Tensor, int]]  # rows whose logprobs are wanted
    errors: dict[int, str]

    def result(self) -> StepResult:
        tokens = self.tokens.tolist()
        errors = dict(self.errors)
        if self.fine is not None:
            errors |= {i: NOT_NUMBERS for i, fine in enumerate(self.fine.tolist()) if not fine}
        logprobs = {
            i: logprob_of(row.float().cpu().numpy(), tokens[i], top)
            for i, (row, top) in self.shown.items() if i not in errors
        }  # fmt: skip
        return StepResult(tokens, logprobs, errors)


def make_runner(model: Model, observer: Observer | None = None) -> TorchRunner | DeviceRunner:
    return TorchRunner(model, observer) if model.device.type == "cpu" else DeviceRunner(model, observer)
