"""One request, whatever API it came through: what is said, with which tools, and how the answer shall look.

Endpoints build a `Conversation`; `prompt.py` turns it into tokens. Nothing here knows tokens or bodies of an API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from halfbyte.engine.request import SamplingParams, SourceInfo
from halfbyte.harmony.messages import Message
from halfbyte.server.answer.tools import Toolbox, ToolChoice
from halfbyte.server.http.errors import bad_request
from halfbyte.server.settings import Effort

# Every effort a client may ask for, and what the model was trained on. "none" also skips the reasoning message.
EFFORTS: dict[str, Effort] = {
    "none": "none",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


@dataclass(frozen=True)
class AnswerFormat:
    """What the answer must look like: JSON (`source` is a schema), a regular expression, a grammar."""

    kind: Literal["json_object", "json_schema", "regex", "ebnf"]
    source: str
    name: str = "json"
    description: str | None = None
    field: str = "response_format"  # what the API that was called has it in: errors name it

    @property
    def is_json(self) -> bool:
        return self.kind in ("json_object", "json_schema")


def json_answer(
    schema: str | None, name: str = "json", description: str | None = None, *, field: str = "response_format"
) -> AnswerFormat:
    """Any JSON object (`schema` None) or one that fits a schema (JSON text)."""
    if schema is None:
        return AnswerFormat("json_object", '{"type":"object"}', name, description, field)
    return AnswerFormat("json_schema", schema, name, description, field)


@dataclass
class Conversation:
    api: str  # for the metrics: chat, responses, messages, ollama
    messages: list[Message]
    instructions: str | None = None
    tools: Toolbox = field(default_factory=Toolbox)
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_calls: bool = True
    effort: Effort = "medium"
    format: AnswerFormat | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_strings: tuple[str, ...] = ()
    opening: str | None = None  # what the answer must begin with; the client has that part already
    identity: str | None = None  # who the model is told it is, where not what it was trained on
    input_field: str = "messages"  # what the API that was called has them in: errors name it


def check_logit_bias(bias: dict[str, float] | None, info: SourceInfo) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit()) or int(key) >= info.vocab:
            raise bad_request(f"{key!r} is not a token id of this model (0 to {info.vocab - 1}).", "logit_bias")
        out[int(key)] = value
    return out


def check_stop_strings(stop: str | Sequence[str] | None, param: str = "stop", most: int = 16) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > most:
        raise bad_request(f"at most {most} stop strings are taken.", param)
    if any(not s for s in strings):
        raise bad_request("a stop string cannot be empty.", param)
    return tuple(dict.fromkeys(strings))
