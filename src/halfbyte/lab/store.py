"""Results in a folder: one file for each run, and an index of them that is made from the files.

    Store(folder).add(file)     writes <time>-<tool>-<hash>.json and the index
    Store(folder).find("served")  by name, by the beginning of a name, `latest`, `latest~2`, or a path

`bench/results` is such a folder. The index (`index.jsonl`, a line for each file) lets a reader choose without opening
all of them; a file that is not in it, or has changed since, is read again. Two writers at once wait for one another.
A file that cannot be read is listed with the reason. Nothing is ever deleted here.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.lab.result import ResultFile, from_json

INDEX = "index.jsonl"


@dataclass(frozen=True)
class Entry:
    """What the index says of one file."""

    name: str
    hash: str
    tool: str = ""
    command: str = ""
    time: str = ""
    machine: str = ""  # its GPU, or its processor where it has none
    commit: str = ""
    models: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    measured: int = 0
    refused: int = 0
    invalid: int = 0
    unreadable: str = ""


def entry_of(name: str, data: bytes) -> Entry:
    digest = hashlib.sha256(data).hexdigest()[:12]
    try:
        file = from_json(json.loads(data))
    except (ValueError, UsageError) as e:
        return Entry(name, digest, unreadable=str(e)[:300])
    states = [r.state for r in file.results]
    return Entry(
        name, digest, file.tool, " ".join(file.command), str(file.environment["time"]), machine_of(file),
        str(file.environment.get("commit") or "")[:12],
        tuple(sorted({r.cell.model for r in file.results if r.cell.model})),
        tuple(sorted({r.cell.engine for r in file.results if r.cell.engine})),
        states.count("measured"), states.count("refused"), states.count("INVALID"),
    )  # fmt: skip


def machine_of(file: ResultFile) -> str:
    return file.gpu or str(file.environment.get("cpu") or "unknown machine")


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # ---- the index -----------------------------------------------------------------------------------------------

    def index(self) -> list[Entry]:
        """An entry for every file, oldest first; what the index file lacks is read, and nothing is written."""
        indexed = self._indexed()
        entries = []
        for path in self._files():
            data = path.read_bytes()
            entry = indexed.get(path.stem)
            if entry is None or entry.hash != hashlib.sha256(data).hexdigest()[:12]:
                entry = entry_of(path.stem, data)
            entries.append(entry)
        return sorted(entries, key=lambda e: (e.time, e.name))

    def _files(self) -> list[Path]:
        if not self.folder.is_dir():
            raise UsageError(f"there is no folder {self.folder}; name one that holds results.")
        return sorted(self.folder.glob("*.json"))

    def _indexed(self) -> dict[str, Entry]:
        path, entries = self.folder / INDEX, {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            with contextlib.suppress(ValueError, TypeError):  # a line that is damaged: its file is read again
                raw: dict[str, Any] = json.loads(line)
                lists = {k: tuple(raw[k]) for k in ("models", "engines")}
                entry = Entry(**(raw | lists))
                entries[entry.name] = entry
        return entries

    def index_text(self) -> str:
        return "".join(json.dumps(asdict(entry)) + "\n" for entry in self.index())

    def _write_index(self) -> None:
        part = self.folder / f"{INDEX}.part"
        part.write_text(self.index_text(), encoding="utf-8")
        part.replace(self.folder / INDEX)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    # ---- files ---------------------------------------------------------------------------------------------------

    def add(self, file: ResultFile) -> Path:
        data = json.dumps(file.as_json(), allow_nan=False, default=str) + "\n"
        when = re.sub(r"\D", "", str(file.environment["time"])[:19])
        tool = re.sub(r"\W+", "-", file.tool.split("/")[-1].split(".")[-1]).strip("-")
        path = self.folder / f"{when}-{tool}-{hashlib.sha256(data.encode()).hexdigest()[:6]}.json"
        with self._alone():
            file.write(path)
            self._write_index()
        return path

    def find(self, name: str) -> Path:
        """A path, a name, the one name that begins so, `latest` or `latest~N`."""
        if Path(name).is_file():
            return Path(name)
        entries = [e for e in self.index() if not e.unreadable] if self.folder.is_dir() else []
        if back := re.fullmatch(r"latest(?:~(\d+))?", name):
            number = int(back[1] or 0)
            if number >= len(entries):
                raise UsageError(f"{self.folder} holds {len(entries)} results, so there is no {name}.")
            return self.folder / f"{entries[-1 - number].name}.json"
        names = [e.name for e in entries]
        fits = [n for n in names if n == name] or [n for n in names if n.startswith(name)]
        if len(fits) != 1:
            names_here = ", ".join(fits or names[-8:]) or "nothing"
            problem = "several results begin with" if fits else "there is no file and no result"
            raise UsageError(
                f"{problem} {name}; {self.folder} has {names_here}{'' if fits or len(names) <= 8 else ', …'}."
            )
        return self.folder / f"{fits[0]}.json"

    def read(self, name: str) -> ResultFile:
        return read_file(self.find(name))

    def all(self) -> list[tuple[Entry, ResultFile]]:
        """Every readable file with its entry, oldest first."""
        return [(e, read_file(self.folder / f"{e.name}.json")) for e in self.index() if not e.unreadable]


def read_file(path: Path) -> ResultFile:
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} is no result file: {e}") from None
    except UsageError as e:
        raise UsageError(f"{path}: {e}") from None
