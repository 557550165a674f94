"""The test log: one Markdown page per run, by the template that the protocol came with.

Written from results alone; nothing in it is typed by hand, and it says nothing that the JSON beside it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halfbyte.lab.levels.protocol import FAIL, INVALID, LEVELS, PASS, REFUSED, SKIPPED, Outcome, Report
from halfbyte.lab.result import Check, Result

TITLES = {
    "1": "Smoke Test", "1.5": "Kernel Path Validation", "2": "Correctness Test", "3": "Stress Test",
    "4": "Performance Benchmark", "5": "Regression Test", "6": "Combinatorial Test",
}  # fmt: skip


def log_markdown(report: Report, environment: dict[str, object]) -> str:
    """The whole page."""
    subject = report.subject
    changes = ", ".join(f"{k}={v}" for k, v in subject.gates.changes().items()) or "exact"
    lines = [
        f"# Test Log: {subject.preset or changes}",
        "",
        f"Date: {str(environment.get('time', ''))[:10]}  ",
        f"Commit: {environment.get('commit') or 'unknown'}  ",
        f"Engine: {subject.peer.name}, model {subject.model.label}  ",
        f"Gates: {changes}  ",
        f"Machine: {environment.get('cpu', '')}{_gpus(environment)}",
        "",
    ]
    for level in LEVELS:
        outcome = report.outcome(level)
        lines += [f"## Level {level}: {TITLES[level]}", ""]
        lines += [*_level(outcome), ""] if outcome is not None else ["- [ ] not run", ""]
    lines += ["## Overall Result", "", *_overall(report)]
    return "\n".join(lines) + "\n"


def _gpus(environment: dict[str, object]) -> str:
    gpus = environment.get("gpus")
    names = [str(g.get("name")) for g in gpus] if isinstance(gpus, list) else []
    return f", {', '.join(names)}" if names else ", no GPU"


def _level(o: Outcome) -> Iterator[str]:
    yield f"- [{'x' if o.verdict == PASS else ' '}] {o.verdict}"
    yield f"- Duration: {int(o.seconds // 60)}m {o.seconds % 60:.0f}s"
    for reason in o.reasons:
        yield f"- {o.verdict}: {_line(reason)}"
    for note in o.notes:
        yield f"- Note: {_line(note)}"
    if o.level == "1.5":
        for r in o.results:
            yield f"- Witness: {r.detail.get('witness', 'none')}"
            observed = r.detail.get("observed") or ["nothing"]
            yield from ("- Observed kernels:", *(f"  - `{_line(str(name))}`" for name in list(observed)[:20]))
    if o.level == "3":
        for r in o.results:
            for when in ("before", "after"):
                memory = r.detail.get(f"memory_{when}")
                yield f"- Memory {when}: {'not known' if memory is None else f'{memory / 2**30:.2f} GB'}"
    if o.level == "4":
        yield from ("", *_figures(o.results))
    elif o.level == "5":
        yield from ("", *_comparisons(o.results))
    elif o.level == "6":
        yield from ("", *_combinations(o.results))
    else:
        yield from ("", *_checks(o.results))


def _checks(results: Sequence[Result]) -> Iterator[str]:
    rows = [(r, c) for r in results for c in (*r.checks, *r.targets)]
    if not rows:
        return
    yield "| Test | Status | Found | Bound | Notes |"
    yield "|---|---|---|---|---|"
    for r, c in rows:
        case = r.cell.shape.get("case")
        what = f"{case}: {c.what}" if case else c.what
        state, found, bound = PASS if c.ok else FAIL, _number(c.value), _number(c.bound)
        yield f"| {_line(what)} | {state} | {found} | {bound} | {_line(c.note)} |"


def _figures(results: Sequence[Result]) -> Iterator[str]:
    yield "| Metric | This Feature | Unit | Targets |"
    yield "|---|---|---|---|"
    for r in results:
        if r.refused:
            yield f"| {r.cell.label} | {INVALID if r.invalid else REFUSED} | | {_line(r.refused)} |"
        for f in r.figures:
            targets = "; ".join(f"{_state(t)} {t.what}" for t in r.targets)
            yield f"| {r.cell.label} {f.name} | {f.value:.5g} ({f.low:.5g} to {f.high:.5g}) | {f.unit} | {targets} |"


def _comparisons(results: Sequence[Result]) -> Iterator[str]:
    yield "| Metric | Against | Baseline | This Feature | Delta | Status | Notes |"
    yield "|---|---|---|---|---|---|---|"
    for r in results:
        against = r.cell.shape.get("against", "")
        if r.refused:
            yield f"| {r.cell.label} | {against} | | | | {INVALID if r.invalid else REFUSED} | {_line(r.refused)} |"
            continue
        before, after, ratio = r.figure("before"), r.figure("speed"), r.figure("ratio")
        delta = f"{ratio.value - 1:+.1%} ({ratio.low - 1:+.1%} to {ratio.high - 1:+.1%})"
        state = PASS if all(t.ok for t in r.targets) else FAIL
        notes = "; ".join(_line(t.note) for t in r.targets)
        speeds = f"{before.value:.5g} | {after.value:.5g} {after.unit}"
        yield f"| {r.cell.label} | {against} | {speeds} | {delta} | {state} | {notes} |"


def _combinations(results: Sequence[Result]) -> Iterator[str]:
    yield "| Combination | Status | Notes |"
    yield "|---|---|---|"
    for r in results:
        gates = ", ".join(f"{k}={v}" for k, v in r.cell.gates.items()) or "exact"
        state = INVALID if r.invalid else REFUSED if r.refused else "run"
        speeds = ", ".join(f"{f.name} {f.value:.4g} {f.unit}" for f in r.figures)
        yield f"| {r.cell.preset or gates} | {state} | {_line(r.refused or speeds)} |"


def _overall(report: Report) -> Iterator[str]:
    bad = [o for o in report.outcomes if o.verdict not in (PASS, SKIPPED)]
    blocked = [o for o in bad if o.verdict == REFUSED]
    missing = [level for level in LEVELS if report.outcome(level) is None]
    skipped = [o.level for o in report.outcomes if o.verdict == SKIPPED]
    whole = report.ok and not missing and not skipped
    part = f" (not yet: level {', '.join([*missing, *skipped])} did not run)" if report.ok and not whole else ""
    yield f"- [{'x' if whole else ' '}] READY TO MERGE{part}"
    issues = "; ".join(f"level {o.level} {o.verdict}: {_line((o.reasons or ['a check failed'])[0])}" for o in bad)
    yield f"- [{'x' if bad and not blocked else ' '}] NEEDS FIXES{f' ({issues})' if bad and not blocked else ''}"
    yield f"- [{'x' if blocked else ' '}] BLOCKED{f' ({issues})' if blocked else ''}"


def _state(check: Check) -> str:
    return "met:" if check.ok else "MISSED:"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _line(text: str) -> str:
    """One line that a table can hold."""
    return " ".join(text.split()).replace("|", "\\|")[:300]
