"""The prefix store: each promise on its own, then a fuzzer of damage, kills between any two writes, two processes and a
full disk. A page's bytes are a function of its key, so a wrong page is always noticed."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from hashlib import shake_128
from pathlib import Path

import pytest

from halfbyte.errors import UsageError
from halfbyte.kv import prefix_store
from halfbyte.kv.file_layer import Bytes, FileLayer
from halfbyte.kv.prefix_store import LOCK, PrefixStore
from halfbyte.kv.segments import HEAD_BYTES, PageLayout

PAGE_BYTES = 700
LAYOUT = PageLayout(b"model A numerics", PAGE_BYTES, 8)
OTHER = PageLayout(b"model B numerics", PAGE_BYTES, 8)
PLENTY = 1 << 20


def key_of(number: int) -> bytes:
    return bytes([number % 2]) + shake_128(number.to_bytes(8, "little")).digest(16)


def page_of(key: bytes, layout: PageLayout = LAYOUT) -> bytes:
    return shake_128(key + layout.identity).digest(layout.page_bytes)


def open_store(
    folder: Path, most: int = PLENTY, layout: PageLayout = LAYOUT, files: FileLayer | None = None
) -> PrefixStore:
    return PrefixStore(folder, layout, most, files=files)


def fill(store: PrefixStore, numbers: Sequence[int]) -> list[int]:
    """Write pages; returns the numbers of those that the store accepted."""
    assert store.layout is not None
    done = [n for n in numbers if store.write(key_of(n), page_of(key_of(n), store.layout))]
    store.flush()
    return done


def present(store: PrefixStore, numbers: Sequence[int]) -> list[int]:
    """Numbers of the pages that the store returns, each checked for its bytes."""
    assert store.layout is not None
    out = []
    for n in numbers:
        page = store.read(key_of(n))
        if page is not None:
            assert page == page_of(key_of(n), store.layout), "a wrong page"
            out.append(n)
    return out


def abandon(store: PrefixStore) -> None:
    """What a killed process leaves: its descriptors are closed, and nothing else happens."""
    if store._active is not None:
        os.close(store._active[1])
        store._active = None
    if store._lock is not None:
        os.close(store._lock)
        store._lock = None


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prefix"))


# ---- disks that fail, processes that end ---------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


class FaultyFiles(FileLayer):
    """Ends the process at an operation, part of which is done; or has room for so many bytes, `honest` if it says so
    beforehand. `others` have taken as many of them."""

    def __init__(
        self, kill_at: int | None = None, part: float = 0.0, room: int | None = None, *, honest: bool = False
    ) -> None:
        self.kill_at, self.part, self.room, self.honest = kill_at, part, room, honest
        self.disk_bytes, self.others = room or 0, 0
        self.log: list[str] = []

    @property
    def operations(self) -> int:
        return len(self.log)

    def _operation(self, name: str) -> bool:
        self.log.append(name)
        return self.operations - 1 == self.kill_at

    def create(self, path: Path) -> int:
        if self._operation("create"):
            if self.part > 0.5:
                os.close(super().create(path))
            raise Killed
        return super().create(path)

    def write(self, fd: int, parts: Sequence[Bytes], offset: int) -> None:
        data = b"".join(parts)
        if self._operation("write"):
            os.pwrite(fd, data[: int(self.part * (len(data) + 1))], offset)
            raise Killed
        if self.room is not None and len(data) > self.room:
            os.pwrite(fd, data[: self.room], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.room is not None:
            self.room -= len(data)
        super().write(fd, parts, offset)

    def sync(self, fd: int) -> None:
        if self._operation("sync"):
            raise Killed

    def truncate(self, fd: int, size: int) -> None:
        if self._operation("truncate"):
            if self.part > 0.5:
                super().truncate(fd, size)
            raise Killed
        super().truncate(fd, size)

    def unlink(self, path: Path) -> None:
        size = path.lstat().st_size if path.is_file() else 0
        if self._operation("unlink"):
            if self.part > 0.5:
                super().unlink(path)
            raise Killed
        super().unlink(path)
        if self.room is not None:
            self.room += size

    def free_bytes(self, folder: Path) -> tuple[int, int]:
        if self.room is None or not self.honest:
            return PLENTY, PLENTY
        return max(0, self.room - self.others), self.disk_bytes


class PowerCut(FaultyFiles):
    """Ends the machine: of what was not synced, some writes are lost, and a new file may be."""

    def __init__(self, rng: random.Random, kill_at: int) -> None:
        super().__init__(kill_at)
        self._rng = rng
        self._paths: dict[int, Path] = {}
        self._synced: dict[Path, bytes] = {}
        self._writes: dict[Path, list[tuple[int, bytes]]] = {}

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._paths[fd] = path
        self._writes[path] = []
        return fd

    def open(self, path: Path, *, writable: bool = False) -> int:
        fd = super().open(path, writable=writable)
        if writable:
            self._paths[fd] = path
            self._synced[path], self._writes[path] = path.read_bytes(), []
        return fd

    def write(self, fd: int, parts: Sequence[Bytes], offset: int) -> None:
        super().write(fd, parts, offset)
        self._writes[self._paths[fd]].append((offset, b"".join(parts)))

    def sync(self, fd: int) -> None:
        super().sync(fd)
        path = self._paths[fd]
        if path.exists():
            self._synced[path], self._writes[path] = path.read_bytes(), []

    def cut(self) -> None:
        for path, writes in self._writes.items():
            if not path.exists():
                continue
            content = bytearray(self._synced.get(path, b""))
            for offset, data in writes:
                if self._rng.random() < 0.5:
                    content.extend(bytes(max(0, offset - len(content))))
                    content[offset : offset + len(data)] = data
            path.unlink()
            if path in self._synced or self._rng.random() < 0.8:
                path.write_bytes(content)


# ---- promises ---------------------------------------------------------------------------------


def test_pages_survive_the_store_with_and_without_a_close(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    store = open_store(folder)
    assert fill(store, range(5)) == list(range(5))
    assert present(store, range(7)) == list(range(5))
    store.close()
    again = open_store(folder)
    assert fill(again, range(5, 8)) == [5, 6, 7]
    abandon(again)
    assert present(open_store(folder), range(9)) == list(range(8))
    assert len(segments(folder)) == 1, "an intact segment is continued"


def test_the_folder_and_its_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir(mode=0o755)
    fill(open_store(folder), [1])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}


def test_a_folder_with_other_files_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        open_store(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("")
    with pytest.raises(UsageError, match="--prefix-folder"):
        open_store(tmp_path / "p")


def test_one_store_writes_others_read_and_one_takes_over(tmp_path: Path) -> None:
    now = [1000.0]
    folder = tmp_path / "p"
    writer = PrefixStore(folder, LAYOUT, PLENTY, clock=lambda: now[0])
    reader = PrefixStore(folder, LAYOUT, PLENTY, clock=lambda: now[0])
    assert (writer.writes, reader.writes) == (True, False)
    fill(writer, range(3))
    assert fill(reader, [9]) == []
    assert present(reader, range(3)) == []
    reader.refresh()
    assert present(reader, range(3)) == [0, 1, 2]
    writer.close()
    assert fill(reader, [9]) == [], "it tries again after a while only"
    now[0] += 60
    assert fill(reader, [9]) == [9]
    assert present(open_store(folder), range(10)) == [0, 1, 2, 9]


def test_another_model_finds_nothing_and_counts_against_the_bound(tmp_path: Path) -> None:
    folder, most = tmp_path / "p", 20 * (PAGE_BYTES + HEAD_BYTES)
    first = PrefixStore(folder, OTHER, most, clock=lambda: 0.0)
    fill(first, range(8))
    first.close()
    store = open_store(folder, most)
    assert present(store, range(8)) == []
    assert store.stats().foreign_bytes > 0
    fill(store, range(8, 60))
    assert sum(p.stat().st_size for p in segments(folder)) == store.stats().bytes <= most
    assert store.stats().foreign_bytes == 0, "what is older and unused goes first"


def test_the_bound_holds_and_what_is_used_stays(tmp_path: Path) -> None:
    now = [0.0]
    folder, most = tmp_path / "p", 30 * (PAGE_BYTES + HEAD_BYTES)
    store = PrefixStore(folder, LAYOUT, most, clock=lambda: now[0])
    for n in range(200):
        now[0] += 600
        store.use([key_of(0), key_of(1)])
        fill(store, [n])
        assert sum(p.stat().st_size for p in segments(folder)) <= most
    left = present(store, range(200))
    assert left[:2] == [0, 1], "used with every page that was added"
    assert 199 in left
    assert len(left) > 12
    assert 3 not in left
    abandon(store)
    assert present(PrefixStore(folder, LAYOUT, most, clock=lambda: now[0]), range(200)) == left


def test_uses_survive_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path / "p")
    fill(store, [1, 2])
    store.use([key_of(1)])
    store.close()
    again = open_store(tmp_path / "p")
    assert [again._index[key_of(n)].uses for n in (1, 2)] == [1, 0]


def test_removed_pages_stay_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "p")
    fill(store, [1, 2])
    store.remove([key_of(1)])
    assert present(store, [1]) == []
    fill(store, [3])
    abandon(store)
    assert present(open_store(tmp_path / "p"), [1, 3]) == [3]


def test_a_full_disk_costs_one_line_and_ends_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    files = FaultyFiles(room=4 * PAGE_BYTES)
    store = PrefixStore(tmp_path / "p", LAYOUT, PLENTY, files=files, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, "halfbyte"):
        for n in range(20):
            now[0] += 20
            fill(store, [n])
    assert len(caplog.records) == 1
    assert os.strerror(errno.ENOSPC) in caplog.text
    stored = present(store, range(20))
    assert stored == [0, 1, 2]
    files.room = PLENTY
    now[0] += 60
    assert fill(store, [30]) == [30]
    abandon(store)
    assert present(open_store(tmp_path / "p"), range(31)) == [0, 1, 2, 30]


def test_damage_costs_one_line_and_only_what_it_hit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path / "p")
    fill(store, range(6))
    path = segments(tmp_path / "p")[0]
    data = bytearray(path.read_bytes())
    for n in (2, 4):
        data[store._index[key_of(n)].offset + 5] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "halfbyte"):
        assert present(store, range(6)) == [0, 1, 3, 5]
    assert len(caplog.records) == 1
    assert store.verify()[1] == 2
    assert store.stats().damaged >= 2


@pytest.mark.parametrize("content", [b"", b"HBPREFIX", b"something else" * 50, b"HBPREFIX" + bytes([9]) + bytes(200)])
def test_a_foreign_or_older_file_is_passed_over(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "p"
    store = open_store(folder)
    fill(store, range(3))
    abandon(store)
    (folder / "00000007.prefix").write_bytes(content)
    (folder / "00000008.prefix").symlink_to(tmp_path)
    (folder / "readme").write_text("not a segment")
    os.mkfifo(folder / "00000009.prefix")
    again = open_store(folder)
    assert present(again, range(3)) == [0, 1, 2]
    assert fill(again, [3]) == [3]
    assert again.clear() > 0
    assert segments(folder) == []
    assert tmp_path.is_dir()


def test_a_folder_in_use_is_not_cleared(tmp_path: Path) -> None:
    writer = open_store(tmp_path / "p")
    fill(writer, [1])
    with pytest.raises(UsageError, match="stop it"):
        PrefixStore(tmp_path / "p", None, 0).clear()
    assert present(writer, [1]) == [1]


def test_a_reader_notices_that_the_folder_was_cleared_and_filled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_store(tmp_path / "p")
    fill(writer, range(5))
    reader, late = open_store(tmp_path / "p", 0), open_store(tmp_path / "p", 0)
    assert present(reader, range(5)) == list(range(5))
    writer.clear()
    fill(writer, range(10, 16))
    assert [p.name for p in segments(tmp_path / "p")] == ["00000001.prefix"], "the number is used again"
    with caplog.at_level(logging.WARNING, "halfbyte"):
        assert present(reader, range(5)) == [], "before it has looked"
        for store in (reader, late):
            store.refresh()
            store.refresh()
            assert present(store, range(20)) == list(range(10, 16))
            assert store.stats().damaged == 0
    assert not caplog.records


def test_a_disk_with_little_room_is_left_to_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The store gives its oldest segments up for new pages, and writes nothing where others need the rest."""
    now = [0.0]
    files = FaultyFiles(room=30 * PAGE_BYTES, honest=True)
    store = PrefixStore(tmp_path / "p", LAYOUT, 20 * PAGE_BYTES, files=files, clock=lambda: now[0])
    for n in range(60):
        now[0] += 600
        assert fill(store, [n]) == [n]
        assert files.free_bytes(tmp_path)[0] >= files.disk_bytes // 20
    assert present(store, range(60))[-1] == 59
    files.others = files.disk_bytes
    with caplog.at_level(logging.WARNING, "halfbyte"):
        for n in range(60, 80):
            now[0] += 600
            assert fill(store, [n]) == []
    assert [r.message for r in caplog.records if os.strerror(errno.ENOSPC) in r.message] == [caplog.messages[0]]
    assert len(caplog.records) == 1
    files.others = 0
    now[0] += 600
    assert fill(store, [99]) == [99]


