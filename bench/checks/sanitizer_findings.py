"""What compute-sanitizer printed, as findings: which kernel, what was said of it, how often; and which of them are
explained.

An explanation is a false report that is understood: the tool, the kernel and the words it is about, and the reason in
a sentence. It stays in the receipt with its count; nothing is dropped. A finding that no explanation fits is an error,
and so is a report that this file could not read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

TOOLS = ("racecheck", "initcheck", "synccheck", "memcheck")  # the slowest first
PRINT_LIMIT = 2000  # reports of one run that are printed whole

_LINE = re.compile(r"^========= (\S.*)$")
_MORE = re.compile(r"^=========  +(\S.*)$")
_NO_REPORT = re.compile(r"COMPUTE-SANITIZER|.*SUMMARY|Target application|Saved host backtrace|Host Frame")
_ADDRESS = re.compile(r"\bat (?:void )?(\$?[\w$:]+)[^\n]*?\+0x[0-9a-f]+")
_ACCESS = re.compile(r"\b(Read|Write|Atomic) access (at [^\[\n]+)(?:\[(\d+) hazards?\])?")
_FUNCTION = re.compile(r"^\$(\w+?)\$_Z(\d+)(\w+)$")  # a function inside of a kernel
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_NUMBER = re.compile(r"0x[0-9a-f]+|\b\d+\b")
UNREAD = "reports that were not printed, or not in words that are read here"


@dataclass(frozen=True)
class SanitizerFinding:
    kernel: str  # "" where the report names none
    message: str  # the report without its numbers; for a race, the two accesses
    count: int = 1  # of a race: hazards


@dataclass(frozen=True)
class KnownFinding:
    tool: str
    kernel: str  # patterns of the whole text
    message: str
    reason: str

    def fits(self, tool: str, finding: SanitizerFinding) -> bool:
        match = re.fullmatch(self.kernel, finding.kernel) and re.fullmatch(self.message, finding.message)
        return tool == self.tool and match is not None


# racecheck follows an mbarrier from the thread that arrives to the threads that wait, and no further. In these kernels
# one lane arrives for its warp.
EXPLANATIONS: tuple[KnownFinding, ...] = (
    KnownFinding(
        "racecheck", "decode_step", r"race: (Write in feed and Read in phase_\w+|Read in phase_\w+ and Write in feed)",
        "A slot of the ring: the copy engine writes it, warps read it. It is filled again after one lane of each warp "
        "has arrived on `empty`, with a count that depends on what all its lanes have loaded (a product of the tensor "
        "cores, which take a warp's operands together); racecheck knows of the arriving lane alone. That no arrival "
        "overtakes a load is read from the machine code (tests/kernels/cuda/decode/test_compile.py).",
    ),
    KnownFinding(
        "racecheck", "decode_step", r"race: (Write in phase_up and Read in feed|Read in feed and Write in phase_up)",
        "Sums of squares: each working warp stores its own, `__syncwarp`, one lane arrives on `squared`; the feeding "
        "warp waits for all of them and reads. It arrives on `routed` afterwards, for which every warp waits before "
        "it can come to the next layer's squares. racecheck knows of the arriving lane alone.",
    ),
    KnownFinding(
        "racecheck", "batch_(product|experts)", r"race: (Read and Write|Write and Read)",
        "Sums that multiplying warps hand to summing warps, and items that are handed out: whoever wrote or read does "
        "`__syncwarp`, then one lane arrives on an mbarrier, for which the warps of the other side wait; racecheck "
        "knows of the arriving lane alone. In the emulator every order gives the same bits "
        "(tests/kernels/cuda/batch/test_products.py), late hand-overs as well (tests/kernels/cuda/test_delays.py).",
    ),
)  # fmt: skip


def read_log(log: str) -> tuple[int | None, list[SanitizerFinding]]:
    """(errors of the summary, findings with what is said of the same kernel in the same words counted together)."""
    seen: Counter[tuple[str, str]] = Counter()
    reports = 0
    for block in _blocks(log):
        reports += 1
        for kernel, message, count in _read_block(block):
            seen[kernel, message] += count
    totals = [int(n) for n in _SUMMARY.findall(log)]
    errors = sum(totals) if totals else None
    findings = [SanitizerFinding(*key, count) for key, count in seen.items()]
    if (errors or 0) > reports:
        findings.append(SanitizerFinding("", UNREAD, (errors or 0) - reports))
    return errors, findings


def _blocks(log: str) -> Iterator[list[str]]:
    """A report's line and the indented ones below it."""
    block: list[str] = []
    for line in log.splitlines():
        if (more := _MORE.match(line)) and block:
            block.append(more[1])
            continue
        if block:
            yield block
        first = _LINE.match(line)
        block = [first[1]] if first and not _NO_REPORT.match(first[1]) else []
    if block:
        yield block


def _read_block(block: list[str]) -> Iterator[tuple[str, str, int]]:
    text = "\n".join(block)
    if "Race reported" in block[0]:
        (kind, first, _), *others = _ACCESS.findall(text) or [("", "", "")]
        for other, function, hazards in others:
            yield _race(kind, first, other, function, int(hazards or 1))
        if others:
            return
    function = _ADDRESS.search(text)
    kernel = _symbol(function[1])[0] if function else ""
    message = _NUMBER.sub("N", block[0].removeprefix("Error: ").removeprefix("Warning: "))
    yield kernel, message, 1


def _race(kind: str, location: str, other_kind: str, other_location: str, hazards: int) -> tuple[str, str, int]:
    ends = []
    kernels = []
    for access, where in ((kind, location), (other_kind, other_location)):
        match = _ADDRESS.search(where)
        kernel, function = _symbol(match[1]) if match else ("", "")
        kernels.append(kernel)
        ends.append(f"{access} in {function}" if function else access)
    return kernels[0], f"race: {' and '.join(ends)}", hazards


def _symbol(name: str) -> tuple[str, str]:
    """(kernel, function inside of it or nothing)."""
    inner = _FUNCTION.match(name)
    if not inner:
        return name, ""
    return inner[1], inner[3][: int(inner[2])]


def explain(
    tool: str, findings: Iterable[SanitizerFinding], explanations: Iterable[KnownFinding] = EXPLANATIONS
) -> tuple[list[tuple[SanitizerFinding, KnownFinding]], list[SanitizerFinding]]:
    """(findings with their explanation, findings without one)."""
    explained, unknown = [], []
    for finding in findings:
        reason = next((e for e in explanations if e.fits(tool, finding)), None)
        if reason is None:
            unknown.append(finding)
        else:
            explained.append((finding, reason))
    return explained, unknown
