"""The system calls with which the prefix store reads and writes, in one place: a test replaces it to stop after any
write, or to fill the disk. Opens regular files only and follows no link."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path

Bytes = bytes | bytearray | memoryview
FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class FileLayer:
    def create(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | FLAGS, 0o600)

    def open(self, path: Path, *, writable: bool = False) -> int:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | FLAGS)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return fd

    def write(self, fd: int, parts: Sequence[Bytes], offset: int) -> None:
        """Write all parts, one after another, from `offset` on."""
        views = [memoryview(part).cast("B") for part in parts]
        while views:
            count = os.pwritev(fd, views, offset)
            offset += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def free_bytes(self, folder: Path) -> tuple[int, int]:
        """Bytes that may still be written to the folder's file system, and its size."""
        stats = os.statvfs(folder)
        return stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize


def lock(path: Path) -> int | None:
    """A descriptor of the lock file, or None if another process or another store has the lock. Closing the descriptor
    gives it back."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | FLAGS, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
