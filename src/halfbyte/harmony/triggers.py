"""The token sequences that begin a final answer: where a grammar wakes up.

A model that reasons first cannot be held to a JSON schema from its first token; it can from the `<|message|>` of its
final answer on. Headers come in a few spellings, so all the ones gpt-oss writes are listed.
"""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.harmony.messages import FINAL
from halfbyte.harmony.vocabulary import Controls, Vocabulary


def final_triggers(vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each way a final answer's text begins; generated tokens that end with one of them are followed by the text."""
    controls = Controls.of(vocabulary)
    head = [controls.channel, *vocabulary.encode(FINAL)]
    return tuple((*head, *format, controls.message) for format in _formats(vocabulary, controls))


def _formats(vocabulary: Vocabulary, controls: Controls) -> Iterator[tuple[int, ...]]:
    json, blank = vocabulary.encode("json"), vocabulary.encode(" ")
    yield ()
    yield (*blank, controls.constrain, *json)
    yield (controls.constrain, *json)
    yield tuple(vocabulary.encode(" json"))
