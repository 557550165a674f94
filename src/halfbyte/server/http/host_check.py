"""The `Host` a request names must be one of this machine's: a web page whose own name was made to point here (DNS
rebinding) is a stranger, though the browser believes it has the same origin as the server.

On loopback the names of loopback pass; bound beyond it, any IP address and the machine's own names. `--allow-host`
widens the list, `*` opens it. A request without the header comes from no browser and passes.
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
        given = headers.getlist("host")
        if self.any or not given:
            return
        if len(given) > 1 or not self._known(_without_port(given[0].strip().lower())):
            raise ApiError(
                403,
                f"This server does not answer for the host {given[0]!r}; name it with --allow-host if it should.",
                code="host_not_allowed",
            )

    def _known(self, host: str) -> bool:
        if host in self.names or host.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return address.is_loopback or not self.local_only


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).rstrip(".")
