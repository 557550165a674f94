"""Starting and stopping a real server process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import PATIENCE, wait_until

from halfbyte.errors import UsageError
from halfbyte.server.run import bind
from halfbyte.server.settings import ServerSettings

HERE = Path(__file__).parent
PROGRAM = """
import logging, signal, sys
sys.path[:0] = {paths!r}
from scripted import Play, ScriptedSource, always, say
from halfbyte.server.run import serve
from halfbyte.server.settings import ServerSettings
logging.basicConfig(level=logging.INFO)
play = Play(say("word " * {words}), delay=0.02)
signal.signal(signal.SIGUSR1, lambda *_: setattr(play, "delay", 0.0))
source = ScriptedSource(always(play))
signal.signal(signal.SIGUSR2, lambda *_: (setattr(source, "ready", False), setattr(source, "gone", True)))
async def factory():
    return source, source.tokenizer
settings = ServerSettings(port=0, drain_seconds={drain}, min_available_bytes=0)
serve(settings, factory, started=lambda url: print(url, flush=True))
print("closed", source.closed, source.active, flush=True)
"""
CHAT = {"model": "gpt-oss-test", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


@contextlib.contextmanager
def process(words: int, drain: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    code = PROGRAM.format(paths=[str(HERE), *sys.path], words=words, drain=drain)
    env = {**os.environ, "PYTHONWARNINGS": "default"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as child:
        try:
            assert child.stdout is not None
            url = child.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), child.communicate()[1]
            yield child, url
        finally:
            child.kill()


class Reader(threading.Thread):
    """One streaming request in the background."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.text, self.error = url, "", ""
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=CHAT, timeout=PATIENCE) as answer:
                for piece in answer.iter_text():
                    self.text += piece
        except httpx.HTTPError as e:
            self.error = type(e).__name__


def test_sigterm_drains(http: httpx.Client) -> None:
    with process(words=3000, drain=PATIENCE) as (child, url):
        reader = Reader(url)
        wait_until(lambda: "word" in reader.text)
        child.send_signal(signal.SIGTERM)
        wait_until(lambda: http.get(f"{url}/health").status_code == 503)
        assert http.get(f"{url}/health/live").status_code == 200
        refused = http.post(f"{url}/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        child.send_signal(signal.SIGUSR1)  # a minute of words, at once
        reader.join(PATIENCE)
        assert reader.text.endswith("data: [DONE]\n\n")  # the running request was not cut
        out, err = child.communicate(timeout=PATIENCE)
        assert out == "closed True 0\n", err
        assert child.returncode == 0
        assert "Traceback" not in err


def test_a_drain_ends(http: httpx.Client) -> None:
    with process(words=5000, drain=0.3) as (child, url):
        reader = Reader(url)
        wait_until(lambda: "word" in reader.text)
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=PATIENCE)
        assert out == "closed True 0\n", err
        assert "they are cancelled" in err
        reader.join(PATIENCE)
        assert not reader.text.endswith("[DONE]\n\n")


def test_the_server_ends_with_a_failure_when_its_engine_is_gone_for_good(http: httpx.Client) -> None:
    with process(words=1, drain=0.3) as (child, url):
        assert http.get(f"{url}/health").json() == {"status": "ready"}
        child.send_signal(signal.SIGUSR2)
        out, err = child.communicate(timeout=PATIENCE)
        assert child.returncode != 0
        assert out == ""
        assert "EngineDiedError: the script says so." in err
        assert "the server ends: the script says so" in err


def test_ctrl_c_twice_ends_at_once_and_quietly(http: httpx.Client) -> None:
    with process(words=100_000, drain=PATIENCE) as (child, url):
        reader = Reader(url)
        wait_until(lambda: "word" in reader.text)
        child.send_signal(signal.SIGINT)
        wait_until(lambda: http.get(f"{url}/health").status_code == 503)  # two at once would be one
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=PATIENCE)
        assert "Traceback" not in err
        assert "second signal" in err
        assert out == "closed True 0\n", err
        assert child.returncode == 0


LOADING = """
import asyncio, sys
sys.path[:0] = {paths!r}
from halfbyte.server.run import serve
from halfbyte.server.settings import ServerSettings
async def factory():
    print("loading", flush=True)
    try:
        await asyncio.sleep(1000)
    finally:
        print("stopped", flush=True)
        await asyncio.sleep(0.5)
try:
    serve(ServerSettings(port=0), factory)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_while_the_model_loads_is_quiet() -> None:
    command = [sys.executable, "-c", LOADING.format(paths=sys.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "loading\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "stopped\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=PATIENCE)
        assert "Traceback" not in err
        assert child.returncode == 130


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="choose another --host or --port"):
            bind(ServerSettings(port=taken.getsockname()[1]))
