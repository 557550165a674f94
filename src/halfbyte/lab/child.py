"""A process that does not outlive the one that started it, however that ends: no measurement leaves a server behind.

The kernel sends the signal (Linux). Elsewhere a parent that is killed leaves its child, and an orderly end stops it.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    assert _LIBC is not None
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """As `subprocess.Popen`. Start it from a thread that lives as long as it should."""
    return subprocess.Popen(command, preexec_fn=_end_with_parent if _LIBC is not None else None, **options)


def run_child(command: Sequence[str], **options: Any) -> int:
    """Its exit status; one that is interrupted is killed."""
    process = start_child(command, **options)
    try:
        return process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
