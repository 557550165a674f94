"""A process that does not outlive the one that started it, however that ends: no measurement leaves a server behind.

The kernel sends the signal (Linux). Elsewhere a parent that is killed leaves its child, and an orderly end stops it.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.errors import PeerError
from halfbyte.lab.peers import keeper

PR_SET_PDEATHSIG = 1
GRACE_S = 0.5  # that a process has between being asked to end and being killed
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    assert _LIBC is not None
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a child like `subprocess.Popen`. Start it from a thread that lives as long as it should."""
    return subprocess.Popen(command, preexec_fn=_end_with_parent if _LIBC is not None else None, **options)


def run_child(command: Sequence[str], **options: Any) -> int:
    """Its exit status. It ends with all that it started, a build with its compilers, when this process is interrupted,
    and also when this process is killed: the keeper between them sees to that."""
    with tempfile.TemporaryDirectory(prefix="halfbyte-child-") as folder:
        status = Path(folder, "status")
        keeper_command = [sys.executable, str(keeper.__file__), str(GRACE_S), str(status), *map(str, command)]
        process = start_child(keeper_command, start_new_session=True, **options)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        error = json.loads(status.read_text(encoding="utf-8"))["error"] if status.exists() else ""
    if error:
        raise PeerError(f"{error}.")
    return code


def output_of(command: Sequence[str], *, may_fail: bool = False, env: Mapping[str, str] | None = None) -> str:
    """What a process printed. One that failed has its last words in the error, unless its output says why itself."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        code = run_child(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=env)
        out.seek(0)
        err.seek(0)
        text = out.read()
        if code and not (may_fail and text.strip()):
            raise PeerError(f"`{' '.join(map(str, command[:3]))} …` ended with {code}: {err.read()[-600:].strip()}")
        return text
