"""A vocabulary that stops: what cannot fit is refused by its length before it is tokenised, the rest as soon as it is
known not to fit. It never cuts a text."""

from __future__ import annotations

import time

from halfbyte.model.tokenizer import PART, Tokenizer
from halfbyte.server.http.errors import ApiError

SECONDS = 20.0  # the most that the tokens of one request may take to make


class TokenBudget:
    """Encodes like its tokenizer until `tokens` have been made in all; one more is a 400."""

    def __init__(self, tokenizer: Tokenizer, tokens: int, param: str) -> None:
        self.special = tokenizer.special
        self.token_bytes = tokenizer.token_bytes
        self._tokenizer = tokenizer
        self._tokens = self._left = tokens
        self._param = param
        self._deadline = time.monotonic() + SECONDS

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        if len(text) <= PART:
            ids = self._tokenizer.encode(text, allow_special=allow_special)
            self._spend(ids)
            return ids
        # A character is a byte at least, and a token so many bytes at the most.
        if len(text) > self._left * self._tokenizer.longest_token:
            raise self._too_long()
        out: list[int] = []
        for ids in self._tokenizer.encode_parts(text, allow_special=allow_special):
            self._spend(ids)
            out += ids
            if time.monotonic() > self._deadline:
                raise ApiError(400, "This text takes too long to tokenise; send less of it.", param=self._param)
        return out

    def _spend(self, ids: list[int]) -> None:
        self._left -= len(ids)
        if self._left < 0:
            raise self._too_long()

    def _too_long(self) -> ApiError:
        return ApiError(
            400,
            f"The prompt has more tokens than the {self._tokens} this model holds in all; shorten the conversation.",
            param=self._param,
            code="context_length_exceeded",
        )
