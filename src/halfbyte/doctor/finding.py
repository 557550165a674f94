"""A finding, and the list of checks that make findings.

A check is a function of a machine and a purpose. It is registered with its id and a line that says what it looks at;
docs/doctor.md has the same table, held to this one by a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from halfbyte.doctor.machine import Machine

SEVERITIES = ("note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    severity: str  # note: worth knowing; warning: slower or riskier than need be; error: it will not serve
    evidence: str  # what was seen, with numbers
    fix: str  # one sentence
    commands: tuple[str, ...] = ()  # for --fix to print; never run
    id: str = ""  # the check's; `diagnose` sets it

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity


@dataclass(frozen=True)
class Purpose:
    """What the machine will be used for."""

    model: str | None = None
    port: int = 8000
    cluster: bool = False
    max_context: int | None = None
    peers: tuple[Machine, ...] = field(default=())  # the other machines of the cluster


Judge = Callable[[Machine, Purpose], Iterable[Finding]]


@dataclass(frozen=True)
class MachineCheck:
    id: str
    worst: str  # the worst severity that it can have
    looks_at: str
    judge: Judge
    cluster: bool = False  # only with --cluster


CHECKS: dict[str, MachineCheck] = {}


def check(id: str, worst: str, looks_at: str, *, cluster: bool = False) -> Callable[[Judge], Judge]:
    assert worst in SEVERITIES, worst
    assert id not in CHECKS, id

    def register(judge: Judge) -> Judge:
        CHECKS[id] = MachineCheck(id, worst, looks_at, judge, cluster)
        return judge

    return register


def table() -> Iterator[str]:
    """The checks as lines of Markdown."""
    yield "| id | at worst | looks at |"
    yield "|---|---|---|"
    for c in CHECKS.values():
        yield f"| `{c.id}` | {c.worst} | {c.looks_at}{' (with `--cluster`)' if c.cluster else ''} |"
