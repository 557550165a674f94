"""`run` and `chat` beside a server that has the model: they ask it, as any client would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from live_server import PATIENCE, Live, wait_until
from scripted import ScriptedSource, always, say

from halfbyte import gates
from halfbyte.cli.conversation import AnswerText, Exchange, Manner, ServerAnswers
from halfbyte.cli.top import WatchedServer
from halfbyte.errors import AskError, PeerDiedError, UsageError
from halfbyte.server.settings import ServerSettings

HALFBYTE = [sys.executable, "-c", "from halfbyte.cli import main; main()"]


def test_a_server_is_asked_with_what_was_said_before(serve: Callable[..., Live]) -> None:
    live = serve(ScriptedSource(always(say("It is 42.", "Adding."))))
    answers = ServerAnswers(live.url, "gpt-oss-test")
    pieces = list(answers.pieces([Exchange("Hi", "Hello!")], "And 17 + 25?", Manner(effort="high", system="Be brief.")))
    assert "".join(p.text for p in pieces if p.kind == "reasoning") == "Adding."
    assert "".join(p.text for p in pieces if p.kind == "content") == "It is 42."
    (prompt,) = live.source.prompts()
    for text in ("Reasoning: high", "Be brief.", "Hi", "Hello!", "And 17 + 25?"):
        assert text in prompt


def test_what_a_server_refuses_is_one_sentence(serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    live = serve(ScriptedSource(always(say("ok"))), ServerSettings(min_available_bytes=0, api_keys=("sesame",)))
    monkeypatch.delenv("HALFBYTE_API_KEY", raising=False)
    with pytest.raises(AskError, match="API key is missing or wrong"):
        list(ServerAnswers(live.url, "gpt-oss-test").pieces((), "Hi", Manner()))
    monkeypatch.setenv("HALFBYTE_API_KEY", "sesame")
    assert list(ServerAnswers(live.url, "gpt-oss-test").pieces((), "Hi", Manner())) == [AnswerText("content", "ok")]
    with pytest.raises(PeerDiedError, match="does not answer"):
        list(ServerAnswers("http://127.0.0.1:9", "gpt-oss-test").pieces((), "Hi", Manner()))


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("over", ["port", "socket"])
def test_every_address_that_a_server_may_have(
    over: str, tls: bool, serve: Callable[..., Live], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = str(tmp_path / "s") if over == "socket" else None
    file, key = request.getfixturevalue("certificate") if tls else (None, None)
    live = serve(
        ScriptedSource(always(say("ok"))),
        ServerSettings(min_available_bytes=0, uds=path, ssl_certfile=file and str(file), ssl_keyfile=key and str(key)),
    )
    url = f"unix:{path}" if path else f"http{'s' if tls else ''}://localhost:{live.port}"
    answers = ServerAnswers(url, "gpt-oss-test", file and str(file))
    assert list(answers.pieces((), "Hi", Manner())) == [AnswerText("content", "ok")]
    with WatchedServer(url, certificate=file and str(file)) as seen:
        assert seen.version()["model"] == "gpt-oss-test"
    if tls:
        with pytest.raises(PeerDiedError, match="does not answer"):
            list(ServerAnswers(url, "gpt-oss-test").pieces((), "Hi", Manner()))


def test_a_certificate_that_was_taken_away(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.pem of the server at https://127.0.0.1:9 cannot be read"):
        list(ServerAnswers("https://127.0.0.1:9", "m", str(tmp_path / "gone.pem")).pieces((), "Hi", Manner()))


@pytest.mark.slow
def test_serve_ps_run_and_stop(tmp_path: Path) -> None:
    kept = gates.cache_folder("cpu")  # compiled kernels, without the list of servers that may run here
    if kept.is_dir():
        (tmp_path / "cpu").symlink_to(kept)
    environment = {**os.environ, "HALFBYTE_CACHE_DIR": str(tmp_path)}

    def halfbyte(*words: str) -> str:
        done = subprocess.run(
            [*HALFBYTE, *words], env=environment, capture_output=True, text=True, timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    command = [*HALFBYTE, "serve", "--port", "0", "--device", "cpu", "--name", "little"]
    server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        files = tmp_path / "servers"
        wait_until(lambda: any('"url": "http' in f.read_text(encoding="utf-8") for f in files.glob("*.json")))
        assert "serving" in halfbyte("ps")
        (found,) = json.loads(halfbyte("ps", "--json"))["servers"]
        assert (found["pid"], found["model"], found["device"]) == (server.pid, "little", "cpu")
        assert set(found["names"]) >= {"little", "tiny"}
        said = halfbyte("run", "tiny", "What is 17 + 25?")
        assert f"asked of the server at {found['url']}" in said
        assert "17 + 25 = 42." in said
        assert "stopped little" in halfbyte("stop", "little")
        assert server.wait(PATIENCE) == 0
        assert json.loads(halfbyte("ps", "--json"))["servers"] == []
    finally:
        server.kill()
        server.wait()
