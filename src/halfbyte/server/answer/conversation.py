"""One request, whatever API it came through, as what the engine and the harmony format need.

Endpoints build a `Turn`; `prepare` renders it, checks it against the context and says where a JSON answer begins.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from halfbyte.engine.request import Constraint, SamplingParams, SourceInfo
from halfbyte.errors import HalfbyteError
from halfbyte.harmony.messages import FINAL, DeveloperContent, Message, ReasoningEffort, SystemContent
from halfbyte.harmony.render import render_prompt
from halfbyte.harmony.stops import final_triggers
from halfbyte.harmony.vocabulary import Controls
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server.answer.tools import Choice, Toolbox
from halfbyte.server.http.errors import ApiError, bad
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


@dataclass(frozen=True)
class Format:
    """A structured answer: any JSON object (`schema` None) or one that fits a schema (JSON text)."""

    name: str = "json"
    schema: str | None = None
    description: str | None = None

    @property
    def source(self) -> str:
        return self.schema if self.schema is not None else '{"type":"object"}'


@dataclass
class Turn:
    api: str  # for the metrics: chat, responses, messages
    messages: list[Message]
    instructions: str | None = None
    tools: Toolbox = field(default_factory=Toolbox)
    choice: Choice = field(default_factory=Choice)
    parallel: bool = True
    effort: Effort = "medium"
    format: Format | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    begins: str | None = None  # what the answer must begin with; the client has that part already


@dataclass(frozen=True)
class Prepared:
    turn: Turn
    prompt: list[int]
    prefill: list[int]  # what the answer begins with, chosen for the model; the parser sees it too
    tools: Toolbox  # those the model was shown
    sampling: SamplingParams  # max_tokens within the context, no stop strings
    constraint: Constraint | None


class Dialect:
    """The words of harmony as token ids of one vocabulary, looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        c = self.controls = Controls.of(tokenizer)
        encode = tokenizer.encode
        self.assistant = encode("assistant")
        # A message has ended, or something began that a plain text cannot hold.
        self.structural = frozenset(
            (c.start, c.channel, c.message, c.constrain, c.end, c.return_, c.call, *tokenizer.eos_tokens)
        )
        self.analysis_header = [c.channel, *encode("analysis"), c.message]
        self.final_header = [c.channel, *encode(FINAL), c.message]
        self.final_headers = final_triggers(tokenizer)
        self.json_header = [c.channel, *encode(FINAL), *encode(" "), c.constrain, *encode("json"), c.message]
        assert tuple(self.json_header) in self.final_headers
        self.new_message = [c.end, c.start, *self.assistant]
        self.empty_reasoning = [*self.analysis_header, *self.new_message]

    def call_to(self, recipient: str) -> list[int]:
        """The rest of the header of a call, from `<|start|>assistant` on."""
        c, encode = self.controls, self.tokenizer.encode
        return [
            *encode(f" to={recipient}"),
            c.channel,
            *encode("commentary"),
            *encode(" "),
            c.constrain,
            *encode("json"),
            c.message,
        ]


def today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()


def conversation(turn: Turn, tools: Toolbox, settings: ServerSettings) -> list[Message]:
    """The messages with harmony's system and developer messages before them."""
    effort: ReasoningEffort = "low" if turn.effort == "none" else turn.effort
    system = SystemContent(
        reasoning_effort=effort,
        knowledge_cutoff=settings.knowledge_cutoff,
        conversation_start_date=settings.conversation_date or today(),
    )
    out = [Message.system(system)]
    instructions = turn.instructions or None
    if turn.format is not None:
        about = f"// {turn.format.description}\n" if turn.format.description else ""
        formats = f"# Response Formats\n\n## {turn.format.name}\n\n{about}{turn.format.source}"
        instructions = f"{instructions}\n\n{formats}" if instructions else formats
    if instructions or tools:
        out.append(Message.developer(DeveloperContent(instructions, tools.namespaces())))
    return out + turn.messages


def prepare(turn: Turn, dialect: Dialect, info: SourceInfo, settings: ServerSettings) -> Prepared:
    tools = turn.tools.restricted(turn.choice)
    try:
        prompt = render_prompt(dialect.tokenizer, conversation(turn, tools, settings))
    except HalfbyteError:
        raise
    except RecursionError:
        raise bad("a JSON schema in the request is nested too deeply to be shown to the model.", "tools") from None
    prefill: list[int] = []
    if turn.begins is not None:
        if turn.choice.mode == "required":
            raise bad("an answer that must begin with given text cannot be a required tool call.", "messages")
        prefill = [*dialect.final_header, *dialect.tokenizer.encode(turn.begins)]
    elif turn.effort == "none" and turn.choice.mode != "required":
        # Without tools the answer begins at once. With them the model must still choose, so it is shown that it
        # has already thought, about nothing.
        prefill = dialect.empty_reasoning if tools else (dialect.json_header if turn.format else dialect.final_header)
    constraint = None
    if turn.format is not None:
        constraint = Constraint(
            "json_object" if turn.format.schema is None else "json_schema",
            turn.format.source,
            triggers=dialect.final_headers,
            end_tokens=(dialect.controls.return_,),
        )
    sampling = replace(
        turn.sampling, stop=(), max_tokens=room(len(prompt) + len(prefill), turn.sampling.max_tokens, info)
    )
    return Prepared(turn, prompt, prefill, tools, sampling, constraint)


def room(prompt: int, wanted: int | None, info: SourceInfo) -> int:
    """How many tokens may follow. An answer that fits less than it asked for ends with the reason "length"."""
    left = info.max_context - prompt
    if left < 1:
        raise ApiError(
            400,
            f"The prompt has {prompt} tokens and this model holds {info.max_context} in all; shorten the conversation.",
            param="messages",
            code="context_length_exceeded",
        )
    return left if wanted is None else min(wanted, left)


def check_logit_bias(bias: dict[str, float] | None, info: SourceInfo) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit()) or int(key) >= info.vocab:
            raise bad(f"{key!r} is not a token id of this model (0 to {info.vocab - 1}).", "logit_bias")
        out[int(key)] = value
    return out


def stops(stop: str | Sequence[str] | None, param: str = "stop", most: int = 16) -> tuple[str, ...]:
    found = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(found) > most:
        raise bad(f"at most {most} stop strings are taken.", param)
    if any(not s for s in found):
        raise bad("a stop string cannot be empty.", param)
    return tuple(dict.fromkeys(found))
