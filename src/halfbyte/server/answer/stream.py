"""Tokens on their way out: a pump between engine and client, stop strings, and the streaming HTTP answer.

The pump never makes the engine wait for a client, and under load hands over several steps at once, so that the cost
of a chunk is shared by its tokens. A client that goes away closes the engine's iterator, which cancels the request.
Nothing here knows what the bytes of an event mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from halfbyte.engine.request import Delta
from halfbyte.server.http import sse

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class Pump:
    """Reads an engine's deltas as they come; `take` returns all that arrived since the last call."""

    def __init__(self, deltas: AsyncIterator[Delta]) -> None:
        self._deltas = deltas
        self._pending: list[Delta] = []
        self._wake: asyncio.Future[None] | None = None
        self._ended = False
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._run(), name="pump")

    async def _run(self) -> None:
        try:
            async for delta in self._deltas:
                self._pending.append(delta)
                if self._wake is not None:
                    self._rouse()
        except Exception as e:
            self._error = e
        finally:
            self._ended = True
            self._rouse()

    def _rouse(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def take(self) -> list[Delta] | None:
        """What has arrived, waiting for something if nothing has; None at the end. Raises what the engine raised."""
        while not self._pending:
            if self._ended:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                return None
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        taken, self._pending = self._pending, []
        return taken

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        close = getattr(self._deltas, "aclose", None)
        if close is not None:
            await close()


class Pacer:
    """How long a stream waits before it sends again. Nothing while few are active; then in step with how many.

    Sixty-four streams at 160 tokens a second each are 10,240 chunks if every token travels alone, 2,000 if each stream
    sends every 32 ms; a reader notices neither.
    """

    FREE = 8  # streams that are never held back
    PER_STREAM = 0.0005
    LONGEST = 0.1

    def __init__(self) -> None:
        self.active = 0

    @property
    def interval(self) -> float:
        if self.active <= self.FREE:
            return 0.0
        return min(self.LONGEST, self.active * self.PER_STREAM)

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[None]:
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces; holds back only what could still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.matched: str | None = None
        self._held = ""
        self._longest = max((len(s) for s in stops), default=0)

    def feed(self, text: str) -> str:
        """The text that may be shown now. After a match, nothing more."""
        if self.matched is not None:
            return ""
        if not self.stops:
            return text
        text = self._held + text
        first, which = len(text), None
        for stop in self.stops:
            at = text.find(stop)
            # The earliest wins; of two at one place the longer, whose text is the less likely accident.
            if at >= 0 and (at < first or (at == first and which is not None and len(stop) > len(which))):
                first, which = at, stop
        if which is not None:
            self.matched, self._held = which, ""
            return text[:first]
        keep = 0
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self.stops):
                keep = size
                break
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep] if keep else text

    def flush(self) -> str:
        """The end came before any match: what was held back was only text."""
        held, self._held = self._held, ""
        return held if self.matched is None else ""


class EventStream(Response):
    """A server-sent event answer written straight to ASGI.

    `chunks` yields ready bytes; a comment is sent whenever it is silent for `keepalive` seconds, so that no proxy gives
    up during a long prompt. When the client leaves, the iterator is closed, wherever it waits.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], *, keepalive: float, headers: dict[str, str] | None = None
    ) -> None:
        self.chunks = chunks
        self.keepalive = keepalive
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",  # nginx would hold the tokens back
                **(headers or {}),
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        writer = asyncio.ensure_future(self._write(start, send))
        watcher = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((writer, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            if not writer.done():
                writer.cancel()
            results = await asyncio.gather(writer, watcher, return_exceptions=True)
            await _close(self.chunks)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _write(self, start: Message, send: Send) -> None:
        await send(start)
        loop = asyncio.get_running_loop()
        last = loop.time()
        beat: asyncio.TimerHandle | None = None

        def keep_alive() -> None:
            # Runs only while the writer waits for a chunk: a chunk being sent is life enough.
            nonlocal beat
            idle = loop.time() - last
            if idle >= self.keepalive:
                beats.append(asyncio.ensure_future(send(_body(sse.KEEPALIVE))))
                idle = 0.0
            beat = loop.call_later(self.keepalive - idle, keep_alive)

        beats: list[asyncio.Future[None]] = []
        beat = loop.call_later(self.keepalive, keep_alive)
        try:
            async for chunk in self.chunks:
                if beats:
                    await asyncio.gather(*beats)
                    beats.clear()
                await send(_body(chunk))
                last = loop.time()
        finally:
            if beat is not None:
                beat.cancel()
            for pending in beats:
                pending.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


async def _gone(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def _close(chunks: AsyncIterator[Any]) -> None:
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


@contextlib.asynccontextmanager
async def closing(items: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Whatever happens inside, the iterator is closed after it, which is how a request is cancelled."""
    try:
        yield items
    finally:
        await _close(items)


async def while_connected(http: HttpRequest, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it and raise ClientGone as soon as the client closes the connection."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(http.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise ClientGone
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def with_first(chunks: AsyncIterator[bytes], wait: float) -> AsyncIterator[bytes]:
    """`chunks`, once its first has come or `wait` seconds have passed.

    A refusal that the engine makes at once is raised here, where it can still become a status code; after `wait` the
    answer is 200 and a refusal becomes an event of the stream.
    """
    first = asyncio.ensure_future(anext(chunks))
    try:
        done, _ = await asyncio.wait({first}, timeout=wait)
    except asyncio.CancelledError:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await _close(chunks)
        raise
    if done and (error := first.exception()) is not None and not isinstance(error, StopAsyncIteration):
        await _close(chunks)
        raise error

    async def rest() -> AsyncIterator[bytes]:
        try:
            try:
                yield await first
            except StopAsyncIteration:
                return
            async for chunk in chunks:
                yield chunk
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await _close(chunks)

    return rest()
