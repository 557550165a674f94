"""`halfbyte pull`: the files of a Hugging Face repository that a model needs, and no others.

The gpt-oss repositories hold the same weights three times; `original/` and `metal/` are left where they are. Downloads
resume where they stopped, every file is checked against the hash the hub publishes, and disk space is checked before
the first byte. Files are never executed, and a file the hub did not list is never asked for. The environment is handed
in, not read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import httpx

from halfbyte.errors import CapacityError, CheckpointError, UsageError

NAMES = {
    "20b": "openai/gpt-oss-20b",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "120b": "openai/gpt-oss-120b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
# What a folder needs beside its weights. Licence texts come along: they are small and people look for them.
COMPANIONS = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "LICENSE",
        "USAGE_POLICY",
        "README.md",
    }
)
MANIFEST = ".halfbyte-pull.json"
RESERVE = 1 << 30  # left free on the disk
CHUNK = 1 << 20
TRIES = 6


@dataclass(frozen=True)
class Hub:
    """Where to pull from, and whether at all."""

    endpoint: str = field(default_factory=lambda: _endpoint())
    token: str | None = None
    offline: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Hub:
        """HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE, as Hugging Face's own tools read them."""
        offline = environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")
        endpoint = environ.get("HF_ENDPOINT", "").strip().rstrip("/") or _endpoint()
        if not endpoint.startswith(("http://", "https://")):
            raise UsageError(f"HF_ENDPOINT is {endpoint!r}; it must begin with http:// or https://.")
        return cls(endpoint, environ.get("HF_TOKEN", "").strip() or None, offline)


@dataclass(frozen=True)
class RemoteFile:
    path: str
    size: int
    sha256: str | None  # of large files
    blob: str | None  # git's id, of small ones

    def hasher(self) -> Any:
        if self.sha256 is not None:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size)

    @property
    def digest(self) -> str | None:
        return self.sha256 or self.blob


