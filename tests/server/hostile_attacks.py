"""The attacks of test_hostile_timing.py, in a process of their own: `python hostile_attacks.py NAME PORT SECONDS`.

Each is repeated for so many seconds by as many clients as it needs. What they send is made before they begin, so that
on two cores they cost the server's processor time and not their own.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "Hi"}]


def request(path: str, body: Any) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join((*lines, f"Content-Length: {len(data)}", "", "")).encode() + data


def chat(**more: Any) -> bytes:
    return request("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, **more})


def schema(value: Any) -> bytes:
    wanted = {"type": "json_schema", "json_schema": {"name": "t", "schema": value, "strict": True}}
    return chat(response_format=wanted, max_tokens=200)


def post(data: bytes) -> Callable[[int], None]:
    def once(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), 60) as sock:
            sock.sendall(data)
            while sock.recv(1 << 16):
                pass

    return once


def endless(begin: bytes, block: bytes) -> Callable[[int], None]:
    def once(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), 60) as sock:
            sock.sendall(begin)
            for _ in range(400 * 1024 * 1024 // len(block)):
                sock.sendall(block)

    return once


def crowd(begin: bytes, count: int) -> Callable[[int], None]:
    """Connections that say a little and stay."""

    def once(port: int) -> None:
        socks = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(count)]
        try:
            for _ in range(20):
                for sock in socks:
                    sock.sendall(begin)
                time.sleep(0.2)
        finally:
            for sock in socks:
                sock.close()

    return once


def unread(port: int) -> None:
    """A stream that nobody reads, for longer than an attack lasts."""
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(chat(stream=True, ignore_eos=True, logprobs=True, top_logprobs=20))
        time.sleep(8)


LARGE = 31 << 20
WORDS = {f"k{i}": {"type": "string", "pattern": f"(a|b|c{i})*d{{1,{i + 2}}}"} for i in range(120)}
PATTERNS = {"type": "object", "properties": WORDS, "required": sorted(WORDS)}
CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
HALVES = b'{"model":"' + b"\\ud800" * 600_000 + b'"}'


def said(text: str, role: str = "user") -> bytes:
    return chat(messages=[{"role": role, "content": text}, *MESSAGES])


# name: clients, what makes what each does again and again
ATTACKS: dict[str, tuple[int, Callable[[], Callable[[int], None]]]] = {
    "a header without end": (2, lambda: endless(b"GET / HTTP/1.1\r\nX: ", b"a" * 65536)),
    "headers without end": (2, lambda: endless(b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 10_000)),
    "a body without end": (2, lambda: endless(CHUNKED, b"10000\r\n" + b" " * 65536 + b"\r\n")),
    "half a head, many times": (1, lambda: crowd(b"X", 500)),
    "a body of one letter": (2, lambda: post(said("a" * LARGE))),
    "a prompt of blanks": (2, lambda: post(request("/v1/completions", {"model": MODEL, "prompt": " " * LARGE}))),
    "one letter to count": (2, lambda: post(request("/tokenize", {"prompt": "a" * (8 << 20)}))),
    "a system prompt of one word": (2, lambda: post(said("word" * (LARGE // 4), "system"))),
    "a prompt a little too long": (8, lambda: post(said("a b " * 60_000))),
    "lists": (2, lambda: post(request("/v1/chat/completions", b"[" + b"[]," * 8_000_000 + b"0]"))),
    "numbers": (2, lambda: post(request("/v1/completions", {"model": MODEL, "prompt": [1] * 900_000}))),
    "messages": (2, lambda: post(chat(messages=MESSAGES * 32_000))),
    "fields": (2, lambda: post(chat(**{f"k{i}": 1 for i in range(95_000)}))),
    "half surrogates": (2, lambda: post(request("/v1/chat/completions", HALVES))),
    "streams that nobody reads": (2, lambda: unread),
    "a schema that takes hours": (2, lambda: post(schema({"type": "integer", "multipleOf": 9999991}))),
    "a schema of many patterns": (2, lambda: post(schema(PATTERNS))),
    "references to themselves": (2, lambda: post(schema(CYCLE))),
    "nested patterns": (2, lambda: post(schema({"type": "string", "pattern": "(" * 3000 + "a" + ")" * 3000}))),
}


def completion(prompt: Any, **more: Any) -> bytes:
    return request("/v1/completions", {"model": MODEL, "prompt": prompt, "ignore_eos": True, **more})


def new_prompts(length: int) -> Callable[[int], None]:
    """Long prompts that no prefix cache has seen."""
    numbers = itertools.count(1)

    def once(port: int) -> None:
        number = next(numbers)
        post(completion([100 + (i * number) % 900 for i in range(length)], max_tokens=1))(port)

    return once


# Clients that ask for what is allowed, and for much of it.
GREEDY: dict[str, tuple[int, Callable[[], Callable[[int], None]]]] = {
    "as many sequences as a request may have": (
        2, lambda: post(completion([[100, i] for i in range(8)], n=16, max_tokens=2000))
    ),
    "more sequences than a request may have": (
        2, lambda: post(completion([[100, i] for i in range(256)], n=16, max_tokens=2000))
    ),
    "answers that fill the pages": (1, lambda: post(completion([100, 200], n=16, max_tokens=8000))),
    "two long prompts at once": (2, lambda: new_prompts(7500)),
}  # fmt: skip


def main(name: str, port: int, seconds: float) -> None:
    clients, make = {**ATTACKS, **GREEDY}[name]
    once = make()
    end = time.monotonic() + seconds
    done = [0] * clients

    def run(client: int) -> None:
        while time.monotonic() < end:
            try:
                once(port)
            except OSError:
                time.sleep(0.01)  # refused: that is what should happen
            done[client] += 1

    threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in range(clients)]
    print("ready", flush=True)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()) + 10)
    print(sum(done), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
