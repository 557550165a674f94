"""Recorded sessions of agents: read from a file, replayed turn by turn with their growing prefix, tools and pauses.

A recording is a file of JSON lines. The first says what it is:

    {"format": "halfbyte.session/1", "about": "who was recorded, and when", "composed": "what was not recorded, if any",
     "tools": [ ...OpenAI's tool definitions... ]}

and every other line is one message of the conversation as /v1/chat/completions takes it, with what was measured of it:

    {"message": {"role": "user", "content": "…"}, "think_s": 0.0}
    {"message": {"role": "assistant", "content": "…", "tool_calls": [...]}, "tokens": 41}
    {"message": {"role": "tool", "tool_call_id": "call_1", "content": "…"}, "think_s": 0.8}

Every assistant message is a turn: the request holds all messages before it, comes `think_s` (of the last message before
it) after the answer to the one before, and asks for exactly `tokens` tokens. What the assistant said when it was
recorded stays in the conversation, whatever the engine under test says, so that every engine reads the same. A line
that does not fit is refused with its number; nothing is skipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.lab.receipts import PACKAGE
from halfbyte.lab.workloads.workload import CHAT, Session, Turn, Workload, repeated

FORMAT = "halfbyte.session/1"
SHIPPED = PACKAGE / "data" / "agent-session.jsonl"


@dataclass(frozen=True)
class Recording:
    about: str
    composed: str
    session: Session

    @property
    def shape(self) -> dict[str, Any]:
        return {"turns": len(self.session.turns), "tg": sum(t.tokens or 0 for t in self.session.turns)}


def read_recording(path: Path) -> Recording:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} cannot be read as a recorded session: {e}.") from None
    head = _line(path, 1, lines[0] if lines else "")
    if head.get("format") != FORMAT:
        raise UsageError(f"{path} is no recorded session: its first line does not say {FORMAT!r}.")
    tools = {"tools": head["tools"]} if head.get("tools") else {}
    messages: list[Mapping[str, Any]] = []
    turns: list[Turn] = []
    think = 0.0
    for number, text in enumerate(lines[1:], 2):
        line = _line(path, number, text)
        message = line.get("message")
        if not isinstance(message, dict) or message.get("role") not in (
            "system",
            "developer",
            "user",
            "assistant",
            "tool",
        ):
            raise UsageError(f"{path}, line {number}: there is no message with a role.")
        if message["role"] == "assistant":
            tokens = line.get("tokens")
            if not isinstance(tokens, int) or tokens < 1 or not messages:
                raise UsageError(f"{path}, line {number}: an assistant's message needs its number of tokens.")
            turns.append(Turn(CHAT, {"messages": list(messages), **tools}, tokens, think if turns else 0.0))
        think = line.get("think_s", 0.0)
        if not isinstance(think, int | float) or isinstance(think, bool) or not 0 <= think < 86400:
            raise UsageError(f"{path}, line {number}: think_s is {think!r}, which is no number of seconds.")
        messages.append(message)
    if not turns:
        raise UsageError(f"{path} records no answer of an assistant.")
    return Recording(str(head.get("about", "")), str(head.get("composed", "")), Session(tuple(turns)))


def _line(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict):
        raise UsageError(f"{path}, line {number} is no JSON object.")
    return line


def replay(path: Path | None = None, speed: float = 1.0, longest: int | None = None) -> Workload:
    """The recorded session; `speed` divides its pauses, `longest` keeps that many of its first turns."""
    if speed <= 0:
        raise UsageError("a recording is replayed at a speed above 0.")
    recording = read_recording(path or SHIPPED)
    turns = recording.session.turns[:longest]
    session = Session(tuple(Turn(t.path, t.body, t.tokens, t.think_s / speed) for t in turns))
    shape = {"turns": len(turns), "tg": sum(t.tokens or 0 for t in turns)} | ({"speed": speed} if speed != 1 else {})
    note = recording.about + (f" Composed: {recording.composed}" if recording.composed else "")
    return repeated([session], "replay", shape, note)
