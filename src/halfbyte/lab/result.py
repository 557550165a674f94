"""The one schema of all measurements: the cell, its figures, their ceilings, the checks, and the code behind them.

A `ResultFile` is the output of a tool: its command, the machine, the hash of every source file behind the figures, and
one `Result` per cell. A cell that could not run is refused. One that ran and cannot be trusted (it failed a comparison,
its figure exceeds what the hardware can do, the card was throttled, the answers had another length) is INVALID. Either
has a reason and no figure; the figures of an INVALID cell are kept in its detail, which no table reads. `from_json`
refuses what does not fit with a sentence that names the field. `receipts.py` decides which files are stale.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from halfbyte import records
from halfbyte.errors import DisturbedError, InvalidFigureError, UsageError
from halfbyte.lab.statistics import LEAST, interval, median

SCHEMA = "halfbyte.result/1"
# Units of which less is better: there a ceiling is the least that it could be.
LESS = frozenset({"us", "ms", "s", "cycles", "B", "GiB", "nats", "relative", "J"})
UNITS = LESS | {
    "tok/s", "GB/s", "TB/s", "TFLOP/s", "%", "tokens", "tests", "requests", "faults", "steps", "ratio", "experts", "W",
    "MHz", "requests/s",
}  # fmt: skip
T = TypeVar("T")
DISTURBED = "disturbed"  # in a result's detail: it is INVALID because the machine did other work
WRITTEN_SAMPLES = 500  # samples of a figure that are written with it


@dataclass(frozen=True)
class Cell:
    """What was measured. `kind` is a noun: prompt, decode, start, accuracy, kernel."""

    kind: str
    model: str = ""  # 120b, tiny; random weights of a shape are named after the shape
    preset: str = ""
    gates: Mapping[str, Any] = field(default_factory=dict)  # what was set, by name or by a preset
    path: str = ""  # what ran it: engine, http, eager, graph, or a kernel's name
    shape: Mapping[str, Any] = field(default_factory=dict)  # pp, tg, depth, concurrency, context, rows, task, case
    engine: str = ""  # whose program answered: vllm 0.26.0, llama.cpp b7941; empty is halfbyte's own

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.model.removeprefix("random:"))

    @property
    def label(self) -> str:
        """llama-bench's words where they fit: `pp2048 @ d512, c=8`."""
        shape = dict(self.shape)
        lengths = [f"{n}{shape.pop(n)}" for n in ("pp", "tg") if n in shape]
        text = " + ".join(lengths) or self.kind
        depth = shape.pop("depth", 0)
        text += f" @ d{depth}" if depth else ""
        concurrency = shape.pop("concurrency", 1)
        rest = [f"c={concurrency}"] if concurrency != 1 else []
        return ", ".join([text, *rest, *(f"{k} {v}" for k, v in shape.items())])


@dataclass(frozen=True)
class FigureCeiling:
    value: float
    source: str  # whose bandwidth or rate it is


