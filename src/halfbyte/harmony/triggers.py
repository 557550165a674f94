"""Token sequences between messages: those that begin a final answer, name a recipient, or end reasoning.

A grammar wakes up where a final answer begins: a model that reasons first cannot be held to a JSON schema from its
first token; it can from the `<|message|>` of its final answer on. Headers come in a few spellings, so all the ones
gpt-oss writes are listed.
"""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.harmony.messages import ANALYSIS, COMMENTARY, FINAL, Role
from halfbyte.harmony.vocabulary import Controls, Vocabulary


def final_triggers(vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each way a final answer's text begins; generated tokens that end with one of them are followed by the text."""
    controls = Controls.of(vocabulary)
    head = [controls.channel, *vocabulary.encode(FINAL)]
    return tuple((*head, *format, controls.message) for format in _formats(vocabulary, controls))


def recipient_triggers(vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each way in which a header comes to its recipient, up to the word before the equals sign: behind the role, a
    channel or a content type, with a blank or without. Each has three tokens or more, so that two tokens before its end
    it is known to be near."""
    controls = Controls.of(vocabulary)
    channels = [(controls.channel, *vocabulary.encode(name)) for name in (ANALYSIS, COMMENTARY, FINAL)]
    openings = [
        (controls.start, *vocabulary.encode(Role.ASSISTANT.value)),
        *channels,
        (controls.constrain, *vocabulary.encode("json")),
    ]
    return tuple((*opening, *vocabulary.encode(word)) for opening in openings for word in (" to", "to"))


def reasoning_closings(vocabulary: Vocabulary, *, tools: bool, json: bool = False) -> tuple[tuple[int, ...], ...]:
    """Each way from the middle of a reasoning message to what may follow it. None of them begins another.

    The final answer, as JSON with `json`; with `tools` also a preamble or a call, up to where the model decides which.
    """
    controls = Controls.of(vocabulary)
    message = (controls.end, controls.start, *vocabulary.encode(Role.ASSISTANT.value))
    formats = tuple(_formats(vocabulary, controls))
    answer = (*message, controls.channel, *vocabulary.encode(FINAL), *formats[1 if json else 0], controls.message)
    if not tools:
        return (answer,)
    commentary = (*message, controls.channel, *vocabulary.encode(COMMENTARY))
    return answer, commentary, (*message, *vocabulary.encode(" to"))


def _formats(vocabulary: Vocabulary, controls: Controls) -> Iterator[tuple[int, ...]]:
    json, blank = vocabulary.encode("json"), vocabulary.encode(" ")
    yield ()
    yield (*blank, controls.constrain, *json)
    yield (controls.constrain, *json)
    yield tuple(vocabulary.encode(" json"))
