"""The parser against OpenAI's StreamableParser where streams are valid, and case by case where they are not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harmony_conversations import Writer, conversation
from harmony_fuzz import check, in_chunks, parse, valid_streams

from halfbyte.errors import CheckpointError
from halfbyte.harmony import Message, Role, render_conversation, render_conversation_for_completion
from halfbyte.harmony.parse import Parser
from halfbyte.model.tokenizer import Tokenizer

# ---- valid streams ------------------------------------------------------------------------------


def package_messages(parser: Any) -> list[Message]:
    return [
        Message(
            Role(m.author.role.value),
            "".join(part.text for part in m.content),
            m.channel,
            m.recipient,
            m.content_type,
            m.author.name,
        )
        for m in parser.messages
    ]


@pytest.mark.parametrize("block", range(4))
def test_equal_to_the_package_on_what_models_emit(package: Any, tokenizer: Tokenizer, block: int) -> None:
    import openai_harmony as oh

    for seed, stream in enumerate(valid_streams()[block::4]):
        theirs = oh.StreamableParser(package, oh.Role.ASSISTANT)
        ours = Parser(tokenizer)
        for token in stream:  # one by one, with what each reports on the way
            theirs.process(token)
            deltas = "".join(event.text for event in ours.feed([token]))
            assert deltas == ((theirs.last_content_delta or "") if ours.open else "")
            if ours.open:
                assert ours.open.channel == theirs.current_channel
                assert ours.open.recipient == theirs.current_recipient
                assert ours.open.content_type == theirs.current_content_type
        theirs.process_eos()
        ours.finish()
        expected = package_messages(theirs)
        assert ours.messages == expected
        assert set(ours.repairs) <= {"foreign_role"}, "tools speak in these streams; nothing else is odd"
        for chunks in ([stream], in_chunks(stream, seed), in_chunks(stream, -seed)):
            assert parse(stream, chunks)[0].messages == expected


@pytest.mark.parametrize("block", range(4))
def test_equal_to_the_package_on_whole_conversations(package: Any, tokenizer: Tokenizer, block: int) -> None:
    import openai_harmony as oh

    compared = 0
    for seed in range(block, 1000, 4):
        messages = conversation(seed)
        # The package cannot read back a named user, nor a content type without a recipient unless it is constrained.
        messages = [m for m in messages if (m.role is Role.TOOL or m.name is None) and m.recipient != "all"]
        stream = render_conversation(tokenizer, messages)
        theirs = oh.StreamableParser(package, None)
        for token in stream:
            theirs.process(token)
        theirs.process_eos()
        ours = Parser(tokenizer, role=None)
        for chunk in in_chunks(stream, seed):
            ours.feed(chunk)
        ours.finish()
        assert ours.messages == package_messages(theirs), f"seed {seed}"
        assert not ours.repairs
        compared += len(messages)
    assert compared > 1000


def test_what_is_rendered_is_read_back(tokenizer: Tokenizer) -> None:
    for seed in range(200):
        messages = [
            m for m in Writer(seed).turn() if m.content_type != "<|constrain|>" and (m.role is Role.TOOL or not m.name)
        ]
        parser = Parser(tokenizer, role=None)
        parser.feed(render_conversation(tokenizer, messages, drop_analysis=False))
        parser.finish()
        assert parser.messages == messages


# ---- malformed streams --------------------------------------------------------------------------

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


def test_a_prefix_sets_the_state_and_is_not_reported(tokenizer: Tokenizer) -> None:
    encode = lambda text: tokenizer.encode(text, allow_special=True)  # noqa: E731
    parser = Parser(tokenizer, prefix=encode("<|channel|>commentary to=functions.f <|constrain|>json<|message|>"))
    events = parser.feed(encode('{"a":1}<|call|>'))
    assert [e.type for e in events] == ["start", "delta", "end"]
    assert parser.messages == [Message.call("f", '{"a":1}')]
    assert parser.account.tokens == len(encode('{"a":1}<|call|>'))

    parser = Parser(
        tokenizer, prefix=encode("<|channel|>analysis<|message|>So<|end|><|start|>assistant<|channel|>final")
    )
    parser.feed(encode("<|message|>Yes<|return|>"))
    assert parser.messages == [Message.final("Yes")]

    parser = Parser(tokenizer, prefix=encode("<|channel|>final<|message|>Once upon"))
    assert [e.text for e in parser.feed(encode(" a time<|return|>"))] == ["", " a time", ""]
    assert parser.messages == [Message.final(" a time")]
    assert not parser.repairs


def test_text_streams_without_waiting(tokenizer: Tokenizer) -> None:
    """A body's token is reported when it arrives, and bare text as soon as it cannot be a header."""
    parser = Parser(tokenizer)
    parser.feed(tokenizer.encode("<|channel|>final<|message|>", allow_special=True))
    for token in tokenizer.encode("The quick brown fox"):
        assert parser.feed([token])[-1].text == tokenizer.decode([token])
    parser = Parser(tokenizer)
    shown = "".join(e.text for e in parser.feed(tokenizer.encode("There is no header here, sorry")))
    assert shown == "There is no header here, sorry"


def test_a_vocabulary_without_control_tokens_is_refused() -> None:
    class Plain:
        special: dict[str, int] = {"<|start|>": 0}

        def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
            return list(text.encode())

        def token_bytes(self, id: int) -> bytes:
            return bytes([id])

    with pytest.raises(CheckpointError, match=r"<\|channel\|>"):
        Parser(Plain())


def test_work_per_token_is_bounded(tokenizer: Tokenizer) -> None:
    """No quadratic corner: a hostile stream costs as many header readings as it has messages."""
    special = tokenizer.special
    control = [special[f"<|{n}|>"] for n in ("start", "channel", "constrain", "message")]
    calls = 0

    class Counting(Parser):
        def _open(self) -> None:
            nonlocal calls
            calls += 1
            super()._open()

    r = random.Random(1)
    for pattern in (
        [control[1], control[3]],
        [control[2], control[3]],
        control,
        [r.choice(control) for _ in range(64)],
    ):
        parser = Counting(tokenizer)
        calls = 0
        parser.feed(pattern * 500)
        parser.finish()
        assert calls <= len(parser.messages)


def test_completion_prompt_and_parser_meet(tokenizer: Tokenizer) -> None:
    prompt = render_conversation_for_completion(tokenizer, [Message.user("x")])
    answer = tokenizer.encode("<|channel|>final<|message|>y<|return|>", allow_special=True)
    whole = Parser(tokenizer, role=None)
    whole.feed(prompt + answer)
    assert whole.messages == [Message.user("x"), Message.final("y")]
