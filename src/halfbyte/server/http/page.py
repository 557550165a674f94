"""The chat page: static files from the package, with headers that let it load nothing from anywhere else."""

from __future__ import annotations

import mimetypes
from hashlib import sha256
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import Response

from halfbyte.server.http.errors import ApiError

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def _load() -> dict[str, tuple[bytes, str, str]]:
    files = {}
    for file in resources.files("halfbyte.server").joinpath("static").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in _TYPES:
            body = file.read_bytes()
            kind = _TYPES.get(suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            files[file.name] = (body, f"{kind}; charset=utf-8", f'"{sha256(body).hexdigest()[:16]}"')
    return files


def router() -> APIRouter:
    api = APIRouter(include_in_schema=False)
    files = _load()

    def serve(name: str, request: Request) -> Response:
        if name not in files:
            raise ApiError(404, f"There is no file {name!r} here.", code="unknown_url")
        body, kind, tag = files[name]
        headers = {**_HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers={**headers, "content-type": kind})

    @api.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return serve("index.html", request)

    @api.get("/static/{name}")
    async def static(name: str, request: Request) -> Response:
        return serve(name, request)

    @api.get("/favicon.ico")
    async def favicon(request: Request) -> Response:
        return serve("icon.svg", request)

    return api
