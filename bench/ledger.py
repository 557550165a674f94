"""Two pages of docs/ made from a store: every figure ever kept, and which value of which gate was ever measured.

    python -m bench ledger [--check]

writes docs/BENCHMARK_RESULTS.md, docs/FEATURE_MATRIX.md, the tables in docs/reviews, the store's index and the
published schema; `--check` only says what is out of date. Whether a figure is stale is not on these pages: it changes
with every source file, and `halfbyte receipts` knows it. Invents nothing: what is on a page is in a file of the store
or in `gates.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import review
from bench.measurement import RESULTS
from bench.schema import PUBLISHED
from bench.schema import text as schema_text
from halfbyte.gates import AXES, PRESETS, Axis
from halfbyte.lab.result import Cell, Figure, Result, ResultFile
from halfbyte.lab.statistics import number
from halfbyte.lab.store import INDEX, Entry, Store

DOCS = RESULTS.parents[1] / "docs"
NOTICE = "Made by `python -m bench ledger` from bench/results; do not edit."
Entries = Sequence[tuple[Entry, ResultFile]]


# ---- every figure ---------------------------------------------------------------------------------------------------


def results_page(entries: Entries) -> Iterator[str]:
    yield "# Benchmark results"
    yield ""
    yield f"{NOTICE} A value is a median, with its 95 % interval where six runs or more were kept and"
    yield "with the least and the largest otherwise. INVALID: it ran and is not believed, so there is no number."
    yield ""
    machines = sorted({entry.machine for entry, _ in entries})
    for machine in machines:
        here = [(e, f) for e, f in entries if e.machine == machine]
        states = Counter(r.state for _, f in here for r in f.results)
        counts = ", ".join(f"{states[s]} {s}" for s in ("measured", "refused", "INVALID") if states[s])
        yield f"## {machine}"
        yield ""
        yield f"{len(here)} files, cells: {counts}."
        yield ""
        for entry, file in reversed(here):
            yield f"### {entry.name}"
            yield ""
            when = entry.time[:16].replace("T", " ")
            commit = f", commit {entry.commit}" if entry.commit else ""
            yield f"{entry.tool} {entry.command}".strip().replace("|", "\\|") + f" · {when}{commit}"
            yield ""
            yield "| cell | figures |"
            yield "|---|---|"
            for result in file.results:
                yield f"| {cell_name(result.cell)} | {cell_text(result)} |"
            yield ""


def cell_name(cell: Cell) -> str:
    labels = (cell.engine, cell.model, cell.preset, cell.path, cell.label)
    return " · ".join(w for w in labels if w).replace("|", "\\|")


def cell_text(result: Result) -> str:
    if result.refused:
        return f"**{result.state}**: {result.refused[:160]}".replace("|", "\\|").replace("\n", " ")
    return "; ".join(figure_text(f) for f in result.figures) or "–"


def figure_text(f: Figure) -> str:
    text = f"{f.name} **{number(f.value)}** {f.unit}".replace(" ratio", "")
    if f.interval is not None:
        text += f" ({number(f.interval[0])}–{number(f.interval[1])} at 95 %, {f.samples} runs)"
    elif f.samples > 1:
        text += f" ({number(f.low)}–{number(f.high)}, {f.samples} runs)"
    if f.ceiling is not None and f.share is not None:
        text += f", {f.share:.0%} of {number(f.ceiling.value)}"
    return text


# ---- which gates ----------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    measured: int = 0
    refused: int = 0
    invalid: int = 0

    def add(self, result: Result) -> None:
        name = {"measured": "measured", "refused": "refused", "INVALID": "invalid"}[result.state]
        setattr(self, name, getattr(self, name) + 1)

    def __str__(self) -> str:
        parts = [f"{n} {outcome}" for outcome, n in (("measured", self.measured), ("refused", self.refused),
                                               ("**INVALID**", self.invalid)) if n]  # fmt: skip
        return ", ".join(parts) or "–"


def choices(cell: Cell) -> dict[str, str]:
    """The gates that a cell had set, its preset's included."""
    preset = PRESETS.get(cell.preset)
    return {k: str(v) for k, v in ((preset.gates.changes() if preset else {}) | dict(cell.gates)).items()}


def uses(text: str, value: str) -> bool:
    """`decode=gemv,prefill=triton` uses gemv and triton."""
    return value in {part.partition("=")[2] or part for part in text.lower().split(",")}


def matrix_page(entries: Entries) -> Iterator[str]:
    results = [r for _, f in entries for r in f.results]
    yield "# Feature matrix"
    yield ""
    yield f"{NOTICE} Each value of each gate, and how many kept cells had it set (a"
    yield "preset's gates count). Which kernels a machine would take, and why no others: `halfbyte explain --why`."
    yield ""
    yield "| gate | value | flag | variable | cells |"
    yield "|---|---|---|---|---|"
    for axis in AXES:
        for value in axis.values:
            if value == "auto":
                continue
            seen = Seen()
            for r in results:
                if uses(choices(r.cell).get(axis.field, ""), value):
                    seen.add(r)
            yield f"| {axis.field} | {value} | `{axis.flag}` | {variable(axis)} | {seen} |"
    yield ""
    yield "## Presets"
    yield ""
    yield "| preset | sets | cells |"
    yield "|---|---|---|"
    for name, preset in PRESETS.items():
        seen = Seen()
        for r in results:
            if r.cell.preset == name:
                seen.add(r)
        changes = ", ".join(f"{k} {v}" for k, v in preset.gates.changes().items()) or "nothing"
        yield f"| {name} | {changes} | {seen} |"
    yield ""
    yield from combinations(results)


def combinations(results: Sequence[Result]) -> Iterator[str]:
    """Cells of `halfbyte matrix`, if any are kept: each combination of gates and what became of it."""
    combinations: dict[str, Seen] = {}
    for r in results:
        if r.cell.gates and not r.cell.preset:
            combinations.setdefault(", ".join(f"{k} {v}" for k, v in sorted(r.cell.gates.items())), Seen()).add(r)
    if not combinations:
        return
    yield "## Combinations"
    yield ""
    yield "| gates | cells |"
    yield "|---|---|"
    for text in sorted(combinations):
        yield f"| {text} | {combinations[text]} |"
    yield ""


def variable(axis: Axis) -> str:
    return ", ".join(f"`{v}`" for v in axis.variables) or "–"


# ---- writing --------------------------------------------------------------------------------------------------------


def pages(store: Store | None = None) -> Mapping[Path, str]:
    """Every generated file and what it should hold."""
    store = store or Store(RESULTS)
    entries = store.all()
    return {
        DOCS / "BENCHMARK_RESULTS.md": "\n".join(results_page(entries)).rstrip() + "\n",
        DOCS / "FEATURE_MATRIX.md": "\n".join(matrix_page(entries)).rstrip() + "\n",
        store.folder / INDEX: store.index_text(),
        PUBLISHED: schema_text(),
        **review.filled(DOCS / "reviews", entries),
    }


def out_of_date(store: Store | None = None) -> list[Path]:
    return [p for p, text in pages(store).items() if not p.is_file() or p.read_text(encoding="utf-8") != text]


def main(*, check: bool = False) -> int:
    stale = out_of_date()
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(DOCS.parent)}")
        if not check:
            path.write_text(pages()[path], encoding="utf-8")
    return 1 if check and stale else 0
