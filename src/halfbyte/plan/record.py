"""Selection and Record: what was chosen and why, and what really ran. Plain values that travel into results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from halfbyte.plan.step import Regime


@dataclass(frozen=True)
class Refusal:
    phase: str
    regime: Regime
    reason: str


@dataclass(frozen=True)
class Selection:
    """The phases of each regime in running order, the layout each weight takes, and every refusal."""

    arch: str
    chosen: Mapping[Regime, tuple[str, ...]]
    layouts: Mapping[str, str]
    formats: Mapping[str, str]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Run:
    """One phase as it ran: with the formats and shapes it really saw."""

    phase: str
    covers: tuple[str, ...]
    regime: Regime
    formats: Mapping[str, str]  # role -> format of the bound weight
    dtype: str
    activation: str
    shapes: Mapping[str, tuple[int, ...]]  # activation name -> shape after the launch
    kernels: tuple[str, ...] = ()  # device kernel names, where known


@dataclass
class Record:
    """Collects distinct runs. Cheap when it has seen everything already."""

    runs: dict[tuple[Any, ...], Run] = field(default_factory=dict)
    counts: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        key = (run.phase, run.regime, tuple(sorted(run.shapes.items())), tuple(sorted(run.formats.items())))
        self.runs.setdefault(key, run)
        self.counts[key] = self.counts.get(key, 0) + 1

    def phases(self, regime: Regime | None = None) -> set[str]:
        return {r.phase for r in self.runs.values() if regime is None or r.regime == regime}

    def as_list(self) -> list[dict[str, Any]]:
        return [asdict(r) | {"count": self.counts[k]} for k, r in self.runs.items()]
