"""One plain ASGI layer before every endpoint.

Checks host, origin and key, lets clients in by turns, bounds the body, names the request, writes the access log and
turns what escapes into a proper answer. It never looks into a body and never logs one.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halfbyte import log_lines
from halfbyte.server.http import sse
from halfbyte.server.http.doorkeeper import home_of
from halfbyte.server.http.errors import ApiError, from_error, is_cancellation, render
from halfbyte.server.http.host_check import HostCheck, OriginCheck
from halfbyte.server.http.metrics import Metrics
from halfbyte.server.http.printable import printable
from halfbyte.server.http.turns import Turns
from halfbyte.server.http.workroom import HUGE, Workroom
from halfbyte.server.settings import KiB, ServerSettings

access = logging.getLogger("halfbyte.access")

# What answers without a key: probes, and the page (which holds no secret and asks for the key itself).
OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/favicon.ico"})
_LONGEST_PATH = 500  # of what the access log shows
_REQUEST_ID = re.compile(r"[A-Za-z0-9._\-]{1,64}")


def owner_of(http: HTTPConnection) -> str:
    """Whose key the request came with; there is one owner where no keys are asked for."""
    return str(http.scope["state"]["owner"])


class BodyTooLarge(ApiError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            413,
            f"The body is larger than the {limit} bytes this server takes; send less.",
            code="request_too_large",
        )


class Bodies:
    """The bytes of all bodies whose requests have not ended."""

    def __init__(self, settings: ServerSettings, workroom: Workroom) -> None:
        self.workroom = workroom
        self.most_each = settings.max_body_bytes
        self.most_in_all = max(settings.max_bodies_bytes, settings.max_body_bytes)
        self.total = 0


class Body:
    """One request's body on its way in: neither it nor all of them together may grow past their limits."""

    FREE = 64 * KiB  # a small one always passes

    def __init__(self, receive: Receive, bodies: Bodies) -> None:
        self._receive = receive
        self._bodies = bodies
        self._size = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            bodies, size = self._bodies, len(message.get("body", b""))
            self._size += size
            bodies.total += size
            if self._size > bodies.most_each:
                raise BodyTooLarge(bodies.most_each)
            if bodies.total > bodies.most_in_all and self._size > self.FREE:
                text = "The server holds as many large requests as it takes at once; try again in a moment."
                raise ApiError(503, text, code="overloaded", retry_after=5)
        return message

    def forget(self) -> None:
        if self._size >= HUGE:
            self._bodies.workroom.trim_later()
        self._bodies.total -= self._size
        self._size = 0


class KeyCheck:
    """Constant-time: every key is compared with every offer, as digests of one length."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def owner(self, headers: Headers) -> str | None:
        """Whose request it is, as a name that tells nothing of the key; None where the key is missing or wrong."""
        if not self._digests:
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        offers = [token.strip()] if scheme.lower() == "bearer" else []
        offers.append(headers.get("x-api-key", ""))  # how Anthropic's clients send theirs
        owner = None
        for offer in offers:
            digest = sha256(offer.encode("utf-8", "surrogateescape")).digest()
            for number, key in enumerate(self._digests):
                if hmac.compare_digest(digest, key):
                    owner = f"key {number}"
        return owner


class Middleware:
    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, bodies: Bodies) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics
        self.keys = KeyCheck(settings.api_keys)
        self.hosts = HostCheck(settings)
        self.origins = OriginCheck(settings)
        self.bodies = bodies
        self.turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else sse.new_id("req_")
        scope.setdefault("state", {})["request_id"] = request_id
        with log_lines.request(request_id) as facts:
            await self._answer(scope, receive, send, headers, facts)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, facts: dict[str, Any]
    ) -> None:
        path, request_id = scope["path"], facts["request_id"]
        start, status = time.perf_counter(), 0
        body = Body(receive, self.bodies)

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                out["x-request-id"] = request_id
                out["request-id"] = request_id  # Anthropic's name for it
                out.setdefault("x-content-type-options", "nosniff")
                if status >= 400:
                    out.setdefault("cache-control", "no-store")
            await send(message)

        try:
            try:
                self.hosts.check(headers)
                self.origins.check(scope["method"], headers)
                owner = scope["state"]["owner"] = self._check_head(scope["method"], path, headers)
                client = scope["state"]["client"] = owner or _client_at(scope)
                if scope["method"] == "POST":
                    await self.turns.take(client)
                await self.app(scope, body.receive, send_named)
            except BaseException as e:
                if is_cancellation(e):
                    raise
                if status:  # the answer has begun; all that is left is to end the connection
                    raise
                error = from_error(e)
                response = render(error, scope, headers)
                if error.status in (401, 413, 503):
                    response.headers["connection"] = "close"  # the rest of the body is not read
                await response(scope, receive, send_named)
        finally:
            body.forget()
            seconds = time.perf_counter() - start
            route = getattr(scope.get("route"), "path", "unknown")
            self.metrics.http(scope["method"], route, status)
            text = printable(path[:_LONGEST_PATH])
            facts |= {"method": scope["method"], "path": text, "route": route, "status": status}
            facts["ms"] = round(1000 * seconds, 1)
            access.info(
                "%s %s %s %.1f ms %s", scope["method"], text, status or "aborted", 1000 * seconds, request_id,
                extra={"facts": facts},
            )  # fmt: skip

    def _check_head(self, method: str, path: str, headers: Headers) -> str:
        """Whose request it is."""
        # A browser sends no key with its preflight; the answer to one tells it only what was configured.
        preflight = method == "OPTIONS" and bool(self.settings.cors_origins)
        free = preflight or path in OPEN_PATHS or path.startswith("/static/")
        owner = self.keys.owner(headers)
        if not free and owner is None:
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.settings.max_body_bytes:
            raise BodyTooLarge(self.settings.max_body_bytes)
        return owner or ""


def _client_at(scope: Scope) -> str:
    """The client of a request that came without a key: its address, an IPv6 network of 64 bits being one. Many programs
    share this machine's own addresses, so there it is the connection; over a unix socket it is the request."""
    peer = scope.get("client")
    if not peer:
        return sse.new_id("client_")
    address, port = peer
    return home_of(address) or f"{address} {port}"
