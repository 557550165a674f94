"""The small files of a model, opened with suspicion; and the one place that turns what damaged files raise into words.

Only regular files are opened, so that a pipe cannot stall us and a device cannot feed us for ever; no more is read than
the caller says such a file may have. `json_records.py` makes sense of JSON, `weight_file.py` reads tensors.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from halfbyte.errors import CheckpointError, HalfbyteError

MIB = 1 << 20
LFS_POINTER = b"version https://git-lfs"
KINDS: dict[str, Callable[[int], bool]] = {
    "a folder": stat.S_ISDIR,
    "a pipe": stat.S_ISFIFO,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
    "a socket": stat.S_ISSOCK,
}

log = logging.getLogger("halfbyte")


def open_regular(path: Path) -> tuple[int, int]:
    """(descriptor, size) of a regular file. Never waits, also where a pipe has no writer."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; fetch it again.") from None
    except OSError as e:
        raise CheckpointError(f"{path} cannot be opened ({e.strerror}).") from None
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status.st_size
    os.close(fd)
    kind = next((kind for kind, is_it in KINDS.items() if is_it(status.st_mode)), "something else")
    raise CheckpointError(f"{path} is {kind}, not a file; put the model's own file there.")


def drop_cached(fd: int, offset: int, count: int) -> None:
    """Give the page cache's copy of these bytes back; 0 of them: to the end. Pages at both ends that others share stay.
    No error where the system takes no such hints."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)


def read_whole(path: Path, limit: int) -> bytes:
    """All bytes of a regular file that must not have more than `limit`."""
    fd, size = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes, but such a file has at most {limit}; fetch it again.")
        try:
            return file.read(limit)
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read ({e.strerror}); check the disk.") from None


def truncated(path: Path, expected: int, actual: int) -> CheckpointError:
    return CheckpointError(f"{path} is truncated: {actual} of at least {expected} bytes are there; fetch it again.")


def lfs_pointer(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is a Git LFS pointer, not weights; run `git lfs pull` in its folder.")


def quote(text: str, most: int = 80) -> str:
    """A name out of a file as an error shows it: quoted, without control characters, not without end."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}…"


def one_line(e: BaseException, most: int = 200) -> str:
    """The text of an exception as one line."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(e)[: 4 * most]).split()) or type(e).__name__
    return text if len(text) <= most else f"{text[:most]}…"


def is_failure(e: BaseException) -> bool:
    """True for an Exception and for a panic of native code; False for what ends a program or a wait."""
    return isinstance(e, Exception) or type(e).__name__ == "PanicException"


@contextmanager
def refusing(path: Path | str) -> Iterator[None]:
    """Turn any error of reading a model's headers into one sentence that names the file.

    The readers refuse the problems that they know with better sentences; this is for the rest.
    """
    try:
        yield
    except HalfbyteError:
        raise
    except OSError as e:
        raise CheckpointError(f"{e.filename or path} cannot be read ({e.strerror or one_line(e)}).") from e
    except MemoryError as e:
        raise CheckpointError(f"{path} asks for more memory than there is; fetch it again.") from e
    except BaseException as e:
        if not is_failure(e):
            raise
        log.debug("%s cannot be read", path, exc_info=True)
        problem = f"{type(e).__name__}: {one_line(e)}"
        raise CheckpointError(f"{path} is damaged or of another kind ({problem}); fetch it again.") from e
