"""What a pulled folder must hold: the record that `pull` writes into it, and the check that `serve --verify` makes.

The record is as trustworthy as the folder it is in: it finds damage, and files that were exchanged
without a new record. Nothing here repairs or fetches anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from halfbyte.errors import CheckpointError
from halfbyte.model.gguf_metadata import SPLIT
from halfbyte.model.json_records import read_json
from halfbyte.model.plain_file import MIB, drop_cached, open_regular, quote

RECORD = ".halfbyte-pull.json"
MAX_BYTES = 4 * MIB
READ_BY_LOADING = ("config.json", "model.safetensors.index.json", "tokenizer.json", "*.safetensors")
BLOCK = 4 * MIB
WORKERS = 4

Progress = Callable[[int, int, str], None]  # (bytes done, bytes in all, file)


@dataclass(frozen=True)
class FileRecord:
    size: int
    digest: str | None = None  # as the hub has it: sha256, or git's id of small files
    sha256: str | None = None  # of what is on disk
    mtime: int = 0


@dataclass(frozen=True)
class PullRecord:
    repo: str = ""
    commit: str = ""
    files: dict[str, FileRecord] = field(default_factory=dict)


def read_record(folder: Path) -> PullRecord:
    return read_json(folder / RECORD, PullRecord, MAX_BYTES)


def write_record(folder: Path, record: PullRecord) -> None:
    temporary = folder / f"{RECORD}.new"
    temporary.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    temporary.replace(folder / RECORD)


def sha256_of(path: Path, on_bytes: Callable[[int], None] = lambda count: None, *, keep_cached: bool = True) -> str:
    hasher = hashlib.sha256()
    fd, _ = open_regular(path)
    with os.fdopen(fd, "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            hasher.update(block)
            on_bytes(len(block))
            if not keep_cached:
                drop_cached(fd, file.tell() - len(block), len(block))
    return hasher.hexdigest()


def read_by_loading(model: Path) -> set[str]:
    if model.is_dir():
        return {p.name for pattern in READ_BY_LOADING for p in model.glob(pattern)}
    part = SPLIT.match(model.name)
    if part is None:
        return {model.name}
    return {f"{part['stem']}-{i + 1:05}-of-{part['count']}.gguf" for i in range(int(part["count"]))}


def verify(model: Path, progress: Progress | None = None, *, keep_cached: bool = True) -> int:
    """Compare the files on disk with the folder's record by hash: the number of files, or an error that names one.
    Without `keep_cached` reading leaves nothing in the page cache."""
    folder = model if model.is_dir() else model.parent
    if not (folder / RECORD).exists():
        raise CheckpointError(
            f"{folder} has no record of checksums ({RECORD}); `halfbyte pull` writes one, so pull the model, or leave"
            " --verify out."
        )
    files: Mapping[str, FileRecord] = read_record(folder).files
    needed = read_by_loading(model)
    unknown = sorted(needed - files.keys())
    if unknown:
        raise CheckpointError(f"{folder / unknown[0]} is not in the record of what was pulled; pull the model again.")
    checked = files if model.is_dir() else {name: files[name] for name in needed}
    total, done, lock = sum(f.size for f in checked.values()), 0, threading.Lock()

    def check(name: str, file: FileRecord) -> None:
        nonlocal done
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{folder / RECORD} names {quote(name)}, which is not in its folder.")
        if file.sha256 is None:
            raise CheckpointError(f"{folder / RECORD} has no SHA-256 of {name}; pull the model again.")

        def count_bytes(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                if progress is not None:
                    progress(done, total, name)

        digest = sha256_of(path, count_bytes, keep_cached=keep_cached)
        if digest != file.sha256:
            raise CheckpointError(
                f"{path} is not the file that was pulled (SHA-256 {digest[:12]}…, recorded {file.sha256[:12]}…); pull"
                " the model again."
            )

    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(check, checked.keys(), checked.values()):
            pass  # the first error is raised here
    return len(checked)
