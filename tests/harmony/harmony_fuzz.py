"""Mutated token streams for the parser, and the account every one of them must satisfy.

`python tests/harmony/harmony_fuzz.py FIRST COUNT` checks COUNT streams from seed FIRST on and prints what it saw; the
long test runs several of these at once.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache

from harmony_conversations import Writer

from halfbyte.harmony.messages import Message
from halfbyte.harmony.parse import Event, Parser, ParserTrace
from halfbyte.harmony.render import render_conversation_for_completion, render_conversation_for_training
from halfbyte.model.tokenizer import Tokenizer

SNIPPETS = (
    "assistant", "analysis", "final", "commentary", " to=functions.x", " to=", "functions.x", "json", " json", "code",
    " ", "\n", "user", "tool", "system", "assistantfinal", "analysisLet", "finalto=functions.f", "python", '{"a": 1',
    "Hello there, how are you doing today?", "to=assistant", "漢", "👩", "thoughts", "user:bob", ":", "to=python code",
)  # fmt: skip
CONTROL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
MUTATIONS = (
    "drop", "drop span", "double", "swap", "control", "rare", "snippet", "random", "truncate", "bytes", "splice",
    "repeat",
)  # fmt: skip


@cache
def valid_streams() -> tuple[tuple[int, ...], ...]:
    """What well-behaved models emit after `<|start|>assistant`: the assistant's part of many turns."""
    tokenizer = Tokenizer.gpt_oss()
    out = []
    for seed in range(400):
        writer = Writer(seed)
        turn = writer.turn(finished=writer.chance(0.7))
        prompt = render_conversation_for_completion(tokenizer, turn[:1])
        whole = render_conversation_for_training(tokenizer, turn, drop_analysis=False)
        if len(whole) > len(prompt):
            out.append(tuple(whole[len(prompt) :]))
    return tuple(out)


@cache
def _snippets() -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(Tokenizer.gpt_oss().encode(text)) for text in SNIPPETS)


def mutated(seed: int) -> list[int]:
    r = random.Random(seed)
    tokenizer = Tokenizer.gpt_oss()
    control = [tokenizer.special[name] for name in CONTROL]
    rare = [tokenizer.special["<|endoftext|>"], 199998, 200017, 201087, 201088, 250000]
    if r.random() < 0.1:  # nothing but noise
        return [
            r.choice(control)
            if r.random() < 0.5
            else r.choice(r.choice(_snippets()))
            if r.random() < 0.7
            else r.randrange(201088)
            for _ in range(r.randint(0, 40))
        ]
    stream = list(r.choice(valid_streams()))
    for _ in range(r.choice((1, 1, 2, 3, 5, 10))):
        at, to = r.randint(0, len(stream)), r.randint(0, len(stream))
        match r.choice(MUTATIONS):
            case "drop":
                del stream[at : at + 1]
            case "drop span":
                del stream[at : at + r.randint(1, 6)]
            case "double":
                stream[at:at] = stream[at : at + r.randint(1, 4)]
            case "swap" if at < len(stream) and to < len(stream):
                stream[at], stream[to] = stream[to], stream[at]
            case "control":
                stream.insert(at, r.choice(control))
            case "rare":
                stream.insert(at, r.choice(rare))
            case "snippet":
                stream[at:at] = r.choice(_snippets())
            case "random":
                stream[at:at] = [r.randrange(201088) for _ in range(r.randint(1, 5))]
            case "truncate":
                del stream[at:]
            case "bytes":  # halves of characters
                stream[at:at] = r.choices(range(256), k=r.randint(1, 3))
            case "splice":
                stream[at:at] = r.choice(valid_streams())[: r.randint(1, 30)]
            case "repeat":
                stream[at:at] = [r.choice(control)] * r.randint(2, 5)
    return stream


def in_chunks(stream: Sequence[int], seed: int) -> list[Sequence[int]]:
    r = random.Random(seed)
    out, at = [], 0
    while at < len(stream):
        size = r.choice((1, 1, 2, 3, 7, 50))
        out.append(stream[at : at + size])
        at += size
    return out


def parse(
    stream: Sequence[int], chunks: Sequence[Sequence[int]] | None = None
) -> tuple[Parser, list[Event], list[ParserTrace]]:
    trace: list[ParserTrace] = []
    parser = Parser(Tokenizer.gpt_oss(), trace=trace)
    events = [event for chunk in ([stream] if chunks is None else chunks) for event in parser.feed(chunk)]
    return parser, events + parser.finish(), trace


