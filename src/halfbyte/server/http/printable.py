"""Text from outside as one line of a log: nothing in it can end the line or command a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
