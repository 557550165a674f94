"""Hugging Face's `tokenizer.json`, as far as halfbyte reads it: a byte-level BPE vocabulary, its merges, added tokens.

Types and ids are checked here, before a table is made for them. What would make the same text give other tokens from
one call to the next, or cut or pad it (`dropout`, `truncation`, `padding`), is refused or left out. The parts that say
how text is cut are handed to the tokenizers package unread.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec

from halfbyte.errors import CheckpointError
from halfbyte.model.plain_file import MIB, parse_json, read_whole, shown

MAX_BYTES = 64 * MIB  # gpt-oss's has 28 MB
MAX_REPEATS = 100_000  # of a pattern, nested ones multiplied; what the regular expression engine unrolls
_REPEAT = re.compile(rb"\{(\d+)(?:,(\d*))?\}")


class AddedToken(msgspec.Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class BPE(msgspec.Struct):
    vocab: dict[str, int] = {}
    merges: list[str | tuple[str, str]] = []
    type: str = "BPE"
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class TokenizerJson(msgspec.Struct):
    model: BPE
    version: str = "1.0"
    added_tokens: list[AddedToken] = []
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")

    def tokens(self) -> list[str]:
        """Tokens in order of id, added ones included; an id that has none is empty."""
        by_id = {id: token for token, id in self.model.vocab.items()}
        by_id.update((added.id, added.content) for added in self.added_tokens)
        return [by_id.get(id, "") for id in range(max(by_id) + 1)]


def read_tokenizer_json(path: Path) -> TokenizerJson:
    return parse_tokenizer_json(read_whole(path, MAX_BYTES), str(path))


def parse_tokenizer_json(raw: bytes, where: str) -> TokenizerJson:
    found = parse_json(raw, TokenizerJson, where)
    vocab, added = found.model.vocab, found.added_tokens
    if found.model.type != "BPE":
        raise CheckpointError(f"{where} is a {shown(found.model.type)} tokenizer, but gpt-oss uses byte-level BPE.")
    if not vocab:
        raise CheckpointError(f"{where} holds no BPE vocabulary, the only kind halfbyte reads.")
    if found.model.dropout:
        raise CheckpointError(f"{where}: model.dropout would give the same text other tokens every time.")
    by_id: dict[int, str] = {}
    for id, token in [*((id, token) for token, id in vocab.items()), *((a.id, a.content) for a in added)]:
        if by_id.setdefault(id, token) != token:
            raise CheckpointError(f"{where} gives the id {id} to {shown(by_id[id])} and to {shown(token)}.")
    lowest, highest = min(by_id), max(by_id)
    if lowest < 0 or highest >= 4 * len(by_id) + 65536:
        problem = lowest if lowest < 0 else highest
        raise CheckpointError(f"{where} has the id {problem} among {len(by_id)} tokens; fetch it again.")
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        _check_patterns(bytes(getattr(found, name)), f"{where}: {name}")
    return found


def _check_patterns(raw: bytes, where: str) -> None:
    """A pattern may be small and its automaton without bound: (((a{999}){999}){999})."""
    counts = [max(int(n or 0) for n in found.groups(b"0")) for found in _REPEAT.finditer(raw)]
    if math.prod(max(1, n) for n in counts) > MAX_REPEATS:
        raise CheckpointError(f"{where} repeats its pattern more than {MAX_REPEATS} times; fetch it again.")


def encode_tokenizer_json(tokenizer: TokenizerJson) -> str:
    """For the tokenizers package."""
    return msgspec.json.encode(tokenizer).decode()


def from_parts(parts: dict[str, Any], where: str) -> TokenizerJson:
    """The same from a vocabulary that another file holds."""
    return parse_tokenizer_json(msgspec.json.encode(parts), where)
