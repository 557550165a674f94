"""The format of a segment, the file in which the prefix store keeps pages: a head, then records, only ever appended.

The head names the identity of the pages (model, numerics, layout) and their size. A record has a head of 64 bytes with
a digest of its own, and a payload with two checksums. So a file can be scanned by its heads alone, a torn or damaged
head ends the scan, and a damaged payload is noticed when it is read. A record is never changed in place.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from halfbyte.kv.file_layer import Bytes, FileLayer

PATTERN = r"\d{8}\.prefix"
VERSION = 1
SEGMENT, RECORD = b"HBPREFIX", b"page"
PAGE, USES = 0, 1  # kinds of records; the payload of the second is a list of keys
KEY_BYTES = 17  # the kind of the page, and the chained hash of its tokens
HEAD_BYTES = 64
_SEGMENT_HEAD = struct.Struct("<8sIIQ16sd")
_RECORD_HEAD = struct.Struct("<4sBxxxQ17sdII")


class DamagedSegmentError(Exception):
    """Why a segment cannot be read, or not beyond a place."""


class ReplacedSegmentError(DamagedSegmentError):
    """Another file has the segment's name."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What pages must share to be exchangeable: an identity, their size in bytes, and the tokens in one."""

    identity: bytes
    page_bytes: int
    page_tokens: int


@dataclass(slots=True)
class PageEntry:
    """Where a page is, and how often and when it was last used."""

    segment: int
    offset: int  # of its payload
    checksums: tuple[int, int]
    time: float
    uses: int = 0


@dataclass(slots=True)
class Segment:
    number: int
    path: Path
    size: int = 0  # bytes of the file
    read: int = 0  # bytes that were scanned
    time: float = 0.0  # when it was made
    layout: PageLayout | None = None  # None: unreadable
    damaged: bool = False  # nothing behind `read` can be read
    leaves: bool = False  # it is about to be removed
    pages: int = 0  # that were scanned or written
    entries: dict[bytes, PageEntry] = field(default_factory=dict)


def segment_head(layout: PageLayout, time: float) -> bytes:
    head = _SEGMENT_HEAD.pack(SEGMENT, VERSION, layout.page_tokens, layout.page_bytes, layout.identity, time)
    return head + blake2b(head, digest_size=HEAD_BYTES - len(head)).digest()


def record_head(layout: PageLayout, kind: int, key: bytes, length: int, sums: tuple[int, int], time: float) -> bytes:
    head = _RECORD_HEAD.pack(RECORD, kind, length, key, time, *sums)
    return head + _digest(head, layout)


def checksums(payload: Bytes) -> tuple[int, int]:
    return zlib.crc32(payload), zlib.adler32(payload)


def _digest(head: bytes, layout: PageLayout) -> bytes:
    return blake2b(head, digest_size=HEAD_BYTES - len(head), key=layout.identity).digest()


def read_head(data: bytes) -> tuple[PageLayout, float]:
    if len(data) < HEAD_BYTES or data[:8] != SEGMENT:
        raise DamagedSegmentError("it is not a file of prefixes")
    head, digest = data[: _SEGMENT_HEAD.size], data[_SEGMENT_HEAD.size : HEAD_BYTES]
    _, version, tokens, size, identity, time = _SEGMENT_HEAD.unpack(head)
    if version != VERSION:
        raise DamagedSegmentError(f"it has version {version} of the format, not {VERSION}")
    if blake2b(head, digest_size=len(digest)).digest() != digest:
        raise DamagedSegmentError("its head is damaged")
    return PageLayout(identity, size, tokens), time


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    kind: int
    key: bytes
    entry: PageEntry
    keys: tuple[bytes, ...] = ()


def scan(files: FileLayer, segment: Segment) -> Iterator[SegmentRecord]:
    """The records behind `segment.read`, which advances over each. Ends where the file does or at a record that is not
    complete yet; raises DamagedSegmentError at a damaged one, and OSError where the file cannot be read."""
    fd = files.open(segment.path)
    try:
        size = os.fstat(fd).st_size
        if segment.layout is None:
            segment.size = size
            if segment.size < HEAD_BYTES:
                return
            segment.layout, segment.time = read_head(os.pread(fd, HEAD_BYTES, 0))
            segment.read = HEAD_BYTES
        elif size < segment.read or not _is_same(fd, segment):
            raise ReplacedSegmentError("it was replaced")
        segment.size = size
        while segment.read + HEAD_BYTES <= segment.size:
            data = os.pread(fd, HEAD_BYTES, segment.read)
            head, digest = data[: _RECORD_HEAD.size], data[_RECORD_HEAD.size :]
            if len(data) < HEAD_BYTES or _digest(head, segment.layout) != digest:
                raise DamagedSegmentError(f"the record at byte {segment.read} is damaged")
            _, kind, length, key, time, crc, adler = _RECORD_HEAD.unpack(head)
            offset = segment.read + HEAD_BYTES
            if offset + length > segment.size:
                return
            keys: tuple[bytes, ...] = ()
            if kind != PAGE:
                payload = os.pread(fd, length, offset)
                if checksums(payload) != (crc, adler):
                    raise DamagedSegmentError(f"the record at byte {segment.read} is damaged")
                keys = tuple(payload[i : i + KEY_BYTES] for i in range(0, length, KEY_BYTES))
            elif length != segment.layout.page_bytes:
                raise DamagedSegmentError(f"the record at byte {segment.read} is not a page")
            segment.read = offset + length
            yield SegmentRecord(kind, key, PageEntry(segment.number, offset, (crc, adler), time), keys)
    finally:
        os.close(fd)


def read_payload(files: FileLayer, segment: Segment, entry: PageEntry, buffer: Bytes) -> None:
    """A page's bytes, into a buffer of their size. DamagedSegmentError if they are not those that were written."""
    assert segment.layout is not None
    assert len(buffer) == segment.layout.page_bytes
    fd = files.open(segment.path)
    try:
        if os.preadv(fd, [buffer], entry.offset) == len(buffer) and checksums(buffer) == entry.checksums:
            return
        if not _is_same(fd, segment):
            raise ReplacedSegmentError("it was replaced")
        raise DamagedSegmentError(f"the page at byte {entry.offset} is damaged")
    finally:
        os.close(fd)


def _is_same(fd: int, segment: Segment) -> bool:
    """Whether the file still has the head that was read, or damage instead of one."""
    try:
        return read_head(os.pread(fd, HEAD_BYTES, 0)) == (segment.layout, segment.time)
    except DamagedSegmentError:
        return True
