"""Who may ask, and what stays a caller's own: host names, origins, keys, log lines; and numbers that are none."""

from __future__ import annotations

import json
import math
import os
import socket

import httpx
import pytest
from hostile_requests import CHAT, Serve, connect, read_all, settings, status_of
from live_server import Live, wait_until
from scripted import ScriptedSource, always, call, say
from starlette.datastructures import Headers

from halfbyte.cli.options import check_number
from halfbyte.errors import UsageError
from halfbyte.gates import child_environment
from halfbyte.server.http.errors import ApiError
from halfbyte.server.http.host_check import HostCheck


@pytest.fixture
def live(serve: Serve) -> Live:
    return serve(ScriptedSource(always(say("Hello.", "hm"))))


@pytest.mark.parametrize(
    ("bound", "allowed", "host", "status"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", 200),
        ("127.0.0.1", (), "LocalHost", 200),
        ("127.0.0.1", (), "[::1]:8000", 200),
        ("127.0.0.1", (), "app.localhost", 200),
        ("127.0.0.1", (), "evil.example", 403),
        ("127.0.0.1", (), "127.0.0.1.evil.example", 403),
        ("127.0.0.1", (), "[::1]", 200),
        ("127.0.0.1", (), "[::1].evil.example", 403),
        ("127.0.0.1", (), "[::1]:80.evil.example", 403),
        ("127.0.0.1", (), "[::1]:", 403),
        ("127.0.0.1", (), "[::1", 403),
        ("127.0.0.1", (), "192.0.2.1", 403),
        ("127.0.0.1", (), "", 403),
        ("127.0.0.1", ("proxy.example",), "proxy.example:443", 200),
        ("127.0.0.1", ("*",), "anything", 200),
        ("0.0.0.0", (), "192.0.2.1:8000", 200),
        ("0.0.0.0", (), socket.gethostname(), 200),
        ("0.0.0.0", (), "evil.example", 403),
    ],
)
def test_the_host_must_be_this_machine(bound: str, allowed: tuple[str, ...], host: str, status: int) -> None:
    check = HostCheck(settings(host=bound, allow_hosts=allowed))
    headers = Headers({"host": host})
    if status == 200:
        check.check(headers)
    else:
        with pytest.raises(ApiError) as refused:
            check.check(headers)
        assert refused.value.status == status


def test_a_rebound_name_reaches_nothing(live: Live, http: httpx.Client) -> None:
    for path in ("/", "/health", "/v1/models", "/v1/chat/completions"):
        answer = http.get(live.url + path, headers={"host": "evil.example"})
        assert answer.status_code == 403
        assert "--allow-host" in answer.json()["error"]["message"]
    with connect(live) as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert status_of(read_all(sock)) == 200  # a probe without the header


