"""A client of a halfbyte server, by any of the addresses that `halfbyte ps` shows: HTTP, HTTPS or a unix socket.

A server of this machine is trusted by the very certificate that it was started with, whatever name is written in it;
every other one has to have a certificate that this machine trusts.
"""

from __future__ import annotations

import ssl

import httpx

from halfbyte import gates as gates_
from halfbyte.errors import UsageError


def open_client(
    address: str, certificate: str | None = None, key: str | None = None, *, timeout: float, reads_forever: bool = False
) -> httpx.Client:
    """`key` is HALFBYTE_API_KEY where none is given."""
    key = key or gates_.setting("HALFBYTE_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    path = address.removeprefix("unix:")
    is_socket = path != address
    base = f"http{'s' if certificate else ''}://localhost" if is_socket else address.rstrip("/")
    try:
        trust = _trusting(certificate) if certificate else True
        transport = httpx.HTTPTransport(uds=path, verify=trust) if is_socket else None
        limits = httpx.Timeout(timeout, read=None if reads_forever else timeout)
        return httpx.Client(base_url=base, headers=headers, timeout=limits, transport=transport, verify=trust)
    except (httpx.InvalidURL, ValueError) as e:
        raise UsageError(
            f"{address!r} is not the address of a server ({e}); give one like http://127.0.0.1:8000."
        ) from None
    except OSError as e:
        raise UsageError(
            f"the certificate {certificate} of the server at {address} cannot be read ({e.strerror or e})."
        ) from None


def _trusting(certificate: str) -> ssl.SSLContext:
    """This certificate alone, also where it is not a root, and by whatever name we reach it."""
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context
