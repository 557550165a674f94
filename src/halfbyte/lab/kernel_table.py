"""Where a device's time goes, by kernel category, from any of three sources: our profile, a torch trace, an nsys
export.

    MoE, dense, attention, norm, quantise, move, other

A profile of ours knows what each launch was for. Of traces only the kernels' names are known, so a category there is a
reading of names (`PATTERNS`), and the kernels behind each row are listed to be checked. Time of kernels that overlap
counts once, for the one that began first. Gaps in which the device waited are counted, and what each thread of the host
did meanwhile. A trace of a CPU has no kernels: there the operators of its busiest thread take their place, by the time
that is their own. Whoever brings a trace that was composed says so, and the table says it again.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError

CATEGORIES = ("MoE", "dense", "attention", "norm", "quantise", "move", "other")
OURS = {
    "moe": "MoE", "linear": "dense", "router": "dense", "attention": "attention", "norm": "norm",
    "quantise": "quantise", "embed": "move",
}  # fmt: skip
# The first that fits counts: a grouped product of experts is no dense one, and a norm that also quantises is a norm.
PATTERNS = tuple(
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        ("MoE", r"moe|expert|grouped_?gemm|matmul_ogs|routing|topk_?(softmax|gating)"),
        (
            "attention",
            r"attn|attention|fmha|flash_|mha_|paged_?kv|kv_?(cache|write)|_and_cache|merge_state|rope|rotary",
        ),
        ("norm", r"norm"),
        ("quantise", r"quant|mxfp8|nvfp4|scaled_fp|cvt_fp|pack_"),
        ("dense", r"gemm|gemv|matmul|\bmm\b|_mm|addmm|linear|cutlass|cublas|nvjet|splitk|wgmma|\bbmm\b|\bdot\b"),
        ("move", r"memcpy|memset|copy|\bcat\b|gather|scatter|index|transpose|permute|embedding|fill|clone|_to\b|empty"),
    )
)
GAP_US = 0.5
TOP = 5  # kernels that a row names
WAITS = re.compile(
    r"synchronize|cudaEventQuery|EventSync|WaitEvent|poll|epoll|select|futex|sem_(timed)?wait|cond_", re.I
)


def category_of(name: str) -> str:
    return next((category for category, pattern in PATTERNS if pattern.search(name)), "other")


@dataclass(frozen=True)
class CategoryRow:
    category: str
    us: float
    share: float  # of the whole time, gaps included
    calls: float
    kernels: tuple[str, ...] = ()  # the longest, with their microseconds


@dataclass(frozen=True)
class HostThread:
    name: str
    busy_us: float
    waiting_us: float  # of it, inside calls that wait
    while_idle_us: float  # busy and not waiting while the device had nothing to do


@dataclass
class KernelTable:
    what: str
    source: str
    per: str  # what the times are of: a step, the whole trace
    rows: list[CategoryRow]
    busy_us: float
    idle_us: float
    gaps: float
    longest_gap_us: float
    threads: list[HostThread] = field(default_factory=list)
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Interval:
    name: str
    start: float  # microseconds
    end: float


@dataclass
class Trace:
    """What any trace comes down to."""

    device: list[Interval] = field(default_factory=list)
    host: dict[str, list[Interval]] = field(default_factory=dict)  # thread -> calls, outermost and inner ones
    operators: dict[str, list[Interval]] = field(default_factory=dict)  # those of them that compute


def table_of(trace: Trace, what: str, source: str, note: str = "") -> KernelTable:
    device = trace.device
    if not device:
        if not any(trace.host.values()):
            raise UsageError(f"{source} holds neither kernels nor operators; nothing can be said of it.")
        calls_of = trace.operators or trace.host
        busiest = max(calls_of, key=lambda t: sum(i.end - i.start for i in outermost(calls_of[t])))
        device = own_time(calls_of[busiest])
        name = busiest if busiest.startswith("thread") else f"thread {busiest}"
        note = f"{note} No kernels: the operators of {name}, by their own time.".strip()
    device = sorted(device, key=lambda i: (i.start, i.end))
    times: dict[str, dict[str, float]] = {}
    calls: dict[str, int] = {}
    gaps: list[tuple[float, float]] = []
    until = device[0].start
    for i in device:
        if i.start > until:
            gaps.append((until, i.start))
        own = max(0.0, i.end - max(until, i.start))
        category = category_of(i.name)
        names = times.setdefault(category, {})
        names[i.name] = names.get(i.name, 0.0) + own
        calls[category] = calls.get(category, 0) + 1
        until = max(until, i.end)
    whole = until - device[0].start
    rows = []
    for category in CATEGORIES:
        if category in times:
            longest = sorted(times[category].items(), key=lambda pair: -pair[1])[:TOP]
            us = sum(times[category].values())
            named = tuple(f"{short(name)} {t:.0f} us" for name, t in longest)
            rows.append(CategoryRow(category, us, us / whole if whole else 0.0, calls[category], named))
    idle = sum(b - a for a, b in gaps)
    return KernelTable(
        what, source, "the whole trace", rows, whole - idle, idle, sum(b - a > GAP_US for a, b in gaps),
        max((b - a for a, b in gaps), default=0.0), host_threads(trace.host, gaps), note,
    )  # fmt: skip


def short(name: str) -> str:
    """A kernel's name without its arguments and most of its template."""
    plain = re.sub(r"\(.*", "", name.replace("(anonymous namespace)::", "").removeprefix("void "))
    return plain if len(plain) <= 60 else plain[:57] + "…"


