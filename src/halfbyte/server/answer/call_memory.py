"""What the model thought before each of its calls, for clients that send the call back without it.

gpt-oss has to see, between the calls of one turn, what it was thinking; most clients drop that, because their API has
no field for it. Kept in memory under the call's own id, which nobody can guess; the oldest go first. Reasoning that a
client does send back counts, whatever is kept here.
"""

from __future__ import annotations

from collections import OrderedDict

from halfbyte.server.answer.answer import Answer


class CallMemory:
    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._thoughts: OrderedDict[str, str] = OrderedDict()

    def keep(self, answer: Answer) -> None:
        """Of a whole answer: what was thought since the call before."""
        thought: list[str] = []
        for item in answer.items:
            if item.kind == "reasoning":
                thought.append(item.text)
            elif item.call is not None and thought:
                self._put(item.call.id, "\n\n".join(thought))
                thought = []

    def recall(self, call_id: str) -> str | None:
        return self._thoughts.get(call_id)

    def _put(self, call_id: str, thought: str) -> None:
        self._thoughts[call_id] = thought
        self.bytes += _size(call_id, thought)
        while self.bytes > self.most_bytes:
            self.bytes -= _size(*self._thoughts.popitem(last=False))


def _size(call_id: str, thought: str) -> int:
    return len(call_id) + 4 * len(thought)  # at most: a character is four bytes
