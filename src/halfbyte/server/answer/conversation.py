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
from halfbyte.server.settings import Effort, ServerSettings

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


MOST_STOPS, LONGEST_STOP = 16, 1024  # stop strings of a request, characters of each


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
    max_reasoning_tokens: int | None = None  # None: as many as the model writes
    format: AnswerFormat | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_strings: tuple[str, ...] = ()
    opening: str | None = None  # what the answer must begin with; the client has that part already
    opens_with_reasoning: bool = False  # the opening is reasoning, not yet the answer
    identity: str | None = None  # who the model is told it is, where not what it was trained on
    owner: str = ""  # whose key the request came with
    input_field: str = "messages"  # what the API that was called has them in: errors name it

    @property
    def reasoning_limit(self) -> int | None:
        """The most tokens of reasoning; None: no limit."""
        return 0 if self.effort == "none" else self.max_reasoning_tokens


def check_logit_bias(bias: dict[str, float] | None, info: SourceInfo) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in (bias or {}).items():
        # Longer ones than any id are not even read as numbers: Python refuses that beyond 4,300 digits.
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= info.vocab:
            beginning = key if len(key) <= 20 else f"{key[:20]}..."
            raise bad_request(f"{beginning!r} is not a token id of this model (0 to {info.vocab - 1}).", "logit_bias")
        out[int(key)] = value
    return out


def reasoning_limit(settings: ServerSettings, *limits: int | None) -> int | None:
    """The first of a request's limits on reasoning that is set, else the server's. None, in a request -1: no limit."""
    limit = next((tokens for tokens in limits if tokens is not None), settings.max_reasoning_tokens)
    return None if limit == -1 else limit


def check_stop_strings(stop: str | Sequence[str] | None, param: str = "stop") -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MOST_STOPS:
        raise bad_request(f"at most {MOST_STOPS} stop strings are taken.", param)
    if any(len(s) > LONGEST_STOP for s in strings):
        raise bad_request(f"a stop string has more than {LONGEST_STOP} characters; shorten it.", param)
    if any(not s for s in strings):
        raise bad_request("a stop string cannot be empty.", param)
    return tuple(dict.fromkeys(strings))
