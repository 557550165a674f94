"""The engine in a process of its own, as a TokenSource. Whatever happens to it, every waiting request is told.

A process that dies or hangs fails the requests it had with EngineDiedError and is started again, after pauses that grow
as long as no life of it lasts. After `restarts` such lives in a row the source is gone: it says why, and whoever serves
it should end. A process that dies before it was ever ready is not restarted: it would only die again.

Hung is a process that, while requests wait, gives no sign of life for `hang` seconds. A step is one; so is the word,
every second, that the process itself works: loads, compiles, captures or, on a CPU, computes. That alone is believed
for `longest` seconds; loading has `hang_loading` between two signs, because imports come before the first. Time in
which this process did not run either does not count.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halfbyte.engine import messages
from halfbyte.engine.checked import checked
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Delta, EngineStats, Request, SourceHealth, SourceInfo
from halfbyte.errors import CapacityError, EngineDiedError, HalfbyteError
from halfbyte.gates import child_environment

log = logging.getLogger("halfbyte")

DEFAULT_FACTORY = "halfbyte.engine.worker:build"


@dataclass
class _Waiting:
    queue: asyncio.Queue[Delta | HalfbyteError]
    choices: int
    closed: set[int] = field(default_factory=set)


class EngineProcess:
    """`await EngineProcess.start(options)`; then `stream`, `stats`, `close` as TokenSource says."""

    def __init__(
        self, factory: str, argument: Any, *, hang: float = 30.0, hang_loading: float = 60.0,
        longest: float = 600.0, restarts: int = 8, first_pause: float = 0.25, settled: float = 30.0,
        progress: Callable[[str], None] | None = None, log_format: str = "text",
    ) -> None:  # fmt: skip
        """`settled`: seconds of service after which a death is the first in a row again. `progress` is told what the
        process does while it loads; `log_format` is that of its log lines."""
        self._start = messages.Start(factory, argument)
        self._progress = progress
        self._log_format = log_format
        self._hang, self._hang_loading, self._longest = hang, hang_loading, longest
        self._restarts, self._first_pause, self._settled = restarts, first_pause, settled
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._info: SourceInfo | None = None
        self._stats = EngineStats()
        self._ready_at: float | None = None  # since when requests are taken
        self._trouble = "the engine is still loading"
        self._gone = False
        self._closing = asyncio.Event()
        self._hung = ""  # why the watchdog killed the process
        self._last_step = self._last_sign = time.monotonic()
        self._started: asyncio.Future[None] | None = None
        self.deaths = 0
        self._in_a_row = 0

    @classmethod
    async def start(cls, options: EngineOptions, **bounds: Any) -> EngineProcess:
        """Spawns the process and returns once the model is loaded, or raises what loading raised."""
        self = cls(DEFAULT_FACTORY, options, **bounds)
        await self.open()
        return self

    async def open(self) -> None:
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="halfbyte-engine-process")
        self._watch = asyncio.create_task(self._watchdog(), name="halfbyte-engine-watchdog")
        try:
            await self._started
        except BaseException:
            await self.close()
            raise

    # ---- TokenSource --------------------------------------------------------------------------

    @property
    def info(self) -> SourceInfo:
        assert self._info is not None, "info is known once start() has returned"
        return self._info

    @property
    def ready(self) -> bool:
        return self._ready_at is not None and not self._closing.is_set()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def stats(self) -> EngineStats:
        return self._stats

    def health(self) -> SourceHealth:
        if not self.ready:
            return SourceHealth(self._trouble, self._gone)
        return SourceHealth(since_step=time.monotonic() - self._last_step if self._waiting else None)

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        request = checked(request)
        if not self.ready:
            raise (EngineDiedError if self._gone else CapacityError)(f"{self._trouble}; try again later.")
        if request.id in self._waiting:
            raise CapacityError(f"a request with the id {request.id!r} is already running; ids must differ.")
        waiting = _Waiting(asyncio.Queue(), request.sampling.n)
        if not self._waiting:
            self._last_step = self._last_sign = time.monotonic()
        self._waiting[request.id] = waiting
        ended = False
        try:
            self._send(messages.Submit(request))
            while len(waiting.closed) < waiting.choices:
                item = await waiting.queue.get()
                if isinstance(item, HalfbyteError):
                    ended = True
                    raise item
                if item.finish is not None:
                    waiting.closed.add(item.index)
                yield item
            ended = True
        finally:
            if self._waiting.get(request.id) is waiting:
                del self._waiting[request.id]
            if not ended and self._ready_at is not None:
                self._send(messages.Cancel([request.id]))

    async def close(self) -> None:
        """Stop the process, tell whoever still waits, and leave nothing behind."""
        self._closing.set()
        if not self._gone:
            self._trouble = "the engine is shutting down"
        self._send(messages.Stop())
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None:
            for _ in range(100):
                if self._process.poll() is not None:
                    break
                await asyncio.sleep(0.05)
            else:
                self._process.kill()
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task
        self._fail_waiting("the engine was shut down")

    def end(self, why: str) -> None:
        """As if it had died of that: whoever waits is told so, and no other life follows."""
        self._restarts, self._hung = 0, why
        if self._process is not None:
            self._process.kill()

    # ---- the process --------------------------------------------------------------------------

    def _send(self, message: messages.ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(messages.frame(message))

    async def _run(self) -> None:
        """One round per life of the process."""
        while True:
            error = await self._run_once()
            ready_at, self._ready_at = self._ready_at, None
            if self._closing.is_set():
                return
            self.deaths += 1
            assert self._started is not None
            if not self._started.done():
                self._started.set_exception(error)
                return
            lasted = ready_at is not None and time.monotonic() - ready_at >= self._settled
            self._in_a_row = 1 if lasted else self._in_a_row + 1
            why = str(error).rstrip(".")
            self._gone = self._in_a_row > self._restarts
            if self._gone:
                self._trouble = f"the engine died {self._in_a_row} times in a row and is not started again: {why}"
            else:
                self._trouble = f"the engine is being started again ({self._in_a_row} of {self._restarts}): {why}"
            self._fail_waiting(why)
            log.error("%s", self._trouble)
            if self._gone:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._first_pause * 2 ** (self._in_a_row - 1))
                return

    async def _run_once(self) -> HalfbyteError:
        """Start the process and read what it says until it is gone; returns why it went."""
        self._hung = ""
        self._last_step = self._last_sign = time.monotonic()
        try:
            process, ours = _spawn(self._log_format)
            self._process = process
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        except OSError as e:
            return EngineDiedError(f"the engine's process could not be started ({e}).")
        self._writer.write(messages.frame(self._start))
        died: HalfbyteError | None = None
        frames = messages.Frames()
        try:
            while data := await reader.read(1 << 20):
                for body in frames.feed(data):
                    died = self._handle(messages.decode_from_engine(body)) or died
        except (ConnectionResetError, BrokenPipeError, msgspec.DecodeError) as e:
            log.debug("reading from the engine ended: %s", e)
        finally:
            self._writer.close()
            self._writer = None
        code = await _reap(process)
        end = f"signal {-code}" if code < 0 else f"exit status {code}"
        return died or EngineDiedError(self._hung or f"the engine process ended unexpectedly ({end}).")

    def _handle(self, message: messages.FromEngine) -> HalfbyteError | None:
        self._last_sign = time.monotonic()
        if isinstance(message, messages.Stepped):
            if message.stats is not None:
                self._stats = message.stats
            self._last_step = self._last_sign
            for id, delta in message.outputs:
                waiting = self._waiting.get(id)
                if waiting is not None:
                    waiting.queue.put_nowait(delta)
        elif isinstance(message, messages.Ready):
            self._info, self._ready_at = message.info, self._last_sign
            assert self._started is not None
            if not self._started.done():
                self._started.set_result(None)
        elif isinstance(message, messages.Refused):
            waiting = self._waiting.get(message.id)
            if waiting is not None:
                waiting.queue.put_nowait(messages.error_of(message.error, message.text))
        elif isinstance(message, messages.Working):
            if self._ready_at is None and message.doing:
                self._trouble = f"the engine is still loading ({message.doing})"
                if self._progress is not None:
                    self._progress(message.doing)
        elif isinstance(message, messages.Died):
            return messages.error_of(message.error, message.text)
        return None

    def _fail_waiting(self, why: str) -> None:
        """Fail everyone who waits. A typed death (out of memory, say) reaches them as an engine that died."""
        error = EngineDiedError(f"{why}; this request was lost.")
        for waiting in self._waiting.values():
            waiting.queue.put_nowait(error)
        self._waiting.clear()
        self._stats = EngineStats()

    async def _watchdog(self) -> None:
        tick = min(1.0, self._hang / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(tick)
            now = time.monotonic()
            if now - before > 2 * tick:  # nobody ran, or this loop was kept from it: nothing is known of the engine
                self._last_step += now - before
                self._last_sign += now - before
                continue
            if (why := self._stands_still(now)) and self._process is not None:
                self._hung = why
                self._process.kill()
                self._last_step = self._last_sign = now

    def _stands_still(self, now: float) -> str:
        """Why the process counts as hung; empty if it does not."""
        silent, step = now - self._last_sign, now - self._last_step
        if self._process is None or self._writer is None:
            return ""
        if self._ready_at is None:
            return f"the engine stood still for {silent:.0f} s while it loaded." if silent > self._hang_loading else ""
        if not self._waiting or (silent <= self._hang and step <= self._longest):
            return ""
        return f"the engine hung: it made no step for {step:.0f} s while requests waited."


def _spawn(log_format: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process and this end of its socket."""
    ours, theirs = socket.socketpair()
    try:
        messages.enlarge_buffers(ours)
        process = subprocess.Popen(
            [sys.executable, "-m", "halfbyte.engine.worker", str(theirs.fileno()), log_format],
            pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=child_environment(PYTHONPATH=_import_path()),
            start_new_session=True,
        )  # fmt: skip
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def _import_path() -> str:
    """Where this package was imported from, first, so that the process runs the same code."""
    return os.pathsep.join(p for p in [*sys.path] if p)


async def _reap(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end; a process whose socket is closed but which does not end is killed."""
    for _ in range(200):
        code = process.poll()
        if code is not None:
            return code
        await asyncio.sleep(0.05)
    process.kill()
    return process.wait()
