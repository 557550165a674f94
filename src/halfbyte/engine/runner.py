"""The protocols of whoever runs batches: what the engine needs of a runner, and a runner of a model.

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
    """What a launched batch produced, one entry per sampled row."""

    tokens: list[int]
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)  # rows that could not be sampled, and why


class StepHandle(Protocol):
    def result(self) -> StepResult:
        """Waits for the step. Raises what the step raised."""
        ...


class ModelRunner(Protocol):
    """Runs batches in the order of their launches. `launch` returns before the step has run."""

    def launch(self, batch: Batch) -> StepHandle: ...

    def close(self) -> None: ...


@runtime_checkable
class KeepsValues(Protocol):
    """A runner that can look at what its model has stored of a sequence (the engine's own; those of tests need not)."""

    def find_broken(self, full: list[int], sliding: list[int], length: int) -> str:
        """Where the sequence with these pages met values that are no numbers. Waits for what was launched."""
        ...

    def clear(self, pages: list[int]) -> None:
        """Zeros, after all that was launched and before all that will be: a masked slot must hold a number."""
        ...


class Model(Protocol):
    """What is needed of `halfbyte.model.gpt_oss.GptOss`."""

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
    """Whoever needs the hidden states of every step (`speculative.eagle3.Eagle3Proposer`)."""

    @property
    def tap(self) -> Callable[[Step], tuple[Tensor, Tensor]]: ...
    def absorb(self, batch: Batch, tokens: Ints, hidden: Tensor, result: StepResult) -> None: ...
