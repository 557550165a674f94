"""The one schema of all that is measured: what, how fast, beside which ceiling, compared with what, by which code.

A `ResultFile` is what a tool leaves behind: its command, the machine, the hash of every source file behind the figures,
and one `Result` per cell. A cell that could not run is refused. One that ran and cannot be believed (it failed a
comparison, its figure lies above what the hardware can do, the card was throttled, the answers had another length) is
INVALID. Either says why and has no number; what an INVALID one showed is kept in its detail, where no table looks.
`from_json` takes nothing that does not fit, and says in a sentence what does not.
Needs neither torch nor the command line's packages. Which files are stale is for `receipts.py` to say.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.errors import InvalidFigureError, UsageError
from halfbyte.lab.statistics import LEAST, interval, median

SCHEMA = "halfbyte.result/1"
# Units of which less is better: there a ceiling is the least that it could be.
LESS = frozenset({"us", "ms", "s", "B", "GiB", "nats", "relative", "J"})
UNITS = LESS | {
    "tok/s", "GB/s", "TB/s", "TFLOP/s", "%", "tokens", "tests", "requests", "faults", "steps", "ratio", "experts", "W",
    "MHz", "requests/s",
}  # fmt: skip
KEPT = 500  # samples of a figure that are written with it


@dataclass(frozen=True)
class Cell:
    """What was measured. `kind` is a noun: prompt, decode, start, accuracy, kernel."""

    kind: str
    model: str = ""  # 120b, tiny, random:20b
    preset: str = ""
    gates: Mapping[str, Any] = field(default_factory=dict)  # what differs from preset exact
    path: str = ""  # what ran it: engine, http, eager, graph, or a kernel's name
    shape: Mapping[str, Any] = field(default_factory=dict)  # pp, tg, depth, concurrency, context, rows, task, case
    engine: str = ""  # whose program answered: vllm 0.26.0, llama.cpp b7941; empty is halfbyte's own

    @property
    def label(self) -> str:
        """llama-bench's words where they fit: `pp2048 @ d512, c=8`."""
        shape = dict(self.shape)
        words = [f"{n}{shape.pop(n)}" for n in ("pp", "tg") if n in shape]
        text = " + ".join(words) or self.kind
        depth = shape.pop("depth", 0)
        text += f" @ d{depth}" if depth else ""
        concurrency = shape.pop("concurrency", 1)
        rest = [f"c={concurrency}"] if concurrency != 1 else []
        return ", ".join([text, *rest, *(f"{k} {v}" for k, v in shape.items())])


@dataclass(frozen=True)
class Ceiling:
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
    ceiling: Ceiling | None = None
    values: tuple[float, ...] = ()  # the samples, in the order in which they were taken; empty where they are too many

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UsageError(f"{self.name} has the unit {self.unit!r}; the schema knows {', '.join(sorted(UNITS))}.")
        if not all(map(math.isfinite, (self.value, self.low, self.high))):
            raise UsageError(f"{self.name} is no number.")
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
        """Of the ceiling that is reached."""
        if self.ceiling is None or not self.value or not self.ceiling.value:
            return None
        ratio = self.value / self.ceiling.value
        return 1 / ratio if self.unit in LESS else ratio

    @property
    def interval(self) -> tuple[float, float] | None:
        """In which the true median lies, at 95 %; None where too few samples were kept to say."""
        if len(self.values) < LEAST:
            return None
        found = interval(self.values)
        return found.low, found.high


def figure(name: str, unit: str, samples: float | Iterable[float], ceiling: Ceiling | None = None) -> Figure:
    """The median of some samples between the least and the largest."""
    values = [float(samples)] if isinstance(samples, int | float) else [float(s) for s in samples]
    if not values:
        raise UsageError(f"{name} was never measured.")
    if not all(map(math.isfinite, values)):
        raise UsageError(f"{name} is no number.")
    kept = tuple(values) if 1 < len(values) <= KEPT else ()
    return Figure(name, unit, median(values), min(values), max(values), len(values), ceiling, kept)


