"""Critical reviews with criteria that are filled from results: a claim stands in docs/reviews, its number in the store.

A review holds a block of criteria, one a line, in a code block named `criteria`:

    decode at 2k, tok/s: speed >= 258 | kind=decode model=120b preset=fast path=engine depth=2048 tg=128 concurrency=1

(a space inside of a word is written as _) and a table between `<!-- filled -->` and `<!-- /filled -->`, which is made
from it: the newest result of that cell, and PASS or FAIL. A cell that nobody measured is NOT MEASURED, one that is
INVALID or refused says so; neither passes. `python -m bench ledger` keeps all of them current."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.lab.result import Result, ResultFile
from halfbyte.lab.statistics import number
from halfbyte.lab.store import Entry

BEGIN, END = "<!-- filled -->", "<!-- /filled -->"
_BLOCK = re.compile(r"```criteria\n(.*?)```", re.DOTALL)
_LINE = re.compile(r"(?P<name>.+?): (?P<figure>\S+) (?P<sign>>=|<=) (?P<bound>[\d.]+) \| (?P<cell>.+)")
_CELL_FIELDS = ("kind", "model", "preset", "path", "engine")
Entries = Sequence[tuple[Entry, ResultFile]]


@dataclass(frozen=True)
class Criterion:
    name: str
    figure: str
    sign: str
    bound: float
    cell: dict[str, str]

    def fits(self, result: Result) -> bool:
        cell = result.cell
        for key, expected in self.cell.items():
            actual: Any = getattr(cell, key).removeprefix("random:") if key in _CELL_FIELDS else cell.shape.get(key)
            actual = cell.gates.get(key) if actual is None else actual
            if actual is None or str(actual).replace(" ", "_") != expected:
                return False
        return True

    def judge(self, entries: Entries) -> tuple[str, str, str]:
        """What was found, the verdict, and where it stands."""
        fitting = [(e, r) for e, f in entries for r in f.results if self.fits(r)]
        measured = [(e, r) for e, r in fitting if any(f.name == self.figure for f in r.figures)]
        if not fitting or (not measured and not fitting[-1][1].refused):
            return "–", "NOT MEASURED", ""
        if not measured or fitting[-1][1].refused:
            entry, result = fitting[-1]
            return "–", f"{result.state}: {result.refused[:80]}", entry.name
        entry, result = measured[-1]
        f = result.figure(self.figure)
        good = f.value >= self.bound if self.sign == ">=" else f.value <= self.bound
        return f"{number(f.value)} {f.unit}".removesuffix(" ratio"), "PASS" if good else "FAIL", entry.name


def criteria(text: str, where: str = "the review") -> list[Criterion]:
    claims = []
    for line in (line.strip() for block in _BLOCK.findall(text) for line in block.splitlines() if line.strip()):
        match = _LINE.fullmatch(line)
        if match is None:
            raise UsageError(
                f"{where}: no criterion: {line!r}; one looks like `name: speed >= 52 | kind=decode tg=32`."
            )
        pairs = [word.partition("=") for word in match["cell"].split()]
        if any(not (key and value) for key, _, value in pairs):
            raise UsageError(
                f"{where}: the cell of {match['name']!r} is words like kind=decode, not {match['cell']!r}."
            )
        cell = {key: value for key, _, value in pairs}
        claims.append(Criterion(match["name"], match["figure"], match["sign"], float(match["bound"]), cell))
    return claims


def table(text: str, entries: Entries, where: str = "the review") -> Iterator[str]:
    yield "| criterion | asked | found | verdict | result |"
    yield "|---|---|---|---|---|"
    for c in criteria(text, where):
        figure, verdict, name = c.judge(entries)
        limit = "at least" if c.sign == ">=" else "at most"
        yield f"| {c.name} | {limit} {c.bound:g} | {figure} | {verdict} | {name} |"


def fill(text: str, entries: Entries, where: str = "the review") -> str:
    """The review with its table made anew."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise UsageError(f"{where} has no place for its table: {BEGIN} and {END}.")
    return "\n".join([before + BEGIN, *table(text, entries, where), END]) + after


def filled(folder: Path, entries: Entries) -> dict[Path, str]:
    """Every review of a folder and what it should hold; the template is none."""
    paths = [p for p in sorted(folder.glob("*.md")) if p.name not in ("TEMPLATE.md", "README.md")]
    return {p: fill(p.read_text(encoding="utf-8"), entries, p.name) for p in paths}
