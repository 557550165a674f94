"""What the model thought before each of its calls, for clients that send the call back without it.

gpt-oss has to see, between the calls of one turn, what it was thinking; most clients drop that, because their API has
no field for it. Kept in memory under the call's own id, for the key that the answer was made with; the oldest go first.
Reasoning that a client does send back counts, whatever is kept here.
"""

from __future__ import annotations

from halfbyte.byte_cache import ByteCache
from halfbyte.server.answer.answer import ChoiceAnswer


class CallMemory:
    def __init__(self, most_bytes: int) -> None:
        self._thoughts: ByteCache[tuple[str, str], str] = ByteCache(most_bytes)  # by owner and id of the call

    def of(self, owner: str) -> OwnCalls:
        return OwnCalls(self._thoughts, owner)


class OwnCalls:
    """The part of the memory that belongs to one key."""

    def __init__(self, thoughts: ByteCache[tuple[str, str], str], owner: str) -> None:
        self._thoughts, self._owner = thoughts, owner

    def keep(self, answer: ChoiceAnswer) -> None:
        """Remember, for each call of a complete answer, the reasoning since the call before it."""
        thought: list[str] = []
        for item in answer.items:
            if item.kind == "reasoning":
                thought.append(item.text)
            elif item.call is not None and thought:
                text = "\n\n".join(thought)
                size = len(item.call.id) + 4 * len(text)  # at most: a character is four bytes
                self._thoughts.put((self._owner, item.call.id), text, size)
                thought = []

    def recall(self, call_id: str) -> str | None:
        return self._thoughts.get((self._owner, call_id))
