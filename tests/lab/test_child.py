"""A child ends with its parent, also when the parent is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

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
