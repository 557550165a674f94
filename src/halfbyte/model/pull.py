"""`halfbyte pull`: a model's folder, complete and checked, from a Hugging Face repository.

A record in the folder (`checksums.py`) says what was checked, so that a second pull reads nothing again, and one
without a network still knows that all is there. Disk space is checked before the first byte. Files are never executed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from halfbyte.errors import CapacityError, CheckpointError, UsageError
from halfbyte.model.checksums import FileRecord, PullRecord, read_record, sha256_of, write_record
from halfbyte.model.download import Download, Progress
from halfbyte.model.hub import Hub, RemoteFile, Repository, choose
from halfbyte.model.pulled import NAMES, default_folder, link, opened, repository

RESERVE = 1 << 30  # left free on the disk


@dataclass
class Pull:
    repo: str
    folder: Path
    hub: Hub
    revision: str = "main"
    file: str | None = None  # one file by name, for GGUF repositories
    report: Callable[[Progress], None] = lambda progress: None
    sleep: Callable[[float], None] = time.sleep
    workers: int = 4
    download: Download = field(init=False)

    def __post_init__(self) -> None:
        self.download = Download(self.folder, self.report, self.workers)

    def run(self) -> Path:
        """The folder (or the one file in it), complete and checked."""
        record = self._read_record()
        if self.hub.offline:
            return self._offline(record, f"HF_HUB_OFFLINE is set and {self.folder} is not complete")
        with self.hub.client() as client:
            return self._run(Repository(self.hub, self.repo, self.revision, self.folder, client, self.sleep), record)

    def _run(self, repository: Repository, record: PullRecord) -> Path:
        try:
            commit, files = repository.listing()
        except CapacityError:
            if self._complete(record):
                return self._result(list(record.files))
            raise
        needed = choose(files, self.repo, self.file)
        missing = [f for f in needed if not self._have(f, record)]
        progress = self.download.progress
        progress.total = sum(f.size for f in needed)
        progress.done = progress.total - sum(f.size for f in missing)
        self._check_space(missing)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.download.fetch(repository, commit, missing)
        self._write_record(commit, needed)
        return self._result([f.path for f in needed])

    def _read_record(self) -> PullRecord:
        """The record of an earlier pull; an unreadable record counts as missing, and everything is checked again."""
        try:
            return read_record(self.folder)
        except CheckpointError:
            return PullRecord()

    def _write_record(self, commit: str, files: list[RemoteFile]) -> None:
        before = self._read_record()
        entries = before.files if before.commit == commit else {}
        for f in files:
            path = self.folder / f.path
            mtime = path.stat().st_mtime_ns
            entry = entries.get(f.path)
            sha256 = f.sha256 or (entry.sha256 if entry is not None and entry.mtime == mtime else None)
            entries[f.path] = FileRecord(f.size, f.digest, sha256 or sha256_of(path), mtime)
        write_record(self.folder, PullRecord(self.repo, commit, entries))

    def _have(self, f: RemoteFile, record: PullRecord) -> bool:
        """Whether the file is on disk and right. One that was checked and not modified since is not read again."""
        path = self.folder / f.path
        try:
            stat = path.stat()
        except OSError:
            return False
        if stat.st_size != f.size:
            return False
        entry = record.files.get(f.path)
        if entry is not None and entry.digest == f.digest and entry.mtime == stat.st_mtime_ns:
            return True
        self.download.advance(0, f.path)
        return f.digest_of(path) == f.digest if f.digest else True

    def _complete(self, record: PullRecord) -> bool:
        if self.file is not None and self.file not in record.files:
            return False
        return bool(record.files) and all(
            (self.folder / name).is_file() and (self.folder / name).stat().st_size == entry.size
            for name, entry in record.files.items()
        )

    def _offline(self, record: PullRecord, problem: str) -> Path:
        if self._complete(record):
            return self._result(list(record.files))
        raise CapacityError(f"{problem}; unset it, or copy the folder from a machine that has it.")

    def _result(self, paths: list[str]) -> Path:
        return opened(self.folder, paths, self.file)

    def _check_space(self, missing: list[RemoteFile]) -> None:
        need = sum(f.size - self.download.part_size(f) for f in missing)
        at = self.folder
        while not at.exists():
            at = at.parent
        free = shutil.disk_usage(at).free
        if need and need + RESERVE > free:
            raise UsageError(
                f"{_gb(need)} are still to be downloaded and {_gb(free)} are free at {at} (1.1 GB stay free); make room"
                " or choose another folder with --to."
            )


def pull(
    model: str,
    folder: Path | None = None,
    *,
    models: Path,
    hub: Hub | None = None,
    revision: str = "main",
    file: str | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """Fetch a model by repository (`openai/gpt-oss-20b`) or short name (`20b`) into `models`, or into `folder`, which
    `models` then has a link to; returns where it is."""
    repo = repository(model)
    if repo is None:
        raise UsageError(f"{model!r} is not a model; give owner/name as on the hub, or one of {', '.join(NAMES)}.")
    where = Pull(repo, folder or default_folder(repo, models), hub or Hub(), revision, file, report).run()
    if folder is not None:
        link(repo, folder, models)
    return where


def _gb(n: int) -> str:
    return f"{n / 1e9:.1f} GB"
