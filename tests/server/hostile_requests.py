"""What the tests of hostile clients send, and how they read the answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from live_server import PATIENCE, Live

from halfbyte.server.settings import ServerSettings

Serve = Callable[..., Live]
CHAT = {"model": "gpt-oss-test", "messages": [{"role": "user", "content": "Hi"}]}


def settings(**more: Any) -> ServerSettings:
    return ServerSettings(**{"min_available_bytes": 0, **more})


def connect(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), PATIENCE)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while True:
        try:
            block = sock.recv(1 << 16)
        except ConnectionResetError:
            return data
        if not block:
            return data
        data += block


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def head(path: str = "/v1/chat/completions", length: int = 0, **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join((*lines, *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()), "", "")).encode()


def chat_bytes(**more: Any) -> bytes:
    body = json.dumps(CHAT | more).encode()
    return head(length=len(body)) + body
