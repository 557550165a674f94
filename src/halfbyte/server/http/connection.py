"""The client's connection while it is being answered: whether it still stands, and when an answer may begin.

A client that goes away closes the iterator its answer comes from, wherever that waits, which is how a request is
cancelled. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


async def wait_for_disconnect(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def close_iterator(items: AsyncIterator[Any]) -> None:
    close = getattr(items, "aclose", None)
    if close is not None:
        await close()


@contextlib.asynccontextmanager
async def auto_close(items: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Whatever happens inside, the iterator is closed after it. (`contextlib.aclosing` wants a generator.)"""
    try:
        yield items
    finally:
        await close_iterator(items)


async def while_connected(http: Request, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it and raise ClientGone as soon as the client closes the connection."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(wait_for_disconnect(http.receive))
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
        await close_iterator(chunks)
        raise
    if done and (error := first.exception()) is not None and not isinstance(error, StopAsyncIteration):
        await close_iterator(chunks)
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
            await close_iterator(chunks)

    return rest()
