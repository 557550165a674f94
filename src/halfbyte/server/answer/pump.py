"""Between engine and client: a pump that never lets one wait for the other, and how often a stream sends.

Under load the pump hands over several steps at once, so that the cost of a chunk is shared by its tokens. Closing it
closes the engine's iterator, which cancels the request. It holds a bounded number of tokens for a client that does not
read, and waits a bounded time for an engine that says nothing; then the request ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar

from halfbyte.server.http.connection import auto_close, close_iterator
from halfbyte.server.http.errors import ApiError, is_cancellation

log = logging.getLogger("halfbyte.server")


class Sized(Protocol):
    @property
    def tokens(self) -> list[int]: ...


T = TypeVar("T")
P = TypeVar("P", bound=Sized)


class Pump(Generic[P]):
    """Reads a stream as it comes; `take` returns all that arrived since the last call.

    Raises ApiError when more than `most_tokens` wait to be taken, or when nothing has come for `silence` seconds.
    `arrived` is told of each item and of the loop's time when it came.
    """

    def __init__(
        self,
        items: AsyncIterator[P],
        *,
        most_tokens: int | None = None,
        silence: float | None = None,
        arrived: Callable[[P, float], None] | None = None,
    ) -> None:
        self._items = items
        self._arrived = arrived
        self._pending: list[P] = []
        self._pending_tokens = 0
        self._most_tokens = most_tokens
        self._silence = silence
        self._wake: asyncio.Future[None] | None = None
        self._ended = False
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = None if silence is None else self._loop.call_later(silence, self._look)
        self._task = asyncio.create_task(self._run(), name="pump")

    async def _run(self) -> None:
        try:
            async for item in self._items:
                self._pending.append(item)
                self._pending_tokens += len(item.tokens)
                self._last = self._loop.time()
                if self._arrived is not None:
                    self._arrived(item, self._last)
                if self._wake is not None:
                    self._wake_taker()
                elif self._most_tokens is not None and self._pending_tokens > self._most_tokens:
                    log.warning("a client reads too slowly: %d tokens wait for it; dropped", self._pending_tokens)
                    raise ApiError(408, "The answer was not read in time; the rest was dropped.", code="slow_reader")
        except BaseException as e:
            if is_cancellation(e):
                raise
            self._error = e
        finally:
            self._ended = True
            self._wake_taker()

    def _look(self) -> None:
        """Set when the stream began, and again only when it rings: a token costs it nothing."""
        assert self._silence is not None
        left = self._last + self._silence - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif not self._ended:
            text = f"The engine gave no token for {self._silence:.0f} seconds, which is as long as this server waits."
            self._error = ApiError(504, text, code="timeout")
            self._ended = True
            self._task.cancel()
            self._wake_taker()

    def _wake_taker(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def take(self) -> list[P] | None:
        """What has arrived, waiting for something if nothing has; None at the end. Raises what the engine raised."""
        while not self._pending:
            if self._ended:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                return None
            self._wake = self._loop.create_future()
            await self._wake
        items, self._pending, self._pending_tokens = self._pending, [], 0
        return items

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await close_iterator(self._items)


class Pacer:
    """How long a stream waits before it sends again. Nothing while few are active; then in step with how many.

    Sixty-four streams at 160 tokens a second each are 10,240 chunks if every token travels alone, 5,000 if each stream
    sends every 13 ms; a reader notices neither. Steps that take longer (a large model) are not held back.
    """

    FREE = 8  # streams that are never held back
    PER_STREAM = 0.0002
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
        except BaseException as e:
            if is_cancellation(e):
                raise
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
