"""Stop strings, matched on the bytes of the output, across token boundaries.

Bytes, because a token may end inside a character. What could still become a match is held back: `visible` is how many
bytes of the whole output may be shown, and it never shrinks.
"""

from __future__ import annotations

from collections.abc import Callable


class StopMatcher:
    __slots__ = ("_bytes", "_longest", "_stops", "_tail", "matched", "total", "visible")

    def __init__(self, stops: tuple[str, ...], token_bytes: Callable[[int], bytes]) -> None:
        self._stops = [(s.encode("utf-8", "surrogatepass"), s) for s in stops]
        self._longest = max(len(b) for b, _ in self._stops)
        self._bytes = token_bytes
        self._tail = b""  # the last bytes that a match could begin in
        self.total = 0
        self.visible = 0
        self.matched: str | None = None

    def add(self, token: int, *, armed: bool = True) -> bool:
        """One more token; True if a stop string is complete. Unarmed (before min_tokens), nothing matches."""
        new = self._bytes(token)
        self.total += len(new)
        if not armed:
            self.visible, self._tail = self.total, b""
            return False
        text = self._tail + new
        base = self.total - len(text)
        first: tuple[int, int, str] | None = None  # where, -length (the longer wins), which
        for stop, name in self._stops:
            at = text.find(stop)
            if at >= 0 and (first is None or (at, -len(stop)) < first[:2]):
                first = (at, -len(stop), name)
        if first is not None:
            self.matched = first[2]
            self.visible = base + first[0]
            return True
        self.visible = self.total - self._could_begin(text)
        self._tail = text[max(0, len(text) - self._longest + 1) :] if self._longest > 1 else b""
        return False

    def _could_begin(self, text: bytes) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-n:]
            if any(stop.startswith(end) for stop, _ in self._stops):
                return n
        return 0

    def finish(self) -> None:
        """The output ended for another reason: everything may be shown."""
        if self.matched is None:
            self.visible = self.total