# ---- threads of the host ---------------------------------------------------------------------------------------------


def outermost(calls: Iterable[Interval]) -> list[Interval]:
    """Calls that lie in no other one of their thread."""
    found: list[Interval] = []
    for i in sorted(calls, key=lambda i: (i.start, -i.end)):
        if not found or i.start >= found[-1].end:
            found.append(i)
    return found


def own_time(calls: Sequence[Interval]) -> list[Interval]:
    """Every call cut into the pieces in which none that it made was running."""
    pieces: list[Interval] = []
    stack: list[Interval] = []
    at = 0.0

    def emit(upto: float) -> None:
        nonlocal at
        if stack and upto > at:
            pieces.append(Interval(stack[-1].name, at, upto))
        at = max(at, upto)

    for i in sorted(calls, key=lambda i: (i.start, -i.end)):
        while stack and stack[-1].end <= i.start:
            emit(stack[-1].end)
            stack.pop()
        emit(i.start)
        at = i.start
        stack.append(i)
    while stack:
        emit(stack[-1].end)
        stack.pop()
    return pieces


def host_threads(host: Mapping[str, Sequence[Interval]], gaps: Sequence[tuple[float, float]]) -> list[HostThread]:
    found = []
    for name, calls in host.items():
        whole = outermost(calls)
        waits = outermost(i for i in calls if WAITS.search(i.name))
        busy, waiting = _sum(whole), _sum(waits)
        working_in_gaps = _overlap(whole, gaps) - _overlap(waits, gaps)
        found.append(HostThread(name, busy, waiting, max(0.0, working_in_gaps)))
    return sorted(found, key=lambda t: -t.busy_us)


def _sum(calls: Iterable[Interval]) -> float:
    return sum(i.end - i.start for i in calls)


def _overlap(calls: Sequence[Interval], gaps: Sequence[tuple[float, float]]) -> float:
    total, k = 0.0, 0
    for i in calls:
        while k < len(gaps) and gaps[k][1] <= i.start:
            k += 1
        n = k
        while n < len(gaps) and gaps[n][0] < i.end:
            total += min(gaps[n][1], i.end) - max(gaps[n][0], i.start)
            n += 1
    return total


# ---- sources --------------------------------------------------------------------------------------------------------


