"""Bytes between disk and tensors: plain reads into place, and writes that appear whole or not at all.

Reads go through `preadv` into the destination, not through `mmap`: mapped pages count twice against unified memory
and fault in slowly. What a CPU looks up by rows, and nothing else, may stay in its file (`mapped`). Where memory is
shared with the page cache, pages are given back as soon as they are read (`forget`). Writes go to a
hidden neighbour that is renamed once it is complete and synced; any failure removes it. Knows no format; refuses to
replace what is already there.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.model.plain_file import LFS_POINTER, drop_cached, lfs_pointer, open_regular, truncated
from halfbyte.model.upload import CudaCopyStream, Uploader

CHUNK = 16 << 20
READERS, MIN_READ = 4, 1 << 20
ZERO_TAIL = 64 << 20  # bytes of zeros at a file's end that no weights have, not even an expert of zeros

OnBytes = Callable[[int], None]


@dataclass
class Reading:
    """State that the files of one model share while they are read: the device, progress, threads and buffers."""

    device: torch.device
    on_bytes: OnBytes | None = None
    keep_cached: bool = True  # leave what was read in the page cache, where the next start finds it
    zero_tails: dict[Path, int] = field(default_factory=dict)  # file -> bytes of zeros at its end that no weights have
    _uploader: Uploader | None = None
    _pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="halfbyte-read")
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        if self._uploader is not None:
            self._uploader.close()
        self._pool = self._uploader = None

    def uploader(self) -> Uploader:
        if self._uploader is None:
            self._uploader = Uploader(CudaCopyStream(self.device))
        return self._uploader


class WeightFile:
    """An open file that tensors are read from."""

    def __init__(self, path: Path, reading: Reading | None = None):
        self.path = path
        self.reading = reading or Reading(torch.device("cpu"))
        self._fd = -1
        self._fd, self.size = open_regular(path)
        if self.bytes_at(0, min(self.size, len(LFS_POINTER))) == LFS_POINTER:
            raise lfs_pointer(path)
        self.zero_tail = self._zero_tail()
        if self.zero_tail >= ZERO_TAIL:
            self.reading.zero_tails[path] = self.zero_tail

    def _zero_tail(self) -> int:
        """Count the zeros at the end, up to ZERO_TAIL or a chunk more; fewer than a page of them are none. One page is
        read of a file that has other bytes in its last one."""
        start, count = self.size, mmap.PAGESIZE
        while start and self.size - start < ZERO_TAIL:
            count = min(count, start)
            used = len(self.bytes_at(start - count, count).rstrip(b"\0"))
            start -= count - used
            if used:
                break
            count = CHUNK
        return self.size - start if self.size - start >= mmap.PAGESIZE else 0

    def close(self) -> None:
        if self._fd >= 0:
            self.forget(0, 0)  # all of it: a large page that two parts share stays until neither is read
            os.close(self._fd)
            self._fd = -1

    __del__ = close

    def bytes_at(self, offset: int, count: int) -> bytes:
        buffer = bytearray(count)
        self._fill(memoryview(buffer), offset)
        return bytes(buffer)

    def new(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on the reading's device, filled from `offset` on."""
        return self.read(offset, torch.empty(shape, dtype=dtype, device=self.reading.device))

    @property
    def descriptor(self) -> int:
        return self._fd

    def announce(self, offset: int, count: int) -> None:
        """Announce bytes that will be read, so that the disk gets many requests at once."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_WILLNEED)

    def forget(self, offset: int, count: int) -> None:
        """Drop bytes that were read from the page cache, unless the reading keeps it."""
        if not self.reading.keep_cached:
            drop_cached(self._fd, offset, count)

    def mapped(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """The tensor mapped from the file: pages are read on first use, and writes are private. None where it is not
        aligned to its dtype."""
        if offset % dtype.itemsize or not self.size:
            return None
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        count = math.prod(shape)
        pages = mmap.mmap(
            self._fd, offset - start + count * dtype.itemsize, flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start,
        )  # fmt: skip
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=offset - start).view(shape)

    def read(self, offset: int, dest: Tensor) -> Tensor:
        """Fill `dest` (contiguous, any device) from `offset` on."""
        flat = dest.view(-1).view(torch.uint8)
        if flat.device.type != "cpu":
            self.reading.uploader().upload(
                flat, lambda part, at: self._fill_alone(_bytes(part), offset + at), self.reading.on_bytes
            )
            return dest
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK]
            self._fill(_bytes(part), offset + start)
            if self.reading.on_bytes is not None:
                self.reading.on_bytes(part.numel())
        return dest

    def _fill(self, view: memoryview, offset: int) -> None:
        """A disk answers several readers faster than one, and so does a page cache."""
        step = -(-len(view) // READERS)
        if step < MIN_READ:
            return self._fill_alone(view, offset)
        starts = range(0, len(view), step)
        for _ in self.reading.pool().map(lambda at: self._fill_alone(view[at : at + step], offset + at), starts):
            pass  # an error of any reader is raised here

    def _fill_alone(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as e:
                raise CheckpointError(f"{self.path} cannot be read ({e.strerror}); check the disk.") from None
            if got == 0:
                raise truncated(self.path, offset + len(view), self.size)
            done += got
        self.forget(offset, len(view))


# ---- writing ------------------------------------------------------------------------------------


@contextmanager
def write_then_rename(target: Path, *, folder: bool, needs: int = 0) -> Iterator[Path]:
    """Yield a hidden neighbour of `target` to write to; it becomes `target` when the block ends without an error."""
    if target.exists():
        raise CheckpointError(f"{target} already exists; remove it or choose another name.")
    parent = target.parent
    new_folders: list[Path] = []
    hidden = parent / f".{target.name}.partial-{os.getpid()}"
    try:
        with clear_errors(target, needs):
            missing = [p for p in (parent, *parent.parents) if not p.exists()]
            parent.mkdir(parents=True, exist_ok=True)
            new_folders = missing
            free = shutil.disk_usage(parent).free
            if needs > free:
                raise _full(target, needs, free)
            if folder:
                hidden.mkdir()
            yield hidden
            _sync_tree(hidden)
            hidden.rename(target)
            _sync(parent)
    except BaseException:
        if hidden.is_dir():
            shutil.rmtree(hidden, ignore_errors=True)
        elif hidden.exists():
            hidden.unlink()
        for path in new_folders:  # the innermost first; one that something else was put into stays
            if any(path.iterdir()):
                break
            path.rmdir()
        raise


@contextmanager
def clear_errors(target: Path, needs: int) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(nearest_folder(target)).free
            raise _full(target, needs, free) from None
        raise CheckpointError(f"{target} cannot be written ({e.strerror}); nothing was kept.") from None


def nearest_folder(path: Path) -> Path:
    """The nearest folder above `path` that is there."""
    return next(p for p in path.absolute().parents if p.is_dir())


def _full(target: Path, needs: int, free: int) -> CheckpointError:
    return CheckpointError(
        f"no space left for {target} ({needs / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free); "
        "nothing was kept, so free some space and run it again."
    )


def write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    """Append a tensor's bytes, wherever it lives and however it strides, a chunk of rows at a time."""
    if tensor.dim() == 0:
        tensor = tensor.view(1)
    row = max(1, tensor[0].nbytes) if tensor.shape[0] else 1
    step = max(1, CHUNK // row)
    for start in range(0, tensor.shape[0], step):
        part = tensor[start : start + step].contiguous().cpu().view(-1).view(torch.uint8)
        file.write(_bytes(part))


def _bytes(flat: Tensor) -> memoryview:
    """A uint8 tensor's memory."""
    array: Any = flat.numpy()
    return memoryview(array)


def _sync_tree(path: Path) -> None:
    for inner in sorted(path.iterdir()) if path.is_dir() else ():
        _sync(inner)
    _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
