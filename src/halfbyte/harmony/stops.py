"""The token sequences that begin an answer or a call: where a grammar wakes up, and what a prompt may end with.

A model that reasons first cannot be held to a JSON schema from its first token; it can from the `<|message|>` of its
final answer on. Headers come in a few spellings, so each function lists all the ones gpt-oss writes.
"""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.harmony.messages import ANALYSIS, COMMENTARY, FINAL, FUNCTIONS
from halfbyte.harmony.vocabulary import Controls, Vocabulary


def final_triggers(vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each way a final answer's text begins; generated tokens that end with one of them are followed by the text."""
    controls = Controls.of(vocabulary)
    head = [controls.channel, *vocabulary.encode(FINAL)]
    return tuple((*head, *format, controls.message) for format in _formats(vocabulary, controls))


def tool_triggers(vocabulary: Vocabulary, name: str) -> tuple[tuple[int, ...], ...]:
    """Each way the arguments of a call to the caller's function `name` begin."""
    controls = Controls.of(vocabulary)
    to = vocabulary.encode(f" to={FUNCTIONS}.{name}")
    out = []
    for channel in (COMMENTARY, ANALYSIS):
        head = [controls.channel, *vocabulary.encode(channel)]
        for format in _formats(vocabulary, controls):
            out.append((*to, *head, *format, controls.message))  # the recipient behind the role
            out.append((*head, *to, *format, controls.message))  # or behind the channel
    return tuple(out)


def end_tokens(vocabulary: Vocabulary) -> tuple[int, ...]:
    """What may follow a complete answer or call: `<|return|>`, `<|call|>`, `<|end|>`."""
    controls = Controls.of(vocabulary)
    return (controls.return_, controls.call, controls.end)


def final_prefix(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Put after `<|start|>assistant`, it makes the model answer at once, without reasoning."""
    return final_triggers(vocabulary)[0]


def call_prefix(vocabulary: Vocabulary, name: str) -> tuple[int, ...]:
    """Put after `<|start|>assistant`, it makes the model call the caller's function `name` at once."""
    controls = Controls.of(vocabulary)
    return (
        *vocabulary.encode(f" to={FUNCTIONS}.{name}"),
        controls.channel,
        *vocabulary.encode(COMMENTARY),
        *vocabulary.encode(" "),
        controls.constrain,
        *vocabulary.encode("json"),
        controls.message,
    )


def _formats(vocabulary: Vocabulary, controls: Controls) -> Iterator[tuple[int, ...]]:
    json, blank = vocabulary.encode("json"), vocabulary.encode(" ")
    yield ()
    yield (*blank, controls.constrain, *json)
    yield (controls.constrain, *json)
    yield tuple(vocabulary.encode(" json"))
