"""The frame around every generating endpoint: a slot first, then the work, then a stream or one JSON body, with the
right status either way. What the work is, it is not told."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from halfbyte.server.http import sse
from halfbyte.server.http.admission import Admission, RequestSlot
from halfbyte.server.http.connection import ClientGone, auto_close, while_connected, with_first
from halfbyte.server.http.errors import ApiError, from_error, is_cancellation
from halfbyte.server.http.event_stream import EventStream
from halfbyte.server.http.openapi import EVENTS
from halfbyte.server.http.workroom import SMALL
from halfbyte.server.settings import ServerSettings

T = TypeVar("T")

# Nobody reads it: the client has gone. nginx's number for that, so that the access log can be read.
CLIENT_GONE = 499


class ResponseWriter(Protocol):
    """One answer in the shape of one API, in either form."""

    headers: dict[str, str] | None
    media_type: str  # of a stream

    @property
    def keepalive(self) -> bytes:
        """What a stream sends while it has nothing to say."""
        ...

    def stream(self) -> AsyncIterator[bytes]: ...

    async def body(self) -> dict[str, Any]: ...

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that broke."""
        ...


class EventWriter:
    """What the writers of server-sent events have in common."""

    headers: dict[str, str] | None = None
    media_type = f"{EVENTS}; charset=utf-8"
    keepalive = sse.KEEPALIVE


async def respond(
    http: Request,
    admission: Admission,
    settings: ServerSettings,
    make_writer: Callable[[RequestSlot], ResponseWriter],
    *,
    streaming: bool,
    more_bytes: int = 0,
) -> Response:
    """Take a slot, then make the answer's writer (which renders the prompt), then let it write.

    `more_bytes` is what the prompt has beside the body: an earlier conversation.
    """
    with contextlib.ExitStack() as stack:
        slot = admission.take_slot(http.scope["state"]["client"])
        stack.callback(slot.release)
        try:
            writer = await _work(http, admission, more_bytes, lambda: make_writer(slot))
            if not streaming:
                body = await while_connected(http, writer.body())
                return Response(sse.dumps(body), headers=writer.headers, media_type="application/json")
            chunks = await while_connected(http, with_first(writer.stream(), settings.headers_after))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        stack.pop_all()  # a stream keeps its slot until it has ended
    return EventStream(
        _with_failure(chunks, writer),
        seconds=settings.keepalive_seconds,
        keepalive=lambda: writer.keepalive,
        media_type=writer.media_type,
        on_close=slot.release,
        headers=writer.headers,
    )


async def compute(
    http: Request, admission: Admission, make_answer: Callable[[], dict[str, Any]], *, more_bytes: int = 0
) -> Response:
    """The answer of an endpoint that asks no engine: it takes a slot for as long as it computes."""
    slot = admission.take_slot(http.scope["state"]["client"])
    try:
        body = await _work(http, admission, more_bytes, lambda: sse.dumps(make_answer()))
        return Response(body, media_type="application/json")
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    finally:
        slot.release()


async def _work(http: Request, admission: Admission, more_bytes: int, work: Callable[[], T]) -> T:
    size = int(http.scope["state"].get("body_bytes", 0)) + more_bytes
    if size <= SMALL:
        return work()
    return await while_connected(http, admission.workroom.run(size, work))


async def _with_failure(chunks: AsyncIterator[bytes], writer: ResponseWriter) -> AsyncIterator[bytes]:
    """The stream, and if it breaks, one last event that says so in the API's own shape."""
    async with auto_close(chunks):
        try:
            async for chunk in chunks:
                yield sse.without_line_breaks(chunk)
        except BaseException as e:
            if is_cancellation(e):
                raise
            yield writer.failure(from_error(e))
