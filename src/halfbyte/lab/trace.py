"""Reads a profiler's trace: torch's JSON (also gzipped) or what `nsys export --type sqlite` writes.

A trace comes down to intervals: on the device, and on each thread of the host. What they mean is for others to say
(`kernel_table.py`: where the time goes; `levels/kernel_path.py`: which kernels ran).
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from halfbyte.errors import UsageError

GAP_US = 0.5  # a wait of the device that counts as a gap
SQLITE, GZIP = b"SQLite format 3", b"\x1f\x8b"
HOST = ("cpu_op", "cuda_runtime", "cuda_driver", "python_function", "user_annotation", "operator")


@dataclass(frozen=True)
class Interval:
    name: str
    start: float  # microseconds
    end: float


class Timed(Protocol):
    """Anything with a start and an end, in microseconds."""

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


Piece = TypeVar("Piece", bound=Timed)


def own_times(pieces: Iterable[Piece]) -> tuple[list[tuple[Piece, float]], list[tuple[float, float]]]:
    """Every piece with the microseconds by which it outlasts all that began before it; and the gaps between them.

    A kernel launched early (programmatic dependent launch) waits for the one in front of it, so the time they share is
    that one's; counted this way, categories add up to the time the device was busy."""
    own: list[tuple[Piece, float]] = []
    gaps: list[tuple[float, float]] = []
    until: float | None = None
    for piece in sorted(pieces, key=lambda p: (p.start, p.end)):
        if until is not None and piece.start > until:
            gaps.append((until, piece.start))
        begin = piece.start if until is None else max(until, piece.start)
        own.append((piece, max(0.0, piece.end - begin)))
        until = max(begin, piece.end)
    return own, gaps


@dataclass
class Trace:
    source: str = "a trace"
    device: list[Interval] = field(default_factory=list)  # kernels and copies
    host: dict[str, list[Interval]] = field(default_factory=dict)  # thread -> calls, outermost and inner ones
    operators: dict[str, list[Interval]] = field(default_factory=dict)  # those of them that compute
    kernels: tuple[str, ...] = ()  # names, once each, without copies
    composed: str = ""  # why a synthetic trace was made; empty for a real one


def read_json(path: Path) -> Any:
    """The document of a JSON file, gzipped or not; None for SQLite."""
    try:
        data = path.read_bytes()
        if data.startswith(SQLITE):
            return None
        return json.loads(gzip.decompress(data) if data.startswith(GZIP) else data)
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror or e}.") from None
    except ValueError:
        raise UsageError(f"{path} is neither JSON nor SQLite; export it with `nsys export --type sqlite`.") from None


def read_trace(path: Path, raw: Any = None) -> Trace:
    """`raw` is the file's document where the caller has read it."""
    raw = read_json(path) if raw is None else raw
    try:
        return from_nsys(path) if raw is None else from_torch(raw, path)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise UsageError(f"{path} is not a trace ({type(e).__name__}: {e}).") from None


def from_torch(raw: Any, path: Path) -> Trace:
    """Chrome's trace format as torch writes it."""
    events = raw.get("traceEvents") if isinstance(raw, dict) else raw
    if not isinstance(events, list):
        raise UsageError(f"{path.name} is no trace: it has no traceEvents.")
    trace, threads = Trace("torch trace"), dict[tuple[Any, Any], str]()
    names = dict[str, None]()
    for e in events:
        if e.get("ph") == "M" and e.get("name") == "thread_name":
            threads[e.get("pid"), e.get("tid")] = str(e["args"]["name"])
    for e in events:
        kind = str(e.get("cat", "")).lower()
        if kind == "kernel":
            names[str(e["name"])] = None
        if e.get("ph") != "X" or "dur" not in e:
            continue
        interval = Interval(str(e.get("name", "")), float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            trace.device.append(interval)
        elif kind in HOST:
            thread = threads.get((e.get("pid"), e.get("tid")), f"thread {e.get('tid')}")
            trace.host.setdefault(thread, []).append(interval)
            if kind in ("cpu_op", "operator"):  # what stands around them is Python: a gap between operators
                trace.operators.setdefault(thread, []).append(interval)
    trace.kernels = tuple(names)
    trace.composed = str(raw.get("composed", "")) if isinstance(raw, dict) else ""
    return trace


def from_nsys(path: Path) -> Trace:
    """The tables that `nsys export --type sqlite` writes; times there are nanoseconds."""
    trace = Trace("nsys")
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            tables = {row[0] for row in db.execute("select name from sqlite_master where type in ('table', 'view')")}
            strings = dict(db.execute("select id, value from StringIds")) if "StringIds" in tables else {}
            if "CUPTI_ACTIVITY_KIND_KERNEL" in tables:
                named = "coalesce(demangledName, shortName)"
                rows = db.execute(f"select start, end, {named} from CUPTI_ACTIVITY_KIND_KERNEL")
                trace.device += [_interval(strings.get(name, name), start, end) for start, end, name in rows]
                trace.kernels = tuple(dict.fromkeys(i.name for i in trace.device))
            for table, name in (("MEMCPY", "memcpy"), ("MEMSET", "memset")):
                if f"CUPTI_ACTIVITY_KIND_{table}" in tables:
                    rows = db.execute(f"select start, end from CUPTI_ACTIVITY_KIND_{table}")
                    trace.device += [_interval(name, start, end) for start, end in rows]
            threads = {}
            if "ThreadNames" in tables:
                threads = {t: strings.get(n, n) for n, t in db.execute("select nameId, globalTid from ThreadNames")}
            for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "OSRT_API"):
                if table in tables:
                    for start, end, name, tid in db.execute(f"select start, end, nameId, globalTid from {table}"):
                        thread = str(threads.get(tid, f"thread {tid & 0xFFFFFF}"))
                        trace.host.setdefault(thread, []).append(_interval(strings.get(name, name), start, end))
            if "COMPOSED" in tables:
                trace.composed = str(db.execute("select why from COMPOSED").fetchone()[0])
    except sqlite3.Error as e:
        raise UsageError(f"{path} is no export of nsys: {e}.") from None
    return trace


def _interval(name: Any, start: int, end: int) -> Interval:
    return Interval(str(name), start / 1e3, end / 1e3)