@dataclass
class Progress:
    """How far a pull is, for a progress bar; `done` counts bytes that are on disk and checked or being written."""

    total: int = 0
    done: int = 0
    file: str = ""


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
    progress: Progress = field(default_factory=Progress)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> Path:
        """The folder (or the one file in it), complete and checked."""
        known = self._read_manifest()
        if self.hub.offline:
            return self._offline(known, f"HF_HUB_OFFLINE is set and {self.folder} is not complete")
        with self._client() as client:
            return self._run(client, known)

    def _run(self, client: httpx.Client, known: dict[str, Any]) -> Path:
        try:
            commit, files = self.listing(client)
        except CapacityError as e:
            if known and self._complete(known):
                return self._result(list(known["files"]))
            raise e
        wanted = choose(files, self.repo, self.file)
        missing = [f for f in wanted if not self._have(f, known)]
        self.progress.total = sum(f.size for f in wanted)
        self.progress.done = self.progress.total - sum(f.size for f in missing)
        self._check_space(missing)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._fetch_all(client, commit, missing)
        self._write_manifest(commit, wanted)
        return self._result([f.path for f in wanted])

    # ---- what there is --------------------------------------------------------------------------

    def listing(self, client: httpx.Client) -> tuple[str, list[RemoteFile]]:
        url = f"{self.hub.endpoint}/api/models/{quote(self.repo)}/revision/{quote(self.revision, safe='')}?blobs=true"
        answer = self._get(client, url)
        try:
            body = answer.json()
            commit = str(body["sha"])
            files = [_remote(entry) for entry in body["siblings"]]
        except (ValueError, KeyError, TypeError) as e:
            raise CheckpointError(
                f"{self.hub.endpoint} does not answer like a hub ({type(e).__name__}); check HF_ENDPOINT."
            ) from None
        return commit, files

    def _get(self, client: httpx.Client, url: str) -> httpx.Response:
        for attempt in range(TRIES):
            try:
                answer = client.get(url)
            except httpx.HTTPError as e:
                if attempt == 2:  # an absent network is not worth a minute
                    raise self._unreachable(e) from None
            else:
                if answer.status_code < 500 and answer.status_code != 429:
                    self._check_status(answer.status_code, self.repo)
                    return answer
                if attempt == TRIES - 1:
                    raise CapacityError(f"{self.hub.endpoint} answers {answer.status_code}; try again later.")
            self.sleep(min(30.0, 0.5 * 2**attempt))
        raise AssertionError("unreachable")

    def _check_status(self, status: int, what: str) -> None:
        if status in (401, 403):
            raise CheckpointError(f"{what} needs permission; accept its terms on the hub and set HF_TOKEN.")
        if status == 404:
            raise CheckpointError(
                f"{what} does not exist at {self.hub.endpoint} (revision {self.revision}); check the name, or set"
                " HF_TOKEN if it is private."
            )
        if status >= 400:
            raise CheckpointError(f"{self.hub.endpoint} answers {status} for {what}.")

    def _unreachable(self, e: Exception) -> CapacityError:
        return CapacityError(
            f"{self.hub.endpoint} cannot be reached ({type(e).__name__}); connect this machine, point HF_ENDPOINT at a"
            f" mirror, or copy the model's folder to {self.folder} from a machine that has it."
        )

    # ---- what we have ---------------------------------------------------------------------------

    def _read_manifest(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and isinstance(found.get("files"), dict) else {}

    def _write_manifest(self, commit: str, files: list[RemoteFile]) -> None:
        known = self._read_manifest()
        entries = known.get("files", {}) if known.get("commit") == commit else {}
        for f in files:
            entries[f.path] = {"size": f.size, "digest": f.digest, "mtime": (self.folder / f.path).stat().st_mtime_ns}
        text = json.dumps({"repo": self.repo, "commit": commit, "files": entries}, indent=1)
        temporary = self.folder / f"{MANIFEST}.new"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.folder / MANIFEST)

    def _have(self, f: RemoteFile, known: dict[str, Any]) -> bool:
        """On disk and right. A file that was checked before and not touched since is not read again."""
        path = self.folder / f.path
        try:
            stat = path.stat()
        except OSError:
            return False
        if stat.st_size != f.size:
            return False
        entry = known.get("files", {}).get(f.path, {})
        if entry.get("digest") == f.digest and entry.get("mtime") == stat.st_mtime_ns:
            return True
        self._tell(f.path)
        return _digest(path, f) == f.digest if f.digest else True

    def _complete(self, known: dict[str, Any]) -> bool:
        files = known.get("files", {})
        if self.file is not None and self.file not in files:
            return False
        return bool(files) and all(
            (self.folder / name).is_file() and (self.folder / name).stat().st_size == entry["size"]
            for name, entry in files.items()
        )

    def _offline(self, known: dict[str, Any], problem: str) -> Path:
        if self._complete(known):
            return self._result(list(known["files"]))
        raise CapacityError(f"{problem}; unset it, or copy the folder from a machine that has it.")

    def _result(self, paths: list[str]) -> Path:
        if self.file is not None:
            return self.folder / self.file
        gguf = [p for p in paths if p.endswith(".gguf")]
        return self.folder / gguf[0] if len(gguf) == 1 == len(paths) else self.folder

    def _check_space(self, missing: list[RemoteFile]) -> None:
        need = sum(f.size - self._part_size(f) for f in missing)
        at = self.folder
        while not at.exists():
            at = at.parent
        free = shutil.disk_usage(at).free
        if need and need + RESERVE > free:
            raise UsageError(
                f"{_gb(need)} are still to be downloaded and {_gb(free)} are free at {at} (1.1 GB stay free); make room"
                " or choose another folder with --to."
            )

    def _part(self, f: RemoteFile) -> Path:
        # The digest is in the name, so half of another revision's file is never continued.
        return self.folder / f"{f.path}.{(f.digest or 'unknown')[:12]}.part"

    def _part_size(self, f: RemoteFile) -> int:
        try:
            return min(f.size, self._part(f).stat().st_size)
        except OSError:
            return 0

    # ---- the download ---------------------------------------------------------------------------

    def _client(self) -> httpx.Client:
        headers = {"user-agent": "halfbyte", "accept-encoding": "identity"}
        if self.hub.token:
            headers["authorization"] = f"Bearer {self.hub.token}"  # httpx drops it where a redirect leaves the host
        return httpx.Client(headers=headers, follow_redirects=True, timeout=httpx.Timeout(30.0, connect=10.0))

    def _fetch_all(self, client: httpx.Client, commit: str, files: list[RemoteFile]) -> None:
        if not files:
            return
        with ThreadPoolExecutor(self.workers) as pool:
            jobs = [pool.submit(self._fetch, client, commit, f) for f in sorted(files, key=lambda f: f.size)]
            try:
                done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
                for job in done:
                    job.result()
            except BaseException:
                self._stop.set()  # also on Ctrl-C: what is on disk stays there, for the next time
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _fetch(self, client: httpx.Client, commit: str, f: RemoteFile) -> None:
        url = f"{self.hub.endpoint}/{quote(self.repo)}/resolve/{quote(commit, safe='')}/{quote(f.path)}"
        part, path = self._part(f), self.folder / f.path
        part.parent.mkdir(parents=True, exist_ok=True)
        wrong = failures = 0
        while not self._stop.is_set():
            before = self._part_size(f)
            try:
                digest = self._stream(client, url, f, part)
            except httpx.HTTPError as e:
                # A line that drops now and then still gets there: only attempts that brought nothing count.
                failures = 0 if self._part_size(f) > before else failures + 1
                if failures >= TRIES:
                    raise self._unreachable(e) from None
                self.sleep(min(30.0, 0.5 * 2**failures))
                continue
            if self._stop.is_set():
                return
            if part.stat().st_size == f.size and (f.digest is None or digest == f.digest):
                part.replace(path)
                return
            part.unlink()
            self._add(-f.size)
            wrong += 1
            if wrong == 2:
                raise CheckpointError(
                    f"{f.path} arrived twice with another hash than the hub publishes; the mirror or the line damages"
                    " it. Try another HF_ENDPOINT."
                )

    def _stream(self, client: httpx.Client, url: str, f: RemoteFile, part: Path) -> str:
        """Append what is missing to `part`; returns the digest of the whole."""
        have = self._part_size(f)
        hasher = f.hasher()
        headers = {"range": f"bytes={have}-"} if 0 < have < f.size else {}
        if have == f.size:
            self._add(f.size)
            return _digest(part, f)
        with client.stream("GET", url, headers=headers) as answer:
            if answer.status_code == 416:
                part.unlink(missing_ok=True)
                raise httpx.ReadError("the server refuses the rest of the file")
            if answer.status_code >= 500 or answer.status_code == 429:
                raise httpx.ReadError(f"the server answers {answer.status_code}")
            self._check_status(answer.status_code, f.path)
            resumed = answer.status_code == 206
            if resumed:
                with part.open("rb") as file:
                    while block := file.read(CHUNK):
                        hasher.update(block)
            received = have if resumed else 0
            self._add(received)
            try:
                with part.open("ab" if resumed else "wb") as file:
                    for block in answer.iter_raw():
                        if self._stop.is_set() or received + len(block) > f.size:
                            break
                        file.write(block)
                        hasher.update(block)
                        received += len(block)
                        self._add(len(block), f.path)
            except BaseException:
                self._add(-received)
                raise
            if received < f.size and not self._stop.is_set():
                self._add(-received)
                raise httpx.ReadError("the connection ended early")
        return str(hasher.hexdigest())

    def _add(self, count: int, name: str = "") -> None:
        with self._lock:
            self.progress.done += count
            self.progress.file = name or self.progress.file
            self.report(self.progress)

    def _tell(self, name: str) -> None:
        self._add(0, name)


