"""Responses that a later request may build on, in memory, bounded in number and in bytes; the oldest go first.

Nothing is written to disk. A response that has gone is a 404 that says so, and so is one of another key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.byte_cache import ByteCache
from halfbyte.server.api.openai_responses_history import ResponseHistory


@dataclass(frozen=True)
class StoredResponse:
    body: dict[str, Any]  # the response as it was answered
    history: ResponseHistory  # the conversation up to and including it
    input_items: list[dict[str, Any]]
    size: int
    owner: str  # whose key it was made with


class ResponseStore:
    def __init__(self, most: int, most_bytes: int) -> None:
        self._items: ByteCache[str, StoredResponse] = ByteCache(most_bytes, most)

    def put(self, id: str, item: StoredResponse) -> None:
        self._items.put(id, item, item.size)

    def get(self, id: str, owner: str) -> StoredResponse | None:
        item = self._items.get(id)
        return item if item is not None and item.owner == owner else None

    def remove(self, id: str) -> bool:
        return self._items.remove(id)
