"""Bodies are parsed and checked here, strictly: what JSON allows but no tokenizer or schema could take is a 400, never
a crash. A large one is parsed off the event loop, and one of too many small parts is not parsed at all.

Every body is read as JSON, whatever its content type: curl and some clients send another one, or none. What a content
type protects against, a web page of another origin, `host_check.py` refuses.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers

from halfbyte.server.http.admission import Admission
from halfbyte.server.http.errors import ApiError, from_validation
from halfbyte.server.http.workroom import SMALL, Workroom
from halfbyte.server.settings import KiB

_decoder = msgspec.json.Decoder()

# Far more than any prompt that fits a context has, counted in texts too because that is quick. Each of them costs much
# more memory and time than its byte.
MOST_PARTS = {b"[{": 100_000, b":": 100_000, b",": 1_000_000}
_MOST_REPAIRED = 512 * KiB  # of a body with half a surrogate pair: it is parsed twice and written once


class StrictJsonRequest(Request):
    """FastAPI's request, whose body is read once and forgotten as soon as it is parsed."""

    model: type[BaseModel] | None = None  # what the body must be
    workroom: Workroom
    longest_text = 0  # bytes that a text of the body may have
    _raw = b""

    @property
    def headers(self) -> Headers:
        """FastAPI parses a body as JSON only where its content type says that it is JSON."""
        others = [(name, value) for name, value in self.scope["headers"] if name != b"content-type"]
        return Headers(raw=[*others, (b"content-type", b"application/json")])

    async def body(self) -> bytes:
        coding = super().headers.get("content-encoding", "identity").lower()
        if coding != "identity":
            text = (
                f"The body has the content encoding {coding!r:.40}, which this server does not read; send it as it is."
            )
            raise ApiError(415, text, code="unsupported_content_encoding")
        self._raw = await super().body()
        self._body = b""
        self.scope["state"]["body_bytes"] = len(self._raw)
        # FastAPI only asks whether there is one, and would keep it for as long as the request runs.
        return b" " if self._raw else b""

    async def json(self) -> Any:
        raw, self._raw = self._raw, b""
        if len(raw) <= SMALL or self.model is None:
            return parse(raw)
        model, longest = self.model, self.longest_text
        return await self.workroom.run(len(raw), lambda: _checked(raw, model, longest))


def parse(raw: bytes) -> Any:
    raw = raw.removeprefix(codecs.BOM_UTF8)  # some shells write it
    for signs, most in MOST_PARTS.items():
        if len(raw) > most and sum(raw.count(sign) for sign in signs) > most:
            text = f"The body has more than {most} times {' or '.join(map(repr, signs.decode()))}; split the request."
            raise ApiError(413, text, code="request_too_large")
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        if len(raw) <= _MOST_REPAIRED and (b"\\ud" in raw or b"\\uD" in raw):
            return _with_surrogates_replaced(raw)
        raise json.JSONDecodeError(str(e) or "nested too deeply", "", 0) from None


def _checked(raw: bytes, model: type[BaseModel], longest_text: int) -> BaseModel:
    """The body as what it must be: FastAPI takes an instance as it is."""
    if has_text_beyond(raw, longest_text):
        text = f"A text of the body has more than {longest_text} bytes, which no request of this model can; shorten it."
        raise ApiError(400, text, code="context_length_exceeded")
    value = parse(raw)
    try:
        return model.model_validate(value)
    except ValidationError as e:
        errors = e.errors(include_url=False, include_context=False, include_input=False)
        raise from_validation(errors, value) from None  # type: ignore[arg-type]


def has_text_beyond(raw: bytes, longest: int) -> bool:
    """Whether one text is longer than that for certain, found without parsing: so many bytes in a row without a
    quotation mark or an escape. A text a quarter longer than that is found, unless it has escapes."""
    step = longest // 8 + 1
    row = 0
    for at in range(0, len(raw) - step + 1, step):
        plain = raw.find(b'"', at, at + step) < 0 and raw.find(b"\\", at, at + step) < 0
        row = row + 1 if plain else 0
        if row * step > longest:
            return True
    return False


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
    """A route whose body, if it has one, is not even read while the server takes no work."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        annotation = None if self.body_field is None else self.body_field.field_info.annotation
        model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None

        async def handle(request: Request) -> Response:
            strict = StrictJsonRequest(request.scope, request.receive)
            if model is not None:
                service = request.app.state.service
                admission: Admission = service.admission
                admission.check()
                strict.model = model
                strict.workroom = admission.workroom
                strict.longest_text = service.longest_text
            return await handler(strict)

        return handle
