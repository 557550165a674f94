"""Where a device's time goes, by kernel category, from our own profile or from a trace (`lab/trace.py`).

    MoE, dense, attention, norm, quantise, move, other

Our profile knows what each launch was for. A trace has only the names of kernels, so a category there follows from the
name (`PATTERNS`), and each row lists its kernels to be checked. Time of kernels that overlap counts once, for the one
that began first. Gaps in which the device waited are counted, and what each thread of the host did meanwhile. A trace
of a CPU has no kernels: the operators of its busiest thread take their place, by their own time. Synthetic traces are
marked, and the table repeats the mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.lab.trace import GAP_US, Interval, Trace, own_times, read_json, read_trace

CATEGORIES = ("MoE", "dense", "attention", "norm", "quantise", "move", "other")
OWN_FAMILIES = {
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


def table_of(trace: Trace, title: str) -> KernelTable:
    device, note = trace.device, f"Composed: {trace.composed}" if trace.composed else ""
    if not device:
        if not any(trace.host.values()):
            raise UsageError(f"{trace.source} holds neither kernels nor operators; nothing can be said of it.")
        calls_of = trace.operators or trace.host
        busiest = max(calls_of, key=lambda t: sum(i.end - i.start for i in outermost(calls_of[t])))
        device = own_time(calls_of[busiest])
        name = busiest if busiest.startswith("thread") else f"thread {busiest}"
        note = f"{note} No kernels: the operators of {name}, by their own time.".strip()
    own, gaps = own_times(device)
    times: dict[str, dict[str, float]] = {}
    calls: dict[str, int] = {}
    for i, us in own:
        category = category_of(i.name)
        names = times.setdefault(category, {})
        names[i.name] = names.get(i.name, 0.0) + us
        calls[category] = calls.get(category, 0) + 1
    busy, idle = sum(us for _, us in own), sum(b - a for a, b in gaps)
    total = busy + idle
    rows = []
    for category in CATEGORIES:
        if category in times:
            longest = sorted(times[category].items(), key=lambda pair: -pair[1])[:TOP]
            us = sum(times[category].values())
            named = tuple(f"{short(name)} {t:.0f} us" for name, t in longest)
            rows.append(CategoryRow(category, us, us / total if total else 0.0, calls[category], named))
    return KernelTable(
        title, trace.source, "the whole trace", rows, busy, idle, sum(b - a > GAP_US for a, b in gaps),
        max((b - a for a, b in gaps), default=0.0), host_threads(trace.host, gaps), note,
    )  # fmt: skip


def short(name: str) -> str:
    """A kernel's name without its arguments and most of its template."""
    plain = re.sub(r"\(.*", "", name.replace("(anonymous namespace)::", "").removeprefix("void "))
    return plain if len(plain) <= 60 else plain[:57] + "…"


# ---- threads of the host ---------------------------------------------------------------------------------------------


def outermost(calls: Iterable[Interval]) -> list[Interval]:
    """Calls that lie in no other one of their thread."""
    outer: list[Interval] = []
    for i in sorted(calls, key=lambda i: (i.start, -i.end)):
        if not outer or i.start >= outer[-1].end:
            outer.append(i)
    return outer


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
    threads = []
    for name, calls in host.items():
        outer = outermost(calls)
        waits = outermost(i for i in calls if WAITS.search(i.name))
        busy, waiting = _sum(outer), _sum(waits)
        working_in_gaps = _overlap(outer, gaps) - _overlap(waits, gaps)
        threads.append(HostThread(name, busy, waiting, max(0.0, working_in_gaps)))
    return sorted(threads, key=lambda t: -t.busy_us)


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


def from_profile(detail: Mapping[str, Any], title: str = "", source: str = "halfbyte profile") -> KernelTable:
    """The table of a `Profile.as_dict()`: times of one step."""
    try:
        lines, step = detail["lines"], float(detail["busy_us"]) + float(detail["idle_us"])
        by_category: dict[str, list[Mapping[str, Any]]] = {}
        for line in lines:
            by_category.setdefault(OWN_FAMILIES.get(line["category"], "other"), []).append(line)
        rows = [
            CategoryRow(
                c, us := sum(float(line["us"]) for line in by_category[c]), us / step if step else 0.0,
                sum(float(line["launches"]) for line in by_category[c]),
                tuple(f"{line['label']} {line['us']:.0f} us" for line in by_category[c]),
            )
            for c in CATEGORIES if c in by_category
        ]  # fmt: skip
        threads = [HostThread(f"queueing a step, {k}", float(v), 0.0, 0.0) for k, v in detail["host_us"].items()]
        return KernelTable(
            title or str(detail["what"]), source, "a step", rows, float(detail["busy_us"]), float(detail["idle_us"]),
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


def read_table(path: Path) -> KernelTable:
    """From a trace of torch's profiler or of nsys, or from what `halfbyte profile --json` printed."""
    raw = read_json(path)
    if isinstance(raw, dict) and "profiles" in raw:
        return from_profile(raw["profiles"][0], source=path.name)
    if isinstance(raw, dict) and "lines" in raw:
        return from_profile(raw, source=path.name)
    return table_of(read_trace(path, raw), path.name)
