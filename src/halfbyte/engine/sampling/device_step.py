"""One step's sampling on a device: what the device needs for it, which rows the host takes over, and the tokens on
their way back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.engine.batch import Batch
from halfbyte.engine.device_health import raise_if_dead
from halfbyte.engine.runner import StepResult
from halfbyte.engine.sampling.adjustments import Adjustments
from halfbyte.engine.sampling.device import DeviceSampler
from halfbyte.engine.sampling.host import NO_TOKEN, not_numbers, sample_row_on_host
from halfbyte.engine.sampling.logprobs import PendingLogprob
from halfbyte.engine.sampling.race import random_keys, row_settings


@dataclass
class PendingResult:
    """The handle of a launched step: its tokens are being copied to the host."""

    rows: Tensor | None = None  # int32 [L, 2] on the host: token, the bits of the row's highest logit; None: L is 0
    copied: torch.cuda.Event | None = None
    logprobs: dict[int, PendingLogprob] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def result(self) -> StepResult:
        if self.rows is None:
            return StepResult([])
        if self.copied is not None:
            try:
                self.copied.synchronize()
            except Exception as e:
                raise_if_dead(torch.device("cuda"), e)
                raise
        rows = self.rows.numpy()
        tokens = rows[:, 0].tolist()
        errors = dict(self.errors)
        finite = np.isfinite(rows.view(np.float32)[:, 1])
        if not finite.all():
            for i in np.nonzero(~finite)[0].tolist():
                barred = rows.view(np.float32)[i, 1] == -np.inf
                errors.setdefault(i, NO_TOKEN if barred else not_numbers(int(rows[i, 1])))
        logprobs = {i: p.logprob(tokens[i]) for i, p in self.logprobs.items() if i not in errors}
        return StepResult(tokens, logprobs, errors)


class DeviceStepSampling:
    def __init__(self, batch: Batch) -> None:
        samplers = batch.samplers
        self.batch = batch
        self.greedy = all(s.greedy for s in samplers)
        self.filtered = False
        # Rows of which more is wanted than a token that the device can sample.
        self._special = [i for i, s in enumerate(samplers) if s.params.logprobs is not None or i in batch.proposals]
        self.arrays: list[NDArray[Any]] = []  # to be sent to the device with the step
        self._settings = self._keys = torch.empty(0)  # those arrays, there
        if not self.greedy:
            self.filtered = any(sampler.filtered for sampler in samplers)
            self.arrays = [row_settings(samplers), random_keys(samplers, batch.sample_positions)]

    def take(self, views: list[Tensor]) -> None:
        """Take the views of `arrays` on the device, which come first among `views`."""
        if not self.greedy:
            self._settings, self._keys = views[:2]

    def _adjust(self, sampler: DeviceSampler, logits: Tensor, rows: Tensor) -> None:
        """Choose again for rows with penalties, bias, a minimum length or a grammar. A row whose own logits are not
        numbers keeps its mark."""
        batch = self.batch
        adjusted = [
            i for i, s in enumerate(batch.samplers) if (s.adjusted or i in batch.masks) and i not in batch.proposals
        ]
        if not adjusted:
            return
        index = torch.tensor(adjusted)
        if logits.device.type == "cuda":
            index = index.pin_memory().to(logits.device, non_blocking=True)
        changed = Adjustments(batch, adjusted, logits.shape[1], logits.device).apply(logits)
        chosen = torch.empty((len(adjusted), 2), dtype=torch.int32, device=logits.device)
        sampler.argmax(changed, chosen, barred=True)
        if not all(batch.samplers[i].greedy for i in adjusted):
            settings, keys = self._settings.index_select(0, index), self._keys.index_select(0, index)
            sampler.sample(changed, settings, keys, chosen, filtered=self.filtered)
        before = rows.index_select(0, index)
        finite = torch.isfinite(before.view(torch.float32)[:, 1:])
        rows.index_copy_(0, index, torch.where(finite, chosen, before))

    def run(self, sampler: DeviceSampler, logits: Tensor, results: Tensor) -> PendingResult:
        """`sampler.argmax` has filled `results`; rows that want something else are changed, and all sent back."""
        batch, count = self.batch, len(self.batch.samplers)
        if not count:
            return PendingResult()
        rows = results[:count]
        if not self.greedy:
            sampler.sample(logits, self._settings, self._keys, rows, filtered=self.filtered)
        logprobs: dict[int, PendingLogprob] = {}
        errors: dict[int, str] = {}
        self._adjust(sampler, logits, rows)
        for i in self._special:
            row_sampler = batch.samplers[i]
            if i in batch.proposals:
                result = sample_row_on_host(logits, batch, i)
                rows[i, 0].fill_(result.tokens[0])
                if result.errors:
                    errors[i] = result.errors[0]
            if i in batch.targets:
                rows[i, 0].fill_(batch.targets[i])
            if row_sampler.params.logprobs is not None:
                logprobs[i] = PendingLogprob.of(logits[i], rows[i, 0], row_sampler.params.logprobs)
        cuda = logits.device.type == "cuda"
        out = torch.empty((count, 2), dtype=torch.int32, pin_memory=cuda)
        out.copy_(rows, non_blocking=cuda)
        copied: torch.cuda.Event | None = None
        if cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return PendingResult(out, copied, logprobs, errors)
