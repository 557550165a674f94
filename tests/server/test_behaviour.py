"""How the server treats strangers, crowds, broken bodies, broken streams and its own end."""

from __future__ import annotations

import codecs
import concurrent.futures
import gzip
import json
import logging
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_server import Live, wait_until
from scripted import Play, ScriptedSource, always, call, say

from halfbyte.errors import ContextError, EngineDiedError, QueueFullError, RequestError, UsageError
from halfbyte.server.settings import ServerSettings, load_api_keys

Serve = Callable[..., Live]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CHAT = {"model": "gpt-oss-test", "messages": [{"role": "user", "content": "Hi"}]}


def settings(**more: Any) -> ServerSettings:
    return ServerSettings(**{"min_available_bytes": 0, **more})


@pytest.fixture
def live(serve: Serve) -> Live:
    return serve(ScriptedSource(always(say("Hello.", "hm"))))


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"functions": []}, "functions"),
        ({"audio": {}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages.0.mood"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "nope"}]}, "messages.0.tool_call_id"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"stream_options": {"include_useage": True}}, "stream_options.include_useage"),
        ({"model": 7}, "model"),
    ],
)
def test_a_bad_parameter_is_named(live: Live, http: httpx.Client, change: dict[str, Any], param: str) -> None:
    answer = http.post(f"{live.url}/v1/chat/completions", json=CHAT | change)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert live.source.requests == []


def test_hosted_service_fields_are_accepted(live: Live, http: httpx.Client) -> None:
    extra = {"user": "u", "metadata": {}, "store": True, "service_tier": "auto", "prompt_cache_key": "k", "seed": None}
    assert http.post(f"{live.url}/v1/chat/completions", json=CHAT | extra).status_code == 200


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/octet-stream"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "gpt-oss-test", "prompt": "Hi"}),
        ("/v1/responses", {"model": "gpt-oss-test", "input": "Hi"}),
        ("/v1/messages", CHAT | {"max_tokens": 9}),
        ("/api/chat", CHAT),
        ("/api/generate", {"model": "gpt-oss-test", "prompt": "Hi"}),
        ("/tokenize", {"model": "gpt-oss-test", "prompt": "Hi"}),
    ],
)
def test_a_json_body_needs_no_content_type(
    live: Live, http: httpx.Client, path: str, body: dict[str, Any], kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = http.post(live.url + path, content=json.dumps(body).encode(), headers=headers)
    assert answer.status_code == 200, answer.text
    marked = http.post(live.url + path, content=codecs.BOM_UTF8 + json.dumps(body).encode(), headers=headers)
    assert marked.status_code == 200, marked.text
    packed = headers | {"content-encoding": "gzip"}
    refused = http.post(live.url + path, content=gzip.compress(json.dumps(body).encode()), headers=packed)
    assert (refused.status_code, "gzip" in refused.text) == (415, True)
    wrong = http.post(live.url + path, content=b"model=gpt-oss-test&prompt=Hi", headers=headers)
    assert wrong.status_code == 400
    assert "JSON" in wrong.text


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"", 400),
        ("POST", "/v1/chat/completions", b"[]", 400),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", b'{"model": NaN}', 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400),
        ("POST", "/v1/messages", b"{", 400),
        ("GET", "/v1/chat/completions", b"", 405),
        ("GET", "/nowhere", b"", 404),
        ("POST", "/v1/embeddings", b"{}", 404),
        ("GET", "/v1/models/other", b"", 404),
        ("GET", "/v1/responses/none", b"", 404),
    ],
)
def test_every_refusal_has_a_shape(
    live: Live, http: httpx.Client, method: str, path: str, body: bytes, status: int
) -> None:
    answer = http.request(method, live.url + path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert answer.json().get("type") == ("error" if path == "/v1/messages" else None)
    assert answer.headers["x-request-id"]


def test_half_a_surrogate_pair_is_no_reason_to_fail(live: Live, http: httpx.Client) -> None:
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": "cut \ud83d"}]})
    assert "\\ud83d" in body
    answer = http.post(f"{live.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert "cut \N{REPLACEMENT CHARACTER}" in live.source.prompts()[0]


def test_deeply_nested_schema_is_refused_or_served(live: Live, http: httpx.Client) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert http.post(f"{live.url}/v1/chat/completions", json=CHAT | {"tools": [tool]}).status_code in (200, 400)


def test_context_limit(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("x")), max_context=200))
    long = CHAT | {"messages": [{"role": "user", "content": "word " * 300}]}
    error = http.post(f"{live.url}/v1/chat/completions", json=long).json()["error"]
    assert error["code"] == "context_length_exceeded"
    http.post(f"{live.url}/v1/chat/completions", json=CHAT | {"max_tokens": 5000})
    request = live.source.requests[0]
    assert request.sampling.max_tokens == 200 - len(request.prompt)


