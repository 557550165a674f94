"""The engine's own process: `python -m halfbyte.engine.worker FD FORMAT`, with a socket to its parent as file FD, its
log lines as text or json.

The first message names the function that builds the core and its argument; then requests come in, and one message
goes out per step. When the parent is gone the socket closes and this process ends: it never becomes an orphan.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from halfbyte import log_lines
from halfbyte.engine import messages
from halfbyte.engine.request import EngineStats, Output, SourceInfo
from halfbyte.errors import EngineDiedError, EngineError, HalfbyteError

if TYPE_CHECKING:  # they import torch, which takes long: signs of life come first
    from halfbyte.engine.loop import Ask, Core

log = logging.getLogger("halfbyte")

PULSE_S = 1.0  # seconds between two signs of life

Report = Callable[[str], None]  # receives a description of the current work
CoreFactory = Callable[[Any, Report], "tuple[Core, SourceInfo]"]


def build(argument: Any, report: Report) -> tuple[Core, SourceInfo]:
    """Build a core and warm it up (`warm_up.py`), as the options say."""
    from halfbyte.engine.build import build_core  # here, because it imports torch and the model
    from halfbyte.engine.options import EngineOptions
    from halfbyte.engine.warm_up import warm_up

    options = msgspec.convert(argument, EngineOptions)
    core, info, _ = build_core(options)
    seconds = warm_up(core, options.warm_up, lambda name, done, of: report(f"warming up, {done} of {of}: {name}"))
    core = core.anew()
    if options.record is not None:
        from halfbyte.engine.record_file import write_record

        atexit.register(write_record, core, info, options.record)  # however the loop ends
    info.details["warm_up"] = {"level": options.warm_up, "seconds": round(sum(seconds.values()), 1)}
    log.info("warm-up %s took %.1f s", options.warm_up, sum(seconds.values()))
    return core, info


class Worker:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._frames = messages.Frames()
        self._pending: list[bytes] = []
        self._core: Core | None = None
        self._sending = threading.Lock()
        self._doing = ""  # while it loads

    def send(self, message: messages.FromEngine) -> None:
        with self._sending:
            self.sock.sendall(messages.frame(message))

    def pulse(self) -> None:
        """Send signs of life while the model loads and while this process works on a step, which may take long. None is
        sent while it waits for a GPU."""
        wait = threading.Event()
        while not wait.wait(PULSE_S):
            if self._core is None or self._core.working or self._core.waits_for_grammars:
                try:
                    self.send(messages.Working(self._doing))
                except OSError:
                    return  # the parent is gone

    def report(self, doing: str) -> None:
        self._doing = doing

    def start_message(self) -> messages.Start:
        while not self._pending:
            data = self.sock.recv(1 << 20)
            if not data:
                sys.exit(0)
            self._pending += self._frames.feed(data)
        return messages.decode_start(self._pending.pop(0))

    def receive(self, wait: bool) -> list[Ask]:
        asks: list[Ask] = []
        while True:
            for body in self._pending:
                message = messages.decode_to_engine(body)
                if isinstance(message, messages.Submit):
                    asks.append(message.request)
                elif isinstance(message, messages.Cancel):
                    asks += message.ids
                else:
                    asks.append(None)
            self._pending = []
            if not select.select([self.sock], [], [], None if wait and not asks else 0)[0]:
                return asks
            data = self.sock.recv(1 << 20)
            if not data:
                return [*asks, None]
            self._pending = self._frames.feed(data)

    def refuse(self, id: str, error: HalfbyteError) -> None:
        self.send(messages.Refused(id, type(error).__name__, str(error)))

    def deliver(self, outputs: list[Output], stats: EngineStats | None) -> None:
        self.send(messages.Stepped(outputs, stats))

    def run(self, core: Core, info: SourceInfo) -> None:
        from halfbyte.engine.loop import EngineLoop

        self._core = core
        gc.collect()
        gc.freeze()  # what loading left lives as long as this process, so collections between steps can skip it
        self.send(messages.Ready(info))
        EngineLoop(core, self.receive, self.refuse, self.deliver).run()


def main(fd: int, log_format: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the socket
    if log_format == "json":
        log_lines.use_json("engine")
    else:
        logging.basicConfig(level=logging.INFO, format="%(name)s[engine] %(levelname)s %(message)s")
    sock = socket.socket(fileno=fd)
    messages.enlarge_buffers(sock)
    worker = Worker(sock)
    try:
        start = worker.start_message()
        threading.Thread(target=worker.pulse, name="halfbyte-pulse", daemon=True).start()
        module, _, function = start.factory.partition(":")
        factory: CoreFactory = getattr(importlib.import_module(module), function)
        worker.run(*factory(start.argument, worker.report))
        return 0
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the parent is gone
    except Exception as e:
        typed = isinstance(e, HalfbyteError)
        if not typed:
            log.exception("the engine died")
        name = type(e).__name__ if typed else EngineError.__name__
        text = str(e) if typed else f"the engine died of {type(e).__name__}: {str(e)[:300]}."
        try:
            worker.send(messages.Died(name, text))
        except OSError:
            log.error("%s", text)
        if isinstance(e, EngineDiedError):  # a dead GPU's context cannot be shut down in order
            sys.stderr.flush()
            os._exit(1)
        return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
