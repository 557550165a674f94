"""What compute-sanitizer printed, as findings: which kernel, what was said of it, how often; and which of them are
explained.

An explanation is a false report that is understood: the tool, the kernel and the words it is about, and the reason in
a sentence. It stays in the receipt with its count; nothing is dropped. A finding that no explanation fits is an error,
and so is a report that this file could not read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

TOOLS = ("racecheck", "initcheck", "synccheck", "memcheck")  # the slowest first
PRINT_LIMIT = 2000  # reports of one run that are printed whole

_REPORT = re.compile(
    r"^========= (?:(?:Error|Warning|Info): )?"
    r"(Race reported|Potential|Uninitialized|Barrier error|Invalid|Unused|Program hit|.*hazard detected)(.*)$"
)
_PLACE = re.compile(r"\bat (?:void )?([A-Za-z_][\w:]*)[^\n]*?\+0x([0-9a-f]+)")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_NUMBER = re.compile(r"0x[0-9a-f]+|\b\d+\b")


@dataclass(frozen=True)
class Finding:
    kernel: str  # "" where the report names none
    what: str  # the report's words, without its numbers
    places: tuple[str, ...]  # offsets into the kernel's machine code
    count: int = 1


@dataclass(frozen=True)
class Explanation:
    tool: str
    kernel: str  # a pattern
    what: str  # a pattern
    reason: str

    def fits(self, tool: str, finding: Finding) -> bool:
        return (
            tool == self.tool
            and re.search(self.kernel, finding.kernel) is not None
            and re.search(self.what, finding.what) is not None
        )


EXPLANATIONS: tuple[Explanation, ...] = ()


def read_log(log: str) -> tuple[int | None, list[Finding]]:
    """(errors of the summary, findings with what is said of the same kernel in the same words counted together)."""
    lines = log.splitlines()
    seen: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for i, line in enumerate(lines):
        if not (report := _REPORT.match(line)):
            continue
        block = [line]
        for more in lines[i + 1 :]:
            if not more.startswith("=========     "):
                break
            block.append(more)
        places = _PLACE.findall("\n".join(block[:4]))
        what = _NUMBER.sub("N", _PLACE.sub("", report[1] + report[2])).strip()
        if what.startswith("Race reported"):
            accesses = re.findall(r"(Read|Write) access", "\n".join(block))
            what = f"Race reported between {' and '.join(accesses)}"
        kernel = places[0][0] if places else ""
        seen[kernel, what, tuple(offset for _, offset in places)] += 1
    totals = [int(n) for n in _SUMMARY.findall(log)]
    errors = sum(totals) if totals else None
    findings = [Finding(*key, count) for key, count in seen.items()]
    unread = (errors or 0) - sum(f.count for f in findings)
    if unread > 0:
        findings.append(Finding("", "reports that were not printed, or not in words this tool reads", (), unread))
    return errors, findings


def explain(
    tool: str, findings: Iterable[Finding], explanations: Iterable[Explanation] = EXPLANATIONS
) -> tuple[list[tuple[Finding, Explanation]], list[Finding]]:
    """(findings with their explanation, findings without one)."""
    known, unknown = [], []
    for finding in findings:
        reason = next((e for e in explanations if e.fits(tool, finding)), None)
        if reason is None:
            unknown.append(finding)
        else:
            known.append((finding, reason))
    return known, unknown
