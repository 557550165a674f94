"""Clients that mean harm, or act as if they did: what they get, and that everybody else is served.

Here is what the server answers. What the same attacks do to a bystander's latency and to memory is timed by
test_hostile_timing.py, which `make test-hostile` runs.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import pytest
from hostile_requests import CHAT, Serve, chat_bytes, connect, head, read_all, settings, status_of
from live_server import PATIENCE, Live, wait_until
from scripted import Play, ScriptedSource, always, say

from halfbyte.server.http import doorkeeper
from halfbyte.server.http.json_body import has_text_beyond
from halfbyte.server.settings import ServerSettings


@pytest.fixture
def live(serve: Serve) -> Live:
    return serve(ScriptedSource(always(say("Hello.", "hm"))))


# ---- connections, heads and bodies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["value", "name", "path", "many"])
def test_a_head_without_end_is_refused_before_the_key_is_asked_for(serve: Serve, where: str) -> None:
    live = serve(ScriptedSource(always(say("x"))), settings(api_keys=("k",)))
    begin = {
        "value": b"GET / HTTP/1.1\r\nX: ",
        "name": b"GET / HTTP/1.1\r\n",
        "path": b"GET /",
        "many": b"GET / HTTP/1.1\r\n",
    }
    with connect(live) as sock:
        sock.sendall(begin[where])
        sent = 0
        try:
            while sent < 64 << 20:
                sent += sock.send(b"a: b\r\n" * 10_000 if where == "many" else b"a" * 60_000)
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert sent < 16 << 20, "it was read without bound"
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_a_body_without_end_is_not_read_after_its_refusal(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))), settings(max_body_bytes=1 << 20))
    with connect(live) as sock:
        lines = ("POST /v1/chat/completions HTTP/1.1", "Host: 127.0.0.1", "Transfer-Encoding: chunked", "", "")
        sock.sendall("\r\n".join(lines).encode())
        sent = 0
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while sent < 64 << 20:
                sock.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
                sent += 65536
        assert sent < 32 << 20, "it was read without bound"
    wait_until(lambda: live.doorkeeper.count == 0)
    # One that sends a little more than was wanted gets its answer, and may go on.
    with connect(live) as sock:
        body = b"x" * 200_000
        sock.sendall(head("/nowhere", length=len(body)) + body)
        assert status_of(sock.recv(1 << 16)) == 404
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in read_all(sock)


def test_many_headers_are_431(live: Live) -> None:
    with connect(live) as sock:
        sock.sendall(head("/health", **{f"x{i}": "y" for i in range(150)}))
        answer = read_all(sock)
    assert status_of(answer) == 431
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


def test_what_is_no_http_has_a_shape(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with connect(live) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = read_all(sock)
    assert status_of(answer) == 400
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    assert not caplog.records, "a line for each would cost more than the request"


@pytest.mark.parametrize("sent", [b"", b"POST / HT", b"\r\n", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n\r\n"])
def test_a_head_that_never_comes_is_not_waited_for(serve: Serve, sent: bytes) -> None:
    live = serve(ScriptedSource(always(say("x"))), settings(head_seconds=0.2, idle_seconds=1))
    with connect(live) as sock:
        sock.sendall(sent)
        assert status_of(read_all(sock)) in (200, 408)
    wait_until(lambda: live.doorkeeper.count == 0)


@pytest.mark.parametrize("limits", [{"body_idle": 0.3}, {"body_seconds": 0.5}])
def test_a_body_that_trickles_is_not_waited_for(serve: Serve, limits: dict[str, float]) -> None:
    live = serve(ScriptedSource(always(say("x"))), settings(**limits))
    with connect(live) as sock:
        sock.sendall(head(length=1000) + b"{")
        assert status_of(read_all(sock)) == 408
    wait_until(lambda: live.doorkeeper.count == 0)
    assert live.service.admission.active == 0


def test_a_reader_that_stops_reading_is_dropped(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    live = serve(
        ScriptedSource(always(Play([1000] * 3_000_000, per_step=2000)), max_context=1 << 22),
        settings(write_seconds=0.5),
    )
    with connect(live) as sock:
        sock.sendall(chat_bytes(stream=True))
        wait_until(lambda: live.source.active == 1)
        wait_until(lambda: live.source.active == 0)
    assert len(live.source.cancelled) == 1
    assert any("has read nothing" in r.getMessage() or "reads too slowly" in r.getMessage() for r in caplog.records)
    wait_until(lambda: live.service.admission.active == 0)


def test_connections_are_limited_and_health_checks_still_answered(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    live = serve(ScriptedSource(always(say("x"))), settings(max_connections=3))
    crowd = [connect(live) for _ in range(3)]
    wait_until(lambda: live.doorkeeper.count == 3)
    assert httpx.get(f"{live.url}/health").status_code == 200
    refused = httpx.post(f"{live.url}/v1/chat/completions", json=CHAT)
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert sum("--max-connections" in r.getMessage() for r in caplog.records) == 1
    for sock in crowd:
        sock.close()
    wait_until(lambda: live.doorkeeper.count == 0)
    assert httpx.post(f"{live.url}/v1/chat/completions", json=CHAT).status_code == 200


def test_silent_connections_do_not_keep_health_checks_out(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))), settings(max_connections=3))
    with contextlib.ExitStack() as stack:
        for _ in range(3 + 2 * doorkeeper.HEALTH_CONNECTIONS):
            stack.enter_context(connect(live))
        wait_until(lambda: live.doorkeeper.count == 3 + doorkeeper.HEALTH_CONNECTIONS)
        for path in doorkeeper.HEALTH_PATHS:
            assert httpx.get(live.url + path).status_code == 200
        assert live.doorkeeper.count <= 3 + doorkeeper.HEALTH_CONNECTIONS
    wait_until(lambda: live.doorkeeper.count == 0)


@pytest.mark.parametrize("later", ["body that stalls", "head without end", "no request"])
def test_a_pipelined_request_writes_nothing_into_the_answer_before_it(serve: Serve, later: str) -> None:
    live = serve(
        ScriptedSource(always(Play(say("word " * 20), delay=0.05))),  # longer than `body_idle`
        settings(body_idle=0.2, head_seconds=3.0, max_head_bytes=2000),
    )
    rest = {
        "body that stalls": head(length=100) + b"{",
        "head without end": b"GET /" + b"a" * 4000,
        "no request": b"\0\r\n\r\n",
    }
    with connect(live) as sock:
        sock.sendall(chat_bytes(stream=True) + rest[later])
        answer, end, after = read_all(sock).partition(b"\r\n0\r\n\r\n")
    assert end
    assert answer.count(b"HTTP/1.1 ") == 1, answer[-600:]
    assert status_of(answer) == 200
    assert answer.rstrip().endswith(b"data: [DONE]")
    assert not after or status_of(after) in (400, 408, 431)  # an answer to the later request, in its turn
    wait_until(lambda: live.doorkeeper.count == 0)


def test_pipelined_requests_are_answered_in_turn_and_all_end_with_their_client(serve: Serve) -> None:
    live = serve(ScriptedSource(always(Play(say("word " * 20), delay=0.001))))
    body = json.dumps(CHAT).encode()
    with connect(live) as sock:
        sock.sendall(chat_bytes() + head(length=len(body)))
        wait_until(lambda: len(live.source.finished + live.source.cancelled) == 1)
        sock.sendall(body + b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert read_all(sock).count(b"HTTP/1.1 200 OK") == 3
    live.source.cancelled.clear()
    live.source.script = always(Play(say("word " * 4000), delay=0.01))
    with connect(live) as sock:
        sock.sendall(chat_bytes() + chat_bytes())
        wait_until(lambda: live.source.active == 1)
    wait_until(lambda: live.source.active == 0)
    assert len(live.source.cancelled) == 1


def test_connections_of_one_address_are_limited_but_not_this_machines(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert doorkeeper.home_of("127.0.0.1") == doorkeeper.home_of("::1") == doorkeeper.home_of("::ffff:127.0.0.5") == ""
    assert doorkeeper.home_of("2001:db8::1") == doorkeeper.home_of("2001:db8::2") == "2001:db8::/64"
    assert ServerSettings().max_connections_per_address >= 256
    live = serve(ScriptedSource(always(say("x"))), settings(max_connections_per_address=2))
    with connect(live), connect(live), connect(live):
        wait_until(lambda: live.doorkeeper.count == 3)
    monkeypatch.setattr(doorkeeper, "home_of", lambda address: "192.0.2.7")
    live = serve(ScriptedSource(always(say("x"))), settings(max_connections_per_address=2))
    with connect(live) as one, connect(live), connect(live) as third:
        assert read_all(third) == b""
        one.sendall(chat_bytes())
        assert status_of(one.recv(1000)) == 200
    assert any("192.0.2.7 holds 2 connections" in r.getMessage() for r in caplog.records)


# ---- the answer ----------------------------------------------------------------------------------------------------


class Panic(BaseException):
    """What native code raises where it cannot go on (pyo3's PanicException): no Exception."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"])
def test_a_panic_of_native_code_is_a_json_error(serve: Serve, http: httpx.Client, path: str, stream: bool) -> None:
    live = serve(ScriptedSource(always(say("x")), refuse=Panic("secret state")))  # type: ignore[arg-type]
    bodies = {
        "/v1/responses": {"model": "gpt-oss-test", "input": "Hi"},
        "/v1/messages": CHAT | {"max_tokens": 10},
        "/v1/completions": {"model": "gpt-oss-test", "prompt": "Hi"},
    }
    answer = http.post(live.url + path, json={**bodies.get(path, CHAT), "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert live.service.admission.active == 0


def test_an_engine_that_says_nothing_is_not_waited_for(serve: Serve, http: httpx.Client) -> None:
    assert ServerSettings().silence_seconds == 600
    live = serve(ScriptedSource(always(Play(say("x"), first_delay=PATIENCE))), settings(silence_seconds=0.3))
    answer = http.post(f"{live.url}/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    wait_until(lambda: live.source.active == 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"])
def test_no_client_can_take_a_character_for_the_end_of_a_line(serve: Serve, http: httpx.Client, path: str) -> None:
    text = "a\u0085b\u2028c\u2029d\x1ce\x0bf é – ‥ €"
    live = serve(ScriptedSource(always(text if path == "/v1/completions" else say(text))))
    bodies = {
        "/v1/responses": {"model": "gpt-oss-test", "input": "Hi"},
        "/v1/messages": CHAT | {"max_tokens": 100},
        "/v1/completions": {"model": "gpt-oss-test", "prompt": "Hi", "max_tokens": 100},
    }
    answer = http.post(live.url + path, json={**bodies.get(path, CHAT), "stream": True})
    said = ""
    for line in answer.content.decode().splitlines():  # at every character that Python takes for the end of one
        assert not line or line.startswith(("data: ", "event: ")), line
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            delta = event["choices"][0] if event.get("choices") else event
            delta = delta.get("delta") or delta.get("text") or ""
            if isinstance(delta, dict):
                delta = delta.get("content") or delta.get("text") or ""
            said += delta if event.get("type") in (None, "content_block_delta", "response.output_text.delta") else ""
    assert said == text


# ---- large bodies --------------------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_before_it_is_tokenised(
    serve: Serve, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve(ScriptedSource(always(say("x")), max_context=1000))
    encoded: list[int] = []
    plain = live.service.tokenizer._plain
    monkeypatch.setattr(live.service.tokenizer, "_plain", lambda text: encoded.append(len(text)) or plain(text))
    monkeypatch.setattr(live.service.tokenizer, "_with_special", live.service.tokenizer._plain)
    for text, most in (("a" * (8 << 20), 1000), ("word " * (1 << 20), 1000), ("a" * 100_000, 200_000)):
        for path, body in (
            ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": text}]}),
            ("/v1/chat/completions", CHAT | {"messages": [{"role": "developer", "content": text}, *CHAT["messages"]]}),
            ("/v1/messages", CHAT | {"messages": [{"role": "user", "content": text}], "max_tokens": 5}),
            ("/v1/messages/count_tokens", CHAT | {"messages": [{"role": "user", "content": text}]}),
            ("/v1/responses", {"model": "gpt-oss-test", "input": text}),
            ("/v1/completions", {"model": "gpt-oss-test", "prompt": text}),
        ):
            encoded.clear()
            answer = http.post(live.url + path, json=body)
            assert answer.status_code == 400
            assert "shorten the conversation" in answer.json()["error"]["message"]
            assert sum(encoded) <= most
    assert live.source.requests == []
    assert live.service.admission.active == 0


def test_tokenising_stops_where_the_context_ends(
    serve: Serve, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text short enough in bytes, far too long in tokens: no more of it is read than shows that."""
    live = serve(ScriptedSource(always(say("x")), max_context=20_000))
    encoded: list[int] = []
    plain = live.service.tokenizer._plain
    monkeypatch.setattr(live.service.tokenizer, "_plain", lambda text: encoded.append(len(text)) or plain(text))
    body = CHAT | {"messages": [{"role": "user", "content": "a1" * 1_000_000}]}
    assert http.post(f"{live.url}/v1/chat/completions", json=body).status_code == 400
    assert sum(encoded) < 200_000


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [1] * 1_100_000},
        {"messages": [{"role": "user", "content": "x"}] * 110_000},
        {"messages": [{"role": "user", "content": ""}] * 33_000},
        {"messages": CHAT["messages"], "logit_bias": {f"k{i}": "x" for i in range(50_000)}},
        {"messages": CHAT["messages"], **{f"k{i}": 1 for i in range(50_000)}},
        {"messages": [{"role": "user", "content": [1] * 500_000}]},
    ],
)
def test_a_body_of_many_parts_is_refused(live: Live, http: httpx.Client, body: dict[str, Any]) -> None:
    answer = http.post(f"{live.url}/v1/chat/completions", json=CHAT | body)
    assert answer.status_code in (400, 413)
    assert len(answer.content) < 1000
    assert live.source.requests == []


@pytest.mark.parametrize(
    ("raw", "beyond"),
    [
        (b'{"a":"' + b"x" * 200 + b'"}', True),
        (b'{"a":"' + b"x" * 90 + b'","b":"' + b"x" * 90 + b'"}', False),
        (b'{"a":"' + b"\\n" * 100 + b'"}', False),  # a hundred bytes of text, written as two hundred
        (b'{"a":"' + b"x" * 99 + b'"}', False),
        (b'{"a":"x"', False),
        (b"", False),
    ],
)
def test_a_text_beyond_every_context_is_seen_without_parsing(raw: bytes, beyond: bool) -> None:
    assert has_text_beyond(raw, 99) is beyond


def test_a_text_beyond_every_context_is_refused(live: Live, http: httpx.Client) -> None:
    answer = http.post(f"{live.url}/v1/completions", json={"model": "tiny", "prompt": " " * (22 << 20)})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "shorten it" in answer.json()["error"]["message"]
    assert live.source.requests == []


def test_large_bodies_in_all_are_bounded(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("x"))), settings(max_body_bytes=1 << 20, max_bodies_bytes=1 << 20))
    with connect(live) as sock:
        sock.sendall(head(length=1 << 20) + b" " * 900_000)
        wait_until(lambda: live.app.state.bodies.total == 900_000)
        large = CHAT | {"messages": [{"role": "user", "content": "x" * 300_000}]}
        assert http.post(f"{live.url}/v1/chat/completions", json=large).status_code == 503
        assert http.post(f"{live.url}/v1/chat/completions", json=CHAT).status_code == 200
    wait_until(lambda: live.app.state.bodies.total == 0)
    assert http.post(f"{live.url}/v1/chat/completions", json=large).status_code == 400, "too long for the context"


def test_a_full_server_does_not_even_read_a_body(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(Play(say("x " * 5000), delay=0.05))), settings(max_requests=1))
    with connect(live) as sock:
        sock.sendall(chat_bytes())
        wait_until(lambda: live.source.active == 1)
        for path in ("/v1/chat/completions", "/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"):
            answer = http.post(live.url + path, content=b"[" * 100, headers={"content-type": "application/json"})
            assert answer.status_code == 429, path
    wait_until(lambda: live.service.admission.active == 0)


def test_long_prompts_are_tokenised_as_they_were(live: Live, http: httpx.Client) -> None:
    """Part by part in a thread, and the tokens are those of the whole at once."""
    text = "The quick brown fox, number 12345, jumps.\n\n" * 8000
    ids = http.post(f"{live.url}/tokenize", json={"prompt": text}).json()["tokens"]
    assert ids == live.service.tokenizer._plain(text)
    assert http.post(f"{live.url}/detokenize", json={"tokens": ids}).json()["prompt"] == text
