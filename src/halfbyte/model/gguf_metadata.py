"""The front of a GGUF file, walked once: its counts, its metadata, and where the list of tensors begins.

Every length is checked against the file before memory is allocated for it. Strings of vocabularies are kept on demand.
The `gguf` package is not used: its reader maps the file as numpy views, twenty seconds for the 650,000 strings of a
gpt-oss vocabulary where this takes half a second, and cannot say where a truncated file ends.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfbyte.errors import CheckpointError
from halfbyte.model.plain_file import LFS_POINTER, MIB, lfs_pointer, quote, truncated

_SCALARS = {
    kind: struct.Struct(code)
    for kind, code in {
        0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
    }.items()
}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_STRING, _ARRAY = 8, 9
MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_STRING = 16 * MIB
SPLIT = re.compile(r"^(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf$")  # the name of one part of a model
MAX_VOCABULARY = 1 << 20  # entries of an array that is kept
KEPT_NUMBERS = 1024  # a longer array of numbers is skipped, unless the caller wants it


@contextmanager
def walk(path: Path, descriptor: int) -> Iterator[Cursor]:
    """A cursor behind the magic and the version of an open file."""
    if os.pread(descriptor, 4, 0) != b"GGUF":
        if os.pread(descriptor, len(LFS_POINTER), 0) == LFS_POINTER:
            raise lfs_pointer(path)
        raise CheckpointError(f"{path} is not a GGUF file; give a Hugging Face model folder, or a .gguf file.")
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        cursor = Cursor(path, data)
        version = cursor.u32()
        if version not in (2, 3):
            raise CheckpointError(f"{path} is GGUF version {version}, but halfbyte reads 2 and 3, little endian.")
        yield cursor


class Cursor:
    """Reads front to back; running off the end of the file is a truncated file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 4

    def u32(self) -> int:
        return int(self._number(_U32))

    def u64(self) -> int:
        return int(self._number(_U64))

    def count(self, most: int, noun: str) -> int:
        n = self.u64()
        if n > most:
            raise CheckpointError(f"{self.path} claims {n} {noun}, but halfbyte reads at most {most}.")
        return n

    def string(self) -> str:
        size = self.u64()
        self._need(size)
        if size > MAX_STRING:
            raise CheckpointError(f"{self.path} has a string of {size} bytes in its header; fetch it again.")
        start, self.at = self.at, self.at + size
        return self.data[start : self.at].decode("utf-8", "replace")

    def metadata(self, keep: str) -> dict[str, Any]:
        """Key -> number, string, or list. Lists of strings are kept for keys that begin with `keep`, else None."""
        metadata: dict[str, Any] = {}
        for _ in range(self.count(MAX_KEYS, "metadata keys")):
            key = self.string()
            if key in metadata:
                raise CheckpointError(f"{self.path} has the key {quote(key)} twice; fetch it again.")
            metadata[key] = self._value(key, bool(keep) and key.startswith(keep))
        return metadata

    def _need(self, count: int) -> None:
        if self.at + count > self.size:
            raise truncated(self.path, self.at + count, self.size)

    def _number(self, code: struct.Struct) -> Any:
        self._need(code.size)
        (value,) = code.unpack_from(self.data, self.at)
        self.at += code.size
        return value

    def _value(self, key: str, keep: bool) -> Any:
        kind = self.u32()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        inner, count = (self.u32(), self.u64()) if kind == _ARRAY else (kind, 0)
        if kind != _ARRAY or inner not in (_STRING, *_SCALARS):
            raise CheckpointError(f"{self.path}: {quote(key)} has a type {inner} that halfbyte does not read.")
        if keep and count > MAX_VOCABULARY:
            raise CheckpointError(f"{self.path}: {quote(key)} has {count} entries; halfbyte reads {MAX_VOCABULARY}.")
        return self._strings(count, keep) if inner == _STRING else self._numbers(_SCALARS[inner], count, keep)

    def _numbers(self, code: struct.Struct, count: int, keep: bool) -> list[Any] | None:
        self._need(code.size * count)
        start, self.at = self.at, self.at + code.size * count
        if not keep and count > KEPT_NUMBERS:
            return None
        return [value for (value,) in code.iter_unpack(self.data[start : self.at])]

    def _strings(self, count: int, keep: bool) -> list[str] | None:
        self._need(8 * count)
        data, at, end, out = self.data, self.at, self.size, []
        unpack = _U64.unpack_from
        for _ in range(count):
            if at + 8 > end:
                raise truncated(self.path, at + 8, end)
            (size,) = unpack(data, at)
            at += 8
            if at + size > end:
                raise truncated(self.path, at + size, end)
            if keep:
                out.append(data[at : at + size].decode("utf-8", "replace"))
            at += size
        self.at = at
        return out if keep else None
