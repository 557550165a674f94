"""What a report is made of: result files from folders, single files or archives, and figures that others published.

An archive (.tar.gz, .tgz, .zip) may come from a stranger: its members are read in memory and never unpacked, and what
is too large or no result file is listed as unreadable. Published figures are kept apart from measured ones throughout.
"""

from __future__ import annotations

import itertools
import json
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from halfbyte.errors import UsageError
from halfbyte.lab.receipts import PACKAGE
from halfbyte.lab.result import ResultFile, from_json
from halfbyte.lab.store import INDEX, Entry, entry_of

PUBLISHED = PACKAGE / "data" / "published.json"
RESULTS, LEVELS = "results.json", "levels.json"  # what `halfbyte check` leaves
LARGEST = 64 << 20  # bytes of a member


@dataclass(frozen=True)
class Published:
    machine: str
    engine: str
    model: str
    test: str
    value: float
    how: str
    source: str
    depth: int = 0
    concurrency: int = 1
    unit: str = "tok/s"

    @property
    def label(self) -> str:
        """What a table has room for; the rest is said once below it."""
        return f"published: {self.source}" if self.how.startswith("published") else "measured here, transcribed"


@dataclass(frozen=True)
class LevelVerdict:
    """What a level of the protocol said of one engine."""

    level: str
    name: str
    verdict: str
    sentence: str


@dataclass(frozen=True)
class EngineVerdicts:
    """One run of the protocol; `cells` are its results' cells, by which it belongs to a result file."""

    cells: str
    levels: tuple[LevelVerdict, ...]

    @property
    def unranked(self) -> str:
        """Why its figures take no place among others; empty for an engine that passed levels 1 to 3."""
        verdicts = {v.level: v.verdict for v in self.levels}
        others = [f"level {n} {verdicts[n]}" for n in RANKED if verdicts.get(n, "PASS") != "PASS"]
        if missing := [n for n in RANKED if n not in verdicts]:
            *some, last = missing
            others.append(f"level{'s' * bool(some)} {' and '.join(filter(None, (', '.join(some), last)))} did not run")
        return f"not ranked: {', '.join(others)}" if others else ""


RANKED = ("1", "1.5", "2", "3")  # levels that an engine must have passed


@dataclass
class Collected:
    files: list[tuple[Entry, ResultFile]] = field(default_factory=list)  # oldest first
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    verdicts: dict[str, EngineVerdicts] = field(default_factory=dict)  # by the hash of the result file


def published(path: Path = PUBLISHED) -> list[Published]:
    return [Published(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def collect(paths: Sequence[Path], *, elsewhere: bool = True) -> Collected:
    """`elsewhere`: also what others published of machines that none of these results is from."""
    collected = Collected(published=published())
    seen: set[str] = set()
    runs: list[EngineVerdicts] = []
    names: set[str] = set()
    for name, data in _members(paths):
        if name == Path(LEVELS).stem:
            runs += read_verdicts(data)
            continue
        entry = entry_of(unique(name, names), data)
        if entry.unreadable:
            collected.unreadable.append((name, entry.unreadable))
        elif entry.hash not in seen:
            seen.add(entry.hash)
            collected.files.append((entry, from_json(json.loads(data))))
    for entry, file in collected.files:
        cells = _cells([asdict(r.cell) for r in file.results])
        if run := next((r for r in runs if r.cells == cells), None):
            collected.verdicts[entry.hash] = run
    collected.files.sort(key=lambda pair: (pair[0].time, pair[0].name))
    if not elsewhere:
        machines = {entry.machine for entry, _ in collected.files}
        collected.published = [p for p in collected.published if p.machine in machines]
    return collected


def unique(name: str, names: set[str]) -> str:
    """The name, with a number where another file has it: links of a page lead to it."""
    numbered = (f"{name}-{k}" for k in itertools.count(2))
    chosen = next(n for n in itertools.chain([name], numbered) if n not in names)
    names.add(chosen)
    return chosen


def read_verdicts(data: bytes) -> list[EngineVerdicts]:
    """The verdicts of a levels.json; empty for another file."""
    try:
        levels = json.loads(data)["levels"]
        cells = _cells([r["cell"] for level in levels for r in level["results"]])
        fields = ("level", "name", "verdict", "sentence")
        return [EngineVerdicts(cells, tuple(LevelVerdict(*(str(o.get(f, "")) for f in fields)) for o in levels))]
    except (ValueError, LookupError, TypeError, AttributeError):
        return []


def _cells(cells: Sequence[object]) -> str:
    return json.dumps(cells, sort_keys=True, default=str)


def _members(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        if path.is_dir():
            # Every run of the protocol has its results under the same name: the folder's says more.
            files = [p for p in sorted(path.glob("*.json")) if _is_result_file(p.name)]
            yield from ((path.resolve().name if p.name == RESULTS else p.stem, p.read_bytes()) for p in files)
        elif not path.is_file():
            raise UsageError(f"there is no {path}; name a result file, a folder of them, or an archive.")
        elif path.name.endswith((".tar.gz", ".tgz", ".tar")):
            yield from _tar(path)
        elif path.suffix == ".zip":
            yield from _zip(path)
        else:
            yield path.stem, path.read_bytes()


def _tar(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and _is_result_file(member.name) and member.size <= LARGEST:
                    file = archive.extractfile(member)
                    if file is not None:
                        yield Path(member.name).stem, file.read()
    except (tarfile.TarError, OSError, EOFError) as e:
        raise UsageError(f"{path} is no archive of results: {e}.") from None


def _zip(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if _is_result_file(member.filename) and member.file_size <= LARGEST:
                    yield Path(member.filename).stem, archive.read(member)
    except (zipfile.BadZipFile, OSError) as e:
        raise UsageError(f"{path} is no archive of results: {e}.") from None


def _is_result_file(name: str) -> bool:
    return name.endswith(".json") and Path(name).name != INDEX