def test_a_small_disk_is_used_though_the_bound_is_large(tmp_path: Path) -> None:
    files = FaultyFiles(room=60 * PAGE_BYTES, honest=True)
    store = open_store(tmp_path / "p", 1 << 40, files=files)
    assert fill(store, range(200)) == list(range(200))
    assert len(present(store, range(200))) > 30
    assert files.free_bytes(tmp_path)[0] >= files.disk_bytes // 20


def test_a_bound_of_a_few_pages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--prefix-disk .* 1MiB"):
        open_store(tmp_path / "p", 3 * PAGE_BYTES)


def test_a_folder_that_cannot_be_locked_is_read_and_costs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "p")
    fill(store, [1])
    store.close()

    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(prefix_store, "lock", read_only)
    now = [0.0]
    with caplog.at_level(logging.WARNING, "halfbyte"):
        store = PrefixStore(tmp_path / "p", LAYOUT, PLENTY, clock=lambda: now[0])
        for n in range(2, 9):
            now[0] += 60
            assert fill(store, [n]) == []
    assert len(caplog.records) == 1
    assert os.strerror(errno.EROFS) in caplog.text
    assert present(store, [1]) == [1]
    with pytest.raises(UsageError, match=os.strerror(errno.EROFS)):
        PrefixStore(tmp_path / "p", None, 0).clear()


