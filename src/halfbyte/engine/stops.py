"""Stop strings, matched across token boundaries.

`ByteStopMatcher` matches on the bytes of the whole output, because a token may end inside a character. The beginning of
a possible match is held back: `visible` is how many bytes of the output may be shown, and it never shrinks.
`TextStopMatcher` matches on text that its caller chooses: of an answer in the chat format, what a reader sees. The work
for a piece of text does not depend on the length of the stop strings beyond what is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class PartialMatches:
    """How much of the end of a text could be the beginning of a stop string, as the text grows (Knuth, Morris, Pratt).

    Stop strings and text are both str or both bytes."""

    __slots__ = ("_borders", "_lengths", "_stops")

    def __init__(self, stops: Sequence[str | bytes]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._lengths = [0] * len(stops)  # of each stop string, what the text ends with

    def feed(self, text: str | bytes) -> int:
        """The longest end of the text so far that begins a stop string but is none yet."""
        for number, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            length, new = self._lengths[number], text
            if len(text) >= len(stop):  # what came before cannot matter
                length, new = 0, text[len(text) - len(stop) + 1 :]
            for unit in new:
                while length and stop[length] != unit:
                    length = borders[length - 1]
                if stop[length] == unit:
                    length += 1
                if length == len(stop):
                    length = borders[length - 1]
            self._lengths[number] = length
        return max(self._lengths, default=0)

    def clear(self) -> None:
        self._lengths = [0] * len(self._stops)


def _borders(stop: str | bytes) -> list[int]:
    """For each beginning of a stop string, the longest proper beginning that it also ends with."""
    out = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = out[length - 1]
        if stop[at] == stop[length]:
            length += 1
        out[at] = length
    return out


class ByteStopMatcher:
    __slots__ = ("_bytes", "_partial", "_stops", "_tail", "matched", "total", "visible")

    def __init__(self, stops: tuple[str, ...], token_bytes: Callable[[int], bytes]) -> None:
        self._stops = [(s.encode("utf-8", "surrogatepass"), s) for s in stops]
        self._partial = PartialMatches([stop for stop, _ in self._stops])
        self._bytes = token_bytes
        self._tail = b""  # the last bytes that a match could begin in
        self.total = 0
        self.visible = 0
        self.matched: str | None = None

    def add(self, token: int, *, armed: bool = True) -> bool:
        """Add a token; True if a stop string is complete. Unarmed (before min_tokens), nothing matches."""
        new = self._bytes(token)
        self.total += len(new)
        if not armed:
            self.visible, self._tail = self.total, b""
            self._partial.clear()
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
        pending = self._partial.feed(new)
        self.visible = self.total - pending
        self._tail = text[len(text) - pending :]
        return False

    def finish(self) -> None:
        """The output ended for another reason: everything may be shown."""
        if self.matched is None:
            self.visible = self.total


class TextStopMatcher:
    """Finds the first stop string in text that arrives in pieces; holds back only what could still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.matched: str | None = None
        self._withheld = ""
        self._partial = PartialMatches(stops)

    def feed(self, text: str) -> str:
        """The text that may be shown now. After a match, nothing more."""
        if self.matched is not None:
            return ""
        if not self.stops:
            return text
        new, text = text, self._withheld + text
        first, which = len(text), None
        for stop in self.stops:
            at = text.find(stop)
            # The earliest wins; of two at one place the longer, whose text is the less likely accident.
            if at >= 0 and (at < first or (at == first and which is not None and len(stop) > len(which))):
                first, which = at, stop
        if which is not None:
            self.matched, self._withheld = which, ""
            return text[:first]
        keep = self._partial.feed(new)
        self._withheld = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end came before any match: what was held back was only text."""
        rest, self._withheld = self._withheld, ""
        self._partial.clear()
        return rest if self.matched is None else ""
