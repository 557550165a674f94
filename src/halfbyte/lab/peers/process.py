"""Starts an engine in a process group of its own, waits until it answers, watches it, and stops it without a trace.

    with PeerProcess(peer, setup, folder) as engine:
        engine.asker.ask(Question("2 + 2 ="))

Ready is an engine whose health is good and that has given a first token; both times are kept. Its output goes straight
to `server.log`, line by line. `keeper.py` stands between: an engine that is stopped, that crashes, or whose lab is
killed leaves no process and no zombie. One that crashes, hangs or is never ready leaves a folder of diagnostics.
A `Peer` of a URL starts nothing, and nothing is stopped.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from halfbyte.errors import AskError, PeerDiedError, PeerRefusedError, UsageError
from halfbyte.gates import AXES, child_environment
from halfbyte.lab.child import start_child
from halfbyte.lab.peers import keeper, signatures
from halfbyte.lab.peers.asker import Asker, Question
from halfbyte.lab.peers.diagnostics import Case, collect
from halfbyte.lab.peers.launch import API_LOG, DEBUG, Launch, Peer, Setup, free_port
from halfbyte.lab.peers.signatures import LogFinding

POLL_S = 0.05
PORTS = 3  # that are tried: between finding one and listening on it another may have taken it
_GATES = {"HALFBYTE_PRESET", *(name for axis in AXES for name in axis.variables)}


@dataclass(frozen=True)
class TimeLimits:
    """Seconds that an engine has."""

    start_s: float = 300.0
    request_s: float = 120.0
    stop_s: float = 30.0
    until: float = float("inf")  # of time.monotonic: then it is ended, even while a request waits for it

    def __post_init__(self) -> None:
        if min(self.start_s, self.request_s, self.stop_s) <= 0:
            raise UsageError("an engine needs more than no seconds to start, answer and stop.")


@dataclass(frozen=True)
class Startup:
    """Seconds from starting the process."""

    healthy_s: float = 0.0
    first_token_s: float = 0.0


@dataclass(frozen=True)
class Ending:
    """How an engine ended. `left` outlived it and was ended by the keeper, `stuck` could not be ended."""

    exit: int | None = None
    how: str = "not started"
    left: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """It ended when it was asked, by itself, and left nothing."""
        return self.how == "asked to end" and not self.left and not self.stuck


class PeerProcess:
    def __init__(
        self, peer: Peer, setup: Setup, folder: Path, limits: TimeLimits | None = None, *, debug: bool = False
    ) -> None:
        self.peer, self.setup, self.folder = peer, replace(setup, folder=folder), folder
        self.limits, self.debug = limits or TimeLimits(), debug
        self.log, self._status = folder / "server.log", folder / "keeper.json"
        self.launch = Launch()
        self.startup, self.ending = Startup(), Ending()
        self.url = self.version = ""
        self.drafted: float | None = None  # tokens, by its metrics, once it was asked for some
        self.diagnostics: list[Path] = []
        self.causes: list[LogFinding] = []
        self._keeper: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._seen: list[str] = []  # its processes, when they were last looked at
        self._asker: Asker | None = None
        self._end_of_life: threading.Timer | None = None

    # ---- start ---------------------------------------------------------------------------------

    def __enter__(self) -> PeerProcess:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for attempt in range(PORTS):
                self.setup = replace(self.setup, port=free_port())
                self.launch = self.peer.launch(self.setup)
                if self.launch.refusals:
                    raise PeerRefusedError(f"{self.peer.name}: {' '.join(self.launch.refusals)}")
                if self._start() or attempt == PORTS - 1:
                    break
            return self
        except BaseException:
            self.stop()
            raise

    def _start(self) -> bool:
        """Whether it became ready; False: its port was taken meanwhile."""
        begun = time.monotonic()
        self.url = self.launch.url or f"http://127.0.0.1:{self.setup.port}"
        self._asker = Asker(self.url, timeout_s=self.limits.request_s, dialect=self.launch.dialect)
        if not self.launch.url:
            self._spawn()
        deadline = begun + self.limits.start_s
        while not self.asker.healthy(self.launch.health):
            if not self.alive:
                return self._failed_start()
            if time.monotonic() > deadline:
                raise self.failure(f"{self.peer.name} was not healthy within {self.limits.start_s:g} s")
            time.sleep(POLL_S)
        healthy = time.monotonic() - begun
        try:
            self.asker.ask(Question("Hello", tokens=1))
        except AskError as e:
            if not self.alive:
                return self._failed_start()
            raise self.failure(f"{self.peer.name} is healthy and gives no first token: {e}") from None
        self.startup = Startup(healthy, time.monotonic() - begun)
        with contextlib.suppress(AskError):  # most engines have such a page
            self.version = str((self.asker.get("/version") or {}).get("version", ""))
        self.processes()
        return True

    def _spawn(self) -> None:
        self._environment = {n: v for n, v in child_environment().items() if n not in _GATES}
        self._environment |= {"PYTHONUNBUFFERED": "1"} | (DEBUG if self.debug else {})
        if self.debug:
            self._environment["FLASHINFER_LOGDEST"] = str(self.folder / API_LOG)
        self._environment |= {**self.setup.environment, **self.launch.environment}
        self._status.unlink(missing_ok=True)
        wrapped = [sys.executable, "-I", "-S", str(Path(keeper.__file__)), str(self.limits.stop_s), str(self._status)]
        if self.launch.record is not None:
            self.launch.record.unlink(missing_ok=True)  # of an earlier run in this folder
        with self.log.open("wb") as log:
            self._keeper = start_child(
                [*wrapped, *self.launch.command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=self._environment,
            )  # fmt: skip
        if self.limits.until < float("inf"):
            left = max(0.0, self.limits.until - time.monotonic())
            self._end_of_life = threading.Timer(left, self._keeper.terminate)
            self._end_of_life.daemon = True
            self._end_of_life.start()

    def _failed_start(self) -> bool:
        """An engine that ended before it was ready: its port was taken, it refused, or it crashed."""
        self.stop()
        text = self.last_words()
        if self._statements().get("error"):
            raise PeerRefusedError(
                f"{self.peer.name}: {self._statements()['error']}; install it, or name another engine."
            )
        if any(s in text for s in ("ddress already in use", "cannot listen on", "couldn't bind")):
            return False
        if self.ending.exit == UsageError.exit_code:  # ours, and the usual one of argument parsers
            raise PeerRefusedError(f"{self.peer.name} refused to start: {text or 'it said nothing'}")
        if (self.ending.exit or 0) > 0 and (reason := self._refusal()):
            raise PeerRefusedError(f"{self.peer.name} refused to start: {reason}")
        raise self.failure(f"{self.peer.name} ended with {status_text(self.ending.exit)} before it was ready")

    def _refusal(self) -> str:
        """What its log says that it does not support; empty where it ended for another reason, or for another one as
        well."""
        findings = signatures.find(self.log.read_text(encoding="utf-8", errors="replace").splitlines())
        return findings[0].message if findings and all(f.signature.refusal for f in findings) else ""

    # ---- watch ---------------------------------------------------------------------------------

    @property
    def asker(self) -> Asker:
        assert self._asker is not None, "an engine is asked once it was started"
        return self._asker

    @property
    def pid(self) -> int:
        """The process id of the engine itself, not of its keeper."""
        deadline = time.monotonic() + self.limits.start_s
        while (pid := self._statements().get("pid")) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        assert pid is not None, "an engine that runs has a process"
        return int(pid)

    @property
    def alive(self) -> bool:
        """Whether it runs; an engine at a URL counts as alive."""
        if self._keeper is None:
            return bool(self.launch.url)
        if self._keeper.poll() is not None:
            return False
        pid = self._statements().get("pid")  # None: the keeper is about to start it
        try:
            return pid is None or psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def dies(self, within_s: float = 2.0) -> bool:
        """Whether it is dead, or will be in a moment: a connection breaks before its process is gone."""
        deadline = time.monotonic() + within_s
        while self.alive and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return not self.alive

    def _tree(self) -> Iterator[psutil.Process]:
        if self._keeper is not None:
            with contextlib.suppress(psutil.Error):
                yield from psutil.Process(self._keeper.pid).children(recursive=True)

    def processes(self) -> list[str]:
        """The engine's processes, one line each; kept for diagnostics, since a crash leaves none."""
        lines = []
        for process in self._tree():
            with contextlib.suppress(psutil.Error), process.oneshot():
                memory = process.memory_info().rss >> 20
                command = " ".join(process.cmdline())[:200] or process.name()
                lines.append(f"{process.pid} of {process.ppid()} {process.status()} {memory} MiB: {command}")
        if lines:
            self._seen = lines
        return lines

    def memory_bytes(self) -> int | None:
        """Memory of its processes, shared pages once where the kernel says; None of an engine elsewhere."""
        if self._keeper is None:
            return None
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    total += _proportional(process)
        return total

    def peak_bytes(self) -> int | None:
        """The most memory that each of its processes has had, added up; None of an engine elsewhere, or where the
        kernel does not say."""
        peaks = []
        for process in self._tree() if self._keeper is not None else ():
            with contextlib.suppress(OSError, ValueError, psutil.Error):
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                peaks += [1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
        return sum(peaks) or None

    def zombies(self) -> list[str]:
        """Processes of the engine that ended and that it does not take note of."""
        names = []
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    names.append(f"{process.pid} {process.name()}")
        return names

    def last_words(self, lines: int = 6) -> str:
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.strip().splitlines()[-lines:])[-900:]

    # ---- end -----------------------------------------------------------------------------------

    def failure(self, why: str) -> PeerDiedError:
        """Gathers diagnostics; the error says what happened, its known cause, and where they are."""
        if self.launch.url:
            return PeerDiedError(f"{why}.")
        self.processes()
        folder = self.folder / f"diagnostics-{len(self.diagnostics) + 1}"
        case = Case(
            why, self.log, self.launch.command, self._environment, self._statements(), self._seen, self.asker.last,
            self.folder / API_LOG,
        )  # fmt: skip
        findings = collect(case, folder)
        self.causes += [f for f in findings if f not in self.causes]
        self.diagnostics.append(folder)
        worst = sorted((f.signature for f in findings), key=lambda s: s.refusal)[:1]
        cause = "".join(f"; {s.cause} {s.fix}" for s in worst)
        return PeerDiedError(f"{why}{cause}; diagnostics in {folder}.".replace(".;", ";"))

    def stop(self) -> Ending:
        """Asks it to end, waits, and makes it; nothing of it is left afterwards."""
        if self._asker is not None:
            self._asker.close()
        if self._end_of_life is not None:
            self._end_of_life.cancel()
        process, self._keeper = self._keeper, None
        if process is None:
            return self.ending
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(self.limits.stop_s + keeper.SETTLE_S + keeper.LAST_S + 10.0)
        except subprocess.TimeoutExpired:  # the keeper itself is stopped, or its engine cannot be killed
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
            process.kill()
            process.wait()
        status = self._statements()
        self.ending = Ending(
            status.get("exit"),
            str(status.get("how", "")),
            tuple(status.get("left", ())),
            tuple(status.get("stuck", ())),
        )
        return self.ending

    def _statements(self) -> Mapping[str, Any]:
        try:
            status: dict[str, Any] = json.loads(self._status.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return status

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def status_text(exit: int | None) -> str:
    return "no exit status" if exit is None else f"signal {-exit}" if exit < 0 else f"exit status {exit}"


def _proportional(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.AccessDenied, AttributeError):
        return int(process.memory_info().rss)
