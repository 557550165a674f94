"""What harmony needs of a tokenizer, and the control tokens it looks up in it.

Any vocabulary that has the harmony control tokens by name will do: gpt-oss's own or the embedded model's. A
vocabulary without them is refused by name, because a conversation rendered without control tokens would be text that
the model has never seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from halfbyte.errors import CheckpointError


class Vocabulary(Protocol):
    @property
    def special(self) -> Mapping[str, int]: ...

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...

    def token_bytes(self, id: int, /) -> bytes: ...


@dataclass(frozen=True)
class Controls:
    """The ids of the tokens that give a conversation its structure."""

    start: int
    channel: int
    constrain: int
    message: int
    end: int
    return_: int
    call: int

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Controls:
        missing = [name for name in CONTROL_NAMES if name not in vocabulary.special]
        if missing:
            raise CheckpointError(
                f"this vocabulary has no {', '.join(missing)}; chat needs a model trained on the harmony format."
            )
        return cls(*(vocabulary.special[name] for name in CONTROL_NAMES))


START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
CONTROL_NAMES = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)  # in the order of Controls' fields
