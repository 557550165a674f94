"""A server that a test started as a process of its own: waiting for it, and asking it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path, seconds: float) -> None:
    """What it wrote is shown if it ends, or takes longer."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(f"{url}/health/ready", timeout=5)
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)


def ask(url: str, question: str, timeout: float, **more: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "temperature": 0, **more}
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(request, timeout=timeout))
