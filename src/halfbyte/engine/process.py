"""The engine in a process of its own, as a TokenSource. Whatever happens to it, every waiting request gets an answer.

If the process dies or hangs, its requests fail with EngineDiedError and it is started again, after pauses that grow
until one process has served for a while. After `restarts` deaths in a row the source is gone for good: `health` says
why, and the server should exit. A process that dies before it was ever ready is not restarted: it would die again.

A process hangs if it gives no sign of life for `hang` seconds while requests wait. A sign of life is a step, or a
message, sent every second, that the process is busy: loading, compiling, capturing or, on a CPU, computing. Without a
step such messages count for `longest` seconds at most. While it loads, `hang_loading` seconds may pass between two
signs, because the imports come before the first. Time in which this process did not run either does not count.
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
        """`settled`: seconds of service after which deaths are counted from one again. `progress` receives descriptions
        of the process's work while it loads. `log_format` is the format of its log lines."""
        self._start = messages.Start(factory, argument)
        self._progress = progress
        self._log_format = log_format
        self._hang, self._hang_loading, self._longest = hang, hang_loading, longest
        self._restarts, self._first_pause, self._settled = restarts, first_pause, settled
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._hang_watch: asyncio.Task[None] | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._info: SourceInfo | None = None
        self._stats = EngineStats()
        self._ready_at: float | None = None  # since when it accepts requests
        self._trouble = "the engine is still loading"
        self._gone = False
        self._closing = asyncio.Event()
        self._kill_reason = ""  # why this side killed the process
        self._last_step = self._last_sign = time.monotonic()
        self._started: asyncio.Future[None] | None = None
        self.deaths = 0
        self._in_a_row = 0

    @classmethod
    async def start(cls, options: EngineOptions, **bounds: Any) -> EngineProcess:
        """Start the process and return once the model is loaded. Raises the error that loading raised."""
        self = cls(DEFAULT_FACTORY, options, **bounds)
        await self.open()
        return self

    async def open(self) -> None:
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="halfbyte-engine-process")
        self._hang_watch = asyncio.create_task(self._watch_for_hangs(), name="halfbyte-engine-hang-watch")
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
        """Stop the process and fail the requests that still wait."""
        self._closing.set()
        if not self._gone:
            self._trouble = "the engine is shutting down"
        self._send(messages.Stop())
        if self._hang_watch is not None:
            self._hang_watch.cancel()
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
        """Kill the engine for good: fail every waiting request with this reason and do not restart."""
        self._restarts, self._kill_reason = 0, why
        if self._process is not None:
            self._process.kill()

    # ---- the process --------------------------------------------------------------------------

    def _send(self, message: messages.ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(messages.frame(message))

    async def _run(self) -> None:
        """Start the process again and again, until it dies too often or is closed."""
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
        """Start the process and read its messages until it is gone; returns the reason."""
        self._kill_reason = ""
        self._last_step = self._last_sign = time.monotonic()
        try:
            process, parent_socket = _spawn(self._log_format)
            self._process = process
            reader, self._writer = await asyncio.open_unix_connection(sock=parent_socket)
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
        return died or EngineDiedError(self._kill_reason or f"the engine process ended unexpectedly ({end}).")

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
        """Fail every waiting request. Whatever error ended the process, they get EngineDiedError."""
        error = EngineDiedError(f"{why}; this request was lost.")
        for waiting in self._waiting.values():
            waiting.queue.put_nowait(error)
        self._waiting.clear()
        self._stats = EngineStats()

    async def _watch_for_hangs(self) -> None:
        tick = min(1.0, self._hang / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(tick)
            now = time.monotonic()
            if now - before > 2 * tick:  # this process did not run either: that says nothing about the engine
                self._last_step += now - before
                self._last_sign += now - before
                continue
            if (why := self._stands_still(now)) and self._process is not None:
                self._kill_reason = why
                self._process.kill()
                self._last_step = self._last_sign = now

    def _stands_still(self, now: float) -> str:
        """The reason why the process counts as hung; empty if it does not."""
        silent, step = now - self._last_sign, now - self._last_step
        if self._process is None or self._writer is None:
            return ""
        if self._ready_at is None:
            if silent <= self._hang_loading:
                return ""
            return f"the engine hung: it gave no sign of life for {silent:.0f} s while it loaded."
        if not self._waiting or (silent <= self._hang and step <= self._longest):
            return ""
        return f"the engine hung: it made no step for {step:.0f} s while requests waited."


def _spawn(log_format: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process; returns it and the parent's end of its socket."""
    parent, child = socket.socketpair()
    try:
        messages.enlarge_buffers(parent)
        process = subprocess.Popen(
            [sys.executable, "-m", "halfbyte.engine.worker", str(child.fileno()), log_format],
            pass_fds=(child.fileno(),), stdin=subprocess.DEVNULL, env=child_environment(PYTHONPATH=_import_path()),
            start_new_session=True,
        )  # fmt: skip
    except BaseException:
        parent.close()
        raise
    finally:
        child.close()
    return process, parent


def _import_path() -> str:
    """The import path of this process, so that the child runs the same code."""
    return os.pathsep.join(p for p in [*sys.path] if p)


async def _reap(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process to end; kill it if it does not, because its socket is closed."""
    for _ in range(200):
        code = process.poll()
        if code is not None:
            return code
        await asyncio.sleep(0.05)
    process.kill()
    return process.wait()
