"""Pages of the KV cache on disk: they survive the program. Holds no tensors and knows no sequences.

A folder has segments (`segments.py`), which are only appended to and removed as a whole, and a lock file. The index is
made from the segments' heads when the store is opened, so there is no second file that could disagree with them. The
store that has the lock writes; others read, see what it adds at `refresh`, and take over when it ends.

Nothing here raises because of what the disk holds or lacks: a damaged, truncated, foreign or older file and a full disk
each cost one log line, and the pages concerned are missing, so that they are computed again. A page is returned only if
its checksums are those with which it was written.

The folder is bounded, segments of other models included, and leaves room on the disk for others. When it is full the
segment of least value goes: tokens per byte times uses, divided by age. Pages of it that are worth more than the
average are written again before it goes, for which half a segment stays free. Every use of a prefix counts for all of
its pages, so the beginning of a prefix outlives its end.

The folder is private (0700, files 0600), since prompts can be reconstructed from what it holds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from halfbyte.errors import UsageError
from halfbyte.kv.file_layer import Bytes, FileLayer, lock
from halfbyte.kv.segments import (
    HEAD_BYTES,
    KEY_BYTES,
    PAGE,
    PATTERN,
    USES,
    DamagedSegmentError,
    PageEntry,
    PageLayout,
    ReplacedSegmentError,
    Segment,
    SegmentRecord,
    checksums,
    read_payload,
    record_head,
    scan,
    segment_head,
)

log = logging.getLogger("halfbyte")

LOCK = "lock"
SEGMENT_BYTES = 256 << 20
SEGMENTS = 8  # the folder holds at least so many when it is full, so that one is a small part of it
FREE_BYTES, FREE_PART = 1 << 30, 20  # of the disk stay free: so many, or that part of it where that is less
RETRY_SECONDS = 30.0  # after a failed write, and between attempts to become the writer
LEAST_PAGES = 8
SCAN_THREADS = 8  # for a folder of many segments
HOUR = 3600.0
_NO_KEY = bytes(KEY_BYTES)


@dataclass(frozen=True)
class StoreStats:
    pages: int = 0
    bytes: int = 0  # of all segments in the folder
    foreign_bytes: int = 0  # of segments of other models, numerics or versions
    segments: int = 0
    damaged: int = 0  # pages and segments that could not be read since the store was opened


@dataclass(frozen=True)
class FolderPart:
    """The segments of one model and plan."""

    identity: str  # empty: unreadable
    segments: int
    pages: int
    bytes: int
    tokens: int  # in pages of both kinds
    modified: float


def prepare_folder(folder: Path) -> None:
    """Make the folder, private. Refuses one that is not empty and that no store has used before."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        names = sorted(p.name for p in folder.iterdir())
        if names and LOCK not in names:
            raise UsageError(f"{folder} holds other files ({names[0]}); give --prefix-folder a new or an empty folder.")
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as e:
        raise UsageError(f"{folder} cannot be used as --prefix-folder ({e.strerror}); choose another folder.") from None


