"""The parser: equal to OpenAI's StreamableParser on valid streams, and steady while a stream comes in."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harmony_conversations import Writer, conversation
from harmony_fuzz import in_chunks, parse, valid_streams

from halfbyte.errors import CheckpointError
from halfbyte.harmony import Message, Role, render_conversation, render_conversation_for_completion
from halfbyte.harmony.parse import Parser
from halfbyte.model.tokenizer import Tokenizer


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
