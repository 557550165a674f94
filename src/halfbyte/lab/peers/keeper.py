"""Stands between the lab and an engine that it starts, and outlives neither: nothing an engine started is left behind.

    python keeper.py GRACE_S STATUS_FILE COMMAND…

The engine gets a session, and so a process group, of its own. Whatever it starts, also what it hands to nobody by
forking twice, becomes a child of this process (Linux), which reaps it. When the engine ends, or when this process is
told to (SIGTERM, which the kernel also sends when the lab is gone), the engine is asked first, has GRACE_S seconds, and
is then killed, and with it every process that is left. STATUS_FILE says how it went, as JSON. Runs alone, by its path:
nothing of halfbyte is imported, so that a start costs milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_CHILD_SUBREAPER = 36
TICK_S = 0.02
SETTLE_S = 3.0  # for what ends with an engine
LAST_S = 5.0  # for what is killed to be gone: a process in a driver's call may take a while


class Keeper:
    def __init__(self, grace: float, status: Path, command: list[str]) -> None:
        self.grace, self.status, self.command = grace, status, command
        self.asked_at: float | None = None
        self.exit: int | None = None  # of the engine: a negative one is the signal that ended it
        self.how = "ended by itself"
        self.left: list[str] = []  # what outlived the engine

    def ask(self, sig: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        if self.asked_at is None:
            self.asked_at = time.monotonic()

    def run(self) -> int:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGTERM, self.ask)
        signal.signal(signal.SIGINT, self.ask)
        try:
            engine = subprocess.Popen(self.command, start_new_session=True, stdin=subprocess.DEVNULL)
        except OSError as e:
            self.write(error=f"{self.command[0]} could not be started: {e.strerror or e}")
            return 127
        self.write(pid=engine.pid)
        signalled = False
        while self.exit is None:
            if self.asked_at is not None and not signalled:
                self.how, signalled = "asked to end", True
                _signal_group(engine.pid, signal.SIGTERM)
            if self.asked_at is not None and time.monotonic() - self.asked_at > self.grace and "killed" not in self.how:
                self.how = f"killed: it did not end within {self.grace:g} s of being asked"
                _signal_group(engine.pid, signal.SIGKILL)
            if not self.reap(engine.pid):
                time.sleep(TICK_S)
        self.settle(engine.pid)
        self.left = [f"{pid} {_command_of(pid)}" for pid in _descendants()]
        self.sweep(engine.pid)
        self.write(pid=engine.pid)
        return self.exit if self.exit >= 0 else 128 - self.exit

    def reap(self, engine: int) -> bool:
        """Takes note of one process that has ended, if there is one."""
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == engine:
            self.exit = os.waitstatus_to_exitcode(status)
        return pid != 0

    def settle(self, engine: int) -> None:
        """Helpers that end by themselves when the engine has ended (Python's resource tracker) are not left behind."""
        begun = time.monotonic()
        while time.monotonic() - begun < SETTLE_S and _descendants():
            while self.reap(engine):
                pass
            time.sleep(TICK_S)

    def sweep(self, engine: int) -> None:
        """Ends all that is left: asked first, unless the engine had to be killed."""
        begun = time.monotonic()
        polite = 0.0 if "killed" in self.how else min(self.grace, 2.0)
        if polite:
            for pid in _descendants():
                _signal(pid, signal.SIGTERM)
        while time.monotonic() - begun < polite + LAST_S:
            while self.reap(engine):
                pass
            left = _descendants()
            if not left:
                return
            if time.monotonic() - begun >= polite:
                for pid in left:
                    _signal(pid, signal.SIGKILL)
            time.sleep(TICK_S)

    def write(self, pid: int | None = None, error: str = "") -> None:
        body = {
            "pid": pid, "exit": self.exit, "how": self.how, "left": self.left, "error": error,
            "stuck": [f"{p} {_command_of(p)}" for p in _descendants()] if self.exit is not None else [],
        }  # fmt: skip
        part = self.status.with_name(self.status.name + ".part")
        part.write_text(json.dumps(body), encoding="utf-8")
        part.replace(self.status)


def _signal(pid: int, sig: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


def _signal_group(pid: int, sig: int) -> None:
    try:
        os.killpg(pid, sig)
    except (ProcessLookupError, PermissionError):
        _signal(pid, sig)


def _descendants() -> list[int]:
    """All processes below this one that still run."""
    parents: dict[int, list[int]] = {}
    try:
        entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for pid in entries:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        if state != "Z":
            parents.setdefault(int(parent), []).append(pid)
    descendants: list[int] = []
    todo = [os.getpid()]
    while todo:
        children = parents.get(todo.pop(), [])
        descendants += children
        todo += children
    return descendants


def _command_of(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return "(gone)"
    return command.decode(errors="replace").strip()[:200]


if __name__ == "__main__":
    sys.exit(Keeper(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]).run())
