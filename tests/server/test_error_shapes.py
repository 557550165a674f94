"""An error has the shape of the API whose router serves the path, before routing and where nothing is, too."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from live_server import Live
from scripted import ScriptedSource, always, say

from halfbyte.server.http.errors import SHAPES
from halfbyte.server.settings import ServerSettings

Serve = Callable[..., Live]
ANTHROPIC_CLIENT = {"anthropic-version": "2023-06-01"}


def shape_of(body: dict) -> str:
    if body.get("type") == "error":
        return "Anthropic"
    return "OpenAI" if isinstance(body["error"], dict) else "Ollama"


@pytest.mark.parametrize(
    ("path", "headers", "shape"),
    [
        ("/v1/chat/completions", {}, "OpenAI"),
        ("/v1/messages", {}, "Anthropic"),
        ("/v1/messages/nothing", {}, "Anthropic"),
        ("/v1/messages/count_tokens", {}, "Anthropic"),
        ("/v1/messagesnothing", {}, "OpenAI"),
        ("/v1/nothing", {}, "OpenAI"),
        ("/v1/nothing", ANTHROPIC_CLIENT, "Anthropic"),
        ("/nothing", {}, "OpenAI"),
        ("/tokenize", {}, "OpenAI"),
        ("/api/chat", {}, "Ollama"),
        ("/api/nothing", {}, "Ollama"),
        ("/api/chat", ANTHROPIC_CLIENT, "Ollama"),
    ],
)
@pytest.mark.parametrize("key", ["right", "wrong"])
def test_shape(serve: Serve, http: httpx.Client, path: str, headers: dict[str, str], shape: str, key: str) -> None:
    """A wrong key is refused before routing; with the right one the path or the body is at fault."""
    live = serve(ScriptedSource(always(say("ok"))), ServerSettings(api_keys=("right",)))
    answer = http.post(f"{live.url}{path}", json={"no": 1}, headers=headers | {"authorization": f"Bearer {key}"})
    assert answer.status_code == (401 if key == "wrong" else 404 if "nothing" in path else 400), answer.text
    assert shape_of(answer.json()) == shape


def test_every_endpoint_has_an_api_with_a_shape(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("ok"))))
    operations = [(path, o) for path, item in live.app.openapi()["paths"].items() for o in item.values()]
    assert len(operations) > 15
    for path, operation in operations:
        (shape,) = {SHAPES[tag].name for tag in operation["tags"]}
        error = operation["responses"]["403"]["content"]["application/json"]["schema"]["$ref"]
        assert error.endswith(f"/{shape}"), path
