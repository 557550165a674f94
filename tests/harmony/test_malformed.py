"""Malformed streams, case by case: what is read out of each, and what is said to have been repaired."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harmony_fuzz import check, parse

from halfbyte.harmony import Message
from halfbyte.harmony.repairs import REPAIRS
from halfbyte.model.tokenizer import Tokenizer

R, C, F = "reasoning", "content", "call"
# stream -> (kind, channel, recipient, content type, text) of each message; what was repaired
CASES: dict[str, tuple[str, list[tuple[str, str | None, str | None, str | None, str]], set[str]]] = {
    "well-formed": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [(R, "analysis", None, None, "Hm."), (C, "final", None, None, "Yes.")],
        set(),
    ),
    "a call, recipient in channel position": (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", "<|constrain|>json", "{}")],
        set(),
    ),
    "a call, recipient in role position": (
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", "json", "{}")],
        set(),
    ),
    "recipient on both sides": (
        " to=functions.f<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", None, "{}")],
        {"doubled_recipient"},
    ),
    "constrain before the recipient": (
        "<|channel|>commentary<|constrain|>json to=functions.f<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", "<|constrain|>json", "{}")],
        set(),
    ),
    "constrain glued to the recipient": (
        "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", "<|constrain|>json", "{}")],
        set(),
    ),
    "constrain twice": (
        "<|channel|>commentary to=functions.f <|constrain|>json<|constrain|>json<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", "<|constrain|>json", "{}")],
        {"doubled_content_type"},
    ),
    "constrain without a format": (
        "<|channel|>final <|constrain|><|message|>{}<|return|>",
        [(C, "final", None, "<|constrain|>", "{}")],
        set(),
    ),
    "constrain after the message token": (
        "<|channel|>commentary to=functions.f<|message|><|constrain|>json<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", "<|constrain|>json", "{}")],
        {"doubled_header"},
    ),
    "constrain instead of the message token": (
        '<|channel|>commentary to=functions.f <|constrain|>json{"a": 1}<|call|>',
        [(F, "commentary", "functions.f", "<|constrain|>json", '{"a": 1}')],
        {"missing_message"},
    ),
    "a format on final": (
        "<|channel|>final json<|message|>{}<|return|>",
        [(C, "final", None, "json", "{}")],
        set(),
    ),
    "no header at all": (
        "Hello! How can I help you today?<|return|>",
        [(C, None, None, None, "Hello! How can I help you today?")],
        {"missing_message"},
    ),
    "short bare text": ("Hi.<|return|>", [(C, None, None, None, "Hi.")], {"missing_message"}),
    "bare text that begins like a header": (
        "assistant is a noun, and final is not.<|return|>",
        [(C, None, None, None, "assistant is a noun, and final is not.")],
        {"missing_message"},
    ),
    "bare text, cut": ("Hi", [(C, None, None, None, "Hi")], {"cut_header"}),
    "bare JSON": ('{"a": [1, 2]}<|return|>', [(C, None, None, None, '{"a": [1, 2]}')], {"missing_message"}),
    "missing message token": (
        "<|channel|>final Hello there, this is the answer.<|return|>",
        [(C, "final", None, None, "Hello there, this is the answer.")],
        {"missing_message"},
    ),
    "missing message token, glued": (
        "<|channel|>analysisLet me think.<|end|><|start|>assistant<|channel|>final<|message|>Ok<|return|>",
        [(R, "analysis", None, None, "Let me think."), (C, "final", None, None, "Ok")],
        {"missing_message"},
    ),
    "a call with neither message token nor arguments": (
        "<|channel|>commentary to=functions.now<|call|>",
        [(F, "commentary", "functions.now", None, "")],
        {"missing_message"},
    ),
    "a call ended by <|end|>": (
        "<|channel|>commentary to=functions.f<|message|>{}<|end|>",
        [(F, "commentary", "functions.f", None, "{}")],
        {"call_without_call"},
    ),
    "a call cut in the middle of its JSON": (
        '<|channel|>commentary to=functions.f<|message|>{"a": [1',
        [(F, "commentary", "functions.f", None, '{"a": [1')],
        set(),
    ),
    "<|call|> after an answer": (
        "<|channel|>final<|message|>Yes<|call|>",
        [(C, "final", None, None, "Yes")],
        {"call_without_recipient"},
    ),
    "the header repeated": (
        "<|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        [(C, "final", None, None, "Yes")],
        {"doubled_start"},
    ),
    "the role repeated": (
        "assistant<|channel|>final<|message|>Yes<|return|>",
        [(C, "final", None, None, "Yes")],
        {"doubled_role"},
    ),
    "two starts": (
        "<|channel|>analysis<|message|>a<|end|><|start|><|start|>assistant<|channel|>final<|message|>b<|return|>",
        [(R, "analysis", None, None, "a"), (C, "final", None, None, "b")],
        {"doubled_start"},
    ),
    "two channels": (
        "<|channel|>analysis<|channel|>final<|message|>Yes<|return|>",
        [(C, "final", None, None, "Yes")],
        {"doubled_channel"},
    ),
    "two message tokens": (
        "<|channel|>final<|message|><|message|>Yes<|return|>",
        [(C, "final", None, None, "Yes")],
        {"doubled_message"},
    ),
    "two ends": ("<|channel|>final<|message|>Yes<|end|><|return|>", [(C, "final", None, None, "Yes")], {"doubled_end"}),
    "no start before the channel": (
        "<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b<|return|>",
        [(R, "analysis", None, None, "a"), (C, "final", None, None, "b")],
        {"missing_start"},
    ),
    "no start before the role": (
        "<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b<|return|>",
        [(R, "analysis", None, None, "a"), (C, "final", None, None, "b")],
        {"missing_start", "doubled_role"},
    ),
    "no end before the start": (
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b<|return|>",
        [(R, "analysis", None, None, "a"), (C, "final", None, None, "b")],
        {"missing_end"},
    ),
    "no end before the channel": (
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>",
        [(R, "analysis", None, None, "a"), (C, "final", None, None, "b")],
        {"missing_end"},
    ),
    "no channel token": (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistantfinal<|message|>b<|return|>",
        [(R, "analysis", None, None, "a"), (C, "final", None, None, "b")],
        {"glued_role"},
    ),
    "a bare channel": ("final<|message|>b<|return|>", [(C, "final", None, None, "b")], {"bare_channel"}),
    "a bare recipient": (
        "<|channel|>commentary functions.f<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", None, "{}")],
        {"bare_recipient"},
    ),
    "channel and recipient glued": (
        "<|channel|>commentaryto=functions.f<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", None, "{}")],
        {"glued_channel"},
    ),
    "a space after to=": (
        "<|channel|>commentary to= functions.f<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", None, "{}")],
        {"spaced_recipient"},
    ),
    "an unknown channel is visible": (
        "<|channel|>thoughts<|message|>Hm<|end|>",
        [(C, "thoughts", None, None, "Hm")],
        {"unknown_channel"},
    ),
    "an empty channel is visible": (
        "<|channel|><|message|>Hm<|end|>",
        [(C, None, None, None, "Hm")],
        {"empty_channel"},
    ),
    "no channel at all": ("<|message|>Hm<|end|>", [(C, None, None, None, "Hm")], set()),
    # From public reports against other engines: llama.cpp 27720, harmony 38 and 60, vllm-mlx 562, vLLM 51977.
    "question marks for a channel": (
        "<|channel|>??<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        [(C, None, None, None, "??"), (C, "final", None, None, "Yes")],
        {"missing_message"},
    ),
    "a question mark behind the channel": (
        "<|channel|>analysis?<|message|>Hm<|end|>",
        [(R, "analysis", None, None, "Hm")],
        {"unclean_channel"},
    ),
    "dashes before the channel": (
        "<|channel|>––commentary to=functions.f<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", None, "{}")],
        {"unclean_channel"},
    ),
    "a header that starts over with another recipient": (
        "<|channel|>commentary to=assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", None, "{}")],
        {"doubled_channel", "doubled_recipient"},
    ),
    "a constraint nobody asked for": (
        "<|channel|>commentary to=functions.web-browsing to=functions.web-browsing <|constrain|>response"
        "<|message|>{}<|call|>",
        [(F, "commentary", "functions.web-browsing", "<|constrain|>response", "{}")],
        {"doubled_recipient"},
    ),
    "a call on the analysis channel": (
        "<|channel|>analysis to=functions.ffgrep code<|message|>{}<|call|>",
        [(F, "analysis", "functions.ffgrep", "code", "{}")],
        set(),
    ),
    "a format for a channel": (
        "<|channel|>commentary to=functions.f<|channel|>json<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", "json", "{}")],
        set(),
    ),
    "a recipient for a format": (
        "<|channel|>commentary <|constrain|>functions.f<|message|>{}<|call|>",
        [(F, "commentary", "functions.f", "<|constrain|>", "{}")],
        {"bare_recipient"},
    ),
    "the role twice": (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistantassistant<|channel|>final<|message|>b<|return|>",
        [(R, "analysis", None, None, "a"), (C, "final", None, None, "b")],
        {"unknown_role"},
    ),
    "a refusal without a header": (
        "This is disallowed content. We must refuse.<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>",
        [(C, None, None, None, "This is disallowed content. We must refuse."), (C, "final", None, None, "No.")],
        {"missing_message"},
    ),
    "an unknown role": (
        "<|channel|>final<|message|>a<|end|><|start|>assistent<|channel|>final<|message|>b<|return|>",
        [(C, "final", None, None, "a"), (C, "final", None, None, "b")],
        {"unknown_role"},
    ),
    "no role": (
        "<|channel|>final<|message|>a<|end|><|start|><|channel|>final<|message|>b<|return|>",
        [(C, "final", None, None, "a"), (C, "final", None, None, "b")],
        {"missing_role"},
    ),
    "the model plays the user": (
        "<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|end|>",
        [(C, "final", None, None, "a"), (C, None, None, None, "b")],
        {"foreign_role"},
    ),
    "words in a header": (
        "<|channel|>final Sure thing<|message|>Yes<|return|>",
        [(C, None, None, None, "Sure thing"), (C, "final", None, None, "Yes")],
        {"stray_words"},
    ),
    "words in a call's header": (
        "<|channel|>commentary to=functions.f I call it<|message|>{}<|call|>",
        [(C, None, None, None, "I call it"), (F, "commentary", "functions.f", None, "{}")],
        {"stray_words"},
    ),
    "many words in a header": (
        "<|channel|>final Sure thing my dear old friend<|message|>Yes<|return|>",
        [(C, "final", None, None, "Sure thing my dear old friendYes")],
        {"missing_message", "late_message"},
    ),
    "many words in a call's header": (
        "<|channel|>commentary to=functions.f Let me call it for you<|message|>{}<|call|>",
        [(C, None, None, None, "Let me call it for you"), (F, "commentary", "functions.f", None, "{}")],
        {"stray_words"},
    ),
    "arguments right after the recipient": (
        '<|channel|>commentary to=functions.f {"a": "one two three four five"}<|call|>',
        [(F, "commentary", "functions.f", None, '{"a": "one two three four five"}')],
        {"missing_message"},
    ),
    "prose between constrain and the arguments": (
        '<|channel|>commentary to=functions.f <|constrain|>I think I should call it{"a":1}<|call|>',
        [
            (C, None, None, None, "I think I should call it"),
            (F, "commentary", "functions.f", "<|constrain|>", '{"a":1}'),
        ],
        {"missing_message", "stray_words"},
    ),
    "prose between the format and the arguments": (
        '<|channel|>commentary to=functions.f <|constrain|>json I think I should call it{"a":1}<|call|>',
        [
            (C, None, None, None, "I think I should call it"),
            (F, "commentary", "functions.f", "<|constrain|>json", '{"a":1}'),
        ],
        {"missing_message", "stray_words"},
    ),
    "prose between constrain and the message token": (
        '<|channel|>commentary to=functions.f <|constrain|>I think I should call it<|message|>{"a":1}<|call|>',
        [
            (C, None, None, None, "I think I should call it"),
            (F, "commentary", "functions.f", "<|constrain|>", '{"a":1}'),
        ],
        {"stray_words"},
    ),
    "prose between the recipient and the arguments": (
        '<|channel|>commentary to=functions.f I think I should call it\n{"a":1}<|call|>',
        [(C, None, None, None, "I think I should call it"), (F, "commentary", "functions.f", None, '{"a":1}')],
        {"missing_message", "stray_words"},
    ),
    "recipient and prose after the format": (
        '<|channel|>commentary <|constrain|>json to=functions.f I think I should call it{"a":1}<|call|>',
        [
            (C, None, None, None, "I think I should call it"),
            (F, "commentary", "functions.f", "<|constrain|>json", '{"a":1}'),
        ],
        {"missing_message", "stray_words"},
    ),
    "code with braces is no prose": (
        '<|channel|>commentary to=functions.f <|constrain|>code x = {"a":1}<|call|>',
        [(F, "commentary", "functions.f", "<|constrain|>code", 'x = {"a":1}')],
        {"missing_message"},
    ),
    "a line break before the recipient": (
        '<|channel|>commentary\nto=functions.f <|constrain|>json<|message|>{"a":1}<|call|>',
        [(F, "commentary", "functions.f", "<|constrain|>json", '{"a":1}')],
        set(),
    ),
    "blanks and a line break before the recipient": (
        '<|channel|>commentary \n to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>',
        [(F, "commentary", "functions.f", "<|constrain|>json", '{"a":1}')],
        set(),
    ),
    "two line breaks before the recipient": (
        '<|channel|>commentary\n\nto=functions.f <|constrain|>json<|message|>{"a":1}<|call|>',
        [(F, "commentary", "functions.f", "<|constrain|>json", '{"a":1}')],
        set(),
    ),
    "a tab before the recipient": (
        '<|channel|>commentary\tto=functions.f <|constrain|>json<|message|>{"a":1}<|call|>',
        [(F, "commentary", "functions.f", "<|constrain|>json", '{"a":1}')],
        set(),
    ),
    "a line break before the recipient, arguments at once": (
        '<|channel|>commentary\nto=functions.f{"a":1}<|call|>',
        [(F, "commentary", "functions.f", None, '{"a":1}')],
        {"missing_message"},
    ),
    "a line break between role and recipient": (
        '\n to=functions.f<|channel|>commentary<|message|>{"a":1}<|call|>',
        [(F, "commentary", "functions.f", None, '{"a":1}')],
        set(),
    ),
    "a line break between format and recipient": (
        '<|channel|>commentary<|constrain|>json\nto=functions.f<|message|>{"a":1}<|call|>',
        [(F, "commentary", "functions.f", "<|constrain|>json", '{"a":1}')],
        set(),
    ),
    "special tokens inside text": (
        "<|channel|>final<|message|>a<|reserved_200017|>b<|message|>c<|constrain|>d<|return|>",
        [(C, "final", None, None, "a<|reserved_200017|>b<|message|>c<|constrain|>d")],
        {"special_in_text"},
    ),
    "end of text ends a message": (
        "<|channel|>final<|message|>a<|endoftext|>",
        [(C, "final", None, None, "a")],
        set(),
    ),
    "blanks between messages": (
        "<|channel|>analysis<|message|>a<|end|>\n\n<|start|>assistant<|channel|>final<|message|>b<|return|>",
        [(R, "analysis", None, None, "a"), (C, "final", None, None, "b")],
        {"doubled_start"},
    ),
    "text between messages": (
        "<|channel|>analysis<|message|>a<|end|>So:<|start|>assistant<|channel|>final<|message|>b<|return|>",
        [(R, "analysis", None, None, "a"), (C, None, None, None, "So:"), (C, "final", None, None, "b")],
        {"missing_start", "abandoned_header"},
    ),
    "cut in the role": (
        "<|channel|>analysis<|message|>a<|end|><|start|>assis",
        [(R, "analysis", None, None, "a")],
        {"cut_header"},
    ),
    "cut in the channel": ("<|channel|>fin", [], {"cut_header"}),
    "cut in the recipient": ("<|channel|>commentary to=functions.get_we", [], {"cut_header"}),
    "cut before the text": ("<|channel|>final<|message|>", [(C, "final", None, None, "")], set()),
    "nothing": ("", [], set()),
    "an end and nothing else": ("<|return|>", [], {"empty_header"}),
    "to=user is not a call": (
        "<|channel|>commentary to=user<|message|>Hi<|end|>",
        [(C, "commentary", "user", None, "Hi")],
        set(),
    ),
    "the built-in python": (
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        [(F, "analysis", "python", "code", "1+1")],
        set(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_malformed(tokenizer: Tokenizer, case: str) -> None:
    text, expected, repairs = CASES[case]
    stream = tokenizer.encode(text, allow_special=True)
    parser, events, _ = parse(stream)
    heads = [event.header for event in events if event.type == "start"]
    got = [
        (h.kind, m.channel, m.recipient, m.content_type, m.text) for h, m in zip(heads, parser.messages, strict=True)
    ]
    assert got == expected
    assert set(parser.repairs) == repairs
    check(stream)


def test_half_a_character_at_the_end(tokenizer: Tokenizer) -> None:
    half = next(id for id in range(256) if tokenizer.token_bytes(id) == b"\xe6")
    stream = [*tokenizer.encode("<|channel|>final<|message|>a", allow_special=True), half]
    parser, events, _ = parse(stream)
    assert parser.messages == [Message.final("a\ufffd")]
    assert parser.repairs == {"half_character": 1}
    assert events[-1].end == "cut"


def test_every_repair_has_its_name_and_its_line_in_the_document() -> None:
    seen = {"half_character"}.union(*(repairs for _, _, repairs in CASES.values()))
    assert seen <= set(REPAIRS)
    page = (Path(__file__).parents[2] / "docs" / "harmony.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(REPAIRS)
