"""Bodies are parsed here, strictly: what JSON allows but no tokenizer or schema could take is a 400, never a crash."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

_decoder = msgspec.json.Decoder()


class StrictJsonRequest(Request):
    async def json(self) -> Any:
        raw = await self.body()
        try:
            return _decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            if b"\\ud" in raw or b"\\uD" in raw:
                return _with_surrogates_replaced(raw)
            raise json.JSONDecodeError(str(e) or "nested too deeply", "", 0) from None


def _with_surrogates_replaced(raw: bytes) -> Any:
    """Half a surrogate pair, which clients that cut strings by UTF-16 units do send, becomes U+FFFD."""
    try:
        text = json.dumps(json.loads(raw, parse_constant=_no_constant), ensure_ascii=False)
        return _decoder.decode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode())
    except (ValueError, RecursionError, msgspec.DecodeError) as e:
        raise json.JSONDecodeError(str(e), "", 0) from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictJsonRequest(request.scope, request.receive))

        return handle
