"""The four APIs of conversations, as level 2 asks them: how a conversation is written, and how an answer is read.

OpenAI's chat completions and Responses, Anthropic's messages, Ollama's chat; each in one piece and as a stream. What an
answer must be is in `conversations.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TOOL, CALL_ID = "get_weather", "call_1"
CITIES = ["Oslo", "Paris", "Rome"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
_FUNCTION = {"name": TOOL, "description": "The weather in a city.", "parameters": SCHEMA}


class ChatTurn(NamedTuple):
    """One message of a conversation."""

    role: str  # system, user, assistant, call (of TOOL), result
    text: str


@dataclass(frozen=True)
class Spoken:
    """An answer of any API."""

    text: str
    calls: Sequence[tuple[str, Any]] = ()  # name, arguments as JSON text or as an object
    reasoning: str = ""
    finish: str = ""  # stop, length or call; another word of the engine's as it is
    prompt_tokens: int = 0  # that the engine counts; 0 where it does not say
    tokens: int = 0
    scores: Sequence[Any] = ()  # an entry for each token, as the API has it, where log probabilities were asked for


@dataclass(frozen=True)
class Api:
    """How an API is asked, and how its answer is read."""

    name: str
    path: str
    body: Callable[[Sequence[ChatTurn], int], dict[str, Any]]  # of a conversation, and the most tokens of its answer
    read: Callable[[Any], Spoken]
    read_stream: Callable[[str], tuple[Spoken, bool]]  # the answer, and whether the stream came to its end
    offer: Mapping[str, Any]  # what a body has more, to offer the tool
    required: Mapping[str, Any] = field(default_factory=dict)  # and to have it called; empty: the API cannot say so
    schema: Mapping[str, Any] = field(default_factory=dict)
    sampled: Callable[[int], Mapping[str, Any]] = lambda seed: {"temperature": 1.0}  # by this seed
    seeded: bool = False  # whether the API has seeds
    stop: Callable[[str], Mapping[str, Any]] | None = None  # to end an answer in front of a string
    scored: Mapping[str, Any] = field(default_factory=dict)  # to get log probabilities


FINISHES = {  # an API's word -> ours
    "tool_calls": "call", "tool_use": "call", "end_turn": "stop", "max_tokens": "length", "completed": "stop",
    "incomplete": "length", "stop_sequence": "stop",
}  # fmt: skip


def _finish(word: Any) -> str:
    return FINISHES.get(str(word or ""), str(word or ""))


def _instructions(turns: Sequence[ChatTurn], field_name: str) -> dict[str, Any]:
    """The system's message, in an API that has a field of its own for it."""
    texts = [turn.text for turn in turns if turn.role == "system"]
    return {field_name: "\n\n".join(texts)} if texts else {}


def _counts(usage: Any, prompt: Sequence[str], answer: str) -> tuple[int, int]:
    """Tokens of the prompt and of the answer, by an API's names of them."""
    usage = usage or {}
    return sum(int(usage.get(name) or 0) for name in prompt), int(usage.get(answer) or 0)


def _events(body: str) -> list[Any]:
    """The JSON of every event of a stream."""
    lines = [line[5:].strip() for line in body.split("\n") if line.startswith("data:")]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


# ---- OpenAI's chat completions ---------------------------------------------------------------------------------------