@dataclass(frozen=True)
class Check:
    """A comparison and its outcome: `value` is what was found, `bound` what it may be at most (or must be at least)."""

    what: str
    ok: bool
    value: float | None = None
    bound: float | None = None
    note: str = ""


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
        """Without its figures, which are kept where they can be looked into and not be mistaken for figures."""
        shown = [{"name": f.name, "unit": f.unit, "value": f.value} for f in self.figures]
        detail = dict(self.detail) | ({"not_believed": shown} if shown else {})
        reason = f"{self.refused}; {why}" if self.refused else why
        return dataclasses.replace(self, figures=(), detail=detail, refused=reason, invalid=True)

    def figure(self, name: str) -> Figure:
        for f in self.figures:
            if f.name == name:
                return f
        known = ", ".join(f.name for f in self.figures) or self.refused or "none"
        raise UsageError(f"{self.cell.label} has no figure {name}; it has: {known}.")


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
            raise UsageError("the environment says no time.")

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


def measure_cell(cell: Cell, work: typing.Callable[[], Result]) -> Result:
    """The cell's result, or what became of it: one cell that fails must not cost the others."""
    try:
        return work()
    except Exception as e:
        return failed_cell(cell, e)


def failed_cell(cell: Cell, e: Exception) -> Result:
    """INVALID where it ran and showed what cannot be, refused otherwise."""
    if isinstance(e, InvalidFigureError):
        return Result(cell, refused=str(e), invalid=True)
    return Result(cell, refused=f"{type(e).__name__}: {e}"[:400])


def from_json(raw: object) -> ResultFile:
    file = _read(ResultFile, raw, "the file")
    assert isinstance(file, ResultFile)
    return file


def read_result(raw: object) -> Result:
    """One result as a run's log keeps it."""
    result = _read(Result, raw, "the result")
    assert isinstance(result, Result)
    return result


def from_json_line(text: str) -> ResultFile:
    """What a tool printed, of which the last line is the file."""
    try:
        return from_json(json.loads(text.strip().rpartition("\n")[2]))
    except ValueError:
        raise UsageError(f"there is no receipt in what was printed: {text[-300:]!r}") from None


def _read(kind: Any, raw: object, where: str) -> Any:
    """`raw` as what the annotation says; dataclasses field by field, JSON objects as they are."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if raw is None else _read(next(k for k in inner if k is not type(None)), raw, where)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return _read_fields(kind, raw, where)
    if origin is tuple:
        if not isinstance(raw, Sequence) or isinstance(raw, str):
            raise UsageError(f"{where} is not a list.")
        return tuple(_read(inner[0], item, f"{where}[{i}]") for i, item in enumerate(raw))
    if origin is not None:  # a mapping
        if not isinstance(raw, Mapping):
            raise UsageError(f"{where} is not an object.")
        return {str(k): _read(inner[1], v, f"{where}.{k}") for k, v in raw.items()}
    if kind is Any:
        return raw
    wanted = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}[kind]
    if not isinstance(raw, wanted) or (kind is not bool and isinstance(raw, bool)):
        raise UsageError(f"{where} is {raw!r}, which is not of type {kind.__name__}.")
    return raw


def _read_fields(kind: type, raw: object, where: str) -> Any:
    if not isinstance(raw, Mapping):
        raise UsageError(f"{where} is not an object.")
    hints = typing.get_type_hints(kind)
    names = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(set(raw) - set(names)):
        raise UsageError(f"{where} has fields that the schema does not know: {', '.join(map(str, unknown))}.")
    values = {}
    for name, f in names.items():
        optional = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        if name in raw:
            values[name] = _read(hints[name], raw[name], f"{where}.{name}")
        elif not optional or name == "schema":
            raise UsageError(f"{where} has no {name}.")
    try:
        return kind(**values)
    except UsageError as e:
        raise UsageError(f"{where}: {e}") from None
