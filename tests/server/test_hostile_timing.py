"""What an attack does to a bystander: `make test-hostile`, alone on the machine, for minutes.

`halfbyte serve` with the embedded model is attacked while a bystander asks for `/health` and for short answers. Its
99th percentile must stay under the larger of three times what it was in quiet and 250 ms, and what the server and its
engine hold in memory must be back within 20 % after a minute. What the attacks are answered is test_hostile.py's.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hostile_attacks import ATTACKS, MODEL

pytestmark = [pytest.mark.hostile, pytest.mark.slow]
HERE = Path(__file__).parent
SECONDS = float(os.environ.get("HOSTILE_SECONDS", "8"))
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0})


class Server:
    def __init__(self, log: Path) -> None:
        command = [sys.executable, "-c", "from halfbyte.cli import main; main()", "serve", "--port", "0"]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())):
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.1)
        self.port = int(found[1])

    def memory(self) -> int:
        me = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [me, *me.children(recursive=True)])

    def ask(self) -> float:
        """Milliseconds that a health check and a short answer take together, over a connection of their own."""
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ready"}'
            connection.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
            answer = connection.getresponse()
            assert (answer.status, b'"choices"' in answer.read()) == (200, True)
        finally:
            connection.close()
        return 1000 * (time.perf_counter() - start)

    def listen(self, seconds: float) -> float:
        """The 99th percentile of a bystander that asks again and again."""
        times = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            times.append(self.ask())
            time.sleep(0.01)
        return sorted(times)[int(0.99 * (len(times) - 1))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "log")
    try:
        for _ in range(20):
            server.ask()
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(60)
        finally:
            server.process.kill()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_bystander_does_not_notice(server: Server, name: str) -> None:
    quiet = server.listen(3)
    before = server.memory()
    command = [sys.executable, str(HERE / "hostile_attacks.py"), name, str(server.port), str(SECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attack:
        assert attack.stdout is not None
        assert attack.stdout.readline() == "ready\n"
        attacked = server.listen(SECONDS)
        peak = server.memory()
        out, _ = attack.communicate(timeout=120)
    deadline = time.monotonic() + 60
    while (after := server.memory()) > 1.2 * before and time.monotonic() < deadline:
        time.sleep(1)
    mib = [round(x / 2**20) for x in (before, peak, after)]
    print(f"\n{name}: {int(out)} times; p99 {quiet:.0f} ms in quiet, {attacked:.0f} ms attacked; memory {mib} MiB")
    assert attacked <= max(3 * quiet, 250)
    assert after <= 1.2 * before
