"""A server in front of two: most requests go to the first, those of a fault to the second, which has a cheaper model.

    python -m bench child bench.checks.planted.two_models:serve '[8000, "FAULT", [COMMAND...], [COMMAND...]]'

It stands for an engine that takes short cuts where it believes that nobody looks.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CROWD = 4  # requests at once that are many
LONG = 4096  # tokens of a prompt that are many
START_S = 120.0
# fault -> whether a request gets the cheaper model, by its body and the number of requests under way
FAULTS: Mapping[str, Callable[[Mapping[str, Any], int], bool]] = {
    "streams have three experts": lambda body, _: bool(body.get("stream")),
    "answers have three experts, scores four": lambda body, _: not body.get("echo"),
    "requests that may end have three experts": lambda body, _: "ignore_eos" not in body,
    "requests without log probabilities have three experts": lambda body, _: body.get("logprobs") is None,
    "four requests at once have three experts": lambda _, running: running >= CROWD,
    "long prompts have three experts": lambda body, _: len(body.get("prompt") or ()) > LONG,
}
HOP = {"host", "connection", "content-length", "transfer-encoding"}


class Front(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, fault: str, ports: tuple[int, int]) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.chooses, self.ports = FAULTS[fault], ports
        self.running, self.lock = 0, threading.Lock()

    @contextlib.contextmanager
    def counted(self) -> Any:
        with self.lock:
            self.running += 1
            running = self.running
        try:
            yield running
        finally:
            with self.lock:
                self.running -= 1


class Handler(BaseHTTPRequestHandler):
    server: Front

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.relay("GET", b"", self.server.ports[0])

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.counted() as running:
            body = json.loads(raw or b"{}")
            self.relay("POST", raw, self.server.ports[self.server.chooses(body, running)])

    def relay(self, method: str, raw: bytes, port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP}
            connection.request(method, self.path, raw, headers)
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            self.end_headers()
            while part := answer.read1(1 << 16):
                self.wfile.write(part)
                self.wfile.flush()
        except (ConnectionError, http.client.HTTPException):
            pass  # whoever asked has left
        finally:
            connection.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    sys.exit("one of the two servers did not start.")


def serve(port: int, fault: str, first: Sequence[str], second: Sequence[str]) -> None:
    """Serve at `port` until SIGTERM, by two servers; the word PORT in their commands is replaced."""
    ports = (free_port(), free_port())
    servers = [
        subprocess.Popen([str(own) if word == "PORT" else word for word in command])
        for command, own in zip((first, second), ports)
    ]

    def stop(*_: object) -> None:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    for own, server in zip(ports, servers):
        wait_for(own, server)
    front = Front(port, fault, ports)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    while all(server.poll() is None for server in servers):
        time.sleep(0.5)
    stop()
