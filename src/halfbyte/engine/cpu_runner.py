"""Runs batches on a CPU: the step and its sampling on one worker thread, which waits inside torch with the GIL released
while the engine schedules the next step. Tokens that the step before has sampled are filled in there.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from halfbyte.engine.batch import Batch, Ints
from halfbyte.engine.runner import HiddenStateObserver, Model, StepResult
from halfbyte.engine.sampling.host import sample_on_host
from halfbyte.plan.step import Step


class CpuRunner:
    def __init__(self, model: Model, observer: HiddenStateObserver | None = None) -> None:
        self.model, self.observer = model, observer
        self._last: list[int] = []  # sampled by the last step that ran
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="halfbyte-step")

    def launch(self, batch: Batch) -> Future[StepResult]:
        return self._thread.submit(self._run, batch)

    def _run(self, batch: Batch) -> StepResult:
        tokens = batch.tokens
        if batch.token_from is not None:
            sampled = np.asarray([*self._last, 0], np.int32)  # -1 finds the 0, which is not used
            tokens = np.where(batch.token_from >= 0, sampled[batch.token_from], tokens)
        self._last = []
        with torch.inference_mode():
            step = _step_of(batch, tokens)
            if self.observer is None:
                result = sample_on_host(self.model.forward(step), batch)
            else:
                logits, hidden = self.observer.tap(step)
                result = sample_on_host(logits, batch)
                self.observer.absorb(batch, tokens, hidden, result)
        self._last = result.tokens
        return result

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _step_of(batch: Batch, tokens: Ints) -> Step:
    """The arrays themselves, as tensors."""
    tensor = torch.from_numpy
    return Step(
        tokens=tensor(tokens), positions=tensor(batch.positions), query_start=tensor(batch.query_start),
        kv_lens=tensor(batch.kv_lens), row_sequence=tensor(batch.row_sequence),
        block_tables={"sliding": tensor(batch.sliding), "full": tensor(batch.full)},
        logit_rows=tensor(batch.logit_rows), max_kv_len=batch.max_kv_len,
    )  # fmt: skip
