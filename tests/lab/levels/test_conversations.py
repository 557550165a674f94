"""Level 2's conversations: over every API the stream of an answer is held against the answer in one piece."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from halfbyte.errors import AskError
from halfbyte.lab.levels.conversations import APIS, QUESTIONS, conversation_checks
from halfbyte.lab.peers.asker import Asker

ANSWERS = {question: f"It is {answer}." for question, answer in QUESTIONS}


class Scripted(Asker):
    """Answers every question over every API; `lost` is left out of streams, `cut` ones have no end."""

    def __init__(self, lost: str = "", *, cut: bool = False, only: str = "") -> None:
        self.lost, self.cut, self.only, self._model = lost, cut, only, "scripted"

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        if self.only and path != self.only:
            raise AskError("HTTP 404: no such API")
        messages = body.get("messages") or body["input"]
        if "tools" in body or "text" in body or "response_format" in body or isinstance(body.get("format"), dict):
            raise AskError("HTTP 400: no tools, no schemas")
        text = ANSWERS[messages[0]["content"]]
        return self.stream(path, text) if body.get("stream") else whole(path, text)

    def stream(self, path: str, text: str) -> str:
        words = [word for word in (text[:3], text[3:]) if word != self.lost]
        events: list[Any]
        if path == "/api/chat":
            lines = [{"message": {"content": word}, "done": False} for word in words]
            return "".join(json.dumps(x) + "\n" for x in [*lines, *([] if self.cut else [{"done": True}])])
        if path == "/v1/chat/completions":
            events, end = [{"choices": [{"delta": {"content": w}}]} for w in words], "[DONE]"
        elif path == "/v1/responses":
            events = [{"type": "response.output_text.delta", "delta": w} for w in words]
            end = json.dumps({"type": "response.completed"})
        else:
            events = [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": w}} for w in words]
            end = json.dumps({"type": "message_stop"})
        return "".join(f"data: {part}\n\n" for part in [*map(json.dumps, events), *([] if self.cut else [end])])


def whole(path: str, text: str) -> Any:
    return {
        "/v1/chat/completions": {"choices": [{"message": {"content": text}}]},
        "/v1/responses": {"output": [{"type": "message", "content": [{"text": text}]}]},
        "/v1/messages": {"content": [{"type": "text", "text": text}]},
        "/api/chat": {"message": {"content": text}},
    }[path]


def streams(asker: Asker) -> dict[str, tuple[bool, str]]:
    checks = conversation_checks(asker, [])
    return {c.what.partition(":")[0]: (c.ok, c.note) for c in checks if "a stream is its answer" in c.what}


def test_streams_of_every_api_are_read() -> None:
    assert streams(Scripted()) == {api.name: (True, "") for api in APIS}


@pytest.mark.parametrize("api", APIS, ids=[api.name for api in APIS])
def test_a_stream_that_is_not_its_answer_fails(api: Any) -> None:
    (ok, note) = streams(Scripted(lost="It ", only=api.path))[api.name]
    assert not ok
    assert "instead of 'It is 42.'" in note
    (ok, note) = streams(Scripted(cut=True, only=api.path))[api.name]
    assert not ok
    assert "no end" in note
