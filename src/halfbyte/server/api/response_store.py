"""Responses that a later request may build on, in memory, bounded in number and in bytes; the oldest go first.

Nothing is written to disk. A response that has gone is a 404 that says so, and so is one of another key.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from halfbyte.server.api.openai_responses_history import History


@dataclass(frozen=True)
class StoredResponse:
    body: dict[str, Any]  # the response as it was answered
    history: History  # the conversation up to and including it
    input_items: list[dict[str, Any]]
    size: int
    owner: str  # whose key it was made with


class ResponseStore:
    def __init__(self, most: int, most_bytes: int) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self.bytes = 0
        self._items: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, id: str, item: StoredResponse) -> None:
        if item.size > self.most_bytes or not self.most:
            return
        self.remove(id)
        self._items[id] = item
        self.bytes += item.size
        while len(self._items) > self.most or self.bytes > self.most_bytes:
            _, oldest = self._items.popitem(last=False)
            self.bytes -= oldest.size

    def get(self, id: str, owner: str) -> StoredResponse | None:
        item = self._items.get(id)
        if item is None or item.owner != owner:
            return None
        self._items.move_to_end(id)  # a conversation that goes on keeps its past
        return item

    def remove(self, id: str) -> bool:
        item = self._items.pop(id, None)
        if item is not None:
            self.bytes -= item.size
        return item is not None