def test_a_folder_that_is_gone_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = open_store(tmp_path / "p")
    reader = open_store(tmp_path / "p")
    fill(writer, [1])
    shutil.rmtree(tmp_path / "p")
    with caplog.at_level(logging.WARNING, "halfbyte"):
        for _ in range(3):
            reader.refresh()
            assert present(reader, [1]) == []
    assert len(caplog.records) == 1
    with caplog.at_level(logging.WARNING, "halfbyte"):
        for n in range(2, 6):
            assert fill(writer, [n]) == []
    assert len(caplog.records) == 2


def test_many_segments_are_read_in_order(tmp_path: Path) -> None:
    """Enough for several threads. What was used counts in whichever order the threads finish."""
    most = 200 * (PAGE_BYTES + HEAD_BYTES)
    store = open_store(tmp_path / "p", most)
    for n in range(150):
        fill(store, [n])
        store.use([key_of(0)])
    store.close()
    assert len(segments(tmp_path / "p")) > 5
    again = open_store(tmp_path / "p", most)
    assert present(again, range(150)) == list(range(150))
    assert again._index[key_of(0)].uses == 150


# ---- every crash point ------------------------------------------------------------------------


def lives(folder: Path, files: FaultyFiles, stores: list[PrefixStore]) -> None:
    """Everything that a store does: it fills its folder beyond the bound with pages of which some are used, removes
    some, closes; the next one goes on; then the folder is cleared and filled again."""
    now = [0.0]
    most = 10 * (PAGE_BYTES + HEAD_BYTES)
    for first in (0, 14):
        store = PrefixStore(folder, LAYOUT, most, files=files, clock=lambda: now[0])
        stores.append(store)
        for n in range(first, first + 14, 2):
            now[0] += 600
            store.use([key_of(first), key_of(first + 1)])
            fill(store, [n, n + 1])
        store.remove([key_of(first + 12)])
        if first == 0:
            store.close()
    stores[-1].clear()
    fill(stores[-1], range(40, 44))


