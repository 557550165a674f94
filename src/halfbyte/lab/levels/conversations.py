"""Conversations over every API that an engine offers: OpenAI's chat completions and Responses, Anthropic, Ollama.

Questions with known answers, a tool that must be called, and an answer that must fit a JSON schema. Whatever the API,
no control token of harmony may stand in a text. An API that the engine does not have (404) is left out, and so is a
feature that it refuses (400, 422, 501); both are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from halfbyte.errors import AskError
from halfbyte.lab.peers.asker import Asker
from halfbyte.lab.result import Check

TOKENS = 320
QUESTIONS = (("what is 17+25?", "42"), ("what is 9+8?", "17"), ("what is 40+30?", "70"), ("what is 12-5?", "7"))
RIGHT = 3  # of the questions, at least
MISSING, REFUSED = ("HTTP 404", "HTTP 405"), ("HTTP 400", "HTTP 422", "HTTP 501")
TOOL = "get_weather"
CITIES = ["Oslo", "Paris", "Rome"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL_QUESTION, SCHEMA_QUESTION = "What is the weather in Paris?", "Name a city as JSON with the key city."
_FUNCTION = {"name": TOOL, "description": "The weather in a city.", "parameters": SCHEMA}


@dataclass(frozen=True)
class Spoken:
    """An answer of any API."""

    text: str
    calls: list[tuple[str, Any]] = field(default_factory=list)  # name, arguments as JSON text or as an object
    reasoning: str = ""


@dataclass(frozen=True)
class Api:
    """How an API is asked, and how its answer is read."""

    name: str
    path: str
    body: Callable[[str, str], dict[str, Any]]  # of a model and a question
    read: Callable[[Any], Spoken]
    read_stream: Callable[[str], tuple[str, bool]]  # the text of a stream, and whether it came to its end
    tool: Mapping[str, Any] = field(default_factory=dict)  # what a body has more, to have the tool called
    schema: Mapping[str, Any] = field(default_factory=dict)


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _chat(raw: Any) -> Spoken:
    message = raw["choices"][0]["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return Spoken(message.get("content") or "", calls, str(reasoning))


def _responses(raw: Any) -> Spoken:
    parts = [p for item in raw["output"] if item["type"] == "message" for p in item["content"]]
    calls = [(item["name"], item["arguments"]) for item in raw["output"] if item["type"] == "function_call"]
    return Spoken("".join(p.get("text", "") for p in parts), calls)


def _anthropic(raw: Any) -> Spoken:
    text = "".join(b["text"] for b in raw["content"] if b["type"] == "text")
    return Spoken(text, [(b["name"], b["input"]) for b in raw["content"] if b["type"] == "tool_use"])


def _events(body: str) -> list[Any]:
    """The JSON of every event of a stream."""
    lines = [line[5:].strip() for line in body.split("\n") if line.startswith("data:")]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def _chat_stream(body: str) -> tuple[str, bool]:
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in _events(body) if e.get("choices"))
    return text, "data: [DONE]" in body


def _responses_stream(body: str) -> tuple[str, bool]:
    events = _events(body)
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    return text, bool(events) and events[-1]["type"] == "response.completed"


def _anthropic_stream(body: str) -> tuple[str, bool]:
    events = _events(body)
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    return "".join(d.get("text", "") for d in deltas), bool(events) and events[-1]["type"] == "message_stop"


def _ollama_stream(body: str) -> tuple[str, bool]:
    lines = [json.loads(line) for line in body.split("\n") if line.strip()]
    text = "".join((e.get("message") or {}).get("content") or "" for e in lines)
    return text, bool(lines) and bool(lines[-1].get("done"))


def _ollama(raw: Any) -> Spoken:
    message = raw["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return Spoken(message.get("content") or "", calls, message.get("thinking") or "")


APIS = (
    Api("chat completions", "/v1/chat/completions",
        lambda model, q: {"model": model, "messages": _messages(q), "max_tokens": TOKENS, "temperature": 0}, _chat,
        _chat_stream, {"tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA,
                                                                     "strict": True}}}),
    Api("Responses", "/v1/responses",
        lambda model, q: {"model": model, "input": _messages(q), "max_output_tokens": TOKENS, "temperature": 0},
        _responses, _responses_stream, {"tools": [{"type": "function", **_FUNCTION}], "tool_choice": "required"},
        {"text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}}),
    Api("Anthropic messages", "/v1/messages",
        lambda model, q: {"model": model, "messages": _messages(q), "max_tokens": TOKENS, "temperature": 0}, _anthropic,
        _anthropic_stream, {"tools": [{"name": TOOL, "description": _FUNCTION["description"], "input_schema": SCHEMA}],
         "tool_choice": {"type": "any"}}),
    Api("Ollama chat", "/api/chat",
        lambda model, q: {"model": model, "messages": _messages(q), "stream": False,
                          "options": {"temperature": 0, "num_predict": TOKENS}}, _ollama,
        _ollama_stream, {}, {"format": SCHEMA}),
)  # fmt: skip


def conversation_checks(asker: Asker, gaps: list[str], *, judged: bool = True) -> list[Check]:
    """Checks of every API; `gaps` gets a sentence for each feature that the engine refuses. Unless `judged`, answers to
    questions need not be right (a model of random weights)."""
    checks: list[Check] = []
    for api in APIS:
        try:
            answers = [talk(asker, api, question) for question, _ in QUESTIONS]
        except AskError as e:
            if str(e).startswith(MISSING):
                continue
            if not str(e).startswith(REFUSED):
                raise
            gaps.append(f"{api.name}: the engine refuses a question, so that the API was not judged ({str(e)[:120]}).")
            continue
        right = sum(a in _numbers(s.text) for (_, a), s in zip(QUESTIONS, answers))
        if judged:
            wrong = next((s.text for (_, a), s in zip(QUESTIONS, answers) if a not in _numbers(s.text)), "")
            note = f"for example {wrong[:60]!r}" if right < len(QUESTIONS) else ""
            checks.append(Check(f"{api.name}: right answers", right >= RIGHT, right, RIGHT, note))
        checks.append(control_check(api.name, answers))
        checks.append(stream_check(asker, api, answers[0]))
        for title, more, question, check in (
            ("a required tool", api.tool, TOOL_QUESTION, tool_check),
            ("a JSON schema", api.schema, SCHEMA_QUESTION, schema_check),
        ):
            if not more:
                continue
            try:
                checks.append(check(api.name, talk(asker, api, question, more)))
            except AskError as e:
                if not str(e).startswith(REFUSED):
                    raise
                gaps.append(f"{api.name}: the engine refuses {title}, which was not judged ({str(e)[:120]}).")
    return checks


def talk(asker: Asker, api: Api, question: str, more: Mapping[str, Any] | None = None) -> Spoken:
    raw = asker.post(api.path, api.body(asker.model, question) | dict(more or {}))
    try:
        return api.read(raw)
    except (LookupError, TypeError, AttributeError) as e:
        raise AskError(f"{api.path}: not an answer of this API ({type(e).__name__}: {e}): {str(raw)[:200]}") from None


def _numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text.replace(",", ""))


def control_check(name: str, answers: list[Spoken]) -> Check:
    leaks = [s for s in answers if "<|" in s.text + s.reasoning or not s.text.strip()]
    note = f"for example {(leaks[0].text or leaks[0].reasoning)[:60]!r}" if leaks else ""
    return Check(f"{name}: texts without control tokens", not leaks, len(leaks), 0, note)


def stream_check(asker: Asker, api: Api, complete: Spoken) -> Check:
    """The deltas of a stream, joined, against the answer in one piece."""
    body = asker.post(api.path, api.body(asker.model, QUESTIONS[0][0]) | {"stream": True})
    try:
        text, ended = api.read_stream(body)
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        text, ended = f"({type(e).__name__}: {e})", False
    note = "" if ended else "the stream has no end"
    if text != complete.text:
        note = f"{text[:40]!r} instead of {complete.text[:40]!r}"
    return Check(f"{api.name}: a stream is its answer", ended and text == complete.text, note=note)


def tool_check(name: str, spoken: Spoken) -> Check:
    problem = ""
    if not spoken.calls:
        problem = f"no call: {spoken.text[:60]!r}"
    elif spoken.calls[0][0] != TOOL:
        problem = f"called {spoken.calls[0][0]!r}"
    else:
        problem = misfit(spoken.calls[0][1])
    return Check(f"{name}: a required tool is called", not problem, note=problem)


def schema_check(name: str, spoken: Spoken) -> Check:
    problem = misfit(spoken.text)
    return Check(f"{name}: an answer fits its schema", not problem, note=problem)


def misfit(value: Any) -> str:
    """How JSON text, or a value, does not fit SCHEMA; empty if it does."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return f"not JSON: {value[:60]!r}"
    if not isinstance(value, dict) or set(value) != {"city"} or value["city"] not in CITIES:
        return f"not as the schema has it: {str(value)[:60]}"
    return ""
