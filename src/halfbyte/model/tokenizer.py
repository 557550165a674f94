"""Text to token ids and back, for gpt-oss's own vocabulary (shipped, never downloaded) and for a model's own.

Text that merely looks like a control token is encoded as plain text unless the caller asks otherwise, so nothing a
user types can end a message. Refuses vocabularies that are not byte-level BPE, because then a token would not be a
fixed run of bytes and streaming could not be exact.
"""

from __future__ import annotations

import base64
import codecs
import functools
import itertools
import lzma
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from halfbyte.errors import CheckpointError
from halfbyte.model.config_json import MAX_BYTES
from halfbyte.model.gguf_vocab import CONTROL, USER_DEFINED, GGUFVocab, read_gguf_vocab
from halfbyte.model.json_records import read_json
from halfbyte.model.model_files import model_path
from halfbyte.model.pattern_trial import try_patterns
from halfbyte.model.plain_file import is_failure, one_line, quote, refusing
from halfbyte.model.tokenizer_json import (
    TokenizerJson,
    check_merges,
    check_tokenizer_json,
    for_package,
    read_tokenizer_json,
)

# How o200k cuts text before merging; the alternatives are tried in this order.
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}*{_SMALL}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}+{_SMALL}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

TOKENIZER_JSON = "tokenizer.json"
_HARMONY_NAMED = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
O200K_TOKENS = 199998  # mergeable tokens; the special ones follow
O200K_HARMONY_VOCAB = 201088
_END_NAMES = ("<|return|>", "<|call|>", "<|endoftext|>")  # where a gpt-oss model stops generating
_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()

# Text longer than this is encoded part by part. A cut is made where the pattern above always cuts: between a letter or
# digit and a blank or a mark that no word ends with, or between letters and digits. Text that has no such place for as
# long again is cut where it stands, digits between groups of three, as the pattern takes them: an encoder's time grows
# faster than the length of one word, and tiktoken's regular expressions panic on a million blanks.
PART = 64 * 1024
_CUT = re.compile(r"(?<=[^\W_])(?=[ \n\r\t、。，！？：；（）])|(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])")


