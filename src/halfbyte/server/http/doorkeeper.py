"""Who may hold a connection, how large its heads may be and how long each part may take.

`Doorkeeper` counts connections and looks at each of them once a second; `GuardedProtocol` is uvicorn's HTTP protocol
with those bounds. All of it happens before a key is checked, so none of it may cost more than the client's own bytes.
A few connections beyond the limit are let in for health checks alone; of these the one that has been silent longest
makes room for the next. Nothing here looks into a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import ipaddress
import logging
import math
from collections import Counter
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from halfbyte.server.http import sse
from halfbyte.server.http.errors import ApiError
from halfbyte.server.settings import ServerSettings

log = logging.getLogger("halfbyte.server")
# uvicorn warns of every request that is no HTTP; a line on a terminal costs more than reading such a request.
_failures = logging.getLogger("halfbyte.server.failures")
_failures.setLevel(logging.ERROR)

HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
HEALTH_CONNECTIONS = 32  # beyond the limit, for health checks alone
HEALTH_SECONDS = 2.0  # how long such a connection may take to ask
OTHER_FILES = 96  # descriptors for the engine's socket, logs, the listener: connections never take them
# What is read of a body after its request was answered: a client that is still sending should see the answer first.
_UNWANTED_BYTES, _UNWANTED_SECONDS = 1024 * 1024, 5.0
_SWEEP_SECONDS = 1.0
_MOST_ADDRESSES = 4096  # whose home is remembered


class Doorkeeper:
    """The connections of one server. `admit` and `leave` bracket each of them."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.most = min(settings.max_connections, _file_room())
        if self.most < settings.max_connections:
            log.warning(
                "this process may open too few files for %d connections; it takes %d (raise `ulimit -n` for more)",
                settings.max_connections,
                self.most,
            )
        self._open: set[GuardedProtocol] = set()
        self._reserve: dict[GuardedProtocol, None] = {}  # those beyond the limit, the oldest first
        self._by_address: Counter[str] = Counter()
        self._homes: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._full = False  # the log has been told
        self._crowded: set[str] = set()  # addresses that the log has been told of

    @property
    def count(self) -> int:
        return len(self._open)

    def admit(self, connection: GuardedProtocol, address: str | None) -> bool:
        """Whether it may stay. `connection.health_only` is set where only a health check is answered."""
        home = self._home(address)
        connection.home = home
        if home and self._by_address[home] >= self.settings.max_connections_per_address:
            if home not in self._crowded:
                self._crowded.add(home)
                log.warning(
                    "%s holds %d connections, all an address may (--max-connections-per-address); more are closed",
                    home,
                    self._by_address[home],
                )
            return False
        if len(self._open) >= self.most:
            if not self._full:
                self._full = True
                log.warning(
                    "%d connections are open, which is the limit (--max-connections); %d more are kept for health "
                    "checks, everything else is refused",
                    len(self._open),
                    HEALTH_CONNECTIONS,
                )
            if len(self._open) >= self.most + HEALTH_CONNECTIONS and not self._make_room():
                return False
            connection.health_only = True
            self._reserve[connection] = None
        self._open.add(connection)
        if home:
            self._by_address[home] += 1
        if self._timer is None:
            self._timer = connection.loop.call_later(_SWEEP_SECONDS, self._sweep, connection.loop)
        return True

    def _make_room(self) -> bool:
        """Ends the reserved connection that has waited longest without sending a request; False if all have sent."""
        silent = next((connection for connection in self._reserve if connection.silent), None)
        if silent is None:
            return False
        silent.transport.abort()
        self.leave(silent)
        return True

    def leave(self, connection: GuardedProtocol) -> None:
        if connection not in self._open:
            return
        self._open.discard(connection)
        self._reserve.pop(connection, None)
        if home := connection.home:
            self._by_address[home] -= 1
            if not self._by_address[home]:
                del self._by_address[home]
                self._crowded.discard(home)
        if self._full and len(self._open) < self.most * 9 // 10:
            self._full = False
            log.warning("%d connections are open; new ones are taken again", len(self._open))

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self._open):
            connection.check_time(now)
        self._timer = loop.call_later(_SWEEP_SECONDS, self._sweep, loop) if self._open else None

    def _home(self, address: str | None) -> str:
        """What the limit counts: an IPv4 address, an IPv6 network of 64 bits; nothing for this machine itself."""
        if address is None:
            return ""
        if (home := self._homes.get(address)) is None:
            if len(self._homes) >= _MOST_ADDRESSES:
                self._homes.clear()
            home = self._homes[address] = home_of(address)
        return home


def home_of(address: str) -> str:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return "" if ip.is_loopback else str(ipaddress.ip_network((ip, 64), strict=False))
        ip = ip.ipv4_mapped
    return "" if ip.is_loopback else str(ip)


