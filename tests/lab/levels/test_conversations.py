"""Level 2's conversations over every API: an honest engine passes, and each fault is found by its check."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from halfbyte.errors import AskError
from halfbyte.lab.levels.chat_apis import APIS, TOOL, Api, Spoken
from halfbyte.lab.levels.conversations import (
    CUTS,
    OPEN_QUESTION,
    QUESTIONS,
    RESULT,
    SCHEMA_QUESTION,
    TOOL_QUESTION,
    conversation_checks,
)
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
    sampled: int = 0  # answers so far
    _model: str = "scripted"

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        if self.only and path != self.only:
            raise AskError("HTTP 404: no such API")
        if self.fault == "refuses tools" and "tools" in body:
            raise AskError("HTTP 400: no tools")
        spoken = self.read(list(body.get("messages") or body["input"]), body)
        return self.stream(path, spoken) if body.get("stream") else whole(path, spoken)

    def read(self, messages: list[Any], body: Mapping[str, Any]) -> Spoken:
        """The answer with its counts, up to its limit or a stop string. A word is a token."""
        settings = {**body, **body.get("options", {})}
        limit = settings.get("max_tokens") or settings.get("max_output_tokens") or settings["num_predict"]
        last, sampled = text_of(messages[-1]), settings["temperature"] > 0 and self.fault != "ignores the temperature"
        if last.endswith(OPEN_QUESTION):
            self.sampled += sampled
            seed = settings.get("seed", self.sampled)
            seed = self.sampled if self.fault == "ignores the seed" else seed
            spoken = Spoken(f"green, eight, door, {'glove' * seed if sampled else 'coat'}", finish="stop")
        else:
            spoken = self.speak(messages, body)
        read = 9 + sum(words(text_of(message)) for message in messages)
        tokens = words(spoken.text) + words(spoken.reasoning)
        if limit in CUTS:
            tokens = limit
            if last != OPEN_QUESTION:
                spoken = Spoken("", finish="stop" if self.fault == "cut ends with stop" else "length")
        stops = [*(settings.get("stop") or ()), *(settings.get("stop_sequences") or ())]
        if stops and self.fault != "ignores stop strings":
            spoken = replace(spoken, text=spoken.text.partition(stops[0])[0])
        if self.fault == "ends with length" and spoken.finish == "stop":
            spoken = replace(spoken, finish="length")
        tokens, read = tokens + (self.fault == "counts more"), read + (self.fault == "reads more") * read
        scored = "".join(last.lower().split()) if self.fault == "keeps answers by letters" else last
        scores = [{"token": "a", "logprob": -float(k)} for k in scored.encode()] if body.get("logprobs") else ()
        return replace(spoken, prompt_tokens=read, tokens=tokens, scores=scores)

    def speak(self, messages: list[Any], body: Mapping[str, Any]) -> Spoken:
        system = bool("system" in body or "instructions" in body or messages[0].get("role") == "system")
        last, before = text_of(messages[-1]), [text_of(m) for m in messages[:-1]]
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
        answer = ANSWERS[" ".join(last.lower().split())]
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


def words(text: str) -> int:
    return len(text.split())


def text_of(message: Any) -> str:
    """What a message of any API says."""
    content = message.get("content") or message.get("output") or ""
    return content if isinstance(content, str) else str(content[0].get("content", ""))


def whole(path: str, s: Spoken) -> Any:
    finish = WORDS[path].get(s.finish, s.finish)
    calls = [{"id": "1", "function": {"name": n, "arguments": a}} for n, a in s.calls]
    usage: dict[str, int] = {"input_tokens": s.prompt_tokens, "output_tokens": s.tokens}
    if path == CHAT:
        message = {"content": s.text, "reasoning_content": s.reasoning, "tool_calls": calls}
        usage = {"prompt_tokens": s.prompt_tokens, "completion_tokens": s.tokens}
        scores = {"content": list(s.scores)} if s.scores else None
        return {"choices": [{"message": message, "finish_reason": finish, "logprobs": scores}], "usage": usage}
    if path == RESPONSES:
        items = [{"type": "function_call", "id": "1", "name": n, "arguments": a} for n, a in s.calls]
        said = [("reasoning", s.reasoning), ("message", s.text)]
        output = [*({"type": k, "content": [{"text": t}]} for k, t in said), *items]
        return {"status": finish, "output": output, "usage": usage}
    if path == ANTHROPIC:
        used = [{"type": "tool_use", "name": n, "input": json.loads(a)} for n, a in s.calls]
        said = [{"type": "thinking", "thinking": s.reasoning}, {"type": "text", "text": s.text}]
        usage = {"input_tokens": s.prompt_tokens - 4, "cache_read_input_tokens": 4, "output_tokens": s.tokens}
        return {"content": [*said, *used], "stop_reason": finish, "usage": usage}
    message = {"content": s.text, "thinking": s.reasoning, "tool_calls": calls}
    counts = {"prompt_eval_count": s.prompt_tokens, "eval_count": s.tokens}
    return {"message": message, "done": True, "done_reason": finish, **counts}


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
    return {c.what: c.note for c in conversation_checks(asker, [] if gaps is None else gaps, words) if not c.ok}


def test_every_api_of_an_honest_engine_passes() -> None:
    gaps: list[str] = []
    checks = conversation_checks(Scripted(), gaps, words)
    assert {c.what: c.note for c in checks if not c.ok} == {}
    assert not gaps
    for api in APIS:
        count = sum(c.what.startswith(f"{api.name}: ") for c in checks)
        features = 2 * bool(api.required) + bool(api.schema) + api.seeded + (api.stop is not None) + bool(api.scored)
        assert count == 10 + features


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
        ("ignores results", "a tool's result is read", f"'It rains.' after {RESULT!r}"),
        ("leaks", "texts without control tokens", "<|channel|>"),
        ("ends with length", "an answer that ends by itself says so", "of 320 at most, ended with 'length'"),
        ("counts more", "tokens are counted", "an answer of 4 tokens counts as 5; an answer of 16"),
        ("reads more", "tokens are counted", "11 more tokens of a question count as 22"),
        ("ignores the temperature", "a temperature is read", "24 sampled answers are alike"),
        ("ignores the seed", "a seed gives the same answer", "instead of"),
        ("keeps answers by letters", "similar questions have answers of their own", "3 of 4 have another's"),
        ("ignores stop strings", "a stop string ends the answer", "(stop) for ', d'"),
    ],
)
def test_each_fault_is_found(api: Api, fault: str, check: str, says: str) -> None:
    wrong = failures(Scripted(fault, only=api.path))
    if ("arguments" in fault or "calls" in fault) and not api.required:
        assert not wrong  # nothing can be required over Ollama's API
    elif (
        ("seed" in fault and not api.seeded)
        or ("stop strings" in fault and api.stop is None)
        or ("letters" in fault and not api.scored)
    ):
        assert not wrong
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