def check(stream: Sequence[int], seed: int = 0) -> Counter[str]:
    """Asserts that nothing is lost or invented and that chunks do not matter; returns the repairs."""
    token_bytes = Tokenizer.gpt_oss().token_bytes
    parser, events, trace = parse(stream)

    # Every token is counted, and every byte is somewhere, in order.
    assert parser.account.tokens == len(stream)
    assert b"".join(t.data for t in trace if t.destination != "stray") == b"".join(map(token_bytes, stream))

    # What went to text is what the events say, message by message.
    texts: dict[int, str] = {}
    raw: dict[int, bytes] = {}
    for event in events:
        texts[event.message] = texts.get(event.message, "") + event.text
    for piece in trace:
        if piece.destination in ("text", "stray"):
            raw[piece.message] = raw.get(piece.message, b"") + piece.data
    assert {n: data.decode("utf-8", "replace") for n, data in raw.items()} == {n: t for n, t in texts.items() if t}
    assert [m.text for m in parser.messages] == [texts[n] for n in range(len(parser.messages))]

    check_order(events, parser.messages)
    check_headers(parser, events, trace)

    # However it is cut, the same messages.
    other, pieces, _ = parse(stream, [[token] for token in stream] if seed % 4 == 0 else in_chunks(stream, seed))
    assert other.messages == parser.messages
    assert other.repairs == parser.repairs
    assert merged(pieces) == merged(events)
    assert parser.finish() == [], "finishing twice does nothing"
    return parser.repairs


def check_order(events: Sequence[Event], messages: Sequence[Message]) -> None:
    """start, deltas, end, one message after the other."""
    number, is_open = 0, False
    for event in events:
        assert event.message == number
        assert (event.type == "start") != is_open
        is_open = event.type != "end"
        number += event.type == "end"
        assert (event.type == "delta") == bool(event.text)
        assert (event.type == "end") == (event.end is not None)
    assert not is_open
    assert number == len(messages)
    heads = [e.header for e in events if e.type == "start"]
    assert [(h.role, h.channel, h.recipient, h.content_type, h.name) for h in heads] == [
        (m.role, m.channel, m.recipient, m.content_type, m.name) for m in messages
    ]


def check_headers(parser: Parser, events: Sequence[Event], trace: Sequence[ParserTrace]) -> None:
    """Each word that vanished into a header is a field of some message, or a word the format knows."""
    known = {
        "to=",
        "assistant",
        "user",
        "system",
        "developer",
        "tool",
        "analysis",
        "commentary",
        "final",
        "json",
        "code",
        "text",
    }
    explained = set(known)
    for header in [event.header for event in events if event.type == "start"] + parser.abandoned:
        fields = (header.channel, header.recipient, header.content_type, header.name, *header.discarded)
        explained |= {part for field in fields if field for part in (field, field.removeprefix("<|constrain|>"))}
    explained |= {
        word for t in trace if t.destination == "stray" for word in t.data.decode("utf-8", "replace").split(" ")
    }
    for piece in trace:
        if piece.destination == "header":
            for data in piece.data.split():  # at ASCII blanks, as the format does
                word = data.decode("utf-8", "replace")
                half = "cut_header" in parser.repairs and any(name.startswith(word) for name in known)
                assert half or _explained(word, explained), (word, explained)


def _explained(word: str, explained: set[str]) -> bool:
    """Whether a word is made of explained ones: `to=x`, `assistantfinal`, `user:bob`, `<|constrain|>json`."""
    if not word or word in explained:
        return True
    return any(
        word.startswith(front) and _explained(word[len(front) :], explained) for front in (*explained, ":") if front
    )


def merged(events: Sequence[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        if event.type == "delta" and out and out[-1].type == "delta":
            out[-1] = event._replace(text=out[-1].text + event.text)
        else:
            out.append(event)
    return out


def run(first: int, count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        stream = mutated(seed)
        try:
            seen.update(check(stream, seed).keys())
        except Exception as e:
            raise AssertionError(f"seed {seed}: {Tokenizer.gpt_oss().decode(stream)!r}") from e
    return seen


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
