"""The small files of a model, opened with suspicion; and the one place that turns what damaged files raise into words.

Only regular files are opened, so that a pipe cannot stall us and a device cannot feed us for ever; no more is read than
the caller says such a file may have; JSON is parsed by its types, and a key given twice is refused, since every reader
would pick another one. Tensors are read by `weight_file.py`.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from halfbyte.errors import CheckpointError, HalfbyteError

T = TypeVar("T")
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


def read_json(path: Path, type: type[T], limit: int) -> T:
    return parse_json(read_whole(path, limit), type, str(path))


def parse_json(raw: bytes, type: type[T], where: str) -> T:
    """JSON of a known type. What has another type is refused before it is built, so memory is bounded by the bytes."""
    try:
        value = msgspec.json.decode(raw, type=type)
        json.loads(raw, object_pairs_hook=_refuse_doubles)
    except DoubledKeyError as e:
        raise CheckpointError(f"{where} has the key {shown(e.key)} twice; fetch it again.") from None
    except msgspec.ValidationError as e:
        raise CheckpointError(f"{where} cannot be read ({mismatch(e)}); fetch it again.") from None
    except (ValueError, RecursionError) as e:  # msgspec's DecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{where} cannot be read as JSON ({one_line(e)}); fetch it again.") from None
    return value


def convert_json(raw: Mapping[str, Any], type: type[T], where: str) -> T:
    """Parsed JSON as a record."""
    try:
        return msgspec.convert(raw, type=type)
    except msgspec.ValidationError as e:
        raise CheckpointError(f"{where} cannot be read ({mismatch(e)}); fetch it again.") from None


def truncated(path: Path, expected: int, actual: int) -> CheckpointError:
    return CheckpointError(f"{path} is truncated: {actual} of at least {expected} bytes are there; fetch it again.")


def lfs_pointer(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is a Git LFS pointer, not weights; run `git lfs pull` in its folder.")


class DoubledKeyError(ValueError):
    def __init__(self, key: str) -> None:
        self.key = key


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        seen: set[str] = set()
        raise DoubledKeyError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]


def mismatch(e: msgspec.ValidationError) -> str:
    """msgspec's sentence, the field first: "num_hidden_layers: expected `int`, got `str`"."""
    text, _, at = one_line(e).partition(" - at `$")
    field = at.rstrip("`").lstrip(".")
    return f"{field}: {text[:1].lower()}{text[1:]}" if field else text


def shown(text: str, most: int = 80) -> str:
    """A name out of a file as an error shows it: quoted, without control characters, not without end."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}…"


def one_line(e: BaseException, most: int = 200) -> str:
    """What an exception says, fit for a sentence."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(e)[: 4 * most]).split()) or type(e).__name__
    return text if len(text) <= most else f"{text[:most]}…"


@contextmanager
def refusing(path: Path | str) -> Iterator[None]:
    """Whatever reading a model's headers raises is about its files, not about us: one sentence that names the file.

    The readers say more, and earlier, of what they know can be wrong; what gets here was foreseen by none of them.
    """
    try:
        yield
    except (HalfbyteError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except OSError as e:
        raise CheckpointError(f"{e.filename or path} cannot be read ({e.strerror or one_line(e)}).") from e
    except MemoryError as e:
        raise CheckpointError(f"{path} asks for more memory than there is; fetch it again.") from e
    except BaseException as e:  # panics of native code are no Exception
        log.debug("%s cannot be read", path, exc_info=True)
        problem = f"{type(e).__name__}: {one_line(e)}"
        raise CheckpointError(f"{path} is damaged or of another kind ({problem}); fetch it again.") from e
