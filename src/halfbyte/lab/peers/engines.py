"""Engines by name: what `--engine` takes."""

from __future__ import annotations

from halfbyte.errors import UsageError
from halfbyte.lab.peers.halfbyte import HalfbytePeer
from halfbyte.lab.peers.launch import Peer
from halfbyte.lab.peers.url import UrlPeer

ENGINES = {"halfbyte": HalfbytePeer}


def engine_named(text: str) -> Peer:
    """An engine by its name, or one that runs already by its address."""
    if "://" in text:
        return UrlPeer(text)
    if text.lower() not in ENGINES:
        raise UsageError(
            f"there is no engine {text!r}; use {', '.join(ENGINES)}, or an address such as http://host:8000."
        )
    return ENGINES[text.lower()]()