class PrefixStore:
    """Thread-safe. `most_bytes` bounds the folder; 0: this store writes nothing. A `layout` of None indexes nothing,
    which is enough to measure, verify and clear a folder."""

    def __init__(
        self,
        folder: Path,
        layout: PageLayout | None,
        most_bytes: int,
        *,
        files: FileLayer | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.layout, self.most_bytes = folder, layout, most_bytes
        if layout is not None and 0 < most_bytes < (least := LEAST_PAGES * (layout.page_bytes + HEAD_BYTES)):
            raise UsageError(
                f"--prefix-disk holds too few pages; give at least {-(-least >> 20)}MiB, or 0 to read only."
            )
        self._files, self._clock = files or FileLayer(), clock
        self._mutex = threading.RLock()
        self._index: dict[bytes, PageEntry] = {}
        self._segments: dict[int, Segment] = {}
        self._active: tuple[Segment, int] | None = None  # appended to by this store, and its descriptor
        self._lock: int | None = None
        self._retry_at = 0.0  # no attempt to write or to become the writer before this time
        self._silent = False  # a failed write was logged, and none has succeeded since
        self._unreadable = False  # was logged
        self._used: list[bytes] = []
        self._damaged = 0
        prepare_folder(folder)
        if most_bytes > 0 and not self._become_writer() and not self._silent:
            log.info("another program writes to the prefix folder %s; this one reads what that stores", folder)
        self.refresh()

    # ---- reading ------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def sample(self, most: int) -> list[bytes]:
        """Keys of up to `most` pages, from all over the folder."""
        with self._mutex:
            keys = list(self._index)
        return keys[:: max(1, -(-len(keys) // most))]

    @property
    def writes(self) -> bool:
        """Whether this store has the lock."""
        return self._lock is not None

    def read(self, key: bytes, buffer: memoryview | None = None) -> memoryview | None:
        """A page's bytes, in `buffer` if there is one; None if they are not there, and then it holds anything."""
        with self._mutex:
            entry = self._index.get(key)
            segment = None if entry is None else self._segments.get(entry.segment)
        if entry is None or segment is None:
            return None
        assert segment.layout is not None
        content = memoryview(bytearray(segment.layout.page_bytes)) if buffer is None else buffer
        try:
            read_payload(self._files, segment, entry, content)
            return content
        except (DamagedSegmentError, OSError) as e:  # of which one that was replaced is a kind
            with self._mutex:
                if self._index.get(key) is entry:
                    self._drop(key)
                if isinstance(e, ReplacedSegmentError):
                    self._replace(segment)
                elif not isinstance(e, FileNotFoundError):  # the writer, another process, has removed the segment
                    self._report(segment, e)
            return None

    def refresh(self) -> None:
        """Read what has been added to the folder since, and forget what was removed."""
        with self._mutex:
            try:
                with os.scandir(self.folder) as files:
                    sizes = {
                        int(file.name[:8]): file.stat(follow_symlinks=False).st_size
                        for file in files if re.fullmatch(PATTERN, file.name)
                    }  # fmt: skip
            except OSError as e:
                if not self._unreadable:
                    log.warning("the prefix folder %s cannot be read: %s", self.folder, e.strerror)
                self._unreadable = True
                return
            self._unreadable = False
            for number in self._segments.keys() - sizes.keys():
                self._forget(number)
            active = None if self._active is None else self._active[0].number
            changed = []
            for number in sorted(sizes.keys() - {active}):
                path = self.folder / f"{number:08d}.prefix"
                segment = self._segments.setdefault(number, Segment(number, path))
                if not segment.damaged and (segment.layout is None or segment.read != sizes[number]):
                    changed.append(segment)
            for segment, records, error in self._scan(changed):
                self._add(segment, records, error)

    def _scan(self, segments: list[Segment]) -> Iterable[tuple[Segment, list[SegmentRecord], Exception | None]]:
        """New records of each segment, in order, and why there are no more. A disk answers several threads at once."""

        def scanned(segment: Segment) -> tuple[Segment, list[SegmentRecord], Exception | None]:
            records: list[SegmentRecord] = []
            try:
                for record in scan(self._files, segment):
                    records.append(record)
            except (DamagedSegmentError, OSError) as e:
                return segment, records, e
            return segment, records, None

        if len(segments) < SCAN_THREADS:
            return map(scanned, segments)
        with ThreadPoolExecutor(SCAN_THREADS) as pool:
            return list(pool.map(scanned, segments))

    def _add(self, segment: Segment, records: list[SegmentRecord], error: Exception | None) -> None:
        for record in records:
            segment.pages += record.kind == PAGE
            if segment.layout == self.layout:
                self._take(segment, record)
        if isinstance(error, FileNotFoundError):
            self._forget(segment.number)
        elif isinstance(error, ReplacedSegmentError):
            self._replace(segment)
        elif error is not None:
            self._report(segment, error)

    def _replace(self, segment: Segment) -> None:
        """The folder was cleared, and another file has this number now: read it at the next `refresh`."""
        if self._segments.get(segment.number) is segment:
            self._forget(segment.number)

    def _take(self, segment: Segment, record: SegmentRecord) -> None:
        if record.kind == PAGE:
            before = self._index.get(record.key)
            if before is not None:  # written again before its segment was removed
                record.entry.uses = before.uses
                self._drop(record.key)
            self._index[record.key] = segment.entries[record.key] = record.entry
        for key in record.keys:
            if key in self._index:
                self._index[key].uses += 1
                self._index[key].time = max(self._index[key].time, record.entry.time)

    def _drop(self, key: bytes) -> None:
        entry = self._index.pop(key, None)
        if entry is not None and entry.segment in self._segments:
            self._segments[entry.segment].entries.pop(key, None)

    def _forget(self, number: int) -> None:
        segment = self._segments.pop(number)
        for key, entry in segment.entries.items():
            if self._index.get(key) is entry:
                del self._index[key]

    def _report(self, segment: Segment, error: Exception) -> None:
        """Count what could not be read; log it once for each segment."""
        self._damaged += 1
        if not segment.damaged:
            problem = error.strerror if isinstance(error, OSError) else error
            log.warning("prefixes in %s are computed again: %s", segment.path, problem)
        segment.damaged = True

    # ---- writing ------------------------------------------------------------------------------

    def use(self, keys: Iterable[bytes]) -> None:
        """Count a use of these pages; written to the folder by the next `flush`."""
        with self._mutex:
            now = self._clock()
            for key in keys:
                entry = self._index.get(key)
                if entry is not None:
                    entry.uses += 1
                    entry.time = now
                    self._used.append(key)

    def write(self, key: bytes, payload: Bytes) -> bool:
        """Append a page. False if it cannot be written now."""
        assert self.layout is not None
        assert len(payload) == self.layout.page_bytes
        assert len(key) == KEY_BYTES
        with self._mutex:
            if key in self._index:
                return True
            return self._append(PAGE, key, payload, make_room=True)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Make these pages unfindable. Their segments go with all they hold, so no later reader finds them either."""
        with self._mutex:
            for number in {self._index[key].segment for key in keys if key in self._index}:
                if self._lock is not None:
                    if self._active is not None and self._active[0].number == number:
                        self._close_active()
                    with contextlib.suppress(OSError):
                        self._files.unlink(self._segments[number].path)
                self._forget(number)

    def flush(self, *, sync: bool = True) -> None:
        """Write the uses that were counted, and have the disk store what was written. Without `sync` the machine does
        that when it likes: what was written survives the program, but not a power cut."""
        with self._mutex:
            used = [key for key in dict.fromkeys(self._used) if key in self._index]
            self._used.clear()
            if used:
                self._append(USES, _NO_KEY, b"".join(used), make_room=True)
            active = self._active
        if active is not None and sync:  # without the lock: reads do not wait, only the thread that writes closes it
            with contextlib.suppress(OSError):
                self._files.sync(active[1])

    def _append(self, kind: int, key: bytes, payload: Bytes, *, make_room: bool) -> bool:
        layout = self.layout
        assert layout is not None
        length = HEAD_BYTES + len(payload)
        if not self._may_write():
            return False
        try:
            if length + HEAD_BYTES > self._segment_bytes():
                return False
            if make_room:
                self._make_room(length)
            segment, fd = self._segment_for(layout, length)
            now, sums = self._clock(), checksums(payload)
            self._files.write(fd, (record_head(layout, kind, key, len(payload), sums, now), payload), segment.read)
        except OSError as e:
            self._write_failed(e)
            return False
        if kind == PAGE:
            entry = PageEntry(segment.number, segment.read + HEAD_BYTES, sums, now)
            self._index[key] = segment.entries[key] = entry
            segment.pages += 1
        segment.read = segment.size = segment.read + length
        self._silent = False
        return True

    def _may_write(self) -> bool:
        if self.most_bytes <= 0 or self._clock() < self._retry_at:
            return False
        if self._lock is None:
            if not self._become_writer():
                self._retry_at = self._clock() + RETRY_SECONDS
                return False
            self.refresh()
        return True

    def _become_writer(self) -> bool:
        try:
            self._lock = lock(self.folder / LOCK)
        except OSError as e:
            self._report_write(e)
        return self._lock is not None

    def _segment_for(self, layout: PageLayout, length: int) -> tuple[Segment, int]:
        """The segment to append to: the active one, the last of an earlier program if it is intact, or a new one."""
        if self._active is not None and self._active[0].read + length <= self._segment_bytes():
            return self._active
        self._close_active()
        last = self._segments.get(max(self._segments, default=0))
        if (
            last is not None and last.layout == layout and not last.damaged and not last.leaves
            and last.read == last.size and last.read + length <= self._segment_bytes()
        ):  # fmt: skip
            self._active = last, self._files.open(last.path, writable=True)
            return self._active
        number = max(self._segments, default=0) + 1
        segment = Segment(number, self.folder / f"{number:08d}.prefix", layout=layout, time=self._clock())
        self._active = segment, self._files.create(segment.path)
        self._segments[number] = segment
        self._files.write(self._active[1], (segment_head(layout, segment.time),), 0)
        segment.read = segment.size = HEAD_BYTES
        return self._active

    def _close_active(self) -> None:
        active, self._active = self._active, None
        if active is not None:
            with contextlib.suppress(OSError):
                self._files.sync(active[1])
            os.close(active[1])

    def _write_failed(self, error: OSError) -> None:
        """Write nothing for a while; what was half written is cut off, or ends the segment if it cannot be."""
        self._report_write(error)
        self._retry_at = self._clock() + RETRY_SECONDS
        if self._active is not None:
            segment, fd = self._active
            try:
                self._files.truncate(fd, segment.read)
                segment.size = segment.read
            except OSError:
                segment.damaged = True
            if segment.read < HEAD_BYTES:  # without a head: of no use
                with contextlib.suppress(OSError):
                    self._files.unlink(segment.path)
                del self._segments[segment.number]
            os.close(fd)
            self._active = None

    def _report_write(self, error: OSError) -> None:
        if not self._silent:
            log.warning("nothing is written to the prefix folder %s for now: %s", self.folder, error.strerror)
        self._silent = True

    # ---- bounds -------------------------------------------------------------------------------

    def _bound(self) -> int:
        """Bytes that the folder may hold: what it was given, and no more than leaves room on the disk for others."""
        free, size = self._files.free_bytes(self.folder)
        return min(self.most_bytes, self._bytes() + free - min(FREE_BYTES, size // FREE_PART))

    def _segment_bytes(self) -> int:
        assert self.layout is not None
        return min(SEGMENT_BYTES, max(self._bound() // SEGMENTS, 2 * (2 * HEAD_BYTES + self.layout.page_bytes)))

    def _room(self) -> int:
        """Bytes that may be added to the folder, without what may be written again before a segment goes."""
        return self._bound() - self._bytes() - self._segment_bytes() // 2

    def _bytes(self) -> int:
        return sum(segment.size for segment in list(self._segments.values()))

    def _make_room(self, length: int) -> None:
        """Remove segments, those of least value first, until `length` bytes and a head fit."""
        while self._segments and self._room() < length + HEAD_BYTES:
            now = self._clock()
            values = {s.number: self._value(s, now) for s in self._segments.values()}
            active = -1 if self._active is None else self._active[0].number
            worst = self._segments[min(values, key=lambda n: (n == active, values[n], n))]
            if self._active is not None and self._active[0] is worst:
                self._close_active()
            worst.leaves = True
            self._rescue(worst, sum(values.values()) / len(values), now)
            self._files.unlink(worst.path)
            self._forget(worst.number)
        if self._room() < length + HEAD_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _rescue(self, segment: Segment, least: float, now: float) -> None:
        """Write those pages of a segment again that are worth more than `least`: no more than half, so that it shrinks,
        and before it is removed, so that no moment exists in which they are gone."""
        assert self.layout is not None
        worth = [e for e in segment.entries.items() if e[1].uses and self._entry_value(segment, e[1], now) > least]
        most = self._segment_bytes() // 2 // (self.layout.page_bytes + 2 * HEAD_BYTES)
        for key, entry in sorted(worth, key=lambda e: -e[1].time)[: min(most, len(segment.entries) // 2)]:
            payload = self.read(key)
            if payload is not None and self._append(PAGE, key, payload, make_room=False):
                self._index[key].uses, self._index[key].time = entry.uses, entry.time

    def _entry_value(self, segment: Segment, entry: PageEntry, now: float) -> float:
        assert segment.layout is not None
        age = max(0.0, now - entry.time) / HOUR
        return segment.layout.page_tokens / segment.layout.page_bytes * (1 + entry.uses) / (1 + age)

    def _value(self, segment: Segment, now: float) -> float:
        """Value per byte of the segment; that of another model has its age alone, since its pages are not indexed."""
        if segment.layout is None:
            return 0.0
        if segment.layout != self.layout:
            return self._entry_value(segment, PageEntry(0, 0, (0, 0), segment.time), now)
        total = sum(self._entry_value(segment, entry, now) for entry in segment.entries.values())
        return total * segment.layout.page_bytes / max(1, segment.size)

    # ---- the folder ---------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Takes no lock: the thread of the steps asks."""
        foreign = sum(s.size for s in list(self._segments.values()) if s.layout != self.layout)
        return StoreStats(len(self._index), self._bytes(), foreign, len(self._segments), self._damaged)

    def contents(self) -> list[FolderPart]:
        """What the folder holds, by identity; unreadable segments last."""
        parts: dict[bytes, list[Segment]] = {}
        for segment in list(self._segments.values()):
            parts.setdefault(b"" if segment.layout is None else segment.layout.identity, []).append(segment)
        return [
            FolderPart(
                identity.hex(), len(group), sum(s.pages for s in group), sum(s.size for s in group),
                sum(s.pages * s.layout.page_tokens for s in group if s.layout), max(s.time for s in group),
            )
            for identity, group in sorted(parts.items(), reverse=True)
        ]  # fmt: skip

    def verify(self) -> tuple[int, int]:
        """Read every record of every segment, whatever its identity; returns the numbers of intact and damaged ones."""
        intact, before = 0, self._damaged
        for segment in list(self._segments.values()):
            again = Segment(segment.number, segment.path)
            try:
                for record in scan(self._files, again):
                    if record.kind == PAGE:
                        try:
                            assert again.layout is not None
                            read_payload(self._files, again, record.entry, bytearray(again.layout.page_bytes))
                        except DamagedSegmentError as e:
                            self._report(again, e)
                            continue
                    intact += 1
                if again.layout is None or again.read != again.size:
                    raise DamagedSegmentError(f"it is cut off at byte {again.size}")
            except (DamagedSegmentError, OSError) as e:
                self._report(again, e)
        return intact, self._damaged - before

    def clear(self) -> int:
        """Remove every segment; returns the bytes that are free again."""
        with self._mutex:
            try:
                if self._lock is None:
                    self._lock = lock(self.folder / LOCK)
                if self._lock is None:
                    raise UsageError(f"a program writes to {self.folder}; stop it before its prefixes are removed.")
                self.refresh()
                self._close_active()
                size = self._bytes()
                for segment in list(self._segments.values()):
                    self._files.unlink(segment.path)
                    self._forget(segment.number)
                return size
            except OSError as e:
                raise UsageError(f"{self.folder} cannot be cleared ({e.strerror}); remove it by other means.") from None

    def close(self) -> None:
        with self._mutex:
            self.flush()
            self._close_active()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
            self.most_bytes = 0
