"""/openapi.json says what is true: keys, answers and errors, held against what the server really sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import jsonschema_rs
import pytest
from live_server import Live
from scripted import ScriptedSource, always, call, say

from halfbyte.server.settings import ServerSettings

Serve = Callable[..., Live]
MODEL = "gpt-oss-test"
HI = [{"role": "user", "content": "Hi"}]
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

ASKED: list[tuple[str, str, Any]] = [
    ("post", "/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    ("post", "/v1/chat/completions", {"messages": HI, "tools": [CHAT_TOOL], "n": 2}),
    ("post", "/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1}),
    ("post", "/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f"}]}),
    ("post", "/v1/responses/input_tokens", {"input": "x"}),
    ("post", "/v1/messages", {"max_tokens": 99, "messages": HI, "thinking": {"type": "adaptive"}}),
    ("post", "/v1/messages/count_tokens", {"messages": HI}),
    ("post", "/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("post", "/detokenize", {"tokens": [5]}),
    ("post", "/api/chat", {"messages": HI, "stream": False, "tools": [CHAT_TOOL]}),
    ("post", "/api/chat", {}),
    ("post", "/api/generate", {"prompt": "x", "stream": False}),
    ("post", "/api/show", {}),
    ("get", "/api/tags", None),
    ("get", "/api/ps", None),
    ("get", "/api/version", None),
    ("get", "/v1/models", None),
    ("get", "/v1/models/{name}", None),
    ("get", "/health", None),
    ("get", "/health/live", None),
    ("get", "/version", None),
    ("get", "/props", None),
]
REFUSED: list[tuple[str, str, Any, int]] = [
    ("post", "/v1/chat/completions", {"messages": []}, 400),
    ("post", "/v1/chat/completions", {"messages": HI, "model": "other"}, 404),
    ("post", "/v1/messages", {"messages": HI}, 400),
    ("post", "/api/chat", {"messages": HI, "format": 5}, 400),
    ("post", "/api/generate", {"prompt": "x", "model": "other"}, 404),
    ("get", "/v1/responses/{response_id}", None, 404),
]


def asked(http: httpx.Client, live: Live, method: str, path: str, body: Any) -> httpx.Response:
    url = live.url + path.replace("{name}", MODEL).replace("{response_id}", "resp_none")
    models = {} if path == "/detokenize" else {"model": MODEL}
    return http.request(method, url, json=None if body is None else {**models, **body})


def published(schema: dict[str, Any], method: str, path: str, status: int) -> dict[str, Any]:
    content = schema["paths"][path][method]["responses"][str(status)]["content"]["application/json"]["schema"]
    return {**content, "components": schema["components"]}


def test_answers_and_errors_are_as_published(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(call("functions.f", '{"a":1}', "think", "Well."))))
    schema = http.get(f"{live.url}/openapi.json").json()
    for method, path, body in ASKED:
        answer = asked(http, live, method, path.replace("{name:path}", "{name}"), body)
        assert answer.status_code == 200, answer.text
        jsonschema_rs.validate(published(schema, method, path, 200), answer.json())
    for method, path, body, status in REFUSED:
        answer = asked(http, live, method, path, body)
        assert answer.status_code == status, answer.text
        jsonschema_rs.validate(published(schema, method, path, status), answer.json())
    stored = http.post(f"{live.url}/v1/responses", json={"model": MODEL, "input": "x"}).json()["id"]
    for method, path in (("get", ""), ("get", "/input_items"), ("delete", "")):
        answer = http.request(method, f"{live.url}/v1/responses/{stored}{path}")
        jsonschema_rs.validate(published(schema, method, "/v1/responses/{response_id}" + path, 200), answer.json())


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_keys_and_statuses(serve: Serve, http: httpx.Client, keys: tuple[str, ...]) -> None:
    live = serve(ScriptedSource(always(say("x"))), ServerSettings(min_available_bytes=0, api_keys=keys))
    schema = http.get(f"{live.url}/openapi.json", headers={"x-api-key": "secret"}).json()
    assert schema["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert schema["components"]["securitySchemes"]["header"]["name"] == "x-api-key"
    assert ({} in schema["security"]) == (not keys)
    chat = schema["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "404", "413", "429", "500", "503", "504"} <= set(chat)
    assert "422" not in str(schema["paths"])
    assert ("401" in chat) == bool(keys)
    assert schema["paths"]["/health"]["get"]["security"] == []
    assert "text/event-stream" in chat["200"]["content"]
    assert "application/x-ndjson" in schema["paths"]["/api/chat"]["post"]["responses"]["200"]["content"]
    # Every endpoint has been asked in these tests, so that no answer goes without a schema.
    known = {path for _, path, *_ in (*ASKED, *REFUSED)} | {"/v1/responses/{response_id}/input_items"}
    assert set(schema["paths"]) <= known | {"/metrics", "/health/ready"}
