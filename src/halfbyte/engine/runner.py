"""Protocols: what the engine needs from a runner of batches, and a runner from a model.

`cpu_runner` and `device_runner` implement them on a GptOss model; tests implement them without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from halfbyte.engine.batch import Batch, Ints
from halfbyte.engine.request import Logprob
from halfbyte.model.config import ModelConfig
from halfbyte.model.weights import Weights
from halfbyte.plan.phase import Spec
from halfbyte.plan.step import Step


@dataclass(slots=True)
class StepResult:
    """The results of a launched batch, one entry for each row with logits."""

    tokens: list[int]
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)  # row that could not be sampled -> reason


class StepHandle(Protocol):
    def result(self) -> StepResult:
        """Wait for the step. Raises the error of the step."""
        ...


class ModelRunner(Protocol):
    """Runs batches in the order of their launches. `launch` returns before the step has run."""

    def launch(self, batch: Batch) -> StepHandle: ...

    def close(self) -> None: ...


@runtime_checkable
class KeepsValues(Protocol):
    """A runner that can read what its model has stored for a sequence. Runners in tests need not."""

    def find_broken(self, full: list[int], sliding: list[int], length: int) -> str:
        """Where the sequence with these pages first had NaN or Inf. Waits for the launched steps."""
        ...

    def clear(self, pages: list[int]) -> None:
        """Fill the pages with zeros after all launched steps and before the next: a masked slot must hold a number."""
        ...


@runtime_checkable
class MovesPages(Protocol):
    """A runner whose KV pages can be copied to host memory and back."""

    def launched_steps(self) -> object:
        """What `read_pages` is to wait for: the steps that were launched so far. Called in the thread of the steps."""
        ...

    def read_pages(self, pages: list[int], behind: object) -> tuple[list[memoryview], float]:
        """Copies of what pages hold, in host memory, and the seconds that copying took, without the wait for `behind`;
        may be called in any thread. A page may be handed out while it is read, so the caller checks afterwards whether
        it was."""
        ...

    def stage_page(self, content: memoryview) -> memoryview:
        """Copy the bytes to where `write_pages` takes them from without delay, if they are not there; in any thread."""
        ...

    def page_buffer(self) -> memoryview:
        """Room for a page's bytes where `write_pages` takes them from without delay; in any thread."""
        ...

    def write_pages(self, pages: list[int], contents: list[memoryview]) -> list[tuple[int, float]]:
        """Fill pages that no sequence holds with staged contents, before the next step; called in the thread of the
        steps. Returns bytes and seconds of copies that are complete, which may be earlier ones."""
        ...


class RunnerModel(Protocol):
    """The part of `halfbyte.model.gpt_oss.GptOss` that runners use."""

    @property
    def device(self) -> torch.device: ...
    @property
    def config(self) -> ModelConfig: ...

    weights: Weights
    spec: Spec

    def kv_pool(self) -> Tensor: ...
    def forward(self, step: Step) -> Tensor: ...
    def best(self, step: Step) -> tuple[Tensor, Tensor]: ...


class HiddenStateObserver(Protocol):
    """Receives the hidden states of every step (`speculative.eagle3.Eagle3Proposer`)."""

    @property
    def suspended(self) -> bool:
        """Whether steps run without it for now; `skip` reports each of them."""
        ...

    def skip(self, batch: Batch) -> None: ...

    @property
    def tap(self) -> Callable[[Step], tuple[Tensor, Tensor]]: ...
    def pool(self) -> Tensor: ...  # its part of every KV page
    def absorb(self, batch: Batch, tokens: Ints, hidden: Tensor, result: StepResult) -> None: ...