def test_a_page_of_another_origin_posts_no_undeclared_json(serve: Serve, http: httpx.Client) -> None:
    """A browser sends these content types, or a body without one, to any server without asking it first."""
    live = serve(ScriptedSource(always(say("hi"))), settings(cors_origins=("https://friend.example",)))
    url = f"{live.url}/v1/chat/completions"
    body = json.dumps({"model": "gpt-oss-test", "messages": [{"role": "user", "content": "Hi"}]}).encode()
    kinds = (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x")
    # Another server on this machine is foreign, too; "null" is a sandboxed frame, or a page that hides where it is.
    for kind in kinds:
        declared = {} if kind is None else {"content-type": kind}
        for origin in ("https://evil.example", "http://127.0.0.1:1", "null"):
            answer = http.post(url, content=body, headers=declared | {"origin": origin})
            assert answer.status_code == 403, (kind, origin)
            assert answer.json()["error"]["code"] == "origin_not_allowed"
            assert "--cors" in answer.json()["error"]["message"]
        assert live.source.requests == []
        for headers in ({}, {"origin": live.url}, {"origin": "https://friend.example"}):
            assert http.post(url, content=body, headers=declared | headers).status_code == 200, (kind, headers)
        live.source.requests.clear()
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in http.options(url, headers=preflight).headers


@pytest.mark.parametrize("key", ["alpha", "beta"])
def test_what_was_thought_before_a_call_belongs_to_a_key(serve: Serve, http: httpx.Client, key: str) -> None:
    answer = call("functions.get_weather", "{}", "my secret thought")
    live = serve(ScriptedSource(always(answer)), settings(api_keys=("alpha", "beta")))
    mine, sender = {"authorization": "Bearer alpha"}, {"authorization": f"Bearer {key}"}
    tool = {"name": "get_weather", "parameters": {"type": "object"}}
    body = CHAT | {"tools": [{"type": "function", "function": tool}]}
    message = http.post(f"{live.url}/v1/chat/completions", json=body, headers=mine).json()["choices"][0]["message"]
    id = message["tool_calls"][0]["id"]
    calls = [{"id": id, "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]
    history = [
        *CHAT["messages"],
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": id, "content": "sun"},
    ]
    tokens = http.post(f"{live.url}/tokenize", json={"messages": history}, headers=sender).json()["tokens"]
    use, result = {"type": "tool_use", "id": id, "name": "get_weather", "input": {}}, {"type": "tool_result"}
    blocks = [
        *CHAT["messages"],
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result | {"tool_use_id": id, "content": "sun"}]},
    ]
    own = [{"id": id, "function": {"name": "get_weather", "arguments": {}}}]
    lines = [*CHAT["messages"], {"role": "assistant", "tool_calls": own}, {"role": "tool", "content": "sun"}]
    for path, messages in (("/v1/chat/completions", history), ("/v1/messages", blocks), ("/api/chat", lines)):
        more = {"model": "gpt-oss-test", "messages": messages, "stream": False}
        more |= {"max_tokens": 50} if path == "/v1/messages" else {}
        assert http.post(live.url + path, json=more, headers=sender).status_code == 200
    prompts = [live.source.tokenizer.decode(tokens), *live.source.prompts()[1:]]
    assert len(prompts) == 4
    assert ["my secret thought" in prompt for prompt in prompts] == [key == "alpha"] * 4


def test_responses_belong_to_a_key(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("mine"))), settings(api_keys=("alpha", "beta")))
    url, body = f"{live.url}/v1/responses", {"model": "gpt-oss-test", "input": "Hi"}
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
    id = http.post(url, json=body, headers=mine).json()["id"]
    for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        assert http.request(method, f"{url}/{id}{path}", headers=other).status_code == 404
    again = body | {"previous_response_id": id}
    assert http.post(url, json=again, headers=other).status_code == 400
    assert http.post(url, json=again, headers=mine).status_code == 200
    assert http.post(f"{url}/input_tokens", json=again, headers=other).status_code == 400
    assert http.get(f"{url}/{id}", headers={"x-api-key": "alpha"}).status_code == 200
    assert http.delete(f"{url}/{id}", headers=mine).status_code == 200


def test_the_engine_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HALFBYTE_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, "secret-marker")
    environment = child_environment(EXTRA="1")
    assert "secret-marker" not in environment.values()
    assert environment["EXTRA"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


def test_logs_have_no_control_characters(serve: Serve, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "halfbyte")
    live = serve(ScriptedSource(always(say("x"))), settings(log_prompts=True))
    http.get(f"{live.url}/a%0Aforged%1B[2J%C2%85%E2%80%A8line")
    body = CHAT | {"messages": [{"role": "user", "content": "one\ntwo\x1b[2J"}]}
    http.post(f"{live.url}/v1/chat/completions", json=body)
    wait_until(lambda: sum(r.name == "halfbyte.access" for r in caplog.records) == 2)
    lines = [r.getMessage() for r in caplog.records if r.name in ("halfbyte.access", "halfbyte.prompts")]
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert "/a\\nforged\\x1b[2J\\x85\\u2028line" in lines[0]


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "top_n_sigma", "repetition_penalty", "presence_penalty"]
)
@pytest.mark.parametrize("value", ["NaN", '"nan"', "Infinity", '"inf"', "1e999"])
def test_what_is_no_number_is_refused(live: Live, http: httpx.Client, field: str, value: str) -> None:
    body = json.dumps(CHAT)[:-1] + f', "{field}": {value}}}'
    answer = http.post(f"{live.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert live.source.requests == []


def test_nan_is_no_setting() -> None:
    for name in ("drain_seconds", "silence_seconds", "head_seconds"):
        with pytest.raises(UsageError, match=name):
            settings(**{name: math.nan})
    with pytest.raises(UsageError, match="not a number"):
        check_number(math.nan, "--timeout")
