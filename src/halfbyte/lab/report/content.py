"""What the page says, as plain values: leaderboards, curves, the matrix, kernel times, histories, refusals, metadata.

Every number leads to the file that holds it. Of one cell the newest measurement counts; older ones are its history.
What others published stands beside ours and is marked so; it never counts as measured. Draws nothing and writes no
HTML."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.lab.compare import judge, key_of, name_of
from halfbyte.lab.kernel_table import KernelTable, from_dict, from_profile
from halfbyte.lab.report.plots import Plot, Series
from halfbyte.lab.report.sources import Collected, EngineVerdicts, Published
from halfbyte.lab.result import Cell, Figure, Result, ResultFile
from halfbyte.lab.statistics import number
from halfbyte.lab.store import Entry

PATHS = ("engine", "http")  # what a user gets; bare graphs and phases are no leaderboard's matter
KINDS = ("prompt", "decode", "serving")


@dataclass(frozen=True)
class FiledResult:
    """A result with the file it came from."""

    entry: Entry
    file: ResultFile
    result: Result

    @property
    def cell(self) -> Cell:
        return self.result.cell

    @property
    def model(self) -> str:
        return self.cell.model

    @property
    def who(self) -> str:
        """Whose program, how it was set, and over what."""
        name = self.cell.engine or "halfbyte"
        gates = ",".join(f"{k}={v}" for k, v in self.cell.gates.items()) if not self.cell.preset else ""
        return ", ".join(t for t in (name, self.cell.preset or gates, "HTTP" if self.cell.path == "http" else "") if t)

    def has(self, name: str) -> bool:
        return any(f.name == name for f in self.result.figures)


def measurements(collected: Collected) -> list[FiledResult]:
    """Oldest first."""
    return [FiledResult(entry, file, r) for entry, file in collected.files for r in file.results]


def newest(results: Iterable[FiledResult]) -> list[FiledResult]:
    """The last of every cell and machine, and refusals only where nothing newer was measured."""
    latest: dict[tuple[str, str], FiledResult] = {}
    for m in results:
        latest[m.entry.machine, key_of(m.cell)] = m
    return list(latest.values())


# ---- leaderboards ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoardRow:
    """One line of a board."""

    who: str
    value: float | None
    text: str
    share: str = ""
    ceiling: float | None = None
    against: str = ""  # the best of the others
    file: str = ""  # where its metadata is
    how: str = "measured"
    state: str = "measured"
    checked: bool = False  # its engine passed levels 1 to 3 of the protocol


@dataclass(frozen=True)
class Board:
    machine: str
    model: str
    test: str
    places: Sequence[BoardRow]

    @property
    def has_peer(self) -> bool:
        return len({p.who.startswith("halfbyte") for p in self.places}) > 1


class Standings:
    """Which engines went through the protocol: by the file of a run, or as the same engine with the same model and
    gates on the same machine."""

    def __init__(self, results: Sequence[FiledResult], verdicts: Mapping[str, EngineVerdicts]) -> None:
        self._of_file = verdicts
        runs = [(m, verdicts[m.entry.hash]) for m in results if m.entry.hash in verdicts]
        self._of_engine = {self._engine(m): run for m, run in runs}

    def _engine(self, m: FiledResult) -> tuple[str, ...]:
        return (m.entry.machine, m.who, m.model)

    def run_of(self, m: FiledResult) -> EngineVerdicts | None:
        return self._of_file.get(m.entry.hash) or self._of_engine.get(self._engine(m))

    def believed(self, results: Sequence[FiledResult]) -> list[FiledResult]:
        """Without engines that did not pass levels 1 to 3."""
        return [m for m in results if (run := self.run_of(m)) is None or not run.unranked]


def boards(
    results: Sequence[FiledResult], others: Sequence[Published], verdicts: Mapping[str, EngineVerdicts] | None = None
) -> list[Board]:
    """An engine whose run of the protocol did not pass levels 1 to 3 is listed and has no place; one that had no such
    run stands behind all that passed."""
    standings = Standings(results, verdicts or {})
    groups: dict[tuple[str, str, str], dict[str, BoardRow]] = {}  # the newest of everybody
    for m in newest(results):
        if m.cell.kind not in KINDS or m.cell.path not in PATHS:
            continue
        test = test_of(m.cell)
        run = standings.run_of(m)
        if run is not None and run.unranked:
            row = BoardRow(m.who, None, run.unranked, file=m.entry.name, how="not ranked", state="not ranked")
        elif m.result.refused:
            row = BoardRow(m.who, None, m.result.refused, file=m.entry.name, how=m.result.state, state=m.result.state)
        else:
            f = m.result.figure("speed")
            ceiling = None if f.ceiling is None else f.ceiling.value
            row = BoardRow(m.who, f.value, spread(f), share(f), ceiling, file=m.entry.name, checked=run is not None)
        groups.setdefault((m.entry.machine, m.model, test), {})[row.who] = row
    for p in others:
        shape: dict[str, Any] = {p.test[:2]: int(p.test[2:]), "depth": p.depth, "concurrency": p.concurrency}
        test = Cell("", shape=shape).label
        row = BoardRow(p.engine, p.value, number(p.value), how=p.label, state="published")
        groups.setdefault((p.machine, p.model, test), {})[f"published {row.who} {row.how}"] = row
    tables = [Board(*key, ranked([*places.values()])) for key, places in groups.items()]
    machines = {b.machine for b in tables if any(p.state != "published" for p in b.places)}

    def order(b: Board) -> tuple[Any, ...]:
        return (
            b.machine not in machines,
            b.machine,
            b.model,
            not b.has_peer,
            [int(n) for n in re.findall(r"\d+", b.test)],
        )

    return sorted(tables, key=order)


def test_of(cell: Cell) -> str:
    """What was asked, in words that are the same for every engine and every seed."""
    shape = {k: v for k, v in cell.shape.items() if k not in ("seed", "workload")}
    workload = str(cell.shape.get("workload", "synthetic"))
    return ("" if workload == "synthetic" else f"{workload}, ") + Cell(cell.kind, shape=shape).label


def ranked(places: Sequence[BoardRow]) -> list[BoardRow]:
    some = any(p.checked for p in places)  # else the order is by speed alone, and every place says that
    peers = [
        p.value
        for p in places
        if p.value is not None
        and not p.who.startswith("halfbyte")
        and (p.checked or p.state == "published" or not some)
    ]
    best = max(peers, default=None)
    rows = []
    for p in sorted(places, key=lambda p: (p.value is None, some and not p.checked, -(p.value or 0.0))):
        own = p.who.startswith("halfbyte") and p.value is not None and best and (p.checked or not some)
        rows.append(BoardRow(**(vars(p) | {"against": f"{p.value / best:.2f}x" if own and p.value and best else ""})))
    return rows


def spread(f: Figure) -> str:
    text = number(f.value)
    if f.interval is not None:
        return f"{text} ({number(f.interval[0])}–{number(f.interval[1])})"
    return f"{text} [{number(f.low)}–{number(f.high)}]" if f.samples > 1 else text


def share(f: Figure) -> str:
    return "" if f.ceiling is None or f.share is None else f"{f.share:.0%} of {number(f.ceiling.value)}"


# ---- curves ---------------------------------------------------------------------------------------------------------


def curves(results: Sequence[FiledResult], others: Sequence[Published], over: str) -> Iterator[Plot]:
    """Speed over `depth` (of one stream) or over `concurrency` (of one depth), a plot for each machine, model and
    test."""
    fixed = "concurrency" if over == "depth" else "depth"
    groups: dict[tuple[str, str, str, Any], dict[str, dict[float, float]]] = {}
    dashed: set[str] = set()
    for m in newest(results):
        shape = m.cell.shape
        if (
            m.cell.kind not in (KINDS if over == "concurrency" else KINDS[:2])
            or m.cell.path not in PATHS
            or not m.has("speed")
            or over not in shape
        ):
            continue
        if over == "depth" and shape.get("concurrency", 1) != 1:
            continue
        test = test_of(replace(m.cell, shape={k: v for k, v in shape.items() if k not in ("depth", "concurrency")}))
        f = m.result.figure("speed")
        group = groups.setdefault((m.entry.machine, m.model, test, shape.get(fixed)), {})
        group.setdefault(m.who, {})[float(shape[over])] = f.value
        if f.ceiling is not None:
            ceiling = f"ceiling of {m.who}"
            dashed.add(ceiling)
            group.setdefault(ceiling, {})[float(shape[over])] = f.ceiling.value
    for p in others:
        at = {"depth": p.depth, "concurrency": p.concurrency}
        key = (p.machine, p.model, p.test, at[fixed])
        if key in groups or over == "concurrency":
            groups.setdefault(key, {}).setdefault(p.engine, {})[float(at[over])] = p.value
    for (machine, model, test, constant), series in sorted(groups.items(), key=str):
        lines = [
            Series(who, sorted(points.items()), who in dashed) for who, points in series.items() if len(points) > 1
        ]
        if any(not line.dashed for line in lines):
            lines.sort(key=lambda line: (line.dashed, not line.name.startswith("halfbyte")))
            behind = f", d{constant}" if over == "concurrency" and constant else ""
            axis = "tokens already in the cache" if over == "depth" else "streams"
            yield Plot(f"{model} {test}{behind} · {machine}", axis, "tokens/s", lines, log_x=True)


def latencies(results: Sequence[FiledResult]) -> Iterator[Plot]:
    """First-token latency over throughput, a line for each engine, workload and way of arrival."""
    groups: dict[tuple[str, str, str], dict[str, list[tuple[float, float]]]] = {}
    for m in newest(results):
        if m.cell.kind != "serving" or not m.has("speed"):
            continue
        name = next((n for n in ("ttft_p99", "first_token_p99") if m.has(n)), None)
        if name is None:
            continue
        work = str(m.cell.shape.get("workload", "synthetic"))
        way = " at a rate" if "rate" in m.cell.shape else ""
        point = m.result.figure("speed").value, m.result.figure(name).value
        groups.setdefault((m.entry.machine, m.model, work), {}).setdefault(m.who + way, []).append(point)
    for (machine, model, work), series in sorted(groups.items()):
        lines = [Series(who, points) for who, points in series.items()]
        yield Plot(f"{model}, {work} · {machine}", "tokens/s of all streams", "first token, p99, ms", lines, log_y=True)


# ---- the matrix -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateChoice:
    """One value of a gate, over all cells that have it."""

    name: str
    run: int
    invalid: int
    refused: int
    speed: str  # the best decode speed
    share: int  # of the best of all, in percent


@dataclass(frozen=True)
class Heat:
    """Choices of gates against one another; a cell is (class, text, title)."""

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[tuple[str, str, str]]]
    counts: Mapping[str, int]
    refused: Sequence[str] = ()  # choices that nothing ran with
    choices: Sequence[GateChoice] = ()
    not_timed: int = 0  # cells that ran beside other work


def heat_maps(results: Sequence[FiledResult]) -> list[Heat]:
    """A map for each machine, engine and model: for each pair of choices the best decode speed there, against the best
    of all, or that every such cell was refused, or that one of them is INVALID."""
    groups: dict[str, list[FiledResult]] = {}
    for m in newest(results):
        if m.cell.kind == "matrix":
            title = f"{m.cell.engine or 'halfbyte'}, {m.model} · {m.entry.machine}"
            groups.setdefault(title, []).append(m)
    return [_heat_map(title, cells) for title, cells in sorted(groups.items())]


def _heat_map(title: str, cells: Sequence[FiledResult]) -> Heat:
    chosen = [({choice_name(k, str(v)) for k, v in m.cell.gates.items()}, m) for m in cells]
    every = sorted(set().union(*(c for c, _ in chosen)))
    names = [n for n in every if any(n in c and m.result.state != "refused" for c, m in chosen)]
    best = max((_decode(m) for m in cells), default=0.0)
    rows = [[_heat([m for c, m in chosen if a in c and b in c], best) for b in names] for a in names]
    states = [m.result.state for m in cells]
    counts = {s: states.count(s) for s in ("measured", "refused", "INVALID")}
    choices = [_choice(n, [m for c, m in chosen if n in c], best) for n in names]
    not_timed = sum("not_timed" in m.result.detail for m in cells)
    return Heat(title, names, rows, counts, [n for n in every if n not in names], choices, not_timed)


def choice_name(axis: str, value: str) -> str:
    """A gate and its value; one format of all groups of layers is written once."""
    parts = dict(part.partition("=")[::2] for part in value.split(",")) if axis == "layers" and "=" in value else {}
    groups = {name: form for name, form in parts.items() if "." not in name}
    if len(groups) > 3 and len(set(groups.values())) == 1:
        value = ", ".join([*dict.fromkeys(groups.values()), *(f"{k}={v}" for k, v in parts.items() if "." in k)])
    return f"{axis} {value}"


def _choice(name: str, here: Sequence[FiledResult], best: float) -> GateChoice:
    states = [m.result.state for m in here]
    speed = max((_decode(m) for m in here), default=0.0)
    return GateChoice(
        name, states.count("measured"), states.count("INVALID"), states.count("refused"),
        number(speed) if speed else "", round(100 * speed / best) if best else 0,
    )  # fmt: skip


def _decode(m: FiledResult) -> float:
    """The speed of a cell of the matrix; 0 where it has none."""
    return next((f.value for f in m.result.figures if f.name in ("decode", "speed")), 0.0)


def _heat(here: Sequence[FiledResult], best: float) -> tuple[str, str, str]:
    if not here:
        return "none", "", "not in the matrix"
    title = "; ".join(f"{name_of(m.cell)}: {m.result.refused or 'measured'}"[:160] for m in here[:4])
    if any(m.result.state == "INVALID" for m in here):
        return "invalid", "×", title
    good = max(_decode(m) for m in here)
    if good and best:
        return f"heat-{round(9 * good / best)}", f"{100 * good / best:.0f}", title
    if any(m.result.state == "measured" for m in here):
        return "heat-5", "+", title
    return "refused", "–", title


# ---- kernels, history, refusals ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    title: str
    file: str
    table: KernelTable


def kernels(results: Sequence[FiledResult]) -> list[Kernels]:
    tables = []
    for m in newest(results):
        try:
            if "kernel_table" in m.result.detail:  # of somebody else's trace
                table = from_dict(m.result.detail["kernel_table"], m.entry.name)
                table = replace(table, what=f"{m.cell.engine or 'halfbyte'} {m.cell.label}")
            elif "lines" in m.result.detail and "busy_us" in m.result.detail:
                table = from_profile(m.result.detail, source=m.entry.name)
            else:
                continue
        except UsageError:
            continue
        title = " ".join(t for t in (m.model, m.cell.preset, table.what) if t)
        tables.append(Kernels(f"{title} · {m.entry.machine}", m.entry.name, table))
    return tables


@dataclass(frozen=True)
class History:
    title: str
    unit: str
    when: Sequence[str]
    values: Sequence[float]
    verdicts: Sequence[str]  # of each against the one before; the first is empty
    sentences: Sequence[str] = field(default_factory=list)

    @property
    def regressions(self) -> list[int]:
        return [i for i, v in enumerate(self.verdicts) if v == "regression"]

    @property
    def plot(self) -> Plot:
        points = list(enumerate(self.values))
        line = Series(
            "", [(float(i), v) for i, v in points], marked=[(float(i), self.values[i]) for i in self.regressions]
        )
        return Plot(self.title, "", self.unit, [line], ticks=list(self.when))


def histories(results: Sequence[FiledResult], figures: Sequence[str] = ("speed", "ttft", "ttft_p99")) -> list[History]:
    series: dict[tuple[str, str, str], list[tuple[FiledResult, Figure]]] = {}
    for m in results:
        for f in m.result.figures:
            if f.name in figures:
                series.setdefault((m.entry.machine, key_of(m.cell), f.name), []).append((m, f))
    timelines = []
    for (machine, _, name), points in series.items():
        if len(points) < 2:
            continue
        judged = [judge(a, b) for (_, a), (_, b) in itertools.pairwise(points)]
        when = [f"{m.entry.time[:10]} {m.entry.commit[:7]}".strip() for m, _ in points]
        title = f"{name_of(points[0][0].cell)}, {name} · {machine}"
        values = [f.value for _, f in points]
        timelines.append(History(title, points[0][1].unit, when, values, ["", *(v for v, _ in judged)],
                            [s for _, s in judged]))  # fmt: skip
    return sorted(timelines, key=lambda h: (not h.regressions, h.title))


@dataclass(frozen=True)
class RefusalGroup:
    """One reason, and every cell that has it."""

    state: str
    why: str
    file: str
    cells: Sequence[tuple[str, str]]  # name; what an INVALID cell had shown


def refusals(results: Sequence[FiledResult]) -> list[RefusalGroup]:
    """INVALID ones first; reasons that differ in numbers alone are one."""
    groups: dict[tuple[str, str, str], list[tuple[str, str, str]]] = {}
    for m in newest(results):
        if m.result.refused:
            line = ", ".join(f"{f['name']} {number(f['value'])} {f['unit']}"
                              for f in m.result.detail.get("not_believed", ())[:4])  # fmt: skip
            alike = re.sub(r"\d+(\.\d+)?", "0", m.result.refused)
            row = name_of(m.cell), line, m.result.refused
            groups.setdefault((m.result.state, m.entry.name, alike), []).append(row)
    refusal_groups = [
        RefusalGroup(state, rows[0][2], file, [(name, figures) for name, figures, _ in sorted(rows)])
        for (state, file, _), rows in groups.items()
    ]
    return sorted(refusal_groups, key=lambda r: (r.state != "INVALID", -len(r.cells), r.why))