class Tokenizer:
    """A byte-level vocabulary: every id stands for fixed bytes, so decoding is a table lookup."""

    def __init__(
        self,
        *,
        name: str,
        table: Sequence[bytes],
        special: Mapping[str, int],
        plain: Callable[[str], list[int]],
        with_special: Callable[[str], list[int]],
    ) -> None:
        self.name = name
        self.special: dict[str, int] = dict(special)
        self.eos_tokens: tuple[int, ...] = tuple(self.special[n] for n in _END_NAMES if n in self.special)
        self._table = list(table)
        self._names = {id: self._table[id].decode("utf-8", "replace") for id in self.special.values()}
        self._plain = plain
        self._with_special = with_special

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, {self.vocab_size} tokens, {len(self._names)} special)"

    @property
    def vocab_size(self) -> int:
        return len(self._table)

    @functools.cached_property
    def longest_token(self) -> int:
        """The most bytes of text that one token stands for."""
        return max(map(len, self._table))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        encode = self._with_special if allow_special else self._plain
        if len(text) <= PART:
            return encode(text)
        return list(itertools.chain.from_iterable(self.encode_parts(text, allow_special=allow_special)))

    def encode_parts(self, text: str, *, allow_special: bool = False) -> Iterator[list[int]]:
        """The ids of `text`, a part at a time, so that the caller may stop in between: no part takes long."""
        encode = self._with_special if allow_special else self._plain
        start = 0
        while len(text) - start > PART:
            cut = _CUT.search(text, start + PART, start + 2 * PART)
            end = cut.end() if cut else _between_digits(text, start, start + 2 * PART)
            yield encode(text[start:end])
            start = end
        yield encode(text[start:])

    def decode(self, ids: Iterable[int], *, errors: str = "replace") -> str:
        """Special tokens appear by name, ids outside the vocabulary as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token. A model's output layer may be padded past the vocabulary: such ids are U+FFFD."""
        return self._table[id] if 0 <= id < len(self._table) else _UNKNOWN

    def special_name(self, id: int) -> str | None:
        return self._names.get(id)

    # ---- where vocabularies come from ---------------------------------------------------------

    @classmethod
    def gpt_oss(cls) -> Tokenizer:
        """o200k_harmony, the vocabulary of gpt-oss-20b and gpt-oss-120b."""
        return _gpt_oss()

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """A Hugging Face tokenizer.json holding a byte-level BPE vocabulary."""
        path = Path(path)
        with refusing(path):
            return _from_json(read_tokenizer_json(path), str(path))

    @classmethod
    def for_model(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a model folder or a .gguf file; gpt-oss's own wherever the vocabulary is gpt-oss's."""
        path = Path(path)
        with refusing(path):
            if not (path / TOKENIZER_JSON).exists():
                path = model_path(path)
            if path.is_dir():
                return cls.of_folder(path)
            if path.suffix == ".gguf" and path.is_file():
                return cls.from_gguf(read_gguf_vocab(path), str(path))
        raise CheckpointError(f"{path} is neither a model folder nor a .gguf file, so it has no tokenizer.")

    @classmethod
    def of_folder(cls, folder: Path, vocab_size: int | None = None) -> Tokenizer:
        """A folder without a tokenizer.json must have gpt-oss's vocabulary: `vocab_size`, or what config.json says."""
        own = folder / TOKENIZER_JSON
        with refusing(own):
            if own.exists():
                raw = read_tokenizer_json(own)
                added = {token.content: token.id for token in raw.added_tokens}
                return cls.gpt_oss() if _is_gpt_oss(raw.tokens(), added) else _from_json(raw, str(own))
            if vocab_size is None:
                vocab_size = read_json(folder / "config.json", dict[str, Any], MAX_BYTES).get("vocab_size")
        if vocab_size != O200K_HARMONY_VOCAB:
            raise CheckpointError(
                f"{folder} has no tokenizer.json and its vocabulary of {quote(str(vocab_size))} tokens is not "
                "gpt-oss's; put the model's tokenizer.json beside its config.json."
            )
        return cls.gpt_oss()

    @classmethod
    def from_gguf(cls, vocab: GGUFVocab, where: str) -> Tokenizer:
        added = {vocab.tokens[id]: id for id in _added(vocab)}
        return cls.gpt_oss() if _is_gpt_oss(vocab.tokens, added) else _from_gguf(vocab, where)


def _between_digits(text: str, start: int, end: int) -> int:
    """`end`, or up to two characters less: a whole number of groups of three after the first digit of its run."""
    if end >= len(text):
        return end
    first = end
    while first > start and unicodedata.category(text[first - 1]).startswith("N"):
        first -= 1
    return end - (end - first) % 3


class Detokenizer:
    """Token ids in, text out, in step: a character is emitted once, when its last byte has arrived."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._bytes = tokenizer.token_bytes
        self._skip = frozenset(tokenizer.special.values()) if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Iterable[int]) -> str:
        if self._skip:
            ids = [id for id in ids if id not in self._skip]
        return self._decoder.decode(b"".join(map(self._bytes, ids)))

    @property
    def pending(self) -> bytes:
        """The bytes of a character that is not complete yet; at most three."""
        return self._decoder.getstate()[0]

    def flush(self) -> str:
        """End the stream: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


# ---- gpt-oss's vocabulary -----------------------------------------------------------------------


def o200k_file() -> bytes:
    """The shipped o200k_base ranks, unpacked: one `base64 rank` line per token."""
    return lzma.decompress(resources.files("halfbyte").joinpath("data/o200k_base.tiktoken.xz").read_bytes())


def harmony_special_tokens() -> dict[str, int]:
    named = set(_HARMONY_NAMED.values())
    reserved = {f"<|reserved_{i}|>": i for i in range(200000, O200K_HARMONY_VOCAB) if i not in named}
    return {"<|endofprompt|>": 200018, **_HARMONY_NAMED, **reserved}


@functools.cache
def _o200k_ranks() -> dict[bytes, int]:
    lines = (line.split() for line in o200k_file().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


@functools.cache
def _gpt_oss() -> Tokenizer:
    import tiktoken  # here, because commands that never tokenize should start without it

    ranks, special = _o200k_ranks(), harmony_special_tokens()
    table = [b""] * O200K_HARMONY_VOCAB
    for token, rank in ranks.items():
        table[rank] = token
    for name, id in special.items():
        table[id] = name.encode()  # 200018 has two names; the reserved one comes later and wins, as in harmony
    encoding = tiktoken.Encoding("o200k_harmony", pat_str=O200K_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return Tokenizer(
        name="o200k_harmony",
        table=table,
        special=special,
        plain=encoding.encode_ordinary,
        with_special=lambda text: encoding.encode(text, allowed_special="all"),
    )


def _is_gpt_oss(tokens: Sequence[str], added: Mapping[str, int]) -> bool:
    """True for o200k with no other added tokens than harmony's; a fine-tune may have its own behind them."""
    if len(tokens) < O200K_TOKENS or not added.items() <= harmony_special_tokens().items():
        return False
    return all(tokens[rank] == _spell(token) for token, rank in _o200k_ranks().items())


# ---- other byte-level vocabularies --------------------------------------------------------------


def _printable_bytes() -> dict[int, str]:
    """The spelling of bytes in byte-level vocabularies: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}


SPELLING = _printable_bytes()
_UNSPELLING = {ord(char): byte for byte, char in SPELLING.items()}


def _spell(token: bytes) -> str:
    return token.decode("latin-1").translate(SPELLING)


def _unspell(token: str, where: str) -> bytes:
    try:
        return bytes(_UNSPELLING[ord(char)] for char in token)
    except KeyError:
        raise CheckpointError(
            f"{where}: the token {quote(token)} is not spelled in byte-level BPE, the only kind halfbyte reads."
        ) from None


def _from_json(raw: TokenizerJson, where: str) -> Tokenizer:
    import tokenizers

    added = raw.added_tokens
    check_merges(raw, where)
    try_patterns(raw.raw, where, trusted=O200K_PATTERN)
    try:
        text = for_package(raw)
        plain = tokenizers.Tokenizer.from_str(text)
        plain.encode_special_tokens = True  # "encode their text", not "encode them as special"
        with_special = tokenizers.Tokenizer.from_str(text)
    except BaseException as e:  # the tokenizers package raises bare Exception, and panics
        if not is_failure(e):
            raise
        raise CheckpointError(f"{where} is not a usable tokenizer.json ({one_line(e)}).") from None
    names = {token.id for token in added}
    table = [t.encode() if id in names else _unspell(t, where) for id, t in enumerate(raw.tokens())]
    return Tokenizer(
        name=where,
        table=table,
        special={token.content: token.id for token in added if token.special or token.content.startswith("<|")},
        plain=functools.partial(_encode, plain, where),
        with_special=functools.partial(_encode, with_special, where),
    )


def _encode(package: Any, where: str, text: str) -> list[int]:
    try:
        # A batch of one: unlike `encode` it lets other threads run, and it keeps no offsets.
        return list(package.encode_batch_fast([_valid(text)], add_special_tokens=False)[0].ids)
    except BaseException as e:  # a pattern may pass its trial and still backtrack on another text
        if not is_failure(e):
            raise
        raise CheckpointError(
            f"{where} cannot encode this text ({one_line(e)}); replace the file with the tokenizer.json that was "
            "published with the model."
        ) from None


def _valid(text: str) -> str:
    """`text` with U+FFFD for half surrogate pairs, which JSON can carry; tiktoken replaces them, too."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _from_gguf(vocab: GGUFVocab, where: str) -> Tokenizer:
    """Rewrites the GGUF vocabulary as a tokenizer.json, so that one path builds both."""
    if vocab.model != "gpt2":
        raise CheckpointError(f"{where}: tokenizer model {quote(vocab.model)} is not byte-level BPE ('gpt2').")
    if vocab.pre == "gpt-4o":
        cut: dict[str, Any] = {"type": "Split", "pattern": {"Regex": O200K_PATTERN}, "behavior": "Isolated"}
        cut["invert"] = False
        steps = [cut, _byte_level(use_regex=False)]
    elif vocab.pre in ("gpt-2", "default"):
        steps = [_byte_level(use_regex=True)]
    else:
        raise CheckpointError(f"{where}: pre-tokenizer {quote(vocab.pre)} is not known (gpt-4o, gpt-2).")
    names = set(_added(vocab))
    added = [
        {"id": id, "content": vocab.tokens[id], "special": vocab.types[id] == CONTROL, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
        for id in sorted(names)
    ]
    raw: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "vocab": {token: id for id, token in enumerate(vocab.tokens) if id not in names},
            "merges": [merge.split(" ", 1) for merge in vocab.merges],
        },
    }
    return _from_json(check_tokenizer_json(raw, where), where)


def _added(vocab: GGUFVocab) -> list[int]:
    """Ids of tokens that are names, not runs of bytes."""
    return [id for id, (_, kind) in enumerate(zip(vocab.tokens, vocab.types)) if kind in (CONTROL, USER_DEFINED)]


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
