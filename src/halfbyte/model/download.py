"""Bytes of a model from the hub to a folder: in parallel, resumed where they stopped, each file checked by its hash.

Written by hand, because `huggingface_hub.snapshot_download` compares sizes, not hashes: 61 GB would be read once more
to check them. What is on disk after an interruption stays there, for the next time; a file gets its name once it is
whole and right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from halfbyte.errors import CheckpointError
from halfbyte.model.hub import CHUNK, TRIES, RemoteFile, Repository, backoff


@dataclass
class Progress:
    """How far a pull is, for a progress bar; `done` counts bytes that are on disk and checked or being written."""

    total: int = 0
    done: int = 0
    file: str = ""


@dataclass
class Download:
    folder: Path
    report: Callable[[Progress], None] = lambda progress: None
    workers: int = 4
    progress: Progress = field(default_factory=Progress)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def fetch(self, repository: Repository, commit: str, files: list[RemoteFile]) -> None:
        """Download all of `files` and check them; the error names the file that failed."""
        if not files:
            return
        with ThreadPoolExecutor(self.workers) as pool:
            jobs = [pool.submit(self._fetch, repository, commit, f) for f in sorted(files, key=lambda f: f.size)]
            try:
                done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
                for job in done:
                    job.result()
            except BaseException:
                self._stop.set()  # also on Ctrl-C
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def part(self, f: RemoteFile) -> Path:
        """The path of a partial download. Its name has the digest, so a part of another revision is never continued."""
        return self.folder / f"{f.path}.{(f.digest or 'unknown')[:12]}.part"

    def part_size(self, f: RemoteFile) -> int:
        try:
            return min(f.size, self.part(f).stat().st_size)
        except OSError:
            return 0

    def advance(self, count: int, name: str = "") -> None:
        with self._lock:
            self.progress.done += count
            self.progress.file = name or self.progress.file
            self.report(self.progress)

    def _fetch(self, repository: Repository, commit: str, f: RemoteFile) -> None:
        url, part = repository.url(commit, f), self.part(f)
        part.parent.mkdir(parents=True, exist_ok=True)
        mismatches = failures = 0
        while not self._stop.is_set():
            before = self.part_size(f)
            try:
                digest = self._stream(repository, url, f, part)
            except httpx.HTTPError as e:
                # A line that drops now and then still gets there: only attempts that brought nothing count.
                failures = 0 if self.part_size(f) > before else failures + 1
                if failures >= TRIES:
                    raise repository.unreachable(e) from None
                repository.sleep(backoff(failures))
                continue
            if self._stop.is_set():
                return
            if part.stat().st_size == f.size and (f.digest is None or digest == f.digest):
                part.replace(self.folder / f.path)
                return
            part.unlink()
            self.advance(-f.size)
            mismatches += 1
            if mismatches == 2:
                raise CheckpointError(
                    f"{f.path} arrived twice with another hash than the hub publishes; the mirror or the line damages"
                    " it. Try another HF_ENDPOINT."
                )

    def _stream(self, repository: Repository, url: str, f: RemoteFile, part: Path) -> str:
        """Append the missing bytes to `part`; returns the digest of the complete file."""
        size_before = self.part_size(f)
        hasher = f.hasher()
        headers = {"range": f"bytes={size_before}-"} if 0 < size_before < f.size else {}
        if size_before == f.size:
            self.advance(f.size)
            return f.digest_of(part)
        with repository.client.stream("GET", url, headers=headers) as answer:
            if answer.status_code == 416:
                part.unlink(missing_ok=True)
                raise httpx.ReadError("the server refuses the rest of the file")
            if answer.status_code >= 500 or answer.status_code == 429:
                raise httpx.ReadError(f"the server answers {answer.status_code}")
            repository.check_status(answer.status_code, f.path)
            resumed = answer.status_code == 206
            if resumed:
                with part.open("rb") as file:
                    while block := file.read(CHUNK):
                        hasher.update(block)
            received = size_before if resumed else 0
            self.advance(received)
            try:
                with part.open("ab" if resumed else "wb") as file:
                    for block in answer.iter_raw():
                        if self._stop.is_set() or received + len(block) > f.size:
                            break
                        file.write(block)
                        hasher.update(block)
                        received += len(block)
                        self.advance(len(block), f.path)
            except BaseException:
                self.advance(-received)
                raise
            if received < f.size and not self._stop.is_set():
                self.advance(-received)
                raise httpx.ReadError("the connection ended early")
        return str(hasher.hexdigest())