def test_body_limit(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("x"))), settings(max_body_bytes=2000))
    big = json.dumps(CHAT | {"user": "x" * 3000}).encode()
    assert http.post(f"{live.url}/v1/chat/completions", content=big).status_code == 413

    def pieces() -> Any:
        yield big[:1500]
        yield big[1500:]

    assert http.post(f"{live.url}/v1/chat/completions", content=pieces()).status_code == 413
    assert http.post(f"{live.url}/v1/messages", content=big).json()["error"]["type"] == "request_too_large"


def test_keys(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("x"))), settings(api_keys=("alpha", "beta")))
    assert http.get(f"{live.url}/v1/models").status_code == 401
    assert http.get(f"{live.url}/v1/models", headers={"authorization": "Bearer gamma"}).status_code == 401
    assert http.get(f"{live.url}/v1/models", headers={"authorization": "Basic alpha"}).status_code == 401
    assert http.get(f"{live.url}/metrics").status_code == 401
    assert http.get(f"{live.url}/v1/models", headers={"authorization": "Bearer beta"}).status_code == 200
    assert http.get(f"{live.url}/v1/models", headers={"x-api-key": "alpha"}).status_code == 200
    for path in ("/", "/health", "/health/live", "/static/chat.js"):
        assert http.get(live.url + path).status_code == 200, path
    with pytest.raises(openai.AuthenticationError):
        live.openai("wrong").models.list()
    refused = http.post(f"{live.url}/v1/messages", json={})
    assert refused.json()["error"]["type"] == "authentication_error"


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# a comment\n\nalpha\n beta \nalpha\n")
    assert load_api_keys(file, ["gamma"]) == ("gamma", "alpha", "beta")
    file.write_text("# none\n")
    with pytest.raises(UsageError, match="holds no key"):
        load_api_keys(file)
    with pytest.raises(UsageError, match="cannot be read"):
        load_api_keys(tmp_path / "absent")


def test_aliases_and_names(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("x"))), settings(model_name="mine", aliases=("gpt-4o",)))
    names = [m["id"] for m in http.get(f"{live.url}/v1/models").json()["data"]]
    assert names == ["mine", "gpt-oss-test", "gpt-4o"]
    for name in names:
        assert http.post(f"{live.url}/v1/chat/completions", json=CHAT | {"model": name}).json()["model"] == name
    unknown = http.post(f"{live.url}/v1/chat/completions", json=CHAT | {"model": "o3"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


def test_cors_is_off_unless_asked_for(serve: Serve, http: httpx.Client) -> None:
    origin = {"origin": "https://app.example", "access-control-request-method": "POST"}
    closed = serve(ScriptedSource(always(say("x"))))
    assert "access-control-allow-origin" not in http.get(f"{closed.url}/health", headers=origin).headers
    opened = serve(ScriptedSource(always(say("x"))), settings(cors_origins=("https://app.example",), api_keys=("k",)))
    preflight = http.options(f"{opened.url}/v1/chat/completions", headers=origin)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"


# ---- crowds and ends -----------------------------------------------------------------------------------------------


def test_the_queue_is_bounded(serve: Serve, http: httpx.Client) -> None:
    slow = Play(say("x " * 50), delay=0.05)
    live = serve(ScriptedSource(always(slow)), settings(max_requests=2))
    url = f"{live.url}/v1/chat/completions"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(http.post, url, json=CHAT) for _ in range(2)]
        wait_until(lambda: live.source.active == 2)
        for stream in (False, True):
            refused = http.post(url, json=CHAT | {"stream": stream})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            # Refused before anything is rendered: whether it would fit the context is not even asked.
            too_long = {"messages": [{"role": "user", "content": "word " * 9000}], "stream": stream}
            assert http.post(url, json=CHAT | too_long).status_code == 429
        assert all(f.result().status_code == 200 for f in running)
    assert http.post(url, json=CHAT | {"max_tokens": 1}).status_code == 200
    assert http.post(url, json=CHAT | too_long).status_code == 400, "with a slot free, the context is what refuses"
    assert live.service.admission.active == 0


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("that can never be served."), 400),
        (ContextError("too long for the KV cache."), 400),
        (QueueFullError("the queue is full."), 429),
        (EngineDiedError("the engine is gone."), 503),
        (RuntimeError("secret detail"), 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_refusal_becomes_a_status(
    serve: Serve, http: httpx.Client, error: Exception, status: int, stream: bool
) -> None:
    live = serve(ScriptedSource(always(say("x")), refuse=error))
    answer = http.post(f"{live.url}/v1/chat/completions", json=CHAT | {"stream": stream})
    assert answer.status_code == status
    message = answer.json()["error"]["message"]
    assert (str(error) == message) == (status != 500)
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert live.service.admission.active == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels(serve: Serve, stream: bool) -> None:
    live = serve(ScriptedSource(always(Play(say("word " * 2000), delay=0.01))))
    body = json.dumps(CHAT | {"stream": stream}).encode()
    port = int(live.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as sock:
        lines = ("POST /v1/chat/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json")
        head = "\r\n".join((*lines, f"Content-Length: {len(body)}", "", ""))
        sock.sendall(head.encode() + body)
        wait_until(lambda: live.source.active == 1)
        if stream:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: live.source.active == 0)
    assert len(live.source.cancelled) == 1
    assert live.source.finished == []
    wait_until(lambda: live.service.admission.active == 0)


def test_a_slow_prompt_keeps_the_connection_alive(serve: Serve, http: httpx.Client) -> None:
    play = Play(say("late"), first_delay=0.6)
    live = serve(ScriptedSource(always(play)), settings(keepalive_seconds=0.1, headers_after=0.1))
    text = http.post(f"{live.url}/v1/chat/completions", json=CHAT | {"stream": True}).text
    assert text.startswith(": keep-alive\n\n")
    assert '"content":"late"' in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_error_in_the_middle(serve: Serve, http: httpx.Client, stream: bool) -> None:
    live = serve(ScriptedSource(always(Play(say("one two three"), fails_after=6))))
    answer = http.post(f"{live.url}/v1/chat/completions", json=CHAT | {"stream": stream})
    if stream:
        last = answer.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the scripted engine failed"
    else:
        assert answer.status_code == 500
    assert live.service.admission.active == 0


def test_not_ready(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("x")), ready=False))
    health = http.get(f"{live.url}/health")
    assert (health.status_code, health.json()["error"]["message"]) == (503, "Not ready: the script says so.")
    assert http.get(f"{live.url}/health/live").status_code == 200
    refused = http.post(f"{live.url}/v1/chat/completions", json=CHAT)
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert "the script says so" in refused.json()["error"]["message"]


