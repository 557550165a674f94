"""Where a token's time goes: categories of operations beside the least they could take, and what follows from it.

A `Span` is a piece of work on the device (or, on a CPU, a phase on the host) with its category; `summarise` makes a
Profile of the spans of some equal steps: time, bandwidth or FLOP/s and share of the ceiling per category, launches per
step, idle gaps. `decide` applies the decision table that the project began with. Measuring is in `timeline.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from halfbyte.roofline import Gpu, Work

# Category -> the operations it holds. A phase that spans several is shown as "qkv + rope/KV".
CATEGORIES: dict[str, tuple[str, ...]] = {
    "embed": ("embed",),
    "qkv": ("attn_norm", "qkv"),
    "rope/KV": ("rope", "kv_write"),
    "attention": ("attention",),
    "o": ("o",),
    "router": ("mlp_norm", "router"),
    "MoE": ("moe",),
    "lm_head": ("final_norm", "lm_head"),
}
SAMPLING, PACKING, OTHER = "sampling", "packing", "other"
ORDER = (*CATEGORIES, SAMPLING, PACKING, OTHER)
# Kernels that only bring activations into another format or order: quantising, grouping by expert, summing up.
_PACKS = re.compile(
    r"quantize|pack_rows|group_rows|sum_rows|batch_finish|group_kernel|count_kernel|tiles_kernel|scatter_kernel"
)
# Kernels whose name tells their operation, for phases that span several.
_NAMES = (
    ("rope/KV", re.compile(r"rope|angles")),
    ("attention", re.compile(r"attention|decode_kernel|merge_kernel|prefill_kernel|flash")),
    ("router", re.compile(r"router|choose")),
    ("MoE", re.compile(r"experts")),
)
_PRODUCT = re.compile(r"product|grouped|linear_kernel|gate_up_kernel|down_kernel")
# The products of a layer in the order they must run.
_PRODUCTS = (("qkv", "qkv"), ("o", "o"), ("moe", "MoE"), ("moe", "MoE"), ("lm_head", "lm_head"))


def category_of(covers: Iterable[str]) -> str:
    held = set(covers)
    return " + ".join(name for name, ops in CATEGORIES.items() if held & set(ops))


def classify(kernels: Sequence[str], covers: Sequence[str]) -> list[str]:
    """Categories of the kernels of one launch, in order: packing is told apart from the product it serves, and a phase
    that spans several categories is divided by names and by the order of its products, where they tell."""
    whole = category_of(covers)
    mine = whole.split(" + ")
    found = [PACKING if _PACKS.search(k) else whole for k in kernels]
    if len(mine) == 1:
        return found
    products = [i for i, k in enumerate(kernels) if found[i] == whole and _PRODUCT.search(k)]
    for i, kernel in enumerate(kernels):
        if found[i] == whole and i not in products:
            found[i] = next((c for c, name in _NAMES if c in mine and name.search(kernel)), whole)
    wanted = [category for op, category in _PRODUCTS if op in covers and category not in found]
    if len(products) == len(wanted):
        for i, category in zip(products, wanted):
            found[i] = category
    return found


@dataclass(frozen=True)
class Span:
    category: str
    name: str
    start: float  # microseconds
    end: float

    @property
    def us(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Line:
    """One category of one step."""

    category: str
    us: float
    of_step: float
    launches: float
    bound: str = ""  # memory or compute; empty where nothing must be moved
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    of_ceiling: float | None = None


@dataclass
class Profile:
    what: str
    rows: int
    step_us: float  # undisturbed, by events or a clock around many steps
    how: str  # where the categories' times come from
    lines: list[Line]
    launches: float
    busy_us: float  # of a step, as traced
    idle_us: float
    gaps: float  # per step: times the device waited more than GAP_US
    longest_gap_us: float
    host_us: dict[str, float] = field(default_factory=dict)  # per step: what the host does, however it was launched
    phases: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def host_us_per_token(self) -> dict[str, float]:
        return {k: v / self.rows for k, v in self.host_us.items()}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"host_us_per_token": self.host_us_per_token}


GAP_US = 0.5


def summarise(
    what: str,
    rows: int,
    spans: Sequence[Span],
    steps: int,
    step_us: float,
    work: Mapping[str, Work],
    gpu: Gpu,
    how: str,
    within: Mapping[str, Mapping[str, float]] | None = None,
) -> Profile:
    """`within`: category -> how its time divides into others, for a kernel that runs several; weights, not times."""
    times: dict[str, float] = {}
    counts: dict[str, float] = {}
    for span, us in _own(spans):
        parts = (within or {}).get(span.category, {span.category: 1.0})
        whole = sum(parts.values())
        for name, weight in parts.items():
            times[name] = times.get(name, 0.0) + us * weight / whole / steps
            counts[name] = counts.get(name, 0.0) + weight / whole / steps
    busy, idle, gaps, longest = _gaps(spans, steps)
    total = busy + idle
    lines = []
    for name in sorted(times, key=_place):
        floor = sum((work[op] for op in _operations(name)), Work())
        seconds = times[name] * 1e-6
        line = Line(name, times[name], times[name] / total if total else 0.0, counts[name])
        if floor.bytes and seconds > 0:
            line = Line(
                name, times[name], times[name] / total, counts[name], floor.bound(gpu), floor.bytes / seconds / 1e9,
                floor.flops / seconds / 1e12, floor.seconds(gpu) / seconds,
            )  # fmt: skip
        lines.append(line)
    return Profile(what, rows, step_us, how, lines, len(spans) / steps, busy, idle, gaps, longest)


def _operations(category: str) -> list[str]:
    return [op for name in category.split(" + ") for op in CATEGORIES.get(name, ())]


def _place(category: str) -> int:
    return ORDER.index(category.split(" + ")[0])


def _own(spans: Sequence[Span]) -> list[tuple[Span, float]]:
    """Every span and the microseconds that are its own: the time by which it outlasts all that began before it. A
    kernel launched early (programmatic dependent launch) waits for the one in front of it, so the time they share is
    that one's; counted this way, categories add up to the time the device was busy."""
    found, until = [], float("-inf")
    for span in sorted(spans, key=lambda s: s.start):
        found.append((span, max(0.0, span.end - max(until, span.start))))
        until = max(until, span.end)
    return found


