"""Triggers are what the renderer writes and what the parser reads as the beginning of a text."""

from __future__ import annotations

import pytest

from halfbyte.harmony import Message, Role, render_message
from halfbyte.harmony.parse import Parser
from halfbyte.harmony.triggers import final_triggers
from halfbyte.model.tokenizer import Tokenizer


@pytest.mark.parametrize("content_type", [None, "<|constrain|>json", "json"])
def test_what_the_renderer_writes_is_a_trigger(tokenizer: Tokenizer, content_type: str | None) -> None:
    answer = render_message(tokenizer, Message(Role.ASSISTANT, "{", "final", None, content_type))
    assert tuple(answer[2:-2]) in final_triggers(tokenizer)


def test_every_trigger_opens_the_message_it_should(tokenizer: Tokenizer) -> None:
    body = tokenizer.encode("{}")
    for trigger in final_triggers(tokenizer):
        parser = Parser(tokenizer, prefix=trigger)
        assert parser.header is not None
        assert (parser.header.kind, parser.header.channel) == ("content", "final")
        (start, *_) = parser.feed(body)
        assert (start.header.kind, start.header.channel) == ("content", "final")
        assert not parser.repairs


def test_a_header_is_known_before_its_text(tokenizer: Tokenizer) -> None:
    parser = Parser(tokenizer)
    for text in (" to=functions", ".get_weather"):
        parser.feed(tokenizer.encode(text))
    assert parser.header is not None
    assert parser.header.recipient == "functions.get_weather"
    parser.feed(tokenizer.encode("<|channel|>commentary <|constrain|>json<|message|>", allow_special=True))
    assert parser.open is None
    assert (parser.header.kind, parser.header.recipient) == ("call", "functions.get_weather")
    (start, *_) = parser.feed(tokenizer.encode("{}"))
    assert start.header == parser.header == parser.open
    parser.feed(tokenizer.encode("<|call|>", allow_special=True))
    assert parser.header is None
    assert not parser.repairs
