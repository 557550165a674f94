"""What a report is made of: result files from folders, single files or archives, and figures that others published.

An archive (.tar.gz, .tgz, .zip) may come from a stranger: its members are read in memory and never unpacked, and what
is too large or no result file is listed as unreadable. Published figures are kept apart from measured ones throughout.
"""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from halfbyte.errors import UsageError
from halfbyte.lab.receipts import PACKAGE
from halfbyte.lab.result import ResultFile, from_json
from halfbyte.lab.store import INDEX, Entry, entry_of

PUBLISHED = PACKAGE / "data" / "published.json"
LEVELS = "levels.json"  # what `halfbyte check` leaves beside its results
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


@dataclass
class Collected:
    files: list[tuple[Entry, ResultFile]] = field(default_factory=list)  # oldest first
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)


def published(path: Path = PUBLISHED) -> list[Published]:
    return [Published(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def collect(paths: Sequence[Path], *, elsewhere: bool = True) -> Collected:
    """`elsewhere`: also what others published of machines that none of these results is from."""
    found = Collected(published=published())
    seen: set[str] = set()
    for name, data in _members(paths):
        entry = entry_of(name, data)
        if entry.unreadable:
            found.unreadable.append((name, entry.unreadable))
        elif entry.hash not in seen:
            seen.add(entry.hash)
            found.files.append((entry, from_json(json.loads(data))))
    found.files.sort(key=lambda pair: (pair[0].time, pair[0].name))
    if not elsewhere:
        machines = {entry.machine for entry, _ in found.files}
        found.published = [p for p in found.published if p.machine in machines]
    return found


def _members(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        if path.is_dir():
            yield from ((p.stem, p.read_bytes()) for p in sorted(path.glob("*.json")) if _wanted(p.name))
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
                if member.isfile() and _wanted(member.name) and member.size <= LARGEST:
                    file = archive.extractfile(member)
                    if file is not None:
                        yield Path(member.name).stem, file.read()
    except (tarfile.TarError, OSError, EOFError) as e:
        raise UsageError(f"{path} is no archive of results: {e}.") from None


def _zip(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if _wanted(member.filename) and member.file_size <= LARGEST:
                    yield Path(member.filename).stem, archive.read(member)
    except (zipfile.BadZipFile, OSError) as e:
        raise UsageError(f"{path} is no archive of results: {e}.") from None


def _wanted(name: str) -> bool:
    return name.endswith(".json") and Path(name).name not in (INDEX, LEVELS)
