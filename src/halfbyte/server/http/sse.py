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


def without_line_breaks(events: bytes) -> bytes:
    """Events whose JSON has no character at which a common client ends a line, though the standard does not: U+0085,
    U+2028 and U+2029 occur in strings only, and are written there as escapes."""
    if b"\xe2\x80" in events:
        events = events.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return events.replace(b"\xc2\x85", b"\\u0085")


def compact(value: Any) -> str:
    """Compact JSON text that keeps every character as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
