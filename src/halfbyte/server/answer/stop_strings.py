"""Stop strings in text that arrives in pieces. What text is searched is the caller's choice."""

from __future__ import annotations


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces; holds back only what could still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.matched: str | None = None
        self._withheld = ""
        self._longest = max((len(s) for s in stops), default=0)

    def feed(self, text: str) -> str:
        """The text that may be shown now. After a match, nothing more."""
        if self.matched is not None:
            return ""
        if not self.stops:
            return text
        text = self._withheld + text
        first, which = len(text), None
        for stop in self.stops:
            at = text.find(stop)
            # The earliest wins; of two at one place the longer, whose text is the less likely accident.
            if at >= 0 and (at < first or (at == first and which is not None and len(stop) > len(which))):
                first, which = at, stop
        if which is not None:
            self.matched, self._withheld = which, ""
            return text[:first]
        keep = 0
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self.stops):
                keep = size
                break
        self._withheld = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep] if keep else text

    def flush(self) -> str:
        """The end came before any match: what was held back was only text."""
        rest, self._withheld = self._withheld, ""
        return rest if self.matched is None else ""
