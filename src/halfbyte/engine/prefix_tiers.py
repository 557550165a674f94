"""Prefixes beyond the pages: host memory, then a folder on disk. Copies pages down when prompts and sequences end, and
brings them up again before a sequence that can use them is admitted.

Down. The pool reports the pages of a prompt that was computed and of a sequence that gives its pages back (`on_end`).
A thread copies each to host memory, another writes it to the disk; a page that was handed out while it was copied is
dropped. So an eviction copies nothing, and a crash loses only what was not written yet. Both queues are bounded: what
does not fit is not stored. Pages of a preempted sequence are about to be handed out: those that go first are copied
before the next step, and the others before anything else, if copying them there and back takes less time than computing
them.

Up. Threads read what the disk has of the first waiting sequences (`turn`, before every step), up to AHEAD_BYTES. When
the scheduler has room to admit a sequence it asks `bring_up`. If the tiers can take the sequence further than the
pages, it waits (`waits_for_pages`) while the rest is read and inserted into the pool, as if it had been cached all
along; the scheduler leaves room for it meanwhile and finds everything in the pages then. That is done where it takes
less time than computing, by speeds that are measured at the start and all the time. While other sequences run, a step
waits for no more than a part of the time that it may spend on prompts.

Nothing that goes wrong here reaches a request: it is logged, and the tokens are computed.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Generic, TypeVar

from halfbyte.byte_cache import ByteCache
from halfbyte.engine.runner import MovesPages
from halfbyte.engine.sequence import Sequence, State
from halfbyte.kv.pages import FULL, SCRATCH, SLIDING, End, Hit, PagePool, PageRef
from halfbyte.kv.prefix_store import StoreStats

if TYPE_CHECKING:
    from halfbyte.engine.scheduler import Scheduler
    from halfbyte.kv.prefix_store import PrefixStore

log = logging.getLogger("halfbyte")
T = TypeVar("T")

PORTION_BYTES = 16 << 20  # copied to host memory at once
MOVE_BYTES = 64 << 20  # the most that is moved in one step, while other sequences run
MOVE_PART = 0.25  # of the time that a step may spend on prompts beside decoding, for moving pages instead
AHEAD_BYTES = 256 << 20  # read and not yet in pages, half of it for sequences that cannot be admitted yet
LOOK_AHEAD = 8  # waiting sequences of a client whose pages are read ahead
ATTEMPTS = 3  # to bring up the pages of one sequence between two admissions
MOST_BROKEN = 1 << 16  # pages with values that are not numbers which are remembered
QUEUE_LENGTH = 256  # prompts and sequences whose pages wait to be copied
REFRESH_SECONDS = 2.0  # between two looks at what another process has written to the folder
SYNC_SECONDS = 5.0  # between two times that the disk is made to store what was written
CLOSE_SECONDS = 30.0  # the most that closing waits for writes
MEASURE_SECONDS, MEASURE_BYTES = 0.02, 64 << 20  # the most that a measurement at the start takes
READERS = min(4, max(1, (os.cpu_count() or 1) // 2))  # threads that read pages
TRIAL = 16  # every so many times a tier that seems too slow is measured again
WEIGHT = 0.3  # of a new measurement of a step, and of a page:
PAGE_WEIGHT = 0.05
MEMORY, DISK = "memory", "disk"


@dataclass
class Speeds:
    """Bytes per second, as measured: from pages to host memory, from there to pages, and from the disk."""

    down: float = 4e9
    up: float = 4e9
    disk: float = 5e8
    rows: float | None = None  # of prompts at their beginning, computed in a second; None: none was computed yet

    def learn(self, name: str, speed: float, weight: float) -> None:
        before = getattr(self, name)
        setattr(self, name, speed if before is None else before + weight * (speed - before))


@dataclass(frozen=True)
class TierStats:
    """Counters of the tiers. Tokens are those of the full pages that were brought up."""

    memory_tokens: int = 0
    disk_tokens: int = 0
    memory_bytes: int = 0  # held now
    skipped_pages: int = 0  # not stored, because they were handed out first or a queue was full
    store: StoreStats = field(default_factory=StoreStats)


@dataclass(frozen=True, slots=True)
class EndedPages:
    """Pages to be copied, of a prompt or of a sequence."""

    refs: list[PageRef]
    end: End
    behind: object  # the steps that were launched when it ended


@dataclass(eq=False)
class Restore:
    """One waiting sequence's pages on their way up."""

    seq: Sequence
    admission: int  # the sequence's last one
    attempts: int = 0
    need: int = 0  # pages that it will hold; 0: there is no room to admit it yet
    plan: deque[tuple[int, bytes]] = field(default_factory=deque)  # pages to be inserted, in order
    unread: deque[tuple[int, bytes]] = field(default_factory=deque)
    pending: set[bytes] = field(default_factory=set)  # keys of pages that are unread, or being read
    ready: dict[bytes, tuple[memoryview, str]] = field(default_factory=dict)  # what was read, and from which tier

    @property
    def live(self) -> bool:
        return self.seq.state is State.WAITING and self.seq.admission == self.admission

    def has(self, kind: int, h: bytes) -> bool:
        return _key(kind, h) in self.ready


