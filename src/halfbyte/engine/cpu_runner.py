"""Runs batches on a CPU, in the thread that asks for the result: the kernels' threads use every core anyway, so a step
that ran in parallel with the engine's own work would only compete with it.

A launched step runs when its result is requested. Tokens that the previous step sampled are filled in then. If every
row needs only the token of its highest logit, no logits are written.
"""

from __future__ import annotations

import numpy as np
import torch

from halfbyte.engine.batch import Batch, Ints
from halfbyte.engine.page_memory import PageMemory
from halfbyte.engine.runner import HiddenStateObserver, RunnerModel, StepResult
from halfbyte.engine.sampling.host import sample_on_host, take_best
from halfbyte.model.diagnose import clear_pages, find_broken
from halfbyte.plan.step import Step


class CpuRunner:
    def __init__(
        self, model: RunnerModel, observer: HiddenStateObserver | None = None, memory: PageMemory | None = None
    ) -> None:
        self.model, self.observer, self.memory = model, observer, memory
        self._last: list[int] = []  # sampled by the last step that ran
        self._launches = 0
        self._to_clear: list[tuple[int, list[int]]] = []  # number of a launch, pages to clear after it

    def launch(self, batch: Batch) -> LaunchedOnCpu:
        self._launches += 1
        return LaunchedOnCpu(self, batch, self._launches)

    def run(self, batch: Batch, number: int) -> StepResult:
        self._clear_behind(number - 1)
        result = self._run(batch)
        self._clear_behind(number)
        return result

    def find_broken(self, full: list[int], sliding: list[int], length: int) -> str:
        return find_broken(self.model, full, sliding, length)

    def clear(self, pages: list[int]) -> None:
        self._to_clear.append((self._launches, pages))

    def launched_steps(self) -> object:
        return None  # a page is complete when it is committed

    def read_pages(self, pages: list[int], behind: object) -> tuple[list[memoryview], float]:
        assert self.memory is not None
        return self.memory.read(pages, behind)

    def stage_page(self, content: memoryview) -> memoryview:
        return content

    def page_buffer(self) -> memoryview:
        assert self.memory is not None
        return self.memory.buffer()

    def write_pages(self, pages: list[int], contents: list[memoryview]) -> list[tuple[int, float]]:
        assert self.memory is not None
        self._to_clear = [(number, [p for p in cleared if p not in pages]) for number, cleared in self._to_clear]
        return self.memory.write(pages, contents)

    def _clear_behind(self, number: int) -> None:
        while self._to_clear and self._to_clear[0][0] <= number:
            clear_pages(self.model, self._to_clear.pop(0)[1])

    def _run(self, batch: Batch) -> StepResult:
        tokens = batch.tokens
        if batch.token_from is not None:
            sampled = np.asarray([*self._last, 0], np.int32)  # -1 finds the 0, which is not used
            tokens = np.where(batch.token_from >= 0, sampled[batch.token_from], tokens)
        self._last = []
        with torch.inference_mode():
            step = _step_of(batch, tokens)
            if self.observer is None or self.observer.suspended:
                if self.observer is not None:
                    self.observer.skip(batch)
                if batch.masks or not all(sampler.simple for sampler in batch.samplers):
                    result = sample_on_host(self.model.forward(step), batch)
                else:
                    result = take_best(*self.model.best(step))
            else:
                logits, hidden = self.observer.tap(step)
                result = sample_on_host(logits, batch)
                self.observer.absorb(batch, tokens, hidden, result)
        self._last = result.tokens
        return result

    def close(self) -> None:
        pass


class LaunchedOnCpu:
    """A step that runs once, when its result is requested; without a request it never runs."""

    __slots__ = ("_batch", "_number", "_runner")

    def __init__(self, runner: CpuRunner, batch: Batch, number: int) -> None:
        self._runner, self._batch, self._number = runner, batch, number

    def result(self) -> StepResult:
        return self._runner.run(self._batch, self._number)


def _step_of(batch: Batch, tokens: Ints) -> Step:
    """The batch as tensors that share its memory."""
    tensor = torch.from_numpy
    return Step(
        tokens=tensor(tokens), positions=tensor(batch.positions), query_start=tensor(batch.query_start),
        kv_lens=tensor(batch.kv_lens), row_sequence=tensor(batch.row_sequence),
        block_tables={"sliding": tensor(batch.sliding_table), "full": tensor(batch.full_table)},
        logit_rows=tensor(batch.logit_rows), max_kv_len=batch.max_kv_len, regime=batch.regime,
    )  # fmt: skip
