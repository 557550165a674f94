"""The streaming HTTP answer: ready bytes to ASGI, with a sign of life while none come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from halfbyte.server.http.connection import close_iterator, wait_for_disconnect


class EventStream(Response):
    """A stream of events or lines written straight to ASGI.

    `chunks` yields ready bytes; `keepalive` is sent whenever it is silent for so many seconds, so that no proxy gives
    up during a long prompt. When the client leaves, the iterator is closed, wherever it waits. `on_close` is called
    once, when nothing more will be sent.
    """

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        seconds: float,
        keepalive: Callable[[], bytes],
        media_type: str,
        on_close: Callable[[], None],
        headers: dict[str, str] | None = None,
    ) -> None:
        self.chunks = chunks
        self.seconds = seconds
        self.keepalive = keepalive
        self.on_close = on_close
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "content-type": media_type,
                "cache-control": "no-cache",
                "x-accel-buffering": "no",  # nginx would hold the tokens back
                **(headers or {}),
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        writer = asyncio.ensure_future(self._write(start, send))
        watcher = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait((writer, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            if not writer.done():
                writer.cancel()
            try:
                results = await asyncio.gather(writer, watcher, return_exceptions=True)
                await close_iterator(self.chunks)
            finally:
                self.on_close()
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
            if idle >= self.seconds:
                beats.append(asyncio.ensure_future(send(_body(self.keepalive()))))
                idle = 0.0
            beat = loop.call_later(self.seconds - idle, keep_alive)

        beats: list[asyncio.Future[None]] = []
        beat = loop.call_later(self.seconds, keep_alive)
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