def _gaps(spans: Sequence[Span], steps: int) -> tuple[float, float, float, float]:
    """Per step: busy and idle microseconds, gaps; and the longest gap of all. Spans may overlap."""
    busy = idle = longest = 0.0
    gaps = 0
    until: float | None = None
    for span in sorted(spans, key=lambda s: s.start):
        if until is None:
            until = span.start
        wait = span.start - until
        if wait > 0:
            idle += wait
            longest = max(longest, wait)
            gaps += wait > GAP_US
        busy += max(0.0, span.end - max(until, span.start))
        until = max(until, span.end)
    return busy / steps, idle / steps, gaps / steps, longest


# ---- what follows from it -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    rule: str
    applies: bool
    sentence: str


def decide(p: Profile, *, reference: Sequence[str] = ()) -> list[Verdict]:
    """The first plan's decision gate, rule by rule, and where the most time could be won."""

    def share(word: str) -> float:
        return sum(line.of_step for line in p.lines if word in line.category.split(" + "))

    rules = (
        ("MoE", 0.5, "MoE", "the experts' kernel and its tiles come first", "the experts are not what to start with"),
        ("attention", 0.4, "attention", "attention comes first", "attention is not what to start with"),
        (
            "packing", 0.1, "quantisation and packing", "keep activations quantised and grouped between kernels",
            "quantising and packing activations is cheap enough",
        ),
    )  # fmt: skip
    found = []
    for word, limit, label, then, otherwise in rules:
        part = share(word)
        text = f"{label} takes {part:.0%} of the step (rule: > {limit:.0%}): {then if part > limit else otherwise}."
        found.append(Verdict(f"{label} > {limit:.0%}", part > limit, text))
    idle = p.idle_us / (p.busy_us + p.idle_us) if p.busy_us + p.idle_us else 0.0
    then = "launches and the host come first" if idle > 0.1 else "launches and the host are hidden"
    text = f"the device idles {idle:.0%} of the time in {p.gaps:.0f} gaps a step (rule: > 10%): {then}."
    found.append(Verdict("idle > 10%", idle > 0.1, text))
    text = (
        f"{', '.join(reference)} ran where a kernel was due: find out why." if reference else "the chosen kernels ran."
    )
    found.append(Verdict("another kernel than the one asked for", bool(reference), text))
    known = [line for line in p.lines if line.of_ceiling is not None]
    if known:
        worst = max(known, key=lambda line: line.us * (1 - min(1.0, line.of_ceiling or 0.0)))
        lost = worst.us * (1 - min(1.0, worst.of_ceiling or 0.0))
        text = (
            f"most is to be won in {worst.category}: {worst.us:.0f} us at {worst.of_ceiling:.0%} of its ceiling, "
            f"{lost:.0f} us above it."
        )
        found.append(Verdict("next", True, text))
    return found
