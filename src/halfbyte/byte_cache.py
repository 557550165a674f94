"""Values that may be needed again, bounded by the bytes they take: the least recently used go first.

A number of values bounds nothing where a client chooses how large each of them is. Not safe for threads: callers lock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    def __init__(self, most_bytes: int, most: int | None = None) -> None:
        """Holds `most_bytes` in all, and `most` values where that is given."""
        self.most_bytes, self.most = most_bytes, most
        self.bytes = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def put(self, key: K, value: V, size: int) -> None:
        """A value that is larger than all may be is not held."""
        self.remove(key)
        if size > self.most_bytes:
            return
        self._values[key] = value, size
        self.bytes += size
        while self.bytes > self.most_bytes or (self.most is not None and len(self._values) > self.most):
            self.bytes -= self._values.popitem(last=False)[1][1]

    def get(self, key: K) -> V | None:
        entry = self._values.get(key)
        if entry is None:
            return None
        self._values.move_to_end(key)
        return entry[0]

    def remove(self, key: K) -> bool:
        entry = self._values.pop(key, None)
        if entry is not None:
            self.bytes -= entry[1]
        return entry is not None

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)
