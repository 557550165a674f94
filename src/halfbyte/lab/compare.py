"""Two result files side by side: what changed in the environment, and which figures changed more than their noise.

Cells are the same when everything that says what was measured is equal. A figure that kept its samples is judged by
`statistics.compare`; one that kept none is shown with its change and no verdict. A cell that only one file has, or that
is INVALID in one of them, is said. Measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from halfbyte.gates import PRESETS
from halfbyte.lab import statistics
from halfbyte.lab.result import LESS, Cell, Figure, Result, ResultFile

# What differs between any two runs and changes no figure.
PASSING = frozenset({
    "time", "memory_available_bytes", "use", "host.load", "host.steal_share", "host.swap_used_bytes", "schema",
})  # fmt: skip
SMALL = 0.01  # a change of a single value that is not shown
# Units of which more or less is neither better nor worse.
NEUTRAL = frozenset({"experts", "tokens", "W", "MHz", "ratio", "B"})


@dataclass(frozen=True)
class Change:
    """One figure of one cell in both files."""

    cell: str
    figure: str
    unit: str
    before: float
    after: float
    verdict: str  # a statistics.Change, "no samples" or "differs"
    sentence: str

    @property
    def share(self) -> float | None:
        return self.after / self.before - 1 if self.before else None

    @property
    def shows(self) -> bool:
        """Whether a reader must see it: it changed, or whether it did is unknown."""
        if self.verdict in ("no samples", "too few runs"):
            return abs(self.share or 0.0) > SMALL or (self.before == 0) != (self.after == 0)
        return self.verdict != "no difference"


@dataclass(frozen=True)
class FileComparison:
    environment: tuple[tuple[str, str, str], ...]  # what, before, after
    changes: tuple[Change, ...]
    only: tuple[str, ...]  # cells that cannot be compared, and why

    @property
    def regressions(self) -> list[Change]:
        return [c for c in self.changes if c.verdict == "regression"]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_files(before: ResultFile, after: ResultFile, threshold: float = statistics.THRESHOLD) -> FileComparison:
    old, new = ({key_of(r.cell): r for r in file.results} for file in (before, after))
    changes: list[Change] = []
    only: list[str] = []
    for key, result in old.items():
        name, other = name_of(result.cell), new.get(key)
        if other is None:
            only.append(f"{name}: only in the first")
        elif result.refused or other.refused:
            reasons = [f"{which}: {r.state}, {r.refused}" for which, r in (("first", result), ("second", other))
                       if r.refused]  # fmt: skip
            only.append(f"{name}: {'; '.join(reasons)}")
        else:
            changes += _figures(name, result, other, threshold)
    only += [f"{name_of(r.cell)}: only in the second" for key, r in new.items() if key not in old]
    return FileComparison(tuple(environment_changes(before, after)), tuple(changes), tuple(only))


def _figures(name: str, before: Result, after: Result, threshold: float) -> Iterator[Change]:
    new = {f.name: f for f in after.figures}
    for f in before.figures:
        if f.name in new and new[f.name].unit == f.unit:
            verdict, sentence = judge(f, new[f.name], threshold)
            yield Change(name, f.name, f.unit, f.value, new[f.name].value, verdict, sentence)


def judge(before: Figure, after: Figure, threshold: float = statistics.THRESHOLD) -> tuple[str, str]:
    if min(len(before.values), len(after.values)) < 2:
        return "no samples", "one value each, so a change cannot be told from noise"
    if min(*before.values, *after.values) <= 0:
        return "no samples", "samples at or below 0 have no ratio"
    comparison = statistics.compare(
        before.values, after.values, less_is_better=before.unit in LESS, threshold=threshold
    )
    if before.unit in NEUTRAL and comparison.change in ("regression", "improvement"):
        return "differs", comparison.sentence.replace(comparison.change, "differs", 1)
    return comparison.change, comparison.sentence


def key_of(cell: Cell) -> str:
    """Gates that the cell's preset sets are left out: a result may name them or not."""
    preset = PRESETS[cell.preset].gates.changes() if cell.preset in PRESETS else {}
    own = {name: value for name, value in cell.gates.items() if preset.get(name) != value}
    return json.dumps(asdict(replace(cell, gates=own)), sort_keys=True, default=str)


def name_of(cell: Cell) -> str:
    gates = ",".join(f"{k}={v}" for k, v in cell.gates.items()) if not cell.preset else ""
    return " ".join(t for t in (cell.engine, cell.model, cell.preset, gates, cell.path, cell.label) if t)


# ---- the environment ------------------------------------------------------------------------------------------------


def environment_changes(before: ResultFile, after: ResultFile) -> Iterator[tuple[str, str, str]]:
    old, new = _facts(before), _facts(after)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name) and not _passing(name):
            yield name, _printed_value(old.get(name)), _printed_value(new.get(name))
    files = {
        n for n in before.measured.keys() | after.measured.keys() if before.measured.get(n) != after.measured.get(n)
    }
    if files:
        listed = ", ".join(sorted(files)[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
        yield "measured sources", f"{len(files)} differ", listed


def _facts(file: ResultFile) -> dict[str, Any]:
    return dict(flat("", file.environment)) | {"command": " ".join(file.command), "tool": file.tool}


def flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for k, v in value.items():
            yield from flat(f"{prefix}.{k}" if prefix else str(k), v)
    elif isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
        for i, v in enumerate(value):
            yield from flat(f"{prefix}[{i}]", v)
    else:
        yield prefix, value


def _passing(name: str) -> bool:
    return any(name == p or name.startswith((f"{p}.", f"{p}[")) for p in PASSING)


def _printed_value(value: Any) -> str:
    return "–" if value is None else str(value)[:80]
