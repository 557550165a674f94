"""Hugging Face's `tokenizer.json`, as far as halfbyte reads it: a byte-level BPE vocabulary, its merges, added tokens.

Types and ids are checked here, before a table is made for them. What would make the same text give other tokens from
one call to the next, or cut or pad it (`dropout`, `truncation`, `padding`), is refused or left out. The parts that say
how text is cut are handed to the tokenizers package unread.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from halfbyte.errors import CheckpointError
from halfbyte.model.json_records import convert, parse_json
from halfbyte.model.plain_file import MIB, quote, read_whole

MAX_BYTES = 64 * MIB  # gpt-oss's has 28 MB
MAX_REPEATS = 100_000  # of a pattern, nested ones multiplied; what the regular expression engine unrolls
REPEAT = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")


class AddedToken(Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class BPE(Struct, frozen=True):
    vocab: dict[str, int] = {}
    merges: list[Any] = []
    type: str = "BPE"
    dropout: float | None = None


class TokenizerJson(Struct, frozen=True):
    model: BPE
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    raw: dict[str, Any] = {}  # all of it

    def tokens(self) -> list[str]:
        """Tokens in order of id, added ones included; an id that has none is empty."""
        by_id = {id: token for token, id in self.model.vocab.items()}
        by_id.update((added.id, added.content) for added in self.added_tokens)
        return [by_id.get(id, "") for id in range(max(by_id) + 1)]


def read_tokenizer_json(path: Path) -> TokenizerJson:
    return parse_tokenizer_json(read_whole(path, MAX_BYTES), str(path))


def parse_tokenizer_json(raw: bytes, where: str) -> TokenizerJson:
    return check_tokenizer_json(parse_json(raw, dict[str, Any], where), where)


def check_tokenizer_json(raw: dict[str, Any], where: str) -> TokenizerJson:
    tokenizer = replace(convert(raw, TokenizerJson, where), raw=raw)
    vocab, added = tokenizer.model.vocab, tokenizer.added_tokens
    if tokenizer.model.type != "BPE":
        raise CheckpointError(f"{where} is a {quote(tokenizer.model.type)} tokenizer, but gpt-oss uses byte-level BPE.")
    if not vocab:
        raise CheckpointError(f"{where} holds no BPE vocabulary, the only kind halfbyte reads.")
    if tokenizer.model.dropout:
        raise CheckpointError(f"{where}: model.dropout would give the same text other tokens every time.")
    by_id: dict[int, str] = {}
    for id, token in [*((id, token) for token, id in vocab.items()), *((a.id, a.content) for a in added)]:
        if by_id.setdefault(id, token) != token:
            raise CheckpointError(f"{where} gives the id {id} to {quote(by_id[id])} and to {quote(token)}.")
    lowest, highest = min(by_id), max(by_id)
    if lowest < 0 or highest >= 4 * len(by_id) + 65536:
        problem = lowest if lowest < 0 else highest
        raise CheckpointError(f"{where} has the id {problem} among {len(by_id)} tokens; fetch it again.")
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        _check_patterns(json.dumps(getattr(tokenizer, name)), f"{where}: {name}")
    return tokenizer


def _check_patterns(text: str, where: str) -> None:
    """A pattern may be small and its automaton without bound: (((a{999}){999}){999})."""
    counts = [max(int(n) for n in repeat.groups("0") if n) for repeat in REPEAT.finditer(text)]
    if math.prod(max(1, n) for n in counts) > MAX_REPEATS:
        raise CheckpointError(f"{where} repeats its pattern more than {MAX_REPEATS} times; fetch it again.")


def check_merges(tokenizer: TokenizerJson, where: str) -> None:
    """Refuse merges whose parts or result are not in the vocabulary; the tokenizers package panics over them."""
    vocab = tokenizer.model.vocab
    for merge in tokenizer.model.merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise CheckpointError(f"{where}: the merge {quote(str(merge))} is not a pair of tokens; fetch it again.")
        for token in (*parts, "".join(parts)):
            if token not in vocab:
                raise CheckpointError(f"{where} merges {quote(token)}, which its vocabulary has not; fetch it again.")


def for_package(tokenizer: TokenizerJson) -> str:
    """The file for the tokenizers package: control tokens are special, and nothing is truncated or padded."""
    added = [
        a | {"special": True} if a["content"].startswith("<|") else a for a in tokenizer.raw.get("added_tokens", [])
    ]
    return json.dumps(tokenizer.raw | {"added_tokens": added, "truncation": None, "padding": None})
