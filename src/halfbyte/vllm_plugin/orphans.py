"""Ends a vLLM process when its parent process is gone.

vLLM's workers have a thread that asks them to stop when their parent is gone. A worker that waits in a collective
operation for a lost node never handles that request and keeps its GPU memory. This module does not import vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

GRACE_S = 10.0  # for vLLM's own shutdown
_watched: list[threading.Thread] = []


def end_with_parent(grace_s: float = GRACE_S) -> None:
    """Start the watching thread once per process, and only in a process that multiprocessing started."""
    parent = multiprocessing.parent_process()
    if parent is None or _watched:
        return
    _watched.append(threading.Thread(target=_watch, args=(parent, grace_s), name="halfbyte-parent", daemon=True))
    _watched[0].start()


def _watch(parent: BaseProcess, grace_s: float) -> None:
    wait([parent.sentinel])
    time.sleep(grace_s)
    print(
        f"halfbyte: the parent of vLLM process {os.getpid()} is gone; ending this process.",
        file=sys.stderr,
    )
    os._exit(1)