def _file_room() -> int:
    """How many connections this process has descriptors for, after raising its own limit as far as it may."""
    try:
        import resource
    except ImportError:  # not POSIX
        return 1 << 16
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 16 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = (1 << 16) if soft == resource.RLIM_INFINITY else soft
    return max(1, room - OTHER_FILES - HEALTH_CONNECTIONS)


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on size and time; which of them was broken is the answer, where one fits."""

    def __init__(self, doorkeeper: Doorkeeper, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _failures
        self.doorkeeper = doorkeeper
        self.home = ""
        self.health_only = False
        self._refused = False
        self._head_bytes = 0  # of the head that is being received
        self._idle = False  # between two requests
        self._head_since = math.inf  # a head is being waited for since then
        self._body_since = math.inf  # a body is being received since then
        self._unwanted_since = math.inf  # a body is still coming though its request was answered
        self._unwanted_bytes = 0
        self._last_data = 0.0
        self._stalled_since = math.inf  # the client reads nothing since then
        self._active: RequestResponseCycle | None = None  # the request that is being answered; `cycle` is the last
        self._last_answer = False  # the connection ends with the answer that is being written

    @property
    def silent(self) -> bool:
        """Whether no request has come so far."""
        return self._head_since != math.inf

    # ---- connections --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_since = self.loop.time()
        if not self.doorkeeper.admit(self, self.client[0] if self.client else None):
            self._refused = True
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.doorkeeper.leave(self)
        super().connection_lost(exc)
        if self._active is not None and not self._active.response_complete:  # uvicorn tells only the last
            self._active.disconnected = True
            self._active.message_event.set()

    # ---- bytes --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._last_data = now = self.loop.time()
        if self._idle:
            self._idle = False
            self._head_since = now
        if self._head_since != math.inf:
            self._head_bytes += len(data)
        if self._unwanted_since != math.inf:
            self._unwanted_bytes += len(data)
            if self._unwanted_bytes > _UNWANTED_BYTES:
                self._refused = True
                self.transport.abort()
                return
        super().data_received(data)
        if self._head_since != math.inf and self._head_bytes > self.doorkeeper.settings.max_head_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_since == math.inf:
            self._head_since = self._last_data

    def on_headers_complete(self) -> None:
        settings = self.doorkeeper.settings
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._head_since, self._head_bytes = math.inf, 0
        if self._refused:
            return
        if len(self.headers) > settings.max_headers or size > settings.max_head_bytes:
            self._refuse_head()
            return
        if self.health_only and not self._is_health_check():
            text = "The server holds as many connections as it takes; try again in a moment."
            self._refuse(ApiError(503, text, code="overloaded", retry_after=5), head=True)
            return
        self._body_since = self._last_data
        super().on_headers_complete()
        if not self.pipeline:
            self._active = self.cycle
        if self.health_only and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_since = math.inf
        if self._unwanted_since != math.inf:
            self._unwanted_since, self._unwanted_bytes = math.inf, 0
            self._idle = not self.pipeline
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._active = self.pipeline[-1][0]  # the next
        super().on_response_complete()
        if self._last_answer:
            self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            return  # the next has begun to arrive already
        if self._body_since != math.inf:
            self._unwanted_since = self.loop.time()
        elif self._head_since == math.inf and not self.pipeline:
            self._idle = True

    def pause_writing(self) -> None:
        self._stalled_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled_since = math.inf
        super().resume_writing()

    def _is_health_check(self) -> bool:
        try:
            return httptools.parse_url(self.url).path.decode("ascii") in HEALTH_PATHS
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            return False

    # ---- time ---------------------------------------------------------------------------------

    def check_time(self, now: float) -> None:
        """Called once a second: end what takes longer than it may."""
        settings = self.doorkeeper.settings
        if now - self._stalled_since > settings.write_seconds:
            log.warning("a client has read nothing for %.0f s; its connection is closed", now - self._stalled_since)
            self.transport.abort()
            return
        if self.transport.is_closing():
            if self._stalled_since == math.inf:
                self._stalled_since = now  # what is left to send must be read in time, too
            return
        if now - self._unwanted_since > _UNWANTED_SECONDS:
            self.transport.close()
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            waited = max(now - self._body_since - settings.body_seconds, now - self._last_data - settings.body_idle)
            if self._body_since != math.inf and not self.flow.read_paused and waited > 0:
                self._refuse(ApiError(408, "The body was not sent in time; send it again.", code="request_timeout"))
        elif not self._idle and self._head_since != math.inf:
            allowed = HEALTH_SECONDS if self.health_only else settings.head_seconds
            if now - self._head_since > allowed:
                self._refuse(ApiError(408, "The request was not sent in time.", code="request_timeout"), head=True)

    # ---- refusals -----------------------------------------------------------------------------

    def _refuse_head(self) -> None:
        settings = self.doorkeeper.settings
        text = (
            f"The request's head is larger than this server takes ({settings.max_headers} headers, "
            f"{settings.max_head_bytes} bytes); send less."
        )
        self._refuse(ApiError(431, text, code="headers_too_large"), head=True)

    def _refuse(self, error: ApiError, *, head: bool = False) -> None:
        """Answer, if an answer has not begun, and read no more from this client. `head`: it is no request yet."""
        if self._refused:
            return
        self._refused = True
        active = self._active
        if active is not None and not active.response_complete and (head or self.cycle is not active):
            # The answer to an earlier request is being written; nothing may stand within it.
            self.pipeline.clear()
            self._last_answer = True
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = sse.dumps(error.openai())
            lines = [
                f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
                *(f"{name}: {value}" for name, value in error.headers.items()),
            ]
            self.transport.write("\r\n".join((*lines, "", "")).encode() + body)
            if self.cycle is not None and not self.cycle.response_complete:
                # Whoever waits for the rest of this request learns that it will not come.
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        error = ApiError(400, "This is not a valid HTTP request.", code="invalid_http")
        self._refuse(error, head=self._head_since != math.inf)
