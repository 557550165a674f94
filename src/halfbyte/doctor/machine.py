"""The only access to a machine: every fact the doctor uses is asked for here, and every answer can be recorded.

A question has a kind and a name; an answer is JSON. A live machine answers from files and programs (`live.py`), a
recorded one from its record, and the checks cannot tell the difference. A question without an answer returns None.
`unanswered` lists the questions that a record does not contain.
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
        """The answer to a question. It is asked once, so that all checks see the same machine."""
        answers = self.answers.setdefault(kind, {})
        if name not in answers:
            answers[name] = self.source(kind, name)
        return answers[name]

    def record(self, about: str) -> dict[str, Any]:
        """All questions and answers so far, to be replayed elsewhere."""
        return {"schema": SCHEMA, "label": "recorded", "about": about, "answers": self.answers}

    # ---- questions, by name ------------------------------------------------------------------------------------------

    def file(self, path: str) -> str | None:
        """The text of a file under /proc or /sys; None if it is missing or unreadable."""
        text = self.ask("file", path)
        return None if text is None else str(text)

    def folder(self, path: str) -> list[str]:
        return list(self.ask("folder", path) or ())

    def command(self, line: str) -> dict[str, Any] | None:
        """{"status", "output"} of a read-only program; None if it is not installed."""
        result = self.ask("command", line)
        return None if result is None else dict(result)

    def output(self, line: str) -> str:
        """The output of a command that succeeded, else an empty string."""
        result = self.command(line)
        return str(result["output"]) if result is not None and result["status"] == 0 else ""

    def variables(self) -> dict[str, str]:
        return dict(self.ask("variables") or {})

    def packages(self) -> dict[str, str]:
        """Name -> version of the installed packages that matter here."""
        return dict(self.ask("packages") or {})

    def program(self, name: str) -> str | None:
        path = self.ask("program", name)
        return None if path is None else str(path)


def from_record(record: dict[str, Any], *, where: str = "the record") -> Machine:
    """A machine that answers from a record. Questions missing from it return None and are listed in `unanswered`."""
    if record.get("schema") != SCHEMA or not isinstance(record.get("answers"), dict):
        raise UsageError(f"{where} is not a machine record; make one with `halfbyte doctor --record FILE`.")
    answers: dict[str, dict[str, Answer]] = record["answers"]

    def answer(kind: str, name: str) -> Answer:
        answers_of_kind = answers.get(kind, {})
        if name not in answers_of_kind:
            machine.unanswered.append(f"{kind} {name}".strip())
        return answers_of_kind.get(name)

    machine = Machine(answer)
    return machine


def read_records(path: Path) -> list[Machine]:
    """The machines recorded in a file: one, or those of a cluster, of which the first is examined."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} cannot be read as a machine record ({e}).") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a machine record; make one with `halfbyte doctor --record FILE`.")
    folder = path.parent
    records = content.get("machines") or [content]
    return [from_record(composed(r, folder), where=str(path)) for r in records]


def composed(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A complete record from one that lists only its differences from another (`base`, a file in the same folder)."""
    base = record.get("base")
    if base is None:
        return record
    other = composed(json.loads((folder / base).read_text(encoding="utf-8")), folder)
    merged = {kind: dict(other_answers) for kind, other_answers in other["answers"].items()}
    for kind, other_answers in record["answers"].items():
        for name, answer in other_answers.items():
            before = merged.setdefault(kind, {}).get(name)
            if isinstance(answer, dict) and isinstance(before, dict) and kind in ("variables", "packages", "imports"):
                answer = {k: v for k, v in {**before, **answer}.items() if v is not None}
            merged[kind][name] = answer
    return {**record, "answers": merged}