class PrefixTiers:
    def __init__(
        self, runner: MovesPages, page_bytes: int, memory_bytes: int, store: PrefixStore | None, *,
        doubling_depth: float = math.inf,
    ) -> None:  # fmt: skip
        """`doubling_depth`: where in a prompt a row takes twice as long as at its beginning."""
        self._runner, self.page_bytes, self.store, self._doubling_depth = runner, page_bytes, store, doubling_depth
        self._scheduler: Scheduler
        self._pages: PagePool
        self._memory: ByteCache[bytes, memoryview] | None = None
        if memory_bytes >= page_bytes:
            self._memory = ByteCache(memory_bytes)
        self._broken: ByteCache[bytes, None] = ByteCache(MOST_BROKEN)  # keys of pages that are not to be stored
        self._mutex = threading.Lock()  # of both
        self._restores: dict[Sequence, Restore] = {}
        self._changed = threading.Condition()  # of the restores, which readers share
        self._progress = threading.Event()
        self._readers: list[threading.Thread] = []
        self._closing = False
        self._skipped = 0
        self._tokens = {MEMORY: 0, DISK: 0}
        self.speeds = Speeds()
        self._refusals = 0
        self._next_sync = 0.0
        self._writer = _Worker("halfbyte-prefix-disk", self._write, QUEUE_LENGTH, self._idle)
        self._copier = _Worker("halfbyte-prefix-copy", self._copy, QUEUE_LENGTH)

    def attach(self, scheduler: Scheduler) -> None:
        """Serve this scheduler and its pages from now on."""
        self._scheduler, self._pages = scheduler, scheduler.pages
        scheduler.tiers = self
        self._pages.on_end = self._save
        self._measure()
        if self.store is not None:
            self._writer.start()

    # ---- down ---------------------------------------------------------------------------------

    def _save(self, refs: list[PageRef], end: End) -> None:
        if not refs:
            return
        behind = self._runner.launched_steps()
        if end == "preempted" and self._memory is not None:
            refs = refs[::-1]  # in the order in which they are handed out
            if not self._worth_keeping(refs):
                return
            budget = max(1, self._bytes_per_step(self.speeds.down) // self.page_bytes)
            first = [ref for ref in refs if self._in_memory(_key(ref.kind, ref.hash)) is None][:budget]
            self._copy_pages(first, behind)
        target = self._writer if self._memory is None else self._copier
        if not target.put(EndedPages(refs, end, behind), first=end == "preempted"):
            self._skipped += len(refs)

    def _worth_keeping(self, refs: list[PageRef]) -> bool:
        """Whether these pages are copied to host memory and back in less time than they are computed."""
        if self.speeds.rows is None:
            return True
        tokens = self._pages.page_size * sum(ref.kind == FULL for ref in refs)
        seconds = len(refs) * self.page_bytes * (1 / self.speeds.down + 1 / self.speeds.up)
        return seconds < self._computing_seconds(0, tokens, self.speeds.rows)

    def _computing_seconds(self, first: int, count: int, speed: float) -> float:
        """How long `count` tokens of a prompt take from position `first` on. A row attends to all rows before it, so
        that deep ones take longer than those by which the speed is mostly measured."""
        return count * (1 + (first + count / 2) / self._doubling_depth) / speed

    def _copy(self, ended: EndedPages) -> None:
        """Copy pages to host memory."""
        absent = [ref for ref in ended.refs if self._in_memory(_key(ref.kind, ref.hash)) is None]
        for some in self._portions(absent):
            self._copy_pages(some, ended.behind)
        if self.store is not None and not self._writer.put(ended):
            self._skipped += len(ended.refs)

    def _copy_pages(self, refs: list[PageRef], behind: object) -> None:
        """Copy these pages to host memory, but those that cannot be read any more."""
        assert self._memory is not None
        for ref, content in zip(refs, self._read_pages(refs, behind), strict=True):
            key = _key(ref.kind, ref.hash)
            with self._mutex:
                if content is not None and key not in self._broken:
                    self._memory.put(key, content, len(content))

    def _portions(self, refs: list[PageRef]) -> Iterator[list[PageRef]]:
        """What is read at once: a page may be handed out while others are."""
        most = max(1, PORTION_BYTES // self.page_bytes)
        return (refs[start : start + most] for start in range(0, len(refs), most))

    def _write(self, pages: EndedPages | list[bytes]) -> None:
        """Write pages to the disk, or remove those with these keys."""
        store = self.store
        if store is None:
            return
        if isinstance(pages, list):
            store.remove(pages)
            return
        stored = [key for ref in pages.refs if (key := _key(ref.kind, ref.hash)) in store or key in self._broken]
        stored_keys = set(stored)
        absent = [ref for ref in pages.refs if _key(ref.kind, ref.hash) not in stored_keys]
        left = len(absent)
        for some in self._portions(absent):
            contents = [self._in_memory(_key(ref.kind, ref.hash)) for ref in some]
            unread = [ref for ref, content in zip(some, contents, strict=True) if content is None]
            read = iter(self._read_pages(unread, pages.behind))
            for ref, in_memory in zip(some, contents, strict=True):
                left -= 1
                content = next(read) if in_memory is None else in_memory
                if content is not None and not store.write(_key(ref.kind, ref.hash), content):
                    self._skipped += 1 + left if store.writes else 0  # the disk is full or broken
                    return
        if pages.end == "prompt":  # another prompt begins with these; an end of the same sequence is no further use
            store.use(stored)
        # Syncing takes milliseconds, or seconds where the disk is busy: not after every prompt.
        now = time.monotonic()
        store.flush(sync=now >= self._next_sync)
        if now >= self._next_sync:
            self._next_sync = now + SYNC_SECONDS

    def _read_pages(self, refs: list[PageRef], behind: object) -> list[memoryview | None]:
        """Copies of these pages; None for one that was handed out first."""
        numbers = [ref.page for ref in refs if self._pages.unchanged(ref)]
        if not numbers:
            self._skipped += len(refs)
            return [None] * len(refs)
        read, seconds = self._runner.read_pages(numbers, behind)
        self.speeds.learn("down", len(numbers) * self.page_bytes / max(1e-9, seconds), self._weight(len(numbers)))
        by_number = dict(zip(numbers, read, strict=True))
        contents = [by_number.get(ref.page) if self._pages.unchanged(ref) else None for ref in refs]
        self._skipped += contents.count(None)
        return contents

    @staticmethod
    def _weight(pages: int) -> float:
        """The weight that a measurement of so many pages has in a speed."""
        return 1 - (1 - PAGE_WEIGHT) ** pages

    def _idle(self) -> None:
        if self.store is not None and not self.store.writes:
            self.store.refresh()

    def forget(self, hashes: list[bytes]) -> None:
        """Remove the pages of a sequence that produced values which are not numbers."""
        keys = [_key(kind, h) for h in hashes for kind in (FULL, SLIDING)]
        with self._mutex:
            for key in keys:
                self._broken.put(key, None, 1)  # copies of it may be under way
                if self._memory is not None:
                    self._memory.remove(key)
        with self._changed:
            for restore in self._restores.values():
                if not restore.pending.isdisjoint(keys) or not restore.ready.keys().isdisjoint(keys):
                    self._end(restore)
                    restore.attempts = ATTEMPTS
        if self.store is not None:
            self._writer.put(keys, always=True)

    # ---- up -----------------------------------------------------------------------------------

    def turn(self) -> None:
        """Before a step: read ahead for the first waiting sequences, and insert what was read into pages."""
        for seq in [seq for seq, restore in self._restores.items() if not restore.live]:
            self._drop(seq)
        if self.store is not None:
            for client in self._scheduler.clients.present.values():
                for seq in client.waiting[:LOOK_AHEAD]:
                    if seq not in self._restores:
                        self._look_ahead(seq)
        budget = self._bytes_per_step(self.speeds.up)
        for restore in list(self._restores.values()):
            if restore.seq.waits_for_pages and budget > 0:
                budget -= self._insert(restore, budget)

    def wait(self, seconds: float) -> None:
        """Wait for a page to be read, because nothing else can run."""
        if any(restore.seq.waits_for_pages for restore in self._restores.values()):
            self._progress.wait(seconds)
            self._progress.clear()

    @property
    def promised_pages(self) -> int:
        """Pages that sequences will hold whose prefix is being brought up."""
        return sum(restore.need for restore in self._restores.values() if restore.seq.waits_for_pages)

    def bring_up(self, seq: Sequence, hit: Hit, limit: int, need: int) -> bool:
        """The scheduler has room for a sequence, `need` pages, of whose first `limit` tokens the pages have `hit`. True
        if it is to wait for more of them."""
        restore = self._restores.get(seq)
        if restore is None or not restore.live:
            restore = self._begin(seq)
        if restore.attempts >= ATTEMPTS:
            return False
        blocks = self._pages.reach(seq.tables, limit, lambda kind, h: self._stored(kind, h) or restore.has(kind, h))
        if blocks <= hit.blocks:
            return False
        absent = self._pages.absent(seq.tables, blocks)
        if not self._faster(absent, hit.blocks, blocks, restore):
            restore.attempts = ATTEMPTS
            return False
        restore.attempts += 1
        restore.need = need
        with self._changed:
            restore.plan = deque(absent)
            self._request(restore, absent)
        seq.waits_for_pages = True
        return True

    def _begin(self, seq: Sequence) -> Restore:
        self._drop(seq)
        with self._changed:
            restore = self._restores[seq] = Restore(seq, seq.admission)
        return restore

    def _drop(self, seq: Sequence) -> None:
        with self._changed:
            restore = self._restores.pop(seq, None)
            if restore is not None:
                self._end(restore)

    def _end(self, restore: Restore) -> None:
        """Nothing more is read or inserted for this sequence. The caller has the lock."""
        restore.seq.waits_for_pages = False
        restore.need = 0
        restore.plan.clear()
        restore.unread.clear()
        restore.pending.clear()
        restore.ready.clear()
        self._changed.notify_all()

    def _look_ahead(self, seq: Sequence) -> None:
        """Begin to read what only the disk has of a sequence that cannot be admitted yet."""
        if seq.leader is not None and not seq.leader.prefilled:
            return  # its leader brings it
        restore = self._begin(seq)
        limit = len(seq.tokens) - 1
        hit, blocks = self._pages.match(seq.tables, limit), self._pages.reach(seq.tables, limit, self._stored)
        if blocks <= hit.blocks:
            return
        absent = self._pages.absent(seq.tables, blocks)
        if self._faster(absent, hit.blocks, blocks, restore):
            with self._changed:
                self._request(restore, [page for page in absent if self._in_memory(_key(*page)) is None])

    def _request(self, restore: Restore, pages: list[tuple[int, bytes]]) -> None:
        """Have these pages read in this order, without those that were read before; forget others that were. The caller
        has the lock."""
        being_read = restore.pending.difference(_key(*page) for page in restore.unread)
        keys = {_key(*page): page for page in pages}
        restore.ready = {key: content for key, content in restore.ready.items() if key in keys}
        restore.unread = deque(page for key, page in keys.items() if key not in restore.ready and key not in being_read)
        restore.pending = being_read.union(_key(*page) for page in restore.unread)
        if not self._readers and restore.unread:
            self._readers = [
                threading.Thread(target=self._read, name="halfbyte-prefix-read", daemon=True) for _ in range(READERS)
            ]
            for thread in self._readers:
                thread.start()
        self._changed.notify_all()

    def _stored(self, kind: int, h: bytes) -> bool:
        key = _key(kind, h)
        if key in self._broken:
            return False
        return (self._memory is not None and key in self._memory) or (self.store is not None and key in self.store)

    def _faster(self, absent: list[tuple[int, bytes]], first: int, end: int, restore: Restore) -> bool:
        """Whether reading and inserting these pages takes less time than computing the blocks from `first` to `end`."""
        speeds = self.speeds
        if speeds.rows is None:
            return True  # nothing was computed yet
        on_disk = len(absent)
        if self._memory is not None or restore.ready:
            on_disk = sum(
                self._in_memory(key) is None and key not in restore.ready for key in (_key(*p) for p in absent)
            )
        seconds = self.page_bytes * (len(absent) / speeds.up + on_disk / speeds.disk)
        size = self._pages.page_size
        if seconds < self._computing_seconds(first * size, (end - first) * size, speeds.rows):
            return True
        self._refusals += 1
        return self._refusals % TRIAL == 0

    def _read(self) -> None:
        """Read pages, those of sequences that can be admitted first."""
        while True:
            with self._changed:
                while (unread := self._next_unread()) is None and not self._closing:
                    self._changed.wait()
                if unread is None:
                    return
                restore, (kind, h) = unread
            key = _key(kind, h)
            try:
                content, tier = self._content(key)
            except Exception:
                log.exception("a prefix could not be read")
                content = None
            with self._changed:
                if key in restore.pending:
                    restore.pending.discard(key)
                    if content is not None:
                        restore.ready[key] = content, tier
            self._progress.set()

    def _next_unread(self) -> tuple[Restore, tuple[int, bytes]] | None:
        """The page to be read next, which is taken; None if there is none or too much was read ahead."""
        waiting = [r for r in self._restores.values() if r.unread]
        for admitted, most in ((True, AHEAD_BYTES), (False, AHEAD_BYTES // 2)):
            size = sum(len(r.ready) for r in self._restores.values() if bool(r.need) is admitted) * self.page_bytes
            for restore in waiting:
                # A page that is to be inserted next is read in any case.
                if bool(restore.need) is admitted and (
                    size < most or (restore.plan and restore.unread[0] == restore.plan[0])
                ):
                    return restore, restore.unread.popleft()
        return None

    def _content(self, key: bytes) -> tuple[memoryview | None, str]:
        """A page from host memory or the disk, where the runner takes it from quickly."""
        content = self._in_memory(key)
        if content is not None:
            return self._runner.stage_page(content), MEMORY
        if self.store is None:
            return None, DISK
        buffer = self._runner.page_buffer()
        start = time.perf_counter()
        content = self.store.read(key, buffer)
        if content is not None:
            self.speeds.learn("disk", len(content) * READERS / max(1e-9, time.perf_counter() - start), PAGE_WEIGHT)
        return content, DISK

    def _in_memory(self, key: bytes) -> memoryview | None:
        if self._memory is None:
            return None
        with self._mutex:
            return self._memory.get(key)

    def _insert(self, restore: Restore, budget: int) -> int:
        """Insert what was read into pages, up to `budget` bytes; returns how many."""
        pages: list[int] = []
        contents: list[memoryview] = []
        with self._changed:
            while restore.plan and len(pages) * self.page_bytes < budget:
                kind, h = restore.plan[0]
                key = _key(kind, h)
                if key in restore.pending:
                    break
                page_read = restore.ready.pop(key, None)
                if page_read is None:
                    restore.plan.clear()  # it could not be read, and the rest is of no use without it
                    break
                restore.plan.popleft()
                content, tier = page_read
                page = self._pages.insert(kind, h)
                if page is not None:
                    pages.append(page)
                    contents.append(content)
                    if kind == FULL:
                        self._tokens[tier] += self._pages.page_size
                        restore.seq.count_restored(self._pages.page_size, from_disk=tier == DISK)
            if not restore.plan:
                self._end(restore)
            self._changed.notify_all()
        if pages:
            for size, seconds in self._runner.write_pages(pages, contents):
                self.speeds.learn("up", size / max(1e-9, seconds), self._weight(size // self.page_bytes))
        return len(pages) * self.page_bytes

    # ---- measurements -------------------------------------------------------------------------

    def _measure(self) -> None:
        """Measure how fast a page is copied both ways, and how fast the disk is where it holds something."""
        runner, size = self._runner, self.page_bytes

        def read() -> memoryview:
            return runner.read_pages([SCRATCH], runner.launched_steps())[0][0]  # waits until it was written

        content = read()

        def there_and_back() -> None:
            runner.write_pages([SCRATCH], [runner.stage_page(content)])
            read()

        down = self._seconds(read)
        both = self._seconds(there_and_back)
        self.speeds.down, self.speeds.up = size / down, size / max(both - down, both / 10)
        if self.store is not None and len(self.store):
            keys = cycle(self.store.sample(1 + MEASURE_BYTES // size))
            store = self.store
            buffer = runner.page_buffer()
            self.speeds.disk = READERS * size / self._seconds(lambda: store.read(next(keys), buffer))

    def _seconds(self, copy: Callable[[], object]) -> float:
        """The seconds that one page takes."""
        count, start, seconds = 0, time.perf_counter(), 0.0
        while not count or (seconds < MEASURE_SECONDS and count * self.page_bytes < MEASURE_BYTES):
            copy()
            count += 1
            seconds = time.perf_counter() - start
        return max(1e-9, seconds / count)

    def computed(self, rows: int, depth: float, seconds: float) -> None:
        """Steps computed so many rows of prompts in this time, `depth` positions deep in the mean."""
        if rows >= self._pages.page_size and seconds > 0:
            self.speeds.learn("rows", rows * (1 + depth / self._doubling_depth) / seconds, WEIGHT)

    def _bytes_per_step(self, speed: float) -> int:
        """Bytes that may be moved at this speed before the next step, so that running sequences are not delayed."""
        if not self._scheduler.running:
            return 1 << 62
        if self.speeds.rows is None:
            return MOVE_BYTES
        seconds = MOVE_PART * self._scheduler.max_rows_with_decode / self.speeds.rows
        return max(self.page_bytes, min(MOVE_BYTES, int(speed * seconds)))

    def stats(self) -> TierStats:
        return TierStats(
            self._tokens[MEMORY], self._tokens[DISK], 0 if self._memory is None else self._memory.bytes, self._skipped,
            StoreStats() if self.store is None else self.store.stats(),
        )  # fmt: skip

    def settle(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until everything that has ended is stored; False if it takes longer."""
        end = time.monotonic() + seconds
        return all(worker.settle(max(0.0, end - time.monotonic())) for worker in (self._copier, self._writer))

    def close(self) -> None:
        self.settle()
        with self._changed:
            self._closing = True
            for restore in self._restores.values():
                self._end(restore)
            self._restores.clear()
            self._changed.notify_all()
        for thread in self._readers:
            thread.join(CLOSE_SECONDS)
        for worker in (self._copier, self._writer):
            worker.close()
        if self.store is not None:
            self.store.close()


class _Worker(Generic[T]):
    """A thread that handles items in order. An error is logged and ends nothing."""

    def __init__(
        self, name: str, handle: Callable[[T], None], most: int, idle: Callable[[], None] | None = None
    ) -> None:
        self._name, self._handle, self._idle, self._most = name, handle, idle, most
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = self._closing = False

    def put(self, item: T, *, first: bool = False, always: bool = False) -> bool:
        """False if too many wait already, which does not matter with `always`."""
        with self._changed:
            if (len(self._items) >= self._most and not always) or self._closing:
                return False
            (self._items.appendleft if first else self._items.append)(item)
            self._changed.notify_all()
        self.start()
        return True

    def start(self) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def settle(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._items and not self._busy, seconds)

    def _next(self) -> T | None:
        """The next item; None if it ends here, or if it was idle for a while."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            timeout = None if self._idle is None else REFRESH_SECONDS
            self._changed.wait_for(lambda: self._items or self._closing, timeout)
            if not self._items:
                return None
            self._busy = True
            return self._items.popleft()

    def _run(self) -> None:
        while True:
            item = self._next()
            try:
                if item is not None:
                    self._handle(item)
                elif self._closing:
                    return
                elif self._idle is not None:
                    self._idle()
            except Exception:
                log.exception("prefixes could not be moved")

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)


def _key(kind: int, h: bytes) -> bytes:
    return bytes((kind,)) + h
