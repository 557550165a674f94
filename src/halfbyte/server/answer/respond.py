"""The last step of every generating endpoint: a stream or one JSON body, with the right status either way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request
from starlette.responses import Response

from halfbyte.server.answer.stream import ClientGone, EventStream, closing, while_connected, with_first
from halfbyte.server.http import sse
from halfbyte.server.http.errors import ApiError, from_error
from halfbyte.server.service import Service

# Nobody reads it: the client has gone. nginx's number for that, so that the access log can be read.
CLIENT_GONE = 499


def openai_failure(error: ApiError) -> bytes:
    return sse.data(error.openai())


async def deliver(
    service: Service,
    http: Request,
    *,
    stream: AsyncIterator[bytes] | None,
    whole: Callable[[], Awaitable[dict[str, Any]]],
    failure: Callable[[ApiError], bytes] = openai_failure,
    headers: dict[str, str] | None = None,
) -> Response:
    settings = service.settings
    try:
        if stream is None:
            body = await while_connected(http, whole())
            return Response(sse.dumps(body), headers=headers, media_type="application/json")
        started = await while_connected(http, with_first(stream, settings.headers_after))
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    return EventStream(_guarded(started, failure), keepalive=settings.keepalive_seconds, headers=headers)


async def _guarded(chunks: AsyncIterator[bytes], failure: Callable[[ApiError], bytes]) -> AsyncIterator[bytes]:
    """The stream, and if it breaks, one last event that says so in the API's own shape."""
    async with closing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except Exception as e:
            yield failure(from_error(e))
