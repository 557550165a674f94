"""The one door to a machine: whatever the doctor knows, it asked here, and every answer can be written down.

Questions have a kind and a name, answers are JSON. A live machine answers from files and programs (`live.py`), a
recorded one from what another said; the checks cannot tell which. A question that nobody can answer has the answer
None, and a record says so, too: `unanswered` lists what a record was never asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError

SCHEMA = 1
LABELS = ("recorded", "composed")
Answer = Any  # JSON
Source = Callable[[str, str], Answer]


class Machine:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.answers: dict[str, dict[str, Answer]] = {}
        self.unanswered: list[str] = []

    def ask(self, kind: str, name: str = "") -> Answer:
        """Asked once, so that all checks see one machine."""
        known = self.answers.setdefault(kind, {})
        if name not in known:
            known[name] = self.source(kind, name)
        return known[name]

    def record(self, about: str) -> dict[str, Any]:
        """Everything that was asked so far, to be replayed elsewhere."""
        return {"schema": SCHEMA, "label": "recorded", "about": about, "answers": self.answers}

    # ---- questions, by name ------------------------------------------------------------------------------------------

    def file(self, path: str) -> str | None:
        """The text of a file of the kernel's; None if it is not there or not to be read."""
        found = self.ask("file", path)
        return None if found is None else str(found)

    def folder(self, path: str) -> list[str]:
        return list(self.ask("folder", path) or ())

    def command(self, line: str) -> dict[str, Any] | None:
        """{"status", "output"} of a program that only looks; None if it is not installed."""
        found = self.ask("command", line)
        return None if found is None else dict(found)

    def output(self, line: str) -> str:
        """Of a command that succeeded, else nothing."""
        found = self.command(line)
        return str(found["output"]) if found is not None and found["status"] == 0 else ""

    def variables(self) -> dict[str, str]:
        return dict(self.ask("variables") or {})

    def packages(self) -> dict[str, str]:
        """Name -> version of those that matter here and are installed."""
        return dict(self.ask("packages") or {})

    def program(self, name: str) -> str | None:
        found = self.ask("program", name)
        return None if found is None else str(found)


def from_record(record: dict[str, Any], *, where: str = "the record") -> Machine:
    """A machine that answers as the recorded one did. What it was never asked is None, and listed."""
    if record.get("schema") != SCHEMA or not isinstance(record.get("answers"), dict):
        raise UsageError(f"{where} is no record of a machine; make one with `halfbyte doctor --record FILE`.")
    answers: dict[str, dict[str, Answer]] = record["answers"]

    def answer(kind: str, name: str) -> Answer:
        known = answers.get(kind, {})
        if name not in known:
            machine.unanswered.append(f"{kind} {name}".strip())
        return known.get(name)

    machine = Machine(answer)
    return machine


def read_records(path: Path) -> list[Machine]:
    """The machines of a file: one, or several of a cluster, the first of which is looked at."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} cannot be read as a record of a machine ({e}).") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is no record of a machine; make one with `halfbyte doctor --record FILE`.")
    folder = path.parent
    records = content.get("machines") or [content]
    return [from_record(composed(r, folder), where=str(path)) for r in records]


def composed(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A record that says only how it differs from another one (`base`, a file beside it), with the other's answers."""
    base = record.get("base")
    if base is None:
        return record
    other = composed(json.loads((folder / base).read_text(encoding="utf-8")), folder)
    merged = {kind: dict(known) for kind, known in other["answers"].items()}
    for kind, known in record["answers"].items():
        for name, answer in known.items():
            before = merged.setdefault(kind, {}).get(name)
            if isinstance(answer, dict) and isinstance(before, dict) and kind in ("variables", "packages", "imports"):
                answer = {k: v for k, v in {**before, **answer}.items() if v is not None}
            merged[kind][name] = answer
    return {**record, "answers": merged}
