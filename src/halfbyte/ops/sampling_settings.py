"""The table of sampling settings: name, type, default, range, and who can apply each.

`SamplingSettings` is the table: `engine.request.SamplingParams` inherits its fields, and the checks of a request, the
rows that a device reads, the CUDA sampler's column numbers, the APIs' translation and vLLM's arguments are derived from
it. What a setting does to a distribution is in `sampling.py`. docs/add-a-sampling-parameter.md lists what a new one
needs. Imports no torch: requests are plain values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One row of the table. Every setting has no effect at its default, except `temperature`."""

    name: str
    default: float
    least: float
    most: float
    above_least: bool  # `least` itself is refused
    column: bool  # a device reads it when it chooses a token: it has a column of the rows' settings
    vllm: bool  # vLLM's engine has it, under this name

    @property
    def range(self) -> str:
        """In words, for people."""
        if self.most == math.inf:
            return f"at least {self.least:g}"
        return f"{'above' if self.above_least else 'at least'} {self.least:g} and at most {self.most:g}"

    def allows(self, value: float) -> bool:
        return (self.least < value if self.above_least else self.least <= value) and value <= self.most


def _setting(
    default: float, least: float, most: float = math.inf, *, above_least: bool = False, column: bool = False,
    vllm: bool = True,
) -> Any:  # fmt: skip
    facts = {"least": least, "most": most, "above_least": above_least, "column": column, "vllm": vllm}
    return field(default=default, metadata=facts)


@dataclass(frozen=True)
class SamplingSettings:
    """How a row's logits become a distribution. `temperature` 0 is greedy; defaults change nothing."""

    temperature: float = _setting(1.0, 0, 100, column=True)
    top_k: int = _setting(0, 0, column=True)  # 0: no limit
    top_p: float = _setting(1.0, 0, 1, above_least=True, column=True)
    min_p: float = _setting(0.0, 0, 1, column=True)
    repetition_penalty: float = _setting(1.0, 0, 100, above_least=True)
    presence_penalty: float = _setting(0.0, -100, 100)
    frequency_penalty: float = _setting(0.0, -100, 100)
    top_n_sigma: float = _setting(0.0, 0, 100, column=True, vllm=False)  # 0: no limit


SETTINGS: dict[str, Setting] = {
    f.name: Setting(f.name, getattr(SamplingSettings, f.name), **f.metadata) for f in fields(SamplingSettings)
}
COLUMNS: tuple[str, ...] = tuple(name for name, setting in SETTINGS.items() if setting.column)
FILTERS: tuple[str, ...] = tuple(name for name in COLUMNS if name != "temperature")  # they exclude tokens


def row_of(settings: SamplingSettings) -> tuple[float, ...]:
    """One row of the settings that a device reads, in the order of `COLUMNS`."""
    return tuple(getattr(settings, name) for name in COLUMNS)


def is_filtered(settings: SamplingSettings) -> bool:
    return any(getattr(settings, name) != SETTINGS[name].default for name in FILTERS)
