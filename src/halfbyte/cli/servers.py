"""The servers that run on this machine, one small file each, so that `ps`, `stop` and `run` find them.

A server writes its file when it starts and removes it when it ends. What a killed one left behind is recognised by its
process, which is gone or is another one by now (its start time differs), and removed by the next command that looks.
Files of other machines that share the folder are left alone. No key and no prompt is ever in such a file.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from halfbyte import gates as gates_
from halfbyte.errors import UsageError
from halfbyte.model.pulled import NAMES


@dataclass(frozen=True)
class RunningServer:
    pid: int
    born: float  # when the process began, by the kernel
    host: str  # the machine
    model: str  # the name that clients ask for
    names: tuple[str, ...]  # every word that means it
    path: str | None  # what it reads its weights from
    device: str
    url: str | None = None  # None while it loads
    since: float = 0.0
    certificate: str | None = None  # the file that it serves HTTPS with

    @property
    def state(self) -> str:
        return "loading" if self.url is None else "serving"

    def is_meant_by(self, text: str) -> bool:
        """A name, the process, or the end of the address: a port, for example."""
        url = self.url or ""
        return text in self.names or text in (str(self.pid), url) or url.endswith(f":{text}")


def folder() -> Path:
    return gates_.cache_folder("servers")


@contextmanager
def listed(
    model: str, names: tuple[str, ...], path: str | None, device: str, certificate: str | None = None
) -> Iterator[Listing]:
    """This process is a server until the block ends."""
    own = psutil.Process()
    entry = RunningServer(
        own.pid, own.create_time(), socket.gethostname(), model, names, path, device, None, time.time(), certificate
    )
    listing = Listing(entry)
    listing.write()
    try:
        yield listing
    finally:
        with suppress(OSError):
            listing.file.unlink(missing_ok=True)


class Listing:
    """This server's file. A folder that cannot be written to does not stop the server."""

    def __init__(self, entry: RunningServer) -> None:
        self.entry = entry
        self.file = folder() / f"{entry.host}-{entry.pid}.json"

    def started(self, url: str) -> None:
        self.entry = replace(self.entry, url=url)
        self.write()

    def write(self) -> None:
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.file.with_suffix(".new")
            fresh.write_text(json.dumps(asdict(self.entry)), encoding="utf-8")
            os.replace(fresh, self.file)


def names_of(text: str, repo: str | None) -> set[str]:
    """What a person may call a model: as it was typed, its repository, and that one's short names."""
    return {text, *([repo] if repo else ()), *(name for name, target in NAMES.items() if target == repo)}


def running() -> list[RunningServer]:
    """The servers of this machine, oldest first."""
    matches = []
    for file in folder().glob("*.json"):
        server = _read(file)
        if server is not None and server.host != socket.gethostname():
            continue
        if server is None or not is_alive(server):
            with suppress(OSError):
                file.unlink(missing_ok=True)
            continue
        matches.append(server)
    return sorted(matches, key=lambda s: s.since)


def is_alive(server: RunningServer) -> bool:
    try:
        process = psutil.Process(server.pid)
        return bool(abs(process.create_time() - server.born) < 1.0 and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def choose(name: str | None) -> RunningServer:
    """The one server that `name` means; without a name, the only one."""
    servers = running()
    if not servers:
        raise UsageError("no server of this machine is running.")
    meant = servers if name is None else [s for s in servers if s.is_meant_by(name)]
    if len(meant) == 1:
        return meant[0]
    listed = ", ".join(f"{s.model} (process {s.pid})" for s in servers)
    if not meant:
        raise UsageError(f"no running server is called {name}; there are {listed}.")
    which = "several servers are running" if name is None else f"several running servers are called {name}"
    raise UsageError(f"{which}; name one by its process or port: {listed}.")


def _read(file: Path) -> RunningServer | None:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return RunningServer(**values | {"names": tuple(values["names"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