def choose(files: list[RemoteFile], repo: str, name: str | None) -> list[RemoteFile]:
    """The files a model needs: top-level safetensors with their companions, or one GGUF file."""
    if name is not None:
        found = [f for f in files if f.path == name]
        if not found:
            raise CheckpointError(f"{repo} has no file {name!r}; it has {_some(f.path for f in files)}.")
        return found
    top = [f for f in files if "/" not in f.path]
    weights = [f for f in top if f.path.endswith(".safetensors")]
    if weights:
        return weights + [f for f in top if f.path in COMPANIONS]
    gguf = [f for f in files if f.path.endswith(".gguf")]
    if len(gguf) == 1:
        return gguf
    if gguf:
        raise CheckpointError(f"{repo} has several GGUF files; name one of {_some(f.path for f in gguf)} with --file.")
    raise CheckpointError(f"{repo} has no safetensors and no GGUF file, so it is no model halfbyte can serve.")


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


def _endpoint() -> str:
    """The hub's address, as its own client knows it."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def default_folder(repo: str, models: Path | None = None) -> Path:
    """Where a model goes; `models` is HALFBYTE_MODELS_DIR, if that is set."""
    return (models or Path.home() / ".cache" / "halfbyte" / "models") / repo.replace("/", "--")


def _remote(entry: dict[str, Any]) -> RemoteFile:
    path = str(entry["rfilename"])
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or not path:
        raise CheckpointError(f"the hub lists a file called {path!r}, which would land outside the model's folder.")
    lfs = entry.get("lfs") or {}
    size = int(lfs.get("size", entry.get("size") or 0))
    return RemoteFile(path, size, lfs.get("sha256"), None if lfs else entry.get("blobId"))


def _digest(path: Path, f: RemoteFile) -> str:
    hasher = f.hasher()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            hasher.update(block)
    return str(hasher.hexdigest())


def _some(names: Any) -> str:
    found = list(names)
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")


def _gb(n: int) -> str:
    return f"{n / 1e9:.1f} GB"
