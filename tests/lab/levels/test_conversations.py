"""Level 2's conversations over every API: an honest engine passes, and each fault is found by its check."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from halfbyte.errors import AskError
from halfbyte.lab.levels.chat_apis import APIS, TOOL, Api, Spoken
from halfbyte.lab.levels.conversations import FEW, QUESTIONS, SCHEMA_QUESTION, TOOL_QUESTION, conversation_checks
from halfbyte.lab.peers.asker import Asker

ANSWERS = {question: f"It is {answer}." for question, answer in QUESTIONS}
CHAT, RESPONSES, ANTHROPIC, OLLAMA = (api.path for api in APIS)
WORDS = {  # ours -> an API's
    CHAT: {"call": "tool_calls"}, RESPONSES: {"stop": "completed", "call": "completed", "length": "incomplete"},
    ANTHROPIC: {"stop": "end_turn", "call": "tool_use", "length": "max_tokens"}, OLLAMA: {},
}  # fmt: skip


@dataclass
class Scripted(Asker):
    """Answers every conversation over every API, or over one; `fault` is what it gets wrong."""

    fault: str = ""
    only: str = ""
    _model: str = "scripted"

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        if self.only and path != self.only:
            raise AskError("HTTP 404: no such API")
        if self.fault == "refuses tools" and "tools" in body:
            raise AskError("HTTP 400: no tools")
        spoken = self.speak(list(body.get("messages") or body["input"]), body)
        return self.stream(path, spoken) if body.get("stream") else whole(path, spoken)

    def speak(self, messages: list[Any], body: Mapping[str, Any]) -> Spoken:
        system = bool("system" in body or "instructions" in body or messages[0].get("role") == "system")
        last, before = text_of(messages[-1]), [text_of(m) for m in messages[:-1]]
        if FEW in (body.get("max_tokens"), body.get("max_output_tokens"), body.get("options", {}).get("num_predict")):
            return Spoken("", finish="stop" if self.fault == "cut ends with stop" else "length")
        if last == TOOL_QUESTION:
            finish = "stop" if self.fault == "calls end with stop" else "call"
            return Spoken("", [(TOOL, '{"city": "Paris"}')], finish=finish)
        if last == SCHEMA_QUESTION:
            return Spoken('{"city": "Oslo"}', finish="stop")
        if last == "What is my name?":
            told = "" if self.fault == "forgets" or not before else before[0]
            return Spoken(f"{told} It is yours.", finish="stop")
        if "21" in last:
            return Spoken("It rains." if self.fault == "ignores results" else f"It is {last}.", finish="stop")
        answer = ANSWERS[last]
        if system and self.fault != "ignores instructions":
            answer = answer.removeprefix("It is ")
        if self.fault == "leaks":
            answer = f"<|channel|>{answer}"
        return Spoken(answer, reasoning="I add.", finish="stop")

    def stream(self, path: str, spoken: Spoken) -> str:
        """Every text in two pieces."""
        if self.fault == "streams lose text":
            spoken = replace(spoken, text=spoken.text[3:])
        if self.fault == "streams lose reasoning":
            spoken = replace(spoken, reasoning=spoken.reasoning[2:])
        if self.fault == "streams lose arguments":
            spoken = replace(
                spoken, calls=[(name, arguments.replace("Paris", "Par")) for name, arguments in spoken.calls]
            )
        lines = [*streamed(path, spoken)]
        if self.fault == "streams are cut":
            lines.pop()
        return "".join(f"{line}\n" if path == OLLAMA else f"data: {line}\n\n" for line in lines)


def text_of(message: Any) -> str:
    """What a message of any API says."""
    content = message.get("content") or message.get("output") or ""
    return content if isinstance(content, str) else str(content[0].get("content", ""))


def whole(path: str, s: Spoken) -> Any:
    finish = WORDS[path].get(s.finish, s.finish)
    calls = [{"id": "1", "function": {"name": n, "arguments": a}} for n, a in s.calls]
    if path == CHAT:
        message = {"content": s.text, "reasoning_content": s.reasoning, "tool_calls": calls}
        return {"choices": [{"message": message, "finish_reason": finish}]}
    if path == RESPONSES:
        items = [{"type": "function_call", "id": "1", "name": n, "arguments": a} for n, a in s.calls]
        said = [("reasoning", s.reasoning), ("message", s.text)]
        return {"status": finish, "output": [*({"type": k, "content": [{"text": t}]} for k, t in said), *items]}
    if path == ANTHROPIC:
        used = [{"type": "tool_use", "name": n, "input": json.loads(a)} for n, a in s.calls]
        said = [{"type": "thinking", "thinking": s.reasoning}, {"type": "text", "text": s.text}]
        return {"content": [*said, *used], "stop_reason": finish}
    message = {"content": s.text, "thinking": s.reasoning, "tool_calls": calls}
    return {"message": message, "done": True, "done_reason": finish}


def streamed(path: str, s: Spoken) -> list[str]:
    finish = WORDS[path].get(s.finish, s.finish)
    events: list[Any] = []
    if path == CHAT:
        deltas: list[Any] = [{"reasoning_content": part} for part in halves(s.reasoning)]
        deltas += [{"content": part} for part in halves(s.text)]
        for name, arguments in s.calls:
            deltas.append({"tool_calls": [{"index": 0, "id": "1", "function": {"name": name, "arguments": ""}}]})
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in halves(arguments)]
        events = [{"choices": [{"delta": delta}]} for delta in deltas]
        events.append({"choices": [{"delta": {}, "finish_reason": finish}]})
        return [*map(json.dumps, events), "[DONE]"]
    if path == RESPONSES:
        events = [{"type": "response.reasoning_text.delta", "delta": part} for part in halves(s.reasoning)]
        events += [{"type": "response.output_text.delta", "delta": part} for part in halves(s.text)]
        for name, arguments in s.calls:
            item = {"type": "function_call", "id": "1", "name": name}
            events.append({"type": "response.output_item.added", "item": item})
            kind = "response.function_call_arguments.delta"
            events += [{"type": kind, "item_id": "1", "delta": part} for part in halves(arguments)]
        return [*map(json.dumps, events), json.dumps({"type": f"response.{finish}"})]
    if path == ANTHROPIC:
        deltas = [{"type": "thinking_delta", "thinking": part} for part in halves(s.reasoning)]
        deltas += [{"type": "text_delta", "text": part} for part in halves(s.text)]
        events = [{"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas]
        for name, arguments in s.calls:
            events.append(
                {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": name}}
            )
            parts = [{"type": "input_json_delta", "partial_json": part} for part in halves(arguments)]
            events += [{"type": "content_block_delta", "index": 1, "delta": part} for part in parts]
        events.append({"type": "message_delta", "delta": {"stop_reason": finish}})
        return [*map(json.dumps, events), json.dumps({"type": "message_stop"})]
    events = [{"message": {"thinking": part}, "done": False} for part in halves(s.reasoning)]
    events += [{"message": {"content": part}, "done": False} for part in halves(s.text)]
    return [*map(json.dumps, events), json.dumps({"done": True, "done_reason": finish})]


def halves(text: str) -> list[str]:
    return [part for part in (text[: len(text) // 2], text[len(text) // 2 :]) if part]


def failures(asker: Asker, gaps: list[str] | None = None) -> dict[str, str]:
    """The checks that fail, with their notes."""
    return {c.what: c.note for c in conversation_checks(asker, [] if gaps is None else gaps) if not c.ok}


def test_every_api_of_an_honest_engine_passes() -> None:
    gaps: list[str] = []
    checks = conversation_checks(Scripted(), gaps)
    assert {c.what: c.note for c in checks if not c.ok} == {}
    assert not gaps
    for api in APIS:
        count = sum(c.what.startswith(f"{api.name}: ") for c in checks)
        assert count == 7 + 2 * bool(api.required) + bool(api.schema)


@pytest.mark.parametrize("api", APIS, ids=[api.name for api in APIS])
@pytest.mark.parametrize(
    ("fault", "check", "says"),
    [
        ("streams lose text", "a stream is its answer", "text 'is 42.' instead of 'It is 42.'"),
        ("streams lose reasoning", "a stream is its answer", "reasoning 'add.' instead of 'I add.'"),
        ("streams are cut", "a stream is its answer", "no end"),
        ("streams lose arguments", "a streamed call is its call", "calls \"[('get_weather', {'city': 'Par'})]\""),
        ("calls end with stop", "a required tool is called", "ended with 'stop'"),
        ("cut ends with stop", "an answer that is cut off says so", "an answer of 4 tokens ended with 'stop'"),
        ("forgets", "earlier turns are read", "for Anna"),
        ("ignores instructions", "instructions are read", "instead of '42'"),
        ("ignores results", "a tool's result is read", "'It rains.' after 'Sunny, 21 degrees'"),
        ("leaks", "texts without control tokens", "<|channel|>"),
    ],
)
def test_each_fault_is_found(api: Api, fault: str, check: str, says: str) -> None:
    wrong = failures(Scripted(fault, only=api.path))
    if ("arguments" in fault or "calls" in fault) and not api.required:
        assert not wrong  # nothing can be required over Ollama's API
    elif fault == "calls end with stop" and api.path == RESPONSES:
        assert not wrong  # it has no word for an answer that ends with a call
    else:
        assert says in wrong[f"{api.name}: {check}"]


def test_what_an_engine_refuses_is_named() -> None:
    gaps: list[str] = []
    assert not failures(Scripted("refuses tools", only=CHAT), gaps)
    assert [gap.partition(", which")[0] for gap in gaps] == [
        f"chat completions: the engine refuses {what}"
        for what in ("a required tool", "a streamed call", "a tool's result")
    ]