def test_memory_shedding(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    live.service.admission.watchdog.shedding = True
    live.service.admission.watchdog.reason = "only 0.10 GiB of memory are available"
    refused = http.post(f"{live.url}/v1/chat/completions", json=CHAT)
    assert refused.status_code == 503
    assert "0.10 GiB" in refused.json()["error"]["message"]
    assert http.get(f"{live.url}/health").status_code == 503


# ---- broken harmony ------------------------------------------------------------------------------------------------

BROKEN = [
    "Just text, no header at all.",
    "<|channel|>final<|message|>unfinished",
    "<|channel|>analysis<|message|>only thinking<|end|>",
    "<|channel|><|message|>nameless channel<|return|>",
    "<|message|><|message|>doubled<|return|>",
    "<|channel|>poetry<|message|>unknown channel<|return|>",
    "<|channel|>final<|message|>a<|start|>user<|message|>b<|end|>c<|return|>",
    '<|channel|>commentary to=functions.f<|message|>{"x":',
    "to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
    "<|channel|>commentary to=browser.search code<|message|>{}<|call|>",
    "<|start|><|start|><|end|><|end|>",
    "<|call|>",
    "",
]


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("tools", [False, True])
def test_malformed_harmony_is_answered(serve: Serve, http: httpx.Client, text: str, tools: bool) -> None:
    live = serve(ScriptedSource(always(Play(text, finish="stop"))))
    extra = {"tools": [{"type": "function", "function": {"name": "f"}}]} if tools else {}
    plain = http.post(f"{live.url}/v1/chat/completions", json=CHAT | extra)
    assert plain.status_code == 200
    message = plain.json()["choices"][0]["message"]
    shown = json.dumps(message, ensure_ascii=False)
    for word in ("text, no header", "unfinished", "only thinking", "nameless", "doubled", "unknown channel"):
        if word in text:
            assert word in shown
    streamed = http.post(f"{live.url}/v1/chat/completions", json=CHAT | extra | {"stream": True})
    content = reasoning = ""
    for line in streamed.text.split("\n\n")[:-2]:
        delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
    assert content == (message["content"] or "")
    assert reasoning == message.get("reasoning_content", "")
    for path, body in (
        ("/v1/responses", {"model": "gpt-oss-test", "input": "Hi"}),
        ("/v1/messages", {**CHAT, "max_tokens": 100, "thinking": {"type": "adaptive"}}),
    ):
        for stream in (False, True):
            assert http.post(live.url + path, json={**body, "stream": stream}).status_code == 200


def test_random_tokens_are_answered(serve: Serve, http: httpx.Client) -> None:
    draw = random.Random(6)
    special = [200002, 200003, 200005, 200006, 200007, 200008, 200012, 199999, 200100]

    def play(request: Any, index: int) -> Play:
        ids = [draw.choice(special) if draw.random() < 0.3 else draw.randrange(0, 201088) for _ in range(60)]
        return Play(ids, per_step=draw.randrange(1, 9))

    live = serve(ScriptedSource(play))
    tools = [{"type": "function", "function": {"name": "f"}}]
    bodies = [
        ("/v1/chat/completions", CHAT | {"tools": tools, "ignore_eos": True, "stream": True}),
        ("/v1/chat/completions", CHAT | {"ignore_eos": True, "logprobs": True, "top_logprobs": 1}),
        ("/v1/responses", {"model": "gpt-oss-test", "input": "Hi", "stream": True}),
        ("/v1/messages", CHAT | {"max_tokens": 90, "stream": True, "thinking": {"type": "adaptive"}}),
        ("/v1/completions", {"model": "gpt-oss-test", "prompt": "x", "max_tokens": 90, "logprobs": 2}),
    ]
    for turn in range(60):
        path, body = bodies[turn % len(bodies)]
        answer = http.post(live.url + path, json=body)
        assert answer.status_code == 200, answer.text
        assert '"error":{' not in answer.text


# ---- what is told --------------------------------------------------------------------------------------------------


def test_prompts_are_not_logged(serve: Serve, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    live = serve(ScriptedSource(always(Play(say("reply-marker"), fails_after=2))))
    body = CHAT | {"messages": [{"role": "user", "content": "prompt-marker"}]}
    http.post(f"{live.url}/v1/chat/completions?secret=query-marker", json=body)
    # The access log's line is written once the answer has gone.
    wait_until(lambda: any("/v1/chat/completions 500" in r.getMessage() for r in caplog.records))
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("halfbyte")]
    for marker in ("prompt-marker", "reply-marker", "query-marker"):
        assert not any(marker in line for line in lines)


def test_prompts_are_logged_when_asked_for(serve: Serve, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    live = serve(ScriptedSource(always(say("x"))), settings(log_prompts=True))
    http.post(f"{live.url}/v1/chat/completions", json=CHAT)
    http.post(f"{live.url}/v1/completions", json={"model": "gpt-oss-test", "prompt": "raw-marker"})
    lines = [r.getMessage() for r in caplog.records if r.name == "halfbyte.prompts"]
    assert "<|start|>user<|message|>Hi<|end|>" in lines[0]
    assert lines[1] == "raw-marker"


def test_metrics(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(Play("oops " + call("functions.f", "{}", "think about it"), cached=2))))
    http.post(f"{live.url}/v1/chat/completions", json=CHAT)
    http.post(f"{live.url}/v1/chat/completions", json={})
    text = http.get(f"{live.url}/metrics").text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line and not line.startswith("#")
    }
    assert values['halfbyte_requests_finished_total{api="chat",reason="stop"}'] == 1
    assert values["halfbyte_cached_prompt_tokens_total"] == 2
    assert values["halfbyte_completion_tokens_total"] == values["halfbyte_request_completion_tokens_sum"] > 0
    assert values["halfbyte_reasoning_tokens_total"] == 3
    assert values["halfbyte_time_to_first_token_seconds_count"] == 1
    assert values["halfbyte_inter_token_seconds_count"] == values["halfbyte_completion_tokens_total"] - 1
    assert values["halfbyte_memory_available_bytes"] > 0
    assert values["halfbyte_ready"] == 1
    assert any(name.startswith("halfbyte_harmony_repairs_total") and v > 0 for name, v in values.items())
    assert values['halfbyte_http_requests_total{method="POST",route="/v1/chat/completions",status="400"}'] == 1


