"""A child ends with its parent, also when the parent is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from halfbyte.errors import PeerError
from halfbyte.lab.child import run_child

PARENT = """
import subprocess, sys, time
from halfbyte.lab.child import start_child
child = start_child([sys.executable, "-c", "import time; time.sleep(300)"])
print(child.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux sends the signal")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_does_not_outlive_its_parent(end: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.send_signal(end)
        parent.wait()
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.05)


def test_an_interrupted_child_takes_its_children_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a build is interrupted, whose compilers are children of its children."""
    said, original = tmp_path / "pid", subprocess.Popen.wait
    interrupted: list[bool] = []

    def wait(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if not interrupted:
            while not (said.exists() and said.read_text().strip()):
                time.sleep(0.02)
            interrupted.append(True)
            raise KeyboardInterrupt
        return original(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        run_child(["sh", "-c", f"sleep 300 & echo $! > {said}; wait"])
    pid = int(said.read_text())
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the grandchild lives on"
        time.sleep(0.05)


BUILD = """
import sys
from halfbyte.lab.child import run_child
run_child(["sh", "-c", f"sh -c 'echo $$ > {sys.argv[1]}; exec sleep 300' & wait"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux sends the signal")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_no_grandchild(end: signal.Signals, tmp_path: Path) -> None:
    """As `check --engine llama.cpp` is killed within a build: the compilers are children of its child."""
    said = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", BUILD, str(said)]) as parent:
        while not (said.exists() and said.read_text().strip()):
            assert parent.poll() is None
            time.sleep(0.02)
        compiler = psutil.Process(int(said.read_text()))
        parent.send_signal(end)
        parent.wait()
    deadline = time.monotonic() + 30
    while compiler.is_running() and compiler.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the grandchild lives on"
        time.sleep(0.05)


def test_a_child_that_cannot_start_and_one_that_fails(tmp_path: Path) -> None:
    assert run_child(["sh", "-c", "exit 3"]) == 3
    with pytest.raises(PeerError, match="no-such-program"):
        run_child([str(tmp_path / "no-such-program")])
