"""The engine in a process of its own, as a TokenSource. Whatever happens to it, every waiting request is told.

A process that dies, or that steps no further for `hang` seconds while requests wait, fails the requests it had with
EngineDiedError and is started again, at most `restarts` times within `window` seconds; then the source stays not
ready and says why. A process that dies before it was ever ready is not restarted: it would only die again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halfbyte.engine import messages
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Delta, EngineStats, Request, SourceInfo
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
        self, factory: str, argument: Any, *, restarts: int = 3, window: float = 600.0, hang: float = 600.0
    ) -> None:
        self._start = messages.Start(factory, argument)
        self._restarts, self._window, self._hang = restarts, window, hang
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._info: SourceInfo | None = None
        self._stats = EngineStats()
        self._ready = False
        self._closing = False
        self._not_ready_reason = "the engine is still loading"
        self._starts: deque[float] = deque()
        self._last_step = time.monotonic()
        self._started: asyncio.Future[None] | None = None
        self.deaths = 0

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
        return self._ready and not self._closing

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def stats(self) -> EngineStats:
        return self._stats

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        if not self.ready:
            raise CapacityError(f"{self._not_ready_reason}; try again later.")
        if request.id in self._waiting:
            raise CapacityError(f"a request with the id {request.id!r} is already running; ids must differ.")
        waiting = _Waiting(asyncio.Queue(), request.sampling.n)
        self._waiting[request.id] = waiting
        if len(self._waiting) == 1:
            self._last_step = time.monotonic()
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
            if not ended and self._ready:
                self._send(messages.Cancel([request.id]))

    async def close(self) -> None:
        """Stop the process, tell whoever still waits, and leave nothing behind."""
        self._closing = True
        self._not_ready_reason = "the engine is shutting down"
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
        self._fail_waiting(EngineDiedError("the engine was shut down before this request ended."))

    # ---- the process --------------------------------------------------------------------------

    def _send(self, message: messages.ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(messages.frame(message))

    async def _run(self) -> None:
        """One round per life of the process."""
        while True:
            text = await self._run_once()
            was_ready, self._ready = self._ready, False
            if self._closing:
                return
            self.deaths += 1
            assert self._started is not None
            if not self._started.done():
                self._started.set_exception(text)
                return
            self._fail_waiting(text)
            log.error("%s", text)
            now = time.monotonic()
            while self._starts and now - self._starts[0] > self._window:
                self._starts.popleft()
            if not was_ready or len(self._starts) > self._restarts:
                self._not_ready_reason = f"the engine died {self.deaths} times and is not started again ({text})"
                log.error("%s", self._not_ready_reason)
                return
            self._not_ready_reason = "the engine died and is being restarted"
            await asyncio.sleep(min(5.0, 0.1 * 2 ** len(self._starts)))

    async def _run_once(self) -> HalfbyteError:
        """Start the process and read what it says until it is gone; returns why it went."""
        ours, theirs = socket.socketpair()
        messages.enlarge_buffers(ours)
        self._starts.append(time.monotonic())
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "halfbyte.engine.worker", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=child_environment(PYTHONPATH=_import_path()),
            start_new_session=True,
        )  # fmt: skip
        theirs.close()
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
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
            if died is None and not self._closing:
                await asyncio.sleep(0)
        code = await _reap(process)
        end = f"signal {-code}" if code < 0 else f"exit status {code}"
        return died or EngineDiedError(f"the engine process ended unexpectedly ({end}); the request was lost.")

    def _handle(self, message: messages.FromEngine) -> HalfbyteError | None:
        if isinstance(message, messages.Stepped):
            self._stats = message.stats
            self._last_step = time.monotonic()
            for id, delta in message.outputs:
                waiting = self._waiting.get(id)
                if waiting is not None:
                    waiting.queue.put_nowait(delta)
        elif isinstance(message, messages.Ready):
            self._info, self._ready = message.info, True
            assert self._started is not None
            if not self._started.done():
                self._started.set_result(None)
        elif isinstance(message, messages.Refused):
            waiting = self._waiting.get(message.id)
            if waiting is not None:
                waiting.queue.put_nowait(messages.error_of(message.error, message.text))
        else:
            return messages.error_of(message.error, message.text)
        return None

    def _fail_waiting(self, error: HalfbyteError) -> None:
        """Fail everyone who waits. A typed death (out of memory, say) reaches them as an engine that died."""
        if not isinstance(error, EngineDiedError):
            error = EngineDiedError(str(error))
        for waiting in self._waiting.values():
            waiting.queue.put_nowait(error)
        self._waiting.clear()
        self._stats = EngineStats()

    async def _watchdog(self) -> None:
        while True:
            await asyncio.sleep(min(5.0, self._hang / 4))
            stuck = time.monotonic() - self._last_step
            if self._ready and self._waiting and stuck > self._hang and self._process is not None:
                log.error("the engine has not stepped for %.0f s while requests wait; it is killed", stuck)
                self._process.kill()
                self._last_step = time.monotonic()


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
