"""A process that vLLM started ends with the one that started it.

vLLM's workers have a thread that asks them to stop when their parent is gone. One that waits in a collective operation
for a node that is gone as well never hears it, and keeps its memory, on a GPU too. Needs no vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

GRACE_S = 10.0  # for vLLM's own way to end
_watched: list[threading.Thread] = []


def end_with_parent(grace_s: float = GRACE_S) -> None:
    """Once in a process, however often it is called; nothing in one that multiprocessing did not start."""
    parent = multiprocessing.parent_process()
    if parent is None or _watched:
        return
    _watched.append(threading.Thread(target=_watch, args=(parent, grace_s), name="halfbyte-parent", daemon=True))
    _watched[0].start()


def _watch(parent: BaseProcess, grace_s: float) -> None:
    wait([parent.sentinel])
    time.sleep(grace_s)
    print(
        f"halfbyte: the process that started process {os.getpid()} of vLLM's is gone, so this one ends.",
        file=sys.stderr,
    )
    os._exit(1)
