"""What the server says when it says no: one exception, three shapes of body (OpenAI's, Anthropic's and Ollama's).

The tag of an endpoint's router names the API, and the API has a shape (`SHAPES`): its body here and its schema in
/openapi.json. Every refusal goes through `ApiError`. The text of a foreign exception never reaches a client: a bug
is logged with its traceback and answered with a plain 500.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from halfbyte.errors import ContextError, HalfbyteError
from halfbyte.server.http import sse

log = logging.getLogger("halfbyte.server")

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A refusal with its HTTP status; `param` names the field at fault, `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    def openai(self) -> dict[str, Any]:
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self._with_param}}

    def ollama(self) -> dict[str, Any]:
        return {"error": self._with_param}

    @property
    def _with_param(self) -> str:
        """For shapes that have no field for it."""
        return f"{self.param}: {self.message}" if self.param and self.param not in self.message else self.message


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def is_cancellation(e: BaseException) -> bool:
    """Whether it ends a task or the process on purpose. A panic of native code is no Exception either, but is not."""
    return isinstance(e, asyncio.CancelledError | GeneratorExit | KeyboardInterrupt | SystemExit)


def from_error(e: BaseException) -> ApiError:
    """Our own exceptions keep their sentence; anything else is a bug and says nothing about itself."""
    if isinstance(e, ApiError):
        return e
    if isinstance(e, HalfbyteError):
        code = "context_length_exceeded" if isinstance(e, ContextError) else None
        retry = 5.0 if e.status in (429, 503) else None
        return ApiError(e.status, str(e), code=code, retry_after=retry)
    log.error("unexpected failure", exc_info=e)
    return ApiError(500, "The server failed on this request; its log has the details.", code="internal_error")


def from_validation(errors: list[dict[str, Any]], body: Any = None) -> ApiError:
    """The most telling thing wrong with a body, as a sentence that names the parameter."""
    error = max(errors, key=_telling)
    path = _path(error, body)
    param = ".".join(str(part) for part in path) or None
    kind = error["type"]
    if kind == "extra_forbidden":
        text = f"Unsupported parameter: '{param}'. This server does not know it; leave it out."
        return bad_request(text, param, "unsupported_parameter")
    if kind == "missing":
        message = f"Missing required parameter: '{param}'." if param else "The request has no body; send a JSON object."
        return bad_request(message, param, "missing_required_parameter")
    if kind == "json_invalid":
        return bad_request("The body is not valid JSON; send one JSON object in UTF-8.", None, "invalid_json")
    text = str(error["msg"]).removeprefix("Value error, ")
    return bad_request(
        f"Invalid value for '{param}': {text}." if param else f"Invalid request: {text}.", param, "invalid_value"
    )


def _telling(error: dict[str, Any]) -> tuple[bool, bool, int]:
    """Our own sentences first, then unknown fields, then what lies deepest: the other branches of a union complain
    near its root."""
    return error["type"] == "value_error", error["type"] == "extra_forbidden", len(error["loc"])


def _path(error: dict[str, Any], body: Any) -> list[str | int]:
    """The place of an error as keys of the body; pydantic also names the branches of unions, which nobody sent."""
    out: list[str | int] = []
    at = body
    loc = [part for part in error["loc"] if part != "body"]
    for position, part in enumerate(loc):
        if (isinstance(at, dict) and part in at) or (isinstance(at, list) and isinstance(part, int) and part < len(at)):
            at = at[part]
        elif not (position == len(loc) - 1 and error["type"] == "missing"):
            continue
        out.append(part)
    return out


@dataclass(frozen=True)
class ErrorShape:
    """How one API writes an error, and how /openapi.json describes that."""

    name: str  # of its schema
    body: Callable[[ApiError], dict[str, Any]]
    schema: dict[str, Any]


_TEXT = {"type": "string"}
OPENAI = ErrorShape("OpenAIError", ApiError.openai, {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"anyOf": [_TEXT, {"type": "null"}], "description": "The field at fault."},
                "code": {"anyOf": [_TEXT, {"type": "null"}]},
            },
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
})  # fmt: skip
ANTHROPIC = ErrorShape("AnthropicError", ApiError.anthropic, {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": _TEXT, "message": _TEXT},
            "required": ["type", "message"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "error"],
})  # fmt: skip
OLLAMA = ErrorShape("OllamaError", ApiError.ollama, {
    "type": "object", "properties": {"error": _TEXT}, "required": ["error"], "additionalProperties": False
})  # fmt: skip
SHAPES = {"OpenAI": OPENAI, "Anthropic": ANTHROPIC, "Ollama": OLLAMA, "server": OPENAI}  # by the tag of a router


def wants_anthropic(headers: Any) -> bool:
    """For what both OpenAI's and Anthropic's clients ask."""
    return "anthropic-version" in headers


def shape_with(tags: Iterable[str]) -> ErrorShape:
    return next((SHAPES[tag] for tag in tags if tag in SHAPES), OPENAI)


def shape_for(scope: Mapping[str, Any]) -> ErrorShape:
    """The shape of the endpoint that was called; before routing, and where nothing is, of those nearest to the path."""
    if (route := scope.get("route")) is not None:
        return shape_with(getattr(route, "tags", ()))
    parts = scope["path"].split("/")
    nearest: dict[int, list[ErrorShape]] = {}
    for path, shape in scope["app"].state.endpoints:
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(parts, path.split("/")))
        nearest.setdefault(len(list(shared)), []).append(shape)
    first, *others = nearest[max(nearest)]
    return first if all(shape is first for shape in others) else OPENAI


def render(error: ApiError, scope: Mapping[str, Any], headers: Any) -> Response:
    """In the shape of the API that was called."""
    shape = shape_for(scope)
    if shape is OPENAI and wants_anthropic(headers):
        shape = ANTHROPIC
    return Response(sse.dumps(shape.body(error)), error.status, {**error.headers}, media_type="application/json")


def install(app: FastAPI) -> None:
    def answer(request: Request, error: ApiError) -> Response:
        return render(error, request.scope, request.headers)

    async def api(request: Request, e: Exception) -> Response:
        return answer(request, from_error(e))

    async def validation(request: Request, e: Exception) -> Response:
        assert isinstance(e, RequestValidationError | ValidationError)
        body = e.body if isinstance(e, RequestValidationError) else None
        return answer(request, from_validation(list(e.errors()), body))  # type: ignore[arg-type]

    async def http(request: Request, e: Exception) -> Response:
        assert isinstance(e, HTTPException)
        if isinstance(e.__cause__, ApiError):  # raised while the body was read, and wrapped on the way
            return answer(request, e.__cause__)
        path, method = request.url.path, request.method
        if e.status_code == 404:
            error = ApiError(404, f"There is nothing at {method} {path}.", code="unknown_url")
        elif e.status_code == 405:
            error = ApiError(
                405, f"{path} does not take {method}.", code="method_not_allowed", headers=dict(e.headers or {})
            )
        else:
            error = ApiError(e.status_code, str(e.detail), headers=dict(e.headers or {}))
        return answer(request, error)

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(HalfbyteError, api)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(ValidationError, validation)
    app.add_exception_handler(HTTPException, http)
