"""Where a token's time goes: rows of a step beside the least they could take, and what follows from it.

A `Span` is a piece of work on the device (or, on a CPU, a phase on the host) with its row: the category its phase says,
and the operations whose work it is, as the launch itself said (`plan.launches`). `summarise` makes a Profile of the
spans of some equal steps: time, bandwidth or FLOP/s and share of the ceiling per row, launches per step, idle gaps. A
row's ceiling is that of its own operations, and an operation has one row: a share above 1 is a fault of this account
and an error. `decide` applies the decision table that the project began with. Measuring is in `timeline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from halfbyte.errors import AccountError
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.lab.trace import GAP_US, own_times
from halfbyte.plan.launches import OTHER, PACKING, SAMPLING, Part
from halfbyte.roofline import Gpu, Work

# Label -> the operations it stands for. A row that does the work of several is shown as "qkv + rope/KV".
LABELS: dict[str, tuple[str, ...]] = {
    "embed": ("embed",),
    "qkv": ("attn_norm", "qkv"),
    "rope/KV": ("rope", "kv_write"),
    "attention": ("attention",),
    "o": ("o",),
    "router": ("mlp_norm", "router"),
    "MoE": ("moe",),
    "lm_head": ("final_norm", "lm_head"),
}
# Of rows that do no operation's work, by category.
HELPERS = {SAMPLING.category: "sampling", PACKING.category: "packing", OTHER.category: "other"}
ORDER = (*LABELS, *HELPERS.values())


class ProfileRow(NamedTuple):
    """One line of a profile: a category of phases, and the operations whose work is done in it."""

    category: str
    operations: tuple[str, ...] = ()

    @classmethod
    def of(cls, part: Part) -> ProfileRow:
        return cls(part.category, part.operations)

    @property
    def label(self) -> str:
        mine = set(self.operations)
        return " + ".join(label for label, ops in LABELS.items() if mine & set(ops)) or HELPERS.get(
            self.category, self.category
        )


@dataclass(frozen=True)
class Span:
    row: ProfileRow
    name: str
    start: float  # microseconds
    end: float


@dataclass(frozen=True)
class Line:
    """One row of one step."""

    label: str
    category: str
    operations: tuple[str, ...]
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
    how: str  # where the rows' times come from
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


def summarise(
    title: str,
    rows: int,
    spans: Sequence[Span],
    steps: int,
    step_us: float,
    work: Mapping[str, Work],
    gpu: Gpu,
    how: str,
    within: Mapping[ProfileRow, Mapping[ProfileRow, float]] | None = None,
) -> Profile:
    """`within`: row -> how its time divides into others, for a kernel that does several; weights, not times."""
    times: dict[ProfileRow, float] = {}
    counts: dict[ProfileRow, float] = {}
    own, gaps = own_times(spans)
    for span, us in own:
        parts = (within or {}).get(span.row, {span.row: 1.0})
        weights = sum(parts.values())
        for row, weight in parts.items():
            times[row] = times.get(row, 0.0) + us * weight / weights / steps
            counts[row] = counts.get(row, 0.0) + weight / weights / steps
    divided = {row for parts in (within or {}).values() for row in parts}
    _gather(times, counts)
    _join(times, counts, divided, work, gpu)
    _check(title, times, work, gpu)
    waits = [b - a for a, b in gaps]
    busy, idle = sum(us for _, us in own) / steps, sum(waits) / steps
    total = busy + idle
    lines = []
    for row in sorted(times, key=_rank):
        floor, us = _floor(row, work), times[row]
        line = Line(row.label, row.category, row.operations, us, us / total if total else 0.0, counts[row])
        if floor.bytes and us > 0:
            seconds = us * 1e-6
            line = Line(
                row.label, row.category, row.operations, us, us / total, counts[row], floor.bound(gpu),
                floor.bytes / seconds / 1e9, floor.flops / seconds / 1e12, floor.seconds(gpu) / seconds,
            )  # fmt: skip
        lines.append(line)
    gap_count, longest = sum(w > GAP_US for w in waits) / steps, max(waits, default=0.0)
    return Profile(title, rows, step_us, how, lines, len(spans) / steps, busy, idle, gap_count, longest)


def _gather(times: dict[ProfileRow, float], counts: dict[ProfileRow, float]) -> None:
    """Rows of one label are one row: a norm and the product behind it, rope and what goes into the cache."""
    for label in {row.label for row in times}:
        mine = [row for row in times if row.label == label]
        if len(mine) == 1:
            continue
        largest = max(mine, key=lambda row: times[row])
        both = ProfileRow(largest.category, tuple(dict.fromkeys(op for row in mine for op in row.operations)))
        us, count = sum(times.pop(row) for row in mine), sum(counts.pop(row) for row in mine)
        times[both], counts[both] = us, count


def _floor(row: ProfileRow, work: Mapping[str, Work]) -> Work:
    return sum((work[op] for op in row.operations), Work())


def _join(
    times: dict[ProfileRow, float],
    counts: dict[ProfileRow, float],
    divided: set[ProfileRow],
    work: Mapping[str, Work],
    gpu: Gpu,
) -> None:
    """Rows of a kernel that runs several, which fetches weights ahead: one that passes its ceiling was served in the
    time of the row before it, so the two are one account."""
    while True:
        order = sorted((row for row in times if row in divided and row.operations), key=_rank)
        over = [i for i, row in enumerate(order) if _floor(row, work).seconds(gpu) * 1e6 > times[row] > 0]
        if not over or len(order) < 2:
            return
        at = max(over[0], 1)
        first, second = order[at - 1], order[at]
        larger = first if times[first] >= times[second] else second
        both = ProfileRow(larger.category, first.operations + second.operations)
        times[both], counts[both] = times.pop(first) + times.pop(second), counts.pop(first) + counts.pop(second)
        divided.add(both)


def _check(title: str, times: Mapping[ProfileRow, float], work: Mapping[str, Work], gpu: Gpu) -> None:
    """The account is sound: no operation stands in two rows, and no row is faster than the machine."""
    owners: dict[str, ProfileRow] = {}
    for row in times:
        for op in row.operations:
            other = owners.setdefault(op, row)
            if other != row:
                raise AccountError(
                    f"{title}: {op} is on the account of two rows, {other.label} and {row.label}; each launch must say "
                    f"whose work it does."
                )
    for row, us in times.items():
        least = _floor(row, work).seconds(gpu) * 1e6
        if us > 0 and least > us:
            raise AccountError(
                f"{title}: {row.label} took {us:.1f} us, and its operations ({', '.join(row.operations)}) take "
                f"{least:.1f} us at least on {gpu.name}, so it would be at {least / us:.0%} of its ceiling: their work "
                f"was done elsewhere."
            )


def _rank(row: ProfileRow) -> int:
    return ORDER.index(row.label.split(" + ")[0]) if row.label.split(" + ")[0] in ORDER else len(ORDER)


# ---- what follows from it -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    rule: str
    applies: bool
    sentence: str


def decide(p: Profile, differences: Sequence[str]) -> list[Decision]:
    """The first plan's decision gate, rule by rule, and where the most time could be won. `differences`: what the
    record says ran otherwise than it was chosen."""

    def share(category: str) -> float:
        return sum(line.of_step for line in p.lines if line.category == category)

    rules = (
        ("moe", 0.5, "MoE", "the experts' kernel and its tiles come first", "the experts are not what to start with"),
        ("attention", 0.4, "attention", "attention comes first", "attention is not what to start with"),
        (
            PACKING.category, 0.1, "quantisation and packing", "keep activations quantised and grouped between kernels",
            "quantising and packing activations is cheap enough",
        ),
    )  # fmt: skip
    verdicts = []
    joined = [line for line in p.lines if {"moe", "attention"} <= set(line.operations)]
    if joined:  # what its parts take is not known, and 0 % of a part would be wrong
        text = f"one kernel runs the whole step ({joined[0].us:.0f} us): what its parts take was not measured."
        return [Decision("one kernel", False, text), _as_planned(differences)]
    for category, limit, label, then, otherwise in rules:
        part = share(category)
        text = f"{label} takes {part:.0%} of the step (rule: > {limit:.0%}): {then if part > limit else otherwise}."
        verdicts.append(Decision(f"{label} > {limit:.0%}", part > limit, text))
    idle = p.idle_us / (p.busy_us + p.idle_us) if p.busy_us + p.idle_us else 0.0
    then = "launches and the host come first" if idle > 0.1 else "launches and the host are hidden"
    text = f"the device idles {idle:.0%} of the time in {p.gaps:.0f} gaps a step (rule: > 10%): {then}."
    verdicts.append(Decision("idle > 10%", idle > 0.1, text))
    verdicts.append(_as_planned(differences))
    bounded = [line for line in p.lines if line.of_ceiling is not None]
    if bounded:
        worst = max(bounded, key=lambda line: line.us * (1 - min(1.0, line.of_ceiling or 0.0)))
        lost = worst.us * (1 - min(1.0, worst.of_ceiling or 0.0))
        text = (
            f"most is to be won in {worst.label}: {worst.us:.0f} us at {worst.of_ceiling:.0%} of its ceiling, "
            f"{lost:.0f} us above it."
        )
        verdicts.append(Decision("next", True, text))
    return verdicts


def _as_planned(differences: Sequence[str]) -> Decision:
    text = "the chosen kernels ran."
    if differences:
        text = f"the record differs from the plan: {'; '.join(differences)}."
    return Decision("another kernel than the one asked for", bool(differences), text)


def profile_result(
    p: Profile, model: str, preset: str, record: Mapping[str, Any], differences: Sequence[str] = ()
) -> Result:
    """A profile as a result; the lines of its table are the detail."""
    cell = Cell("profile", model, preset, path="graph" if p.rows <= 64 else "eager", shape={"what": p.what})
    figures = (figure("step", "us", p.step_us), figure("speed", "tok/s", p.rows * 1e6 / p.step_us))
    detail = p.as_dict() | {"decisions": [v.sentence for v in decide(p, differences)]}
    return Result(cell, figures, record=record, detail=detail)
