"""`halfbyte profile` of a model: its decode step and a prompt, what follows from them, and the receipt.

Measuring is in `timeline.py`; what the lines mean is in `profile.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from halfbyte.errors import UsageError
from halfbyte.lab import environment, receipts, timeline
from halfbyte.lab.machine import device_roof, limit_threads
from halfbyte.lab.options import preset_of
from halfbyte.lab.profile import Decision, Profile, decide, profile_result
from halfbyte.lab.result import ResultFile
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.load import ModelName
from halfbyte.roofline import Gpu


@dataclass(frozen=True)
class ModelProfile:
    name: ModelName
    model: GptOss
    profiles: list[Profile]  # decode first

    @property
    def roof(self) -> Gpu:
        return device_roof(self.model.device, self.model.weights.nbytes)

    @property
    def differences(self) -> list[str]:
        """Each difference between what ran and what was chosen."""
        return [str(d) for d in self.model.plan.differences()]

    @property
    def decisions(self) -> list[Decision]:
        return decide(self.profiles[0], self.differences)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.name.label,
            "profiles": [p.as_dict() for p in self.profiles],
            "decisions": [asdict(d) for d in self.decisions],
            "record": self.model.plan.record.as_dict(),
            "environment": environment.collect(self.model.gates),
        }

    def file(self) -> ResultFile:
        """The receipt."""
        measured = receipts.measured({b.phase for bound in self.model.plan.bound.values() for b in bound})
        preset, record = (
            preset_of(self.model.gates, gpu=self.model.device.type != "cpu"),
            self.model.plan.record.as_dict(),
        )
        results = [profile_result(p, self.name.shape_name, preset, record, self.differences) for p in self.profiles]
        return receipts.result_file("halfbyte profile", results, measured)


def profile_model(name: ModelName, model: GptOss, tokens: int, depth: int, batch: int, pp: int) -> ModelProfile:
    """Decode steps at some depth, and a prompt unless `pp` is 0."""
    longest = max(depth + tokens, pp) + 64
    if longest > model.config.max_context:
        raise UsageError(f"{longest} tokens are more than this model's context of {model.config.max_context}.")
    limit_threads(model.device, model.weights.nbytes)
    with torch.inference_mode():
        profiles = [timeline.decode_profile(model, tokens, depth, batch)]
        if pp:
            profiles.append(timeline.prefill_profile(model, pp))
    return ModelProfile(name, model, profiles)
