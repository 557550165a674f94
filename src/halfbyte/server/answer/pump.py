"""Between engine and client: a pump that never lets one wait for the other, and how often a stream sends.

Under load the pump hands over several steps at once, so that the cost of a chunk is shared by its tokens. Closing it
closes the engine's iterator, which cancels the request. What passes through it is not looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from halfbyte.server.http.connection import auto_close, close_iterator

T = TypeVar("T")


class Pump(Generic[T]):
    """Reads a stream as it comes; `take` returns all that arrived since the last call."""

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._items = items
        self._pending: list[T] = []
        self._wake: asyncio.Future[None] | None = None
        self._ended = False
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._run(), name="pump")

    async def _run(self) -> None:
        try:
            async for item in self._items:
                self._pending.append(item)
                if self._wake is not None:
                    self._wake_taker()
        except Exception as e:
            self._error = e
        finally:
            self._ended = True
            self._wake_taker()

    def _wake_taker(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def take(self) -> list[T] | None:
        """What has arrived, waiting for something if nothing has; None at the end. Raises what the engine raised."""
        while not self._pending:
            if self._ended:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                return None
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        items, self._pending = self._pending, []
        return items

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await close_iterator(self._items)


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


async def merge(streams: list[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Several streams as one, in order of arrival."""
    queue: asyncio.Queue[T | BaseException | None] = asyncio.Queue()

    async def drain(stream: AsyncIterator[T]) -> None:
        try:
            async with auto_close(stream):
                async for item in stream:
                    queue.put_nowait(item)
        except Exception as e:
            queue.put_nowait(e)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
