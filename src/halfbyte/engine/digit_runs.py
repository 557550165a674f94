"""How many digits stand in a row in a JSON value that is being written. A grammar bounds no number, so that a model
that has begun to repeat a digit would go on until the context ends.

Digits within texts are not counted. The limit is above what a 256-bit integer needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_DIGITS: Final = 128  # in a row; a token that crosses the limit is the last
_QUOTE, _ESCAPE, _ZERO, _NINE = b'"\\09'


class DigitRun:
    """The position of one value that is being written."""

    __slots__ = ("_bytes", "_digits", "_escaped", "_in_text", "length")

    def __init__(self, token_bytes: Callable[[int], bytes], digits: NDArray[np.int32]) -> None:
        self._bytes, self._digits = token_bytes, digits
        self._in_text = self._escaped = False
        self.length = 0

    def copy(self) -> DigitRun:
        new = DigitRun(self._bytes, self._digits)
        new._in_text, new._escaped, new.length = self._in_text, self._escaped, self.length
        return new

    def observe(self, token: int) -> None:
        data = self._bytes(token)
        if self._in_text and not self._escaped and b'"' not in data and b"\\" not in data:
            return
        for byte in data:
            if self._in_text:
                if self._escaped or byte == _ESCAPE:
                    self._escaped = not self._escaped
                else:
                    self._in_text = byte != _QUOTE
            elif _ZERO <= byte <= _NINE:
                self.length += 1
            else:
                self.length = 0
                self._in_text = byte == _QUOTE

    def limit(self, mask: NDArray[np.int32]) -> NDArray[np.int32]:
        """The mask without further digits, where there are too many and something else may follow."""
        if self.length < MOST_DIGITS:
            return mask
        others: NDArray[np.int32] = mask & ~self._digits
        return others if others.any() else mask