def test_a_kill_at_every_operation(tmp_path: Path) -> None:
    """Whatever was in the index of the killed store and has a file is found again, with its bytes; and the next store
    writes. With each operation not begun, begun, or done."""
    whole = FaultyFiles()
    lives(tmp_path / "whole", whole, [])
    kinds = Counter(whole.log)
    assert min(kinds[k] for k in ("create", "write", "sync", "unlink")) > 2, kinds
    logging.getLogger("halfbyte").setLevel(logging.ERROR)
    try:
        for at in range(whole.operations):
            for part in {"write": (0.0, 0.4, 1.0), "sync": (0.0,)}.get(whole.log[at], (0.0, 0.7)):
                folder = tmp_path / f"{at} {part}"
                stores: list[PrefixStore] = []
                with pytest.raises(Killed):
                    lives(folder, FaultyFiles(kill_at=at, part=part), stores)
                numbers = {int(path.name[:8]) for path in segments(folder)}
                index = stores[-1]._index if stores else {}
                expected = [n for n in range(44) if (e := index.get(key_of(n))) and e.segment in numbers]
                for store in stores:
                    abandon(store)
                again = open_store(folder)
                assert set(expected) <= set(present(again, range(44))), (
                    f"killed at {at} ({whole.log[at]}), {part} of it"
                )
                assert fill(again, [50]) == [50]
                again.close()
                shutil.rmtree(folder)
    finally:
        logging.getLogger("halfbyte").setLevel(logging.NOTSET)