def _chat_message(turn: ChatTurn) -> dict[str, Any]:
    if turn.role == "call":
        call = {"id": CALL_ID, "type": "function", "function": {"name": TOOL, "arguments": turn.text}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if turn.role == "result":
        return {"role": "tool", "tool_call_id": CALL_ID, "content": turn.text}
    return {"role": turn.role, "content": turn.text}


def _chat_body(turns: Sequence[ChatTurn], tokens: int) -> dict[str, Any]:
    return {"messages": [_chat_message(t) for t in turns], "max_tokens": tokens, "temperature": 0}


def _reasoning(message: Mapping[str, Any]) -> str:
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def _chat(raw: Any) -> Spoken:
    choice = raw["choices"][0]
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    counts = _counts(raw.get("usage"), ("prompt_tokens",), "completion_tokens")
    finish = _finish(choice.get("finish_reason"))
    scores = (choice.get("logprobs") or {}).get("content") or ()
    return Spoken(message.get("content") or "", calls, _reasoning(message), finish, *counts, scores)


def _chat_stream(body: str) -> tuple[Spoken, bool]:
    text, reasoning, finish = "", "", ""
    calls: dict[int, list[str]] = {}
    for choice in (e["choices"][0] for e in _events(body) if e.get("choices")):
        delta = choice.get("delta") or {}
        text, reasoning = text + (delta.get("content") or ""), reasoning + _reasoning(delta)
        finish = choice.get("finish_reason") or finish
        for part in delta.get("tool_calls") or ():
            call, function = calls.setdefault(part["index"], ["", ""]), part.get("function") or {}
            call[0] += function.get("name") or ""
            call[1] += function.get("arguments") or ""
    spoken = Spoken(text, [(name, arguments) for name, arguments in calls.values()], reasoning, _finish(finish))
    return spoken, "data: [DONE]" in body


# ---- OpenAI's Responses ----------------------------------------------------------------------------------------------


def _responses_item(turn: ChatTurn) -> dict[str, Any]:
    if turn.role == "call":
        return {"type": "function_call", "call_id": CALL_ID, "name": TOOL, "arguments": turn.text}
    if turn.role == "result":
        return {"type": "function_call_output", "call_id": CALL_ID, "output": turn.text}
    return {"role": turn.role, "content": turn.text}


def _responses_body(turns: Sequence[ChatTurn], tokens: int) -> dict[str, Any]:
    items = [_responses_item(t) for t in turns if t.role != "system"]
    return {"input": items, **_instructions(turns, "instructions"), "max_output_tokens": tokens, "temperature": 0}


def _responses_finish(status: Any, calls: Sequence[Any]) -> str:
    finish = _finish(status)
    return "call" if calls and finish == "stop" else finish


def _responses(raw: Any) -> Spoken:
    parts = {kind: [p for item in raw["output"] if item["type"] == kind for p in item.get("content") or ()]
             for kind in ("message", "reasoning")}  # fmt: skip
    text, reasoning = ("".join(p.get("text", "") for p in parts[kind]) for kind in ("message", "reasoning"))
    calls = [(item["name"], item["arguments"]) for item in raw["output"] if item["type"] == "function_call"]
    counts = _counts(raw.get("usage"), ("input_tokens",), "output_tokens")
    return Spoken(text, calls, reasoning, _responses_finish(raw.get("status"), calls), *counts)


def _responses_stream(body: str) -> tuple[Spoken, bool]:
    """Text and arguments by their deltas, names by the items that were added."""
    events = _events(body)
    text, reasoning = (
        "".join(e["delta"] for e in events if e["type"] == f"response.{kind}_text.delta")
        for kind in ("output", "reasoning")
    )
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    deltas = [(e["item_id"], e["delta"]) for e in events if e["type"] == "response.function_call_arguments.delta"]
    calls = [
        (item["name"], "".join(delta for id, delta in deltas if id == item["id"]))
        for item in added
        if item["type"] == "function_call"
    ]
    last = str(events[-1]["type"]).removeprefix("response.") if events else ""
    return Spoken(text, calls, reasoning, _responses_finish(last, calls)), last in ("completed", "incomplete")


# ---- Anthropic's messages --------------------------------------------------------------------------------------------


def _anthropic_message(turn: ChatTurn) -> dict[str, Any]:
    if turn.role == "call":
        block = {"type": "tool_use", "id": CALL_ID, "name": TOOL, "input": json.loads(turn.text)}
        return {"role": "assistant", "content": [block]}
    if turn.role == "result":
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": CALL_ID, "content": turn.text}]}
    return {"role": turn.role, "content": turn.text}


def _anthropic_body(turns: Sequence[ChatTurn], tokens: int) -> dict[str, Any]:
    messages = [_anthropic_message(t) for t in turns if t.role != "system"]
    return {"messages": messages, **_instructions(turns, "system"), "max_tokens": tokens, "temperature": 0}


def _anthropic(raw: Any) -> Spoken:
    text, reasoning = ("".join(b[kind] for b in raw["content"] if b["type"] == kind) for kind in ("text", "thinking"))
    calls = [(b["name"], b["input"]) for b in raw["content"] if b["type"] == "tool_use"]
    read = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    counts = _counts(raw.get("usage"), read, "output_tokens")
    return Spoken(text, calls, reasoning, _finish(raw.get("stop_reason")), *counts)


def _anthropic_stream(body: str) -> tuple[Spoken, bool]:
    events = _events(body)
    deltas = [(e.get("index", 0), e["delta"]) for e in events if e["type"] == "content_block_delta"]
    calls = []
    for event in events:
        block = event.get("content_block") or {}
        if event["type"] == "content_block_start" and block.get("type") == "tool_use":
            parts = [delta.get("partial_json", "") for index, delta in deltas if index == event["index"]]
            calls.append((block["name"], "".join(parts)))
    text, reasoning = ("".join(delta.get(kind, "") for _, delta in deltas) for kind in ("text", "thinking"))
    ends = [e["delta"].get("stop_reason") for e in events if e["type"] == "message_delta"]
    spoken = Spoken(text, calls, reasoning, _finish(next(filter(None, ends), "")))
    return spoken, bool(events) and events[-1]["type"] == "message_stop"


# ---- Ollama's chat ---------------------------------------------------------------------------------------------------


def _ollama_message(turn: ChatTurn) -> dict[str, Any]:
    if turn.role == "call":
        call = {"function": {"name": TOOL, "arguments": json.loads(turn.text)}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if turn.role == "result":
        return {"role": "tool", "tool_name": TOOL, "content": turn.text}
    return {"role": turn.role, "content": turn.text}


def _ollama_body(turns: Sequence[ChatTurn], tokens: int) -> dict[str, Any]:
    options = {"temperature": 0, "num_predict": tokens}
    return {"messages": [_ollama_message(t) for t in turns], "stream": False, "options": options}


def _ollama(raw: Any) -> Spoken:
    message = raw.get("message") or {}
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    counts, finish = _counts(raw, ("prompt_eval_count",), "eval_count"), _finish(raw.get("done_reason"))
    return Spoken(message.get("content") or "", calls, message.get("thinking") or "", finish, *counts)


def _ollama_stream(body: str) -> tuple[Spoken, bool]:
    lines = [json.loads(line) for line in body.split("\n") if line.strip()]
    parts = [_ollama(line) for line in lines]
    text, reasoning = "".join(p.text for p in parts), "".join(p.reasoning for p in parts)
    spoken = Spoken(text, [c for p in parts for c in p.calls], reasoning, parts[-1].finish if parts else "")
    return spoken, bool(lines) and bool(lines[-1].get("done"))


# ---- all of them -----------------------------------------------------------------------------------------------------

_CHAT_TOOLS = {"tools": [{"type": "function", "function": _FUNCTION}]}
_JSON_SCHEMA = {"name": "city", "schema": SCHEMA, "strict": True}


def _seeded(seed: int) -> Mapping[str, Any]:
    return {"temperature": 1.0, "seed": seed}


APIS = (
    Api("chat completions", "/v1/chat/completions", _chat_body, _chat, _chat_stream, _CHAT_TOOLS,
        {"tool_choice": "required"}, {"response_format": {"type": "json_schema", "json_schema": _JSON_SCHEMA}},
        _seeded, True, lambda text: {"stop": [text]}, {"logprobs": True, "top_logprobs": 2}),
    Api("Responses", "/v1/responses", _responses_body, _responses, _responses_stream,
        {"tools": [{"type": "function", **_FUNCTION}]}, {"tool_choice": "required"},
        {"text": {"format": {"type": "json_schema", **_JSON_SCHEMA}}}),
    Api("Anthropic messages", "/v1/messages", _anthropic_body, _anthropic, _anthropic_stream,
        {"tools": [{"name": TOOL, "description": _FUNCTION["description"], "input_schema": SCHEMA}]},
        {"tool_choice": {"type": "any"}}, stop=lambda text: {"stop_sequences": [text]}),
    Api("Ollama chat", "/api/chat", _ollama_body, _ollama, _ollama_stream, _CHAT_TOOLS, {}, {"format": SCHEMA},
        lambda seed: {"options": _seeded(seed)}, True, lambda text: {"options": {"stop": [text]}}),
)  # fmt: skip
