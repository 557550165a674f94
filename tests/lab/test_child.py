"""A child ends with its parent, also when the parent is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

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