class BoundedFiles(FaultyFiles):
    """Checks after each write that the folder is not larger than it may be, and counts the copies of page 0."""

    def __init__(self, folder: Path, most: int, kill_at: int | None = None) -> None:
        super().__init__(kill_at, 0.7)
        self.folder, self.most, self.copies = folder, most, 0

    def write(self, fd: int, parts: Sequence[Bytes], offset: int) -> None:
        self.copies += parts[-1] == page_of(key_of(0))
        super().write(fd, parts, offset)
        assert sum(path.stat().st_size for path in segments(self.folder)) <= self.most


def test_pages_that_are_written_again_are_never_gone(tmp_path: Path) -> None:
    """A page that is used now and then outlives the segments in which it is, and a kill at any moment; the bound holds
    meanwhile."""
    most = 80 * (PAGE_BYTES + HEAD_BYTES)

    def life(files: BoundedFiles, stores: list[PrefixStore]) -> None:
        now = [0.0]
        stores.append(PrefixStore(files.folder, LAYOUT, most, files=files, clock=lambda: now[0]))
        fill(stores[0], range(10))
        for n in range(10, 220, 5):
            now[0] += 300
            if n % 100 == 10:
                stores[0].use([key_of(0)])
            fill(stores[0], range(n, n + 5))

    whole = BoundedFiles(tmp_path / "whole", most)
    life(whole, [])
    evictions = [i for i, name in enumerate(whole.log) if name == "unlink"]
    assert whole.copies > 2
    for at in {i + d for i in evictions for d in (-3, -2, -1, 0, 1)}:
        stores: list[PrefixStore] = []
        files = BoundedFiles(tmp_path / str(at), most, at)
        with pytest.raises(Killed):
            life(files, stores)
        abandon(stores[0])
        again = open_store(files.folder)
        assert present(again, [0]) == [0], f"killed at {at} ({whole.log[at]})"
        abandon(again)


# ---- the fuzzer -------------------------------------------------------------------------------


def damage(rng: random.Random, folder: Path) -> None:
    paths = segments(folder)
    if not paths:
        return
    path = rng.choice(paths)
    data = bytearray(path.read_bytes())
    kind = rng.randrange(6)
    if kind == 0 and data:  # bits
        for _ in range(rng.choice((1, 3, 40))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data) + 1) :]
    elif kind == 2:  # a hole, as after a power cut
        start = rng.randrange(len(data) + 1)
        data[start : start + rng.randrange(1, 2000)] = bytes(min(len(data) - start, 2000))
    elif kind == 3:  # bytes lost or added in the middle
        start = rng.randrange(len(data) + 1)
        data[start : start + rng.randrange(200)] = rng.randbytes(rng.randrange(200))
    elif kind == 4 and len(paths) > 1:  # a piece of another segment in the wrong place
        other = rng.choice(paths).read_bytes()
        start = rng.randrange(len(data) + 1)
        data[start : start + 900] = other[rng.randrange(len(other) + 1) :][:900]
    elif kind == 5:
        path.unlink()
        return
    path.write_bytes(data)


