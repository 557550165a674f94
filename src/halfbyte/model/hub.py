"""What the hub has of a model: its files, their sizes and hashes, and which of them a model needs.

The gpt-oss repositories hold the same weights three times; `original/` and `metal/` are left where they are. A file the
hub did not list is never asked for, and one that would land outside the model's folder is refused. The environment is
handed in, not read.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import httpx

from halfbyte.errors import CapacityError, CheckpointError, UsageError

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
ENDPOINT = "https://huggingface.co"
CHUNK = 1 << 20
TRIES = 6


@dataclass(frozen=True)
class Hub:
    """The address of the hub, the token, and whether to stay offline."""

    endpoint: str = ENDPOINT
    token: str | None = None
    offline: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Hub:
        """HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE, as Hugging Face's own tools read them."""
        offline = environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")
        endpoint = environ.get("HF_ENDPOINT", "").strip().rstrip("/") or ENDPOINT
        if not endpoint.startswith(("http://", "https://")):
            raise UsageError(f"HF_ENDPOINT is {endpoint!r}; it must begin with http:// or https://.")
        return cls(endpoint, environ.get("HF_TOKEN", "").strip() or None, offline)

    def client(self) -> httpx.Client:
        headers = {"user-agent": "halfbyte", "accept-encoding": "identity"}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"  # httpx drops it where a redirect leaves the host
        return httpx.Client(headers=headers, follow_redirects=True, timeout=httpx.Timeout(30.0, connect=10.0))

    def check_status(self, status: int, subject: str, revision: str) -> None:
        if status in (401, 403):
            raise CheckpointError(f"{subject} needs permission; accept its terms on the hub and set HF_TOKEN.")
        if status == 404:
            raise CheckpointError(
                f"{subject} does not exist at {self.endpoint} (revision {revision}); check the name, or set"
                " HF_TOKEN if it is private."
            )
        if status >= 400:
            raise CheckpointError(f"{self.endpoint} answers {status} for {subject}.")

    def unreachable(self, e: Exception, folder: Path) -> CapacityError:
        return CapacityError(
            f"{self.endpoint} cannot be reached ({type(e).__name__}); connect this machine, point HF_ENDPOINT at a"
            f" mirror, or copy the model's folder to {folder} from a machine that has it."
        )


@dataclass(frozen=True)
class RemoteFile:
    path: str
    size: int
    sha256: str | None  # of large files
    blob: str | None  # git's id, of small ones

    @classmethod
    def from_listing(cls, entry: dict[str, Any]) -> RemoteFile:
        path = str(entry["rfilename"])
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or "\\" in path or not path:
            raise CheckpointError(f"the hub lists a file called {path!r}, which would land outside the model's folder.")
        lfs = entry.get("lfs") or {}
        size = int(lfs.get("size", entry.get("size") or 0))
        return cls(path, size, lfs.get("sha256"), None if lfs else entry.get("blobId"))

    @property
    def digest(self) -> str | None:
        return self.sha256 or self.blob

    def hasher(self) -> Any:
        if self.sha256 is not None:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size)

    def digest_of(self, path: Path) -> str:
        """The digest of the file on disk, by the kind of hash that the hub has for it."""
        hasher = self.hasher()
        with path.open("rb") as file:
            while block := file.read(CHUNK):
                hasher.update(block)
        return str(hasher.hexdigest())


@dataclass(frozen=True)
class Repository:
    """One revision of a model on the hub."""

    hub: Hub
    name: str  # owner/name
    revision: str
    folder: Path  # where the model goes; said in refusals
    client: httpx.Client
    sleep: Callable[[float], None] = time.sleep

    def listing(self) -> tuple[str, list[RemoteFile]]:
        """(commit, files)"""
        endpoint = self.hub.endpoint
        url = f"{endpoint}/api/models/{quote(self.name)}/revision/{quote(self.revision, safe='')}?blobs=true"
        answer = self._get(url)
        try:
            body = answer.json()
            return str(body["sha"]), [RemoteFile.from_listing(entry) for entry in body["siblings"]]
        except (ValueError, KeyError, TypeError) as e:
            raise CheckpointError(
                f"{endpoint} does not answer like a hub ({type(e).__name__}); check HF_ENDPOINT."
            ) from None

    def url(self, commit: str, file: RemoteFile) -> str:
        return f"{self.hub.endpoint}/{quote(self.name)}/resolve/{quote(commit, safe='')}/{quote(file.path)}"

    def check_status(self, status: int, subject: str) -> None:
        self.hub.check_status(status, subject, self.revision)

    def unreachable(self, e: Exception) -> CapacityError:
        return self.hub.unreachable(e, self.folder)

    def _get(self, url: str) -> httpx.Response:
        for attempt in range(TRIES):
            try:
                answer = self.client.get(url)
            except httpx.HTTPError as e:
                if attempt == 2:  # an absent network is not worth a minute
                    raise self.unreachable(e) from None
            else:
                if answer.status_code < 500 and answer.status_code != 429:
                    self.check_status(answer.status_code, self.name)
                    return answer
                if attempt == TRIES - 1:
                    raise CapacityError(f"{self.hub.endpoint} answers {answer.status_code}; try again later.")
            self.sleep(backoff(attempt))
        raise AssertionError("unreachable")


def backoff(attempt: int) -> float:
    return min(30.0, 0.5 * float(2**attempt))


def choose(files: list[RemoteFile], repo: str, name: str | None) -> list[RemoteFile]:
    """The files a model needs: top-level safetensors with their companions, or one GGUF file."""
    if name is not None:
        matches = [f for f in files if f.path == name]
        if not matches:
            raise CheckpointError(f"{repo} has no file {name!r}; it has {_first_names(f.path for f in files)}.")
        return matches
    top = [f for f in files if "/" not in f.path]
    weights = [f for f in top if f.path.endswith(".safetensors")]
    if weights:
        return weights + [f for f in top if f.path in COMPANIONS]
    gguf = [f for f in files if f.path.endswith(".gguf")]
    if len(gguf) == 1:
        return gguf
    if gguf:
        names = _first_names(f.path for f in gguf)
        raise CheckpointError(f"{repo} has several GGUF files; name one of {names} with --file.")
    raise CheckpointError(f"{repo} has no safetensors and no GGUF file, so halfbyte cannot serve it.")


def _first_names(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