def from_profile(detail: Mapping[str, Any], what: str = "", source: str = "halfbyte profile") -> KernelTable:
    """Of `Profile.as_dict()`: times of one step."""
    try:
        lines, step = detail["lines"], float(detail["busy_us"]) + float(detail["idle_us"])
        found: dict[str, list[Mapping[str, Any]]] = {}
        for line in lines:
            found.setdefault(OURS.get(line["category"], "other"), []).append(line)
        rows = [
            CategoryRow(
                c, us := sum(float(line["us"]) for line in found[c]), us / step if step else 0.0,
                sum(float(line["launches"]) for line in found[c]),
                tuple(f"{line['label']} {line['us']:.0f} us" for line in found[c]),
            )
            for c in CATEGORIES if c in found
        ]  # fmt: skip
        threads = [HostThread(f"queueing a step, {k}", float(v), 0.0, 0.0) for k, v in detail["host_us"].items()]
        return KernelTable(
            what or str(detail["what"]), source, "a step", rows, float(detail["busy_us"]), float(detail["idle_us"]),
            float(detail["gaps"]), float(detail["longest_gap_us"]), threads, str(detail["how"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as e:
        raise UsageError(f"{source} is no profile of ours ({type(e).__name__}: {e}).") from None


def from_dict(raw: Mapping[str, Any], source: str) -> KernelTable:
    """What `as_dict` of one gave."""
    try:
        rows = [CategoryRow(**{**row, "kernels": tuple(row["kernels"])}) for row in raw["rows"]]
        return KernelTable(**{**raw, "rows": rows, "threads": [HostThread(**t) for t in raw["threads"]]})
    except (KeyError, TypeError) as e:
        raise UsageError(f"{source} has no table of kernels ({type(e).__name__}: {e}).") from None


def read_trace(path: Path) -> KernelTable:
    """A trace of torch's profiler (JSON, also gzipped), an nsys export (SQLite), or `halfbyte profile --json`."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror}.") from None
    if data.startswith(b"SQLite format 3"):
        return from_nsys(path)
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    try:
        raw = json.loads(data)
    except ValueError:
        raise UsageError(f"{path} is neither JSON nor SQLite; export it with `nsys export --type sqlite`.") from None
    if isinstance(raw, dict) and "profiles" in raw:
        return from_profile(raw["profiles"][0], source=path.name)
    if isinstance(raw, dict) and "lines" in raw:
        return from_profile(raw, source=path.name)
    return from_torch(raw, path.name)


def from_torch(raw: Any, source: str) -> KernelTable:
    """Chrome's trace format as torch writes it."""
    events = raw.get("traceEvents") if isinstance(raw, dict) else raw
    if not isinstance(events, list):
        raise UsageError(f"{source} is no trace: it has no traceEvents.")
    trace, names = Trace(), dict[tuple[Any, Any], str]()
    for e in events:
        if e.get("ph") == "M" and e.get("name") == "thread_name":
            names[e.get("pid"), e.get("tid")] = str(e["args"]["name"])
    for e in events:
        if e.get("ph") != "X" or "dur" not in e:
            continue
        interval = Interval(str(e.get("name", "")), float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        kind = str(e.get("cat", "")).lower()
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            trace.device.append(interval)
        elif kind in ("cpu_op", "cuda_runtime", "cuda_driver", "python_function", "user_annotation", "operator"):
            thread = names.get((e.get("pid"), e.get("tid")), f"thread {e.get('tid')}")
            trace.host.setdefault(thread, []).append(interval)
            if kind in ("cpu_op", "operator"):  # what stands around them is Python: a gap between operators
                trace.operators.setdefault(thread, []).append(interval)
    note = str(raw.get("composed", "")) if isinstance(raw, dict) else ""
    return table_of(trace, source, "torch trace", f"Composed: {note}" if note else "")


def from_nsys(path: Path) -> KernelTable:
    """The tables that `nsys export --type sqlite` writes; times there are nanoseconds."""
    trace = Trace()
    note = ""
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            tables = {row[0] for row in db.execute("select name from sqlite_master where type in ('table', 'view')")}
            strings = dict(db.execute("select id, value from StringIds")) if "StringIds" in tables else {}
            if "CUPTI_ACTIVITY_KIND_KERNEL" in tables:
                named = "coalesce(demangledName, shortName)"
                rows = db.execute(f"select start, end, {named} from CUPTI_ACTIVITY_KIND_KERNEL")
                trace.device += [_nano(strings.get(name, name), start, end) for start, end, name in rows]
            for table, name in (("MEMCPY", "memcpy"), ("MEMSET", "memset")):
                if f"CUPTI_ACTIVITY_KIND_{table}" in tables:
                    rows = db.execute(f"select start, end from CUPTI_ACTIVITY_KIND_{table}")
                    trace.device += [_nano(name, start, end) for start, end in rows]
            threads = {}
            if "ThreadNames" in tables:
                threads = {t: strings.get(n, n) for n, t in db.execute("select nameId, globalTid from ThreadNames")}
            for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "OSRT_API"):
                if table in tables:
                    for start, end, name, tid in db.execute(f"select start, end, nameId, globalTid from {table}"):
                        thread = str(threads.get(tid, f"thread {tid & 0xFFFFFF}"))
                        trace.host.setdefault(thread, []).append(_nano(strings.get(name, name), start, end))
            if "COMPOSED" in tables:
                note = "Composed: " + str(db.execute("select why from COMPOSED").fetchone()[0])
    except sqlite3.Error as e:
        raise UsageError(f"{path} is no export of nsys: {e}.") from None
    return table_of(trace, path.name, "nsys", note)


def _nano(name: Any, start: int, end: int) -> Interval:
    return Interval(str(name), start / 1e3, end / 1e3)
