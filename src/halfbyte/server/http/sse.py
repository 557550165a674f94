"""JSON and server-sent events as bytes, the fast way: no model objects, no per-token encoders.

Knows nothing of the APIs; the endpoint files say what goes into an event.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()
dumps = _encoder.encode
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"


def quote(text: str) -> bytes:
    """A string as JSON. Lone surrogates cannot be written in UTF-8: they become U+FFFD rather than an exception."""
    try:
        return _encoder.encode(text)
    except (UnicodeEncodeError, msgspec.EncodeError):
        return _encoder.encode(text.encode("utf-8", "replace").decode("utf-8"))


def data(payload: Any) -> bytes:
    return b"data: " + dumps(payload) + b"\n\n"


def event(name: str, payload: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + dumps(payload) + b"\n\n"


def compact(value: Any) -> str:
    """Compact JSON text that keeps every character as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
