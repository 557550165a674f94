"""Runs batches on a GptOss model: arrays to a Step, forward, sample. One worker thread, so launches overlap the host.

The thread waits inside torch with the GIL released, which is what lets the engine schedule the next step meanwhile.
Tokens that the step before has sampled are filled in here, on the way to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from halfbyte.engine.batch import Batch, Ints, StepResult
from halfbyte.engine.sampler import sample
from halfbyte.plan.step import Step


class Model(Protocol):
    """What is needed of `halfbyte.model.gpt_oss.GptOss`."""

    @property
    def device(self) -> torch.device: ...
    def forward(self, step: Step) -> Tensor: ...


def to_step(batch: Batch, tokens: Ints, device: torch.device) -> Step:
    def put(values: Ints) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    return Step(
        tokens=put(tokens), positions=put(batch.positions), query_start=put(batch.query_start),
        kv_lens=put(batch.kv_lens), row_sequence=put(batch.row_sequence),
        block_tables={"sliding": put(batch.sliding), "full": put(batch.full)},
        logit_rows=put(batch.logit_rows), max_kv_len=batch.max_kv_len,
    )  # fmt: skip


class Observer(Protocol):
    """Whoever needs the hidden states of every step (`speculative.eagle3.Eagle3Proposer`)."""

    @property
    def tap(self) -> Callable[[Step], tuple[Tensor, Tensor]]: ...
    def absorb(self, batch: Batch, tokens: Ints, hidden: Tensor, result: StepResult) -> None: ...


class TorchRunner:
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
            step = to_step(batch, tokens, self.model.device)
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
