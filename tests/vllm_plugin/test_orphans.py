"""Workers whose parent was killed do not stay behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

# A parent that starts a worker, which says its number and then waits for ever where no signal of Python's is seen.
PROGRAM = """
import multiprocessing, sys, threading, time

def work(guarded):
    from halfbyte.vllm_plugin.orphans import end_with_parent
    if guarded:
        end_with_parent(0.2)
        end_with_parent(0.2)
    print(multiprocessing.current_process().pid, threading.active_count(), flush=True)
    threading.Lock().acquire() and threading.Event().wait()

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[1] == "guarded",)).start()
    time.sleep(600)
"""


def start(tmp_path: Path, how: str) -> tuple[subprocess.Popen[str], psutil.Process, int]:
    script = tmp_path / "parent.py"
    script.write_text(PROGRAM, encoding="utf-8")
    parent = subprocess.Popen([sys.executable, str(script), how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        number, threads = parent.stdout.readline().split()
    return parent, psutil.Process(int(number)), int(threads)


def test_a_worker_ends_when_its_parent_was_killed(tmp_path: Path) -> None:
    parent, worker, threads = start(tmp_path, "guarded")
    try:
        assert threads == 2  # one that watches, though it was asked for twice
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(60)
        gone, _ = psutil.wait_procs([worker], 60)
        assert gone
    finally:
        parent.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()


def test_without_it_the_worker_stays(tmp_path: Path) -> None:
    parent, worker, _ = start(tmp_path, "alone")
    try:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(60)
        with pytest.raises(psutil.TimeoutExpired):
            worker.wait(1)
    finally:
        worker.kill()


def test_a_process_of_its_own_is_left_alone() -> None:
    from halfbyte.vllm_plugin import orphans

    orphans.end_with_parent()
    assert not orphans._watched
