"""Starting and stopping a real server process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from live_server import PATIENCE, Live, wait_until
from scripted import ScriptedSource, always, say

from halfbyte.errors import UsageError
from halfbyte.server.run import _address, bind
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


# ---- other ways to listen ------------------------------------------------------------------------------------------


def test_a_unix_socket(tmp_path: Path, serve: Callable[..., Live]) -> None:
    path = tmp_path / "halfbyte.sock"
    settings = ServerSettings(min_available_bytes=0, uds=str(path))
    live = serve(ScriptedSource(always(say("ok"))), settings)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.name") as client:
        answer = client.post("/v1/chat/completions", json=CHAT | {"stream": False})
    assert answer.json()["choices"][0]["message"]["content"] == "ok"
    with pytest.raises(UsageError, match="cannot listen on"):
        bind(settings)  # somebody answers there
    live.server.should_exit = True
    live.thread.join(PATIENCE)
    assert path.exists()  # as a server that was killed leaves it
    bind(settings).close()
    path.unlink()
    path.write_text("a file of somebody's own")
    with pytest.raises(UsageError, match="cannot listen on"):
        bind(settings)
    assert path.read_text() == "a file of somebody's own"
    assert settings.local_only


def test_tls(certificate: tuple[Path, Path], serve: Callable[..., Live]) -> None:
    file, key = certificate
    settings = ServerSettings(min_available_bytes=0, ssl_certfile=str(file), ssl_keyfile=str(key))
    live = serve(ScriptedSource(always(say("ok"))), settings)
    trusted = ssl.create_default_context(cafile=str(file))
    address = f"https://127.0.0.1:{live.port}/v1/chat/completions"
    assert "ok" in httpx.post(address, json=CHAT, verify=trusted).text
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://127.0.0.1:{live.port}/health")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert _address(settings, sock).startswith("https://127.0.0.1:")
    for wrong in (replace(settings, ssl_certfile="/no/such.pem"), replace(settings, ssl_keyfile=str(file))):
        with pytest.raises(UsageError, match="cannot be used for TLS"):
            bind(wrong)
    with pytest.raises(UsageError, match="--ssl-keyfile needs --ssl-certfile"):
        ServerSettings(ssl_keyfile=str(key))
