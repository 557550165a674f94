"""The `halfbyte` command. Every subcommand has --json; a user's mistake is one sentence and exit code 2."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["main"]

INTERRUPTED = 130


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    replaced = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if replaced:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from halfbyte.cli import app  # takes a while, and Ctrl-C must not print a traceback meanwhile

        app.main()
    finally:
        if replaced:
            signal.signal(signal.SIGINT, before)


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Ctrl-C within an import ends the program at once. Modules of native code lose the exception that Python raises
    there, and nothing that an import could leave behind needs to be tidied up."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
