"""The vocabulary stored in a GGUF file's metadata, read without touching its tensors.

The gguf package builds several numpy views per string, which takes twenty seconds for the 650,000 strings of a
gpt-oss vocabulary; walking the header by hand takes half a second. Refuses files that are not GGUF version 2 or 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from halfbyte.errors import CheckpointError

_SCALAR_SIZE = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_INT32_CODES = {4: "I", 5: "i"}
_PREFIX = "tokenizer.ggml."

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


@dataclass(frozen=True)
class GGUFVocab:
    model: str  # "gpt2" means byte-level BPE
    pre: str  # the name of the pre-tokenizer
    tokens: list[str]
    types: list[int]
    merges: list[str]


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def u32(self) -> int:
        (value,) = struct.unpack_from("<I", self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self) -> int:
        (value,) = struct.unpack_from("<Q", self.data, self.at)
        self.at += 8
        return int(value)

    def string(self) -> str:
        size = self.u64()
        if self.at + size > len(self.data):
            raise ValueError("a string runs past the end of the file")
        start, self.at = self.at, self.at + size
        return self.data[start : self.at].decode("utf-8", "replace")

    def strings(self, count: int, keep: bool) -> list[str]:
        data, at, out, end = self.data, self.at, [], len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            (size,) = unpack(data, at)
            at += 8
            if at + size > end:
                raise ValueError("a string runs past the end of the file")
            if keep:
                out.append(data[at : at + size].decode("utf-8", "replace"))
            at += size
        self.at = at
        return out

    def value(self, keep: bool) -> object:
        kind = self.u32()
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            self.at += _SCALAR_SIZE[kind]
            return None
        kind, count = self.u32(), self.u64()
        if kind == _STRING:
            return self.strings(count, keep)
        start = self.at
        self.at += _SCALAR_SIZE[kind] * count
        if self.at > len(self.data):
            raise ValueError("an array runs past the end of the file")
        code = _INT32_CODES.get(kind)
        return list(struct.unpack_from(f"<{count}{code}", self.data, start)) if keep and code else None


def read_gguf_vocab(path: Path) -> GGUFVocab:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata = _metadata(_Cursor(data))
    except (OSError, ValueError, KeyError, struct.error) as e:
        raise CheckpointError(f"{path} cannot be read as GGUF ({e}); fetch it again.") from None
    tokens, types, merges = (metadata.get(key) for key in ("tokens", "token_type", "merges"))
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{path} carries no vocabulary; convert it again with its tokenizer.")
    return GGUFVocab(
        model=str(metadata.get("model")),
        pre=str(metadata.get("pre") or "default"),
        tokens=tokens,
        types=types if isinstance(types, list) else [],
        merges=merges if isinstance(merges, list) else [],
    )


def _metadata(cursor: _Cursor) -> dict[str, object]:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.u32()
    if version not in (2, 3):
        raise ValueError(f"version {version} is not 2 or 3")
    cursor.u64()  # tensor count
    metadata: dict[str, object] = {}
    for _ in range(cursor.u64()):
        key = cursor.string()
        ours = key.startswith(_PREFIX)
        value = cursor.value(keep=ours)
        if ours:
            metadata[key.removeprefix(_PREFIX)] = value
    return metadata
