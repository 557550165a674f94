"""Messages between a client and the engine's process: MessagePack frames on a socket, one per step.

Errors travel as class name and message, and become an error of that class again on the other side.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from halfbyte import errors
from halfbyte.engine.request import EngineStats, Output, Request, SourceInfo

_HEADER = struct.Struct("<I")


class Start(msgspec.Struct, tag="start"):
    """The first message: the function that builds the core ("module:function") and its argument (EngineOptions)."""

    factory: str
    argument: Any


class Submit(msgspec.Struct, tag="submit"):
    request: Request


class Cancel(msgspec.Struct, tag="cancel"):
    ids: list[str]


class Stop(msgspec.Struct, tag="stop"):
    pass


class Ready(msgspec.Struct, tag="ready"):
    info: SourceInfo


class Working(msgspec.Struct, tag="working"):
    """A sign of life while the model loads or a step takes long."""

    doing: str = ""  # while it loads: a description of the current work


class Refused(msgspec.Struct, tag="refused"):
    id: str
    error: str
    text: str


class Stepped(msgspec.Struct, tag="step"):
    outputs: list[Output]
    stats: EngineStats | None = None  # not in every message


class Died(msgspec.Struct, tag="died"):
    error: str
    text: str


ToEngine = Submit | Cancel | Stop
FromEngine = Ready | Working | Refused | Stepped | Died

_encoder = msgspec.msgpack.Encoder()
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: Any) -> bytes:
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


def error_of(name: str, text: str) -> errors.HalfbyteError:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.HalfbyteError):
        return kind(text)
    return errors.EngineError(f"{name}: {text}")


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        out, at = [], 0
        while len(self._buffer) - at >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer, at)
            end = at + _HEADER.size + size
            if len(self._buffer) < end:
                break
            out.append(bytes(self._buffer[at + _HEADER.size : end]))
            at = end
        del self._buffer[:at]
        return out


def enlarge_buffers(sock: socket.socket) -> None:
    """Large buffers, so that a step's message rarely waits for its reader."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, 1 << 22)
