"""An engine that runs already, somewhere: it is asked, and neither started, watched nor stopped.

It has whatever gates it was started with. Gates that are named all the same are what its owner says of it, and the
kernel path holds them against its log or a trace.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from halfbyte.errors import UsageError
from halfbyte.lab.peers.launch import Launch, Progress, Setup


class UrlPeer:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no address of an engine; one looks like http://127.0.0.1:8000.")
        self._url = parts.geturl().rstrip("/").removesuffix("/v1")
        self.name = parts.netloc

    def prepare(self, setup: Setup, progress: Progress) -> Setup:
        return setup

    def launch(self, setup: Setup) -> Launch:
        return Launch(url=self._url, health="/v1/models")
