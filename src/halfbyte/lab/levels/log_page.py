"""The files of a run of the protocol: results in the one schema, the levels' verdicts, and the test log.

The log is a Markdown page by the template that the protocol came with. It is written from the results alone and says
nothing that the JSON does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from halfbyte.lab import receipts
from halfbyte.lab.levels.matrix import NOT_TIMED
from halfbyte.lab.levels.protocol import FAIL, INCONCLUSIVE, INVALID, LEVELS, PASS, REFUSED, Outcome, ProtocolReport
from halfbyte.lab.report.sources import LEVELS as LEVELS_FILE
from halfbyte.lab.report.sources import RESULTS
from halfbyte.lab.result import Check, Result

TOOL = "halfbyte check"
TITLES = {
    "1": "Smoke Test", "1.5": "Kernel Path Validation", "2": "Correctness Test", "3": "Stress Test",
    "4": "Performance Benchmark", "5": "Regression Test", "6": "Combinatorial Test",
}  # fmt: skip


def write_files(report: ProtocolReport, folder: Path) -> list[Path]:
    """Writes results.json, levels.json and test_log.md into the folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = receipts.sources_of([receipts.PACKAGE / "engine" / "build.py"], ("engine",))
    measured = receipts.hashes(sources) if report.subject.peer.name == "halfbyte" else {}
    file = receipts.result_file(TOOL, report.results, measured)
    file.write(folder / RESULTS)
    levels = {"ok": report.ok, "levels": [o.as_dict() for o in report.outcomes]}
    texts = {LEVELS_FILE: json.dumps(levels, default=str) + "\n"}
    texts["test_log.md"] = log_markdown(report, dict(file.environment))
    for name, text in texts.items():
        part = folder / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)
    return [folder / name for name in (RESULTS, LEVELS_FILE, "test_log.md")]


def log_markdown(report: ProtocolReport, environment: dict[str, object]) -> str:
    """The whole page."""
    subject = report.subject
    changes = ", ".join(f"{k}={v}" for k, v in subject.gates.changes().items()) or "all at their defaults"
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
    yield f"- [{'x' if o.verdict == PASS else ' '}] {o.verdict}: {_line(o.sentence)}"
    yield f"- Duration: {int(o.seconds // 60)}m {o.seconds % 60:.0f}s"
    for reason in o.reasons[1:]:
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
        title = f"{case}: {c.what}" if case else c.what
        state, value, bound = PASS if c.ok else FAIL, _number(c.value), _number(c.bound)
        yield f"| {_line(title)} | {state} | {value} | {bound} | {_line(c.note)} |"


def _figures(results: Sequence[Result]) -> Iterator[str]:
    for r in results[:1]:
        if command := r.detail.get("command"):
            yield f"- Engine version: {r.detail.get('version') or 'not known'}; command: `{_line(' '.join(command))}`"
            yield ""
    yield "| Metric | Baseline | This Feature | Difference | TTFT p50 / p99 | Peak memory | Acceptance | Targets |"
    yield "|---|---|---|---|---|---|---|---|"
    for r in results:
        if r.refused:
            yield f"| {r.cell.label} | | {INVALID if r.invalid else REFUSED} | | | | | {_line(r.refused)} |"
        speed = next((f for f in r.figures if f.name == "speed"), None)
        if speed is None:
            continue
        targets = "; ".join(f"{_state(t)} {t.what}" for t in r.targets)
        columns = (
            r.cell.label, *baseline_columns(r, f"{speed.value:.5g} ({speed.low:.5g} to {speed.high:.5g}) {speed.unit}"),
            first_tokens(r), memory_text(r.detail.get("peak_bytes")), acceptance_text(r), targets,
        )  # fmt: skip
        yield f"| {' | '.join(columns)} |"


def baseline_columns(r: Result, speed: str) -> tuple[str, str, str]:
    """The baseline's speed, this one's, and the difference with its interval."""
    b = r.detail.get("baseline") or {}
    if "ratio" not in b:
        return ("the same" if not b else f"REFUSED: {_line(b['refused'])}" if b["refused"] else "", speed, "")
    return f"{b['speed']:.5g}", speed, f"{b['ratio'] - 1:+.1%} ({b['low'] - 1:+.1%} to {b['high'] - 1:+.1%})"


def first_tokens(r: Result) -> str:
    t = r.detail.get("ttft_ms")
    return f"{t['p50']:.4g} / {t['p99']:.4g} ms" if t else ""


def memory_text(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f} GiB"


def acceptance_text(r: Result) -> str:
    share = r.detail.get("acceptance")
    return "" if share is None else f"{share:.0%} of drafts"


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
        if r.detail.get("change") == INCONCLUSIVE.lower():
            state = INCONCLUSIVE
        notes = "; ".join(_line(t.note) for t in r.targets)
        speeds = f"{before.value:.5g} | {after.value:.5g} {after.unit}"
        yield f"| {r.cell.label} | {against} | {speeds} | {delta} | {state} | {notes} |"


def _combinations(results: Sequence[Result]) -> Iterator[str]:
    yield "| Combination | Status | Notes |"
    yield "|---|---|---|"
    for r in results:
        gates = ", ".join(f"{k}={v}" for k, v in r.cell.gates.items()) or "no gates"
        state = INVALID if r.invalid else REFUSED if r.refused else "run"
        speeds = ", ".join(f"{f.name} {f.value:.4g} {f.unit}" for f in r.figures)
        notes = "; ".join(filter(None, (r.refused, speeds, r.detail.get(NOT_TIMED, ""))))
        yield f"| {r.cell.preset or gates} | {state} | {_line(notes)} |"


def _overall(report: ProtocolReport) -> Iterator[str]:
    bad = [o for o in report.outcomes if o.verdict != PASS]
    blocked = [o for o in bad if o.verdict == REFUSED]
    missing = [level for level in LEVELS if report.outcome(level) is None]
    complete = report.ok and not missing
    part = f" (not yet: level {', '.join(missing)} did not run)" if report.ok and not complete else ""
    yield f"- [{'x' if complete else ' '}] READY TO MERGE{part}"
    issues = "; ".join(
        f"level {o.level} {o.verdict}: {_line((o.reasons or ['a check failed'])[0]).rstrip('.')}" for o in bad
    )
    yield f"- [{'x' if bad and not blocked else ' '}] NEEDS FIXES{f' ({issues})' if bad and not blocked else ''}"
    yield f"- [{'x' if blocked else ' '}] BLOCKED{f' ({issues})' if blocked else ''}"


def _state(check: Check) -> str:
    return "met:" if check.ok else "MISSED:"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _line(text: str) -> str:
    """One line that a table can hold."""
    return " ".join(text.split()).replace("|", "\\|")[:300]
