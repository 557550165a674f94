"""/openapi.json as it is true: how a key is sent, what each endpoint answers, and the errors that it really sends.

FastAPI would promise a 422 that this server never sends, and no key at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from halfbyte.server.http.errors import SHAPES, shape_with
from halfbyte.server.http.middleware import OPEN_PATHS
from halfbyte.server.settings import ServerSettings

EVENTS = "text/event-stream"
JSON_LINES = "application/x-ndjson"


class Described(BaseModel):
    """What an endpoint answers. Answers are not made from such classes: they describe."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def answers(model: type[BaseModel], text: str, stream: str | None = None) -> dict[int | str, dict[str, Any]]:
    """For the `responses` of a route: the object, and how it is streamed where it can be."""
    described: dict[str, Any] = {"model": model, "description": text}
    if stream is not None:
        described["content"] = {stream: {"schema": {"type": "string"}}}
    return {200: described}


_SENTENCES = {
    400: "The request cannot be served as written; the error names the field.",
    401: "The key is missing or wrong.",
    403: "The Host is not one of this server's.",
    404: "There is no such model, or no such stored response.",
    408: "The body was not sent in time, or the answer not read.",
    413: "The body is too large, or has too many parts.",
    429: "As many requests as this server takes are running or waiting; Retry-After says when to come back.",
    500: "The engine failed on this request.",
    503: "No request is taken now: it starts, shuts down or is short of memory. Retry-After says when to come back.",
    504: "It took longer than this server allows.",
}
_WITH_RETRY = (429, 503)
_OF_BODIES = (400, 404, 408, 413, 429, 500, 503, 504)


def describe(app: FastAPI, settings: ServerSettings) -> Callable[[], dict[str, Any]]:
    """What `app.openapi` becomes."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _amended(plain(), bool(settings.api_keys))
        return app.openapi_schema

    return openapi


def _amended(schema: dict[str, Any], keys: bool) -> dict[str, Any]:
    components = schema.setdefault("components", {})
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer KEY"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    schemas = components.setdefault("schemas", {})
    schemas |= {shape.name: shape.schema for shape in SHAPES.values()}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schema["security"] = [{"bearer": []}, {"header": []}] if keys else [{}, {"bearer": []}, {"header": []}]
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _amend(operation, path, keys)
    return schema


def _amend(operation: dict[str, Any], path: str, keys: bool) -> None:
    responses: dict[str, Any] = operation.setdefault("responses", {})
    responses.pop("422", None)
    for content in responses.get("200", {}).get("content", {}).values():
        if "$ref" in content["schema"]:  # FastAPI's own guess stands beside what was said
            content["schema"] = {"$ref": content["schema"]["$ref"]}
    codes = {403, *(int(code) for code in responses if code != "200")}
    if path in OPEN_PATHS:
        operation["security"] = []
    elif keys:
        codes.add(401)
    if "requestBody" in operation:
        codes.update(_OF_BODIES)
    if "{" in path:
        codes.add(404)
    shape = shape_with(operation.get("tags", ()))
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape.name}"}}}
    for code in sorted(codes):
        responses[str(code)] = {"description": _SENTENCES[code], "content": error}
        if code in _WITH_RETRY:
            retry = {"schema": {"type": "integer"}, "description": "Seconds."}
            responses[str(code)]["headers"] = {"Retry-After": retry}
