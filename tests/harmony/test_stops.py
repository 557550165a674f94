"""Triggers are what the renderer writes and what the parser reads as the beginning of a text."""

from __future__ import annotations

import pytest

from halfbyte.harmony import Message, Role, render_message
from halfbyte.harmony.parse import Parser
from halfbyte.harmony.stops import call_prefix, end_tokens, final_prefix, final_triggers, tool_triggers
from halfbyte.model.tokenizer import Tokenizer


@pytest.mark.parametrize("content_type", [None, "<|constrain|>json", "json"])
def test_what_the_renderer_writes_is_a_trigger(tokenizer: Tokenizer, content_type: str | None) -> None:
    answer = render_message(tokenizer, Message(Role.ASSISTANT, "{", "final", None, content_type))
    assert tuple(answer[2:-2]) in final_triggers(tokenizer)
    call = render_message(tokenizer, Message(Role.ASSISTANT, "{", "commentary", "functions.f", content_type))
    assert tuple(call[2:-2]) in tool_triggers(tokenizer, "f")


def test_every_trigger_opens_the_message_it_should(tokenizer: Tokenizer) -> None:
    body = tokenizer.encode("{}")
    for trigger in final_triggers(tokenizer):
        parser = Parser(tokenizer, prefix=trigger)
        (start, *_) = parser.feed(body)
        assert (start.header.kind, start.header.channel) == ("content", "final")
        assert not parser.repairs
    for trigger in tool_triggers(tokenizer, "get_weather"):
        (start, *_) = Parser(tokenizer, prefix=trigger).feed(body)
        assert (start.header.kind, start.header.function) == ("call", "get_weather")
    assert len(set(tool_triggers(tokenizer, "f"))) == 16


def test_prefixes_are_triggers(tokenizer: Tokenizer) -> None:
    assert final_prefix(tokenizer) in final_triggers(tokenizer)
    assert call_prefix(tokenizer, "f") in tool_triggers(tokenizer, "f")
    assert end_tokens(tokenizer) == (200002, 200012, 200007)