def test_tokenize_and_back(live: Live, http: httpx.Client) -> None:
    ids = http.post(f"{live.url}/tokenize", json={"prompt": "Hello <|start|>"}).json()["tokens"]
    assert 200006 not in ids
    assert http.post(f"{live.url}/detokenize", json={"tokens": ids}).json()["prompt"] == "Hello <|start|>"
    special = http.post(f"{live.url}/tokenize", json={"prompt": "<|start|>", "parse_special": True}).json()
    assert special["tokens"] == [200006]
    chat = http.post(f"{live.url}/tokenize", json={"messages": CHAT["messages"]}).json()
    usage = http.post(f"{live.url}/v1/chat/completions", json=CHAT).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    assert http.post(f"{live.url}/tokenize", json={}).status_code == 400
    assert http.post(f"{live.url}/detokenize", json={"tokens": [10**12]}).status_code == 200


def test_version_and_page(live: Live, http: httpx.Client) -> None:
    assert http.get(f"{live.url}/version").json()["details"] == {"plan": "scripted"}
    page = http.get(live.url)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    again = http.get(live.url, headers={"if-none-match": page.headers["etag"]})
    assert again.status_code == 304
    assert http.get(f"{live.url}/static/../settings.py").status_code == 404
    assert http.get(f"{live.url}/static/absent.js").status_code == 404
