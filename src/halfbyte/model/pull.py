"""`halfbyte pull`: a model's folder, complete and checked, from a Hugging Face repository.

A manifest in the folder says what was checked, so that a second pull reads nothing again, and one without a network
still knows that all is there. Disk space is checked before the first byte. Files are never executed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.errors import CapacityError, UsageError
from halfbyte.model.download import Download, Progress
from halfbyte.model.hub import Hub, RemoteFile, Repository, choose

NAMES = {
    "20b": "openai/gpt-oss-20b",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "120b": "openai/gpt-oss-120b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
MANIFEST = ".halfbyte-pull.json"
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
        manifest = self._read_manifest()
        if self.hub.offline:
            return self._offline(manifest, f"HF_HUB_OFFLINE is set and {self.folder} is not complete")
        with self.hub.client() as client:
            return self._run(Repository(self.hub, self.repo, self.revision, self.folder, client, self.sleep), manifest)

    def _run(self, repository: Repository, manifest: dict[str, Any]) -> Path:
        try:
            commit, files = repository.listing()
        except CapacityError:
            if manifest and self._complete(manifest):
                return self._result(list(manifest["files"]))
            raise
        needed = choose(files, self.repo, self.file)
        missing = [f for f in needed if not self._have(f, manifest)]
        progress = self.download.progress
        progress.total = sum(f.size for f in needed)
        progress.done = progress.total - sum(f.size for f in missing)
        self._check_space(missing)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.download.fetch(repository, commit, missing)
        self._write_manifest(commit, needed)
        return self._result([f.path for f in needed])

    def _read_manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else {}

    def _write_manifest(self, commit: str, files: list[RemoteFile]) -> None:
        manifest = self._read_manifest()
        entries = manifest.get("files", {}) if manifest.get("commit") == commit else {}
        for f in files:
            entries[f.path] = {"size": f.size, "digest": f.digest, "mtime": (self.folder / f.path).stat().st_mtime_ns}
        text = json.dumps({"repo": self.repo, "commit": commit, "files": entries}, indent=1)
        temporary = self.folder / f"{MANIFEST}.new"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.folder / MANIFEST)

    def _have(self, f: RemoteFile, manifest: dict[str, Any]) -> bool:
        """On disk and right. A file that was checked before and not touched since is not read again."""
        path = self.folder / f.path
        try:
            stat = path.stat()
        except OSError:
            return False
        if stat.st_size != f.size:
            return False
        entry = manifest.get("files", {}).get(f.path, {})
        if entry.get("digest") == f.digest and entry.get("mtime") == stat.st_mtime_ns:
            return True
        self.download.advance(0, f.path)
        return f.digest_of(path) == f.digest if f.digest else True

    def _complete(self, manifest: dict[str, Any]) -> bool:
        files = manifest.get("files", {})
        if self.file is not None and self.file not in files:
            return False
        return bool(files) and all(
            (self.folder / name).is_file() and (self.folder / name).stat().st_size == entry["size"]
            for name, entry in files.items()
        )

    def _offline(self, manifest: dict[str, Any], problem: str) -> Path:
        if self._complete(manifest):
            return self._result(list(manifest["files"]))
        raise CapacityError(f"{problem}; unset it, or copy the folder from a machine that has it.")

    def _result(self, paths: list[str]) -> Path:
        if self.file is not None:
            return self.folder / self.file
        gguf = [p for p in paths if p.endswith(".gguf")]
        return self.folder / gguf[0] if len(gguf) == 1 == len(paths) else self.folder

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
    hub: Hub | None = None,
    revision: str = "main",
    file: str | None = None,
    models: Path | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """Fetch a model by repository (`openai/gpt-oss-20b`) or short name (`20b`); returns where it is."""
    repo = NAMES.get(model.lower(), model)
    parts = repo.split("/")
    if len(parts) != 2 or not all(
        p and p.strip(".") and p.replace("-", "").replace("_", "").replace(".", "").isalnum() for p in parts
    ):
        raise UsageError(f"{model!r} is not a model; give owner/name as on the hub, or one of {', '.join(NAMES)}.")
    return Pull(repo, folder or default_folder(repo, models), hub or Hub(), revision, file, report).run()


def default_folder(repo: str, models: Path | None = None) -> Path:
    """Where a model goes; `models` is HALFBYTE_MODELS_DIR, if that is set."""
    return (models or Path.home() / ".cache" / "halfbyte" / "models") / repo.replace("/", "--")


def _gb(n: int) -> str:
    return f"{n / 1e9:.1f} GB"
