"""Requests that a web page of a stranger makes a browser send are refused by the headers that the browser adds.

The `Host` a request names must be one of this machine's: a web page whose own name was made to point here (DNS
rebinding) is a stranger, though the browser believes it has the same origin as the server. On loopback the names of
loopback pass; bound beyond it, any IP address and the machine's own names. `--allow-host` widens the list, `*` opens
it. A request without the header comes from no browser and passes.

The `Origin` of a body that is not declared as JSON must be the server's own or one of `--cors`: a browser sends such a
body to any server without asking it first. For a declared JSON body it asks, and is told what `--cors` allows.
"""

from __future__ import annotations

import ipaddress
import socket

from starlette.datastructures import Headers

from halfbyte.server.http.errors import ApiError
from halfbyte.server.settings import ServerSettings


class HostCheck:
    def __init__(self, settings: ServerSettings) -> None:
        self.local_only = settings.local_only
        self.any = "*" in settings.allow_hosts or settings.uds is not None  # no browser reaches a unix socket
        self.names = {"localhost", settings.host.lower(), *(host.lower().rstrip(".") for host in settings.allow_hosts)}
        if not self.local_only:
            own = socket.gethostname().lower()
            self.names |= {own, own.partition(".")[0], f"{own.partition('.')[0]}.local", socket.getfqdn().lower()}

    def check(self, headers: Headers) -> None:
        """Raises the refusal of a host that is not ours."""
        names = headers.getlist("host")
        if self.any or not names:
            return
        if len(names) > 1 or not self._is_allowed(_without_port(names[0].strip().lower())):
            raise ApiError(
                403,
                f"This server does not answer for the host {names[0]!r}; name it with --allow-host if it should.",
                code="host_not_allowed",
            )

    def _is_allowed(self, host: str) -> bool:
        if host in self.names or host.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return address.is_loopback or not self.local_only


def _without_port(host: str) -> str:
    if host.startswith("["):
        address, closed, rest = host[1:].partition("]")
        return address if closed and (not rest or (rest[0] == ":" and rest[1:].isdigit())) else host
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).rstrip(".")


class OriginCheck:
    def __init__(self, settings: ServerSettings) -> None:
        self.allowed = frozenset(settings.cors_origins)

    def check(self, method: str, headers: Headers) -> None:
        """Raises the refusal of a body from a page of another origin that its browser sent without asking."""
        origin = headers.get("origin")
        if origin is None or method in ("GET", "HEAD", "OPTIONS") or _declares_json(headers):
            return
        own = origin.lower().partition("://")[2] == headers.get("host", "").strip().lower()
        if not (own or origin in self.allowed or "*" in self.allowed):
            raise ApiError(
                403,
                f"Pages of {origin!r} may not call this server; name their origin with --cors if they should.",
                code="origin_not_allowed",
            )


def _declares_json(headers: Headers) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