@dataclass(frozen=True)
class Figure:
    """A median with its spread. Above its ceiling it does not exist: the account is wrong, not the machine fast."""

    name: str
    unit: str
    value: float
    low: float
    high: float
    samples: int = 1
    ceiling: FigureCeiling | None = None
    values: tuple[float, ...] = ()  # the samples, in the order in which they were taken; empty where they are too many

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UsageError(f"{self.name} has the unit {self.unit!r}; the schema knows {', '.join(sorted(UNITS))}.")
        if not all(map(math.isfinite, (self.value, self.low, self.high))):
            raise UsageError(f"{self.name} is not finite.")
        if not self.low <= self.value <= self.high:
            raise UsageError(f"{self.name}: {self.value} lies outside of its own spread, {self.low} to {self.high}.")
        if self.samples < 1:
            raise UsageError(f"{self.name} was measured {self.samples} times.")
        if self.share is not None and self.share > 1:
            assert self.ceiling is not None
            raise InvalidFigureError(
                f"{self.name} of {self.value:.6g} {self.unit} passes its ceiling of {self.ceiling.value:.6g} "
                f"({self.ceiling.source}): something was not really read or computed, or was counted twice."
            )

    @property
    def share(self) -> float | None:
        """Fraction of the ceiling reached."""
        if self.ceiling is None or not self.value or not self.ceiling.value:
            return None
        ratio = self.value / self.ceiling.value
        return 1 / ratio if self.unit in LESS else ratio

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the median; None where there are too few samples."""
        if len(self.values) < LEAST:
            return None
        bounds = interval(self.values)
        return bounds.low, bounds.high


def figure(name: str, unit: str, samples: float | Iterable[float], ceiling: FigureCeiling | None = None) -> Figure:
    """The median of some samples between the least and the largest."""
    values = [float(samples)] if isinstance(samples, int | float) else [float(s) for s in samples]
    if not values:
        raise UsageError(f"{name} was never measured.")
    if not all(map(math.isfinite, values)):
        raise UsageError(f"{name} is not finite.")
    samples_written = tuple(values) if 1 < len(values) <= WRITTEN_SAMPLES else ()
    return Figure(name, unit, median(values), min(values), max(values), len(values), ceiling, samples_written)


@dataclass(frozen=True)
class Check:
    """A comparison and its outcome: `value` is what was found, `bound` what it may be at most (or must be at least)."""

    what: str
    ok: bool
    value: float | None = None
    bound: float | None = None
    note: str = ""

    @property
    def sentence(self) -> str:
        """A failed check for people: what was found, its bound and the note."""
        bound = "" if self.bound is None else f" (bound {self.bound:.6g})"
        figures = "" if self.value is None else f"{self.value:.6g}{bound}"
        reason = "; ".join(part for part in (figures, self.note) if part)
        return f"{self.what} failed" + (f": {reason}" if reason else "")


def worst_check(checks: Iterable[Check]) -> Check | None:
    """The failed check that is furthest from its bound; the first one where none has a bound."""

    def distance(check: Check) -> float:
        if check.value is None or check.bound is None:
            return 1.0
        if not check.bound or not check.value:
            return 1.0 + abs(check.value - check.bound)
        return max(abs(check.value / check.bound), abs(check.bound / check.value))

    return max((c for c in checks if not c.ok), key=distance, default=None)


@dataclass(frozen=True)
class Result:
    cell: Cell
    figures: tuple[Figure, ...] = ()
    checks: tuple[Check, ...] = ()  # in front of the figures: one that failed leaves none
    targets: tuple[Check, ...] = ()  # what the figures should reach; missing one does not void them
    record: Mapping[str, Any] | None = None  # the kernels that really ran: the plan's record as JSON
    detail: Mapping[str, Any] = field(default_factory=dict)  # what only this kind of cell knows (traces, margins)
    refused: str = ""  # why there is no figure
    invalid: bool = False  # it ran, and cannot be believed: `refused` says why

    def __post_init__(self) -> None:
        failed = [c.what for c in self.checks if not c.ok]
        if failed and not self.refused:
            object.__setattr__(self, "refused", f"failed in front of the timing: {', '.join(failed)}")
        if failed:
            object.__setattr__(self, "invalid", True)
        if self.invalid and not self.refused:
            raise UsageError(f"{self.cell.label} is INVALID for no reason; say why.")
        if self.refused and self.figures:
            raise UsageError(f"{self.cell.label} was refused ({self.refused}) and has figures all the same.")
        names = [f.name for f in self.figures]
        if len(set(names)) < len(names):
            raise UsageError(f"{self.cell.label} has two figures of one name: {', '.join(names)}.")

    @property
    def state(self) -> str:
        return "INVALID" if self.invalid else "refused" if self.refused else "measured"

    def invalidated(self, why: str) -> Result:
        """This result as INVALID: its figures move into the detail, where they cannot be mistaken for figures."""
        figures = [{"name": f.name, "unit": f.unit, "value": f.value} for f in self.figures]
        detail = dict(self.detail) | ({"not_believed": figures} if figures else {})
        reason = f"{self.refused}; {why}" if self.refused else why
        return dataclasses.replace(self, figures=(), detail=detail, refused=reason, invalid=True)

    def figure(self, name: str) -> Figure:
        for f in self.figures:
            if f.name == name:
                return f
        names = ", ".join(f.name for f in self.figures) or self.refused or "none"
        raise UsageError(f"{self.cell.label} has no figure {name}; it has: {names}.")


@dataclass(frozen=True)
class ResultFile:
    tool: str  # halfbyte bench, bench/kernels/decode.py
    command: tuple[str, ...]
    environment: Mapping[str, Any]  # lab/environment.py; at least its time
    measured: Mapping[str, str]  # source file -> hash
    results: tuple[Result, ...]
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise UsageError(f"this is schema {self.schema!r}, and only {SCHEMA!r} is read; measure it again.")
        if not isinstance(self.environment.get("time"), str):
            raise UsageError("the environment record has no `time`.")

    @property
    def gpu(self) -> str:
        gpus = self.environment.get("gpus") or [{}]
        return str(gpus[0].get("name", ""))

    @property
    def date(self) -> str:
        return str(self.environment["time"])[:10]

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def write(self, path: Path) -> None:
        """Whole or not at all: a run that is ended leaves the file before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.as_json(), allow_nan=False, default=str) + "\n", encoding="utf-8")
        part.replace(path)


def measure_cell(cell: Cell, work: Callable[[], Result]) -> Result:
    """The cell's result, or what became of it: one cell that fails must not cost the others."""
    try:
        return work()
    except Exception as e:
        return failed_cell(cell, e)


def failed_cell(cell: Cell, e: Exception) -> Result:
    """INVALID where it ran and showed what cannot be, refused otherwise."""
    if isinstance(e, InvalidFigureError):
        detail = {DISTURBED: True} if isinstance(e, DisturbedError) else {}
        return Result(cell, refused=str(e), invalid=True, detail=detail)
    return Result(cell, refused=f"{type(e).__name__}: {e}"[:400])


def from_json(raw: object) -> ResultFile:
    if isinstance(raw, Mapping) and "schema" not in raw:
        raise UsageError("the file has no schema.")
    return _read(ResultFile, raw, "the file")


def read_result(raw: object) -> Result:
    """One result as a run's log keeps it."""
    return _read(Result, raw, "the result")


def _read(kind: type[T], raw: object, where: str) -> T:
    """`raw` as a record, which must hold every field of `raw`."""
    try:
        record = records.convert(raw, kind)
    except records.MismatchError as e:
        raise UsageError(f"{where} cannot be read ({e}).") from None
    except UsageError as e:
        raise UsageError(f"{where} cannot be read: {e}") from None
    if unknown := _unknown(raw, msgspec.to_builtins(record), ""):
        raise UsageError(f"{where} has fields that the schema does not know: {unknown}.")
    return record


def _unknown(raw: Any, record: Any, path: str) -> str:
    """The path of a field of `raw` that `record` does not have, or nothing."""
    if isinstance(raw, Mapping):
        for key, value in raw.items():
            field = f"{path}.{key}" if path else str(key)
            if key not in record:
                return field
            if unknown := _unknown(value, record[key], field):
                return unknown
    elif isinstance(raw, list):
        for i, (value, item) in enumerate(zip(raw, record)):
            if unknown := _unknown(value, item, f"{path}[{i}]"):
                return unknown
    return ""