def run_case(seed: int, folder: Path) -> None:
    """A few lives of stores of one folder. No read returns another page's bytes, nothing raises, the bound holds; and
    what was accepted is there after a kill where nothing was damaged, evicted or missing room."""
    rng = random.Random(seed)
    most = rng.choice((PLENTY, PLENTY, 12 * (PAGE_BYTES + HEAD_BYTES)))
    harmless = most == PLENTY
    accepted: set[int] = set()
    for _ in range(rng.randrange(2, 5)):
        layout = LAYOUT if rng.random() < 0.85 else OTHER
        files = FaultyFiles(
            kill_at=rng.randrange(30) if rng.random() < 0.6 else None, part=rng.random(),
            room=rng.randrange(9000) if rng.random() < 0.2 else None, honest=rng.random() < 0.5,
        )  # fmt: skip
        if rng.random() < 0.15:
            files = PowerCut(rng, rng.randrange(30))
        harmless = harmless and files.room is None
        now = [1000.0 * seed]
        store = PrefixStore(folder, layout, most, files=files, clock=lambda now=now: now[0])  # type: ignore[misc]
        second = PrefixStore(folder, LAYOUT, most, clock=lambda now=now: now[0])  # type: ignore[misc]
        if harmless:
            assert accepted <= set(present(second, sorted(accepted)))
        try:
            for _ in range(rng.randrange(1, 12)):
                now[0] += rng.choice((0.1, 10.0, 5000.0))
                numbers = [rng.randrange(40) for _ in range(rng.randrange(1, 6))]
                action = rng.random()
                if action < 0.6:
                    for n in numbers:
                        if store.write(key_of(n), page_of(key_of(n), layout)) and layout is LAYOUT:
                            accepted.add(n)
                    store.flush()
                elif action < 0.75:
                    store.use([key_of(n) for n in numbers])
                elif action < 0.8:
                    harmless = False
                    store.remove([key_of(n) for n in numbers])
                elif action < 0.9:
                    second.refresh()
                    present(second, range(40))
                else:
                    present(store, numbers)
                if rng.random() < 0.02 and store.writes:
                    harmless = False
                    store.clear()
        except Killed:
            if isinstance(files, PowerCut):
                harmless = False
                files.cut()
        abandon(store)
        assert sum(p.stat().st_size for p in segments(folder)) <= most + PAGE_BYTES + HEAD_BYTES
        second.refresh()
        present(second, range(40))
        abandon(second)
        if rng.random() < 0.5:
            harmless = False
            for _ in range(rng.randrange(1, 4)):
                damage(rng, folder)
    last = open_store(folder, files=FaultyFiles())
    present(last, range(40))
    fill(last, [50])
    assert present(last, [50]) == [50]
    last.verify()
    last.close()


def run_cases(first: int, count: int, tmp_path: Path) -> None:
    logging.getLogger("halfbyte").setLevel(logging.ERROR)
    try:
        for seed in range(first, first + count):
            folder = tmp_path / f"case {seed}"
            run_case(seed, folder)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    finally:
        logging.getLogger("halfbyte").setLevel(logging.NOTSET)


def test_500_cases_of_damage_kills_two_stores_and_a_full_disk(tmp_path: Path) -> None:
    run_cases(0, 500, tmp_path)


@pytest.mark.slow
def test_20000_cases_of_damage_kills_two_stores_and_a_full_disk(tmp_path: Path) -> None:
    run_cases(500, 20_000, tmp_path)


def _write_without_end(folder: Path) -> None:
    store = open_store(folder, 40 * (PAGE_BYTES + HEAD_BYTES), files=FaultyFiles())
    n = 0
    while True:
        fill(store, [n % 500])
        n += 1


def test_a_process_killed_while_it_writes_leaves_nothing_wrong(tmp_path: Path) -> None:
    """Two real processes on one folder; the kernel ends the writer wherever it is."""
    folder = tmp_path / "p"
    context = multiprocessing.get_context("fork")
    for _ in range(4):
        process = context.Process(target=_write_without_end, args=(folder,), daemon=True)
        process.start()
        try:
            reader = open_store(folder, 0)
            seen = 0
            while seen < 5:
                reader.refresh()
                seen += bool(present(reader, range(500)))
                assert process.is_alive()
        finally:
            process.kill()
            process.join()
        reader.close()
        last = open_store(folder)
        assert last.writes, "the lock ends with its process"
        assert present(last, range(500))
        last.close()
    assert (folder / LOCK).exists()
