"""The chat page: static files from the package, with headers that let it load nothing from anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import Response

from halfbyte.server.http.errors import ApiError

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
    ".woff2": "font/woff2",
}


def _files(folder: Traversable, inside: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{inside}{entry.name}/")
        else:
            yield f"{inside}{entry.name}", entry


def _load() -> dict[str, tuple[bytes, str, str]]:
    """Path -> (bytes, type, tag), all of them read now: a request never touches the disk."""
    files = {}
    for name, file in _files(resources.files("halfbyte.server").joinpath("static")):
        kind = _TYPES.get("." + name.rpartition(".")[2])
        if kind is not None:
            body = file.read_bytes()
            files[name] = (body, kind, f'"{sha256(body).hexdigest()[:16]}"')
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

    @api.get("/static/{name:path}")
    async def static(name: str, request: Request) -> Response:
        return serve(name, request)

    @api.get("/favicon.ico")
    async def favicon(request: Request) -> Response:
        return serve("icon.svg", request)

    return api
