"""Limits of tokens over every API: whatever a right request asks for, its answer stays within the context.

The property test draws requests (API, tools, tool choice, format, effort, number of choices, limit) and answers of a
model that follows its grammar or does not, in a context that leaves any number of tokens behind the prompt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import PATIENCE, Live
from scripted import Play, ScriptedSource, call, in_turn, say

from halfbyte.engine.request import Request
from halfbyte.server.settings import ServerSettings

CONTEXT = 8192
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
NAMES = ("get_weather", "get_weather_now", "find_a_name_that_takes_a_good_number_of_tokens_to_write")
APIS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
Serve = Callable[..., Live]


class DrawnScript:
    """What a model might write, drawn from a seed: under a grammar what fits it, else any harmony, good or bad."""

    def __init__(self) -> None:
        self.draw = random.Random(0)
        self.written: dict[str, int] = {}  # tokens that the source handed out, by request
        self.finishes: dict[str, str] = {}

    def __call__(self, request: Request, index: int) -> Play:
        draw, constraint = self.draw, request.constraint
        words = "word " * draw.choice((0, 1, 3, 40))
        if constraint is not None and not constraint.triggers:
            if constraint.kind == "regex":
                names = constraint.source.strip("()").replace("\\", "").split("|")
                return Play(f"{draw.choice(names)}<|channel|>", per_step=draw.choice((1, 4)))
            value = json.dumps({"place": words})
            return Play(f"{value}{draw.choice(('<|call|>', '<|return|>', ''))}", per_step=draw.choice((1, 4)))
        texts = (
            say(words, words), say('{"place": "Bern"}'), call(f"functions.{draw.choice(NAMES)}", "{}", words),
            f"{words}<|end|>", f"{words}<|return|>", "<|return|>", "<|channel|><|channel|><|message|><|return|>",
            f"<|channel|>analysis<|message|>{words}<|end|><|start|>assistant<|return|>", words * 9,
        )  # fmt: skip
        return Play(draw.choice(texts), per_step=draw.choice((1, 4)))


class CountingSource(ScriptedSource):
    """Counts the tokens that it handed out, and notes how each request ended."""

    async def stream(self, request: Request) -> Any:
        script = self.script
        assert isinstance(script, DrawnScript)
        async for delta in super().stream(request):
            script.written[request.id] = script.written.get(request.id, 0) + len(delta.tokens)
            if delta.finish is not None:
                script.finishes[request.id] = delta.finish
            yield delta


@pytest.fixture(scope="module")
def drawn() -> Iterator[tuple[Live, DrawnScript, httpx.Client]]:
    script = DrawnScript()
    live = Live(CountingSource(script), ServerSettings(min_available_bytes=0))
    with httpx.Client(timeout=PATIENCE, base_url=live.url) as http:
        yield live, script, http
    live.close()


def body_of(
    api: str, choice: str, names: tuple[str, ...], strict: bool, format: str, effort: str | None, limit: int | None,
    n: int = 1, stream: bool = False, reasoning: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A right request in the words of one API; what the API has no word for is left out."""
    functions = [{"name": name, "description": "Something.", "parameters": PLACE, "strict": strict} for name in names]
    tools: list[Any] = [{"type": "function", "function": f} for f in functions]
    messages = [{"role": "user", "content": "Hello"}]
    body: dict[str, Any] = {"model": "gpt-oss-test", "messages": messages, "stream": stream}
    if api == "/api/chat":
        body |= {"tools": tools} if names else {}
        body |= {"format": {"json_object": "json", "json_schema": PLACE}[format]} if format else {}
        body |= {"options": {"num_predict": limit}} if limit else {}
        return body | ({"think": effort} if effort in ("low", "medium", "high") else {})
    if api == "/v1/messages":
        tools = [{"name": f["name"], "input_schema": PLACE, "strict": strict} for f in functions]
        words = {"auto": "auto", "none": "none", "required": "any", "named": "tool"}
        body |= {"tools": tools, "tool_choice": {"type": words[choice]}} if names else {}
        if names and choice == "named":
            body["tool_choice"]["name"] = names[-1]
        if format == "json_schema":
            body["output_config"] = {"format": {"type": "json_schema", "schema": PLACE}}
        if effort in ("low", "medium", "high"):
            body |= {"thinking": {"type": "adaptive"}}
        if reasoning:
            body |= {"thinking": {"type": "enabled", "budget_tokens": reasoning}}
        return body | {"max_tokens": limit or 1 << 20}
    flat = api == "/v1/responses"
    if names:
        body["tools"] = [{"type": "function", **f} for f in functions] if flat else tools
        body["tool_choice"] = choice
        if choice == "named":
            name = {"name": names[-1]}
            body["tool_choice"] = {"type": "function"} | (name if flat else {"function": name})
    if format:
        schema: dict[str, Any] = {"name": "thing", "schema": PLACE, "strict": True} if format == "json_schema" else {}
        if flat:
            body["text"] = {"format": {"type": format, **schema}}
        else:
            body["response_format"] = {"type": format} | ({"json_schema": schema} if schema else {})
    if flat:
        del body["messages"]
        body |= {"input": "Hello", "store": False, "reasoning": {"effort": effort, "max_tokens": reasoning}}
        return body | ({"max_output_tokens": limit} if limit else {})
    body |= {"n": n} | ({"reasoning_effort": effort} if effort else {})
    body |= {"reasoning": {"max_tokens": reasoning}} if reasoning is not None else {}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    return body | ({"max_completion_tokens": limit} if limit else {})


def usage_of(api: str, answer: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and of the answer."""
    if api == "/api/chat":
        return answer["prompt_eval_count"], answer["eval_count"]
    usage = answer["usage"]
    if api == "/v1/chat/completions":
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return usage["prompt_tokens"], usage["completion_tokens"]
    if api == "/v1/responses":
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        return usage["input_tokens"], usage["output_tokens"]
    cached = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + cached, usage["output_tokens"]


def reasons_of(api: str, answer: dict[str, Any]) -> list[str]:
    if api == "/v1/chat/completions":
        return [choice["finish_reason"] for choice in answer["choices"]]
    if api == "/v1/responses":
        return ["length" if answer["status"] == "incomplete" else "stop"]
    reason = answer["done_reason"] if api == "/api/chat" else answer["stop_reason"]
    return ["length" if reason == "max_tokens" else reason]


REQUESTS = st.fixed_dictionaries(
    {
        "api": st.sampled_from(APIS),
        "choice": st.sampled_from(("auto", "none", "required", "named")),
        "names": st.sampled_from(((), NAMES[:1], NAMES[:2], NAMES)),
        "strict": st.booleans(),
        "format": st.sampled_from(("", "json_object", "json_schema")),
        "effort": st.sampled_from((None, "none", "low", "medium", "high")),
        "limit": st.sampled_from((None, 1, 2, 3, 5, 8, 13, 21, 34, 1000, CONTEXT, 1 << 20)),
        "n": st.sampled_from((1, 1, 1, 2, 3)),
        "reasoning": st.sampled_from((None, None, 0, 1, 2, 5, 13)),
    }
)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(request=REQUESTS, room=st.one_of(st.integers(1, 60), st.just(CONTEXT)), seed=st.integers(0, 1 << 30))
def test_every_right_request_is_answered_within_the_context(
    drawn: tuple[Live, DrawnScript, httpx.Client], request: dict[str, Any], room: int, seed: int
) -> None:
    live, script, http = drawn
    source, api, limit, n = live.source, request["api"], request["limit"], request["n"]
    if api != "/v1/chat/completions":
        request, n = request | {"n": 1}, 1
    body = body_of(**request)
    source.max_context = CONTEXT
    script.draw = random.Random(seed)
    first = http.post(api, json=body)
    assert first.status_code == 200, first.text
    prompt_length, _ = usage_of(api, first.json())
    source.max_context = min(CONTEXT, prompt_length + room)
    script.written.clear()
    script.finishes.clear()
    script.draw = random.Random(seed)
    response = http.post(api, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    prompt, completion = usage_of(api, answer)
    assert prompt == prompt_length
    assert completion == sum(script.written.values())
    assert completion <= n * min(limit or CONTEXT, source.max_context - prompt)
    reasons = reasons_of(api, answer)
    assert len(reasons) == n
    cut = [finish for finish in script.finishes.values() if finish == "length"]
    assert reasons.count("length") >= len(cut)  # an answer is also cut where no room is left for another request
    if "length" not in reasons and request["names"] and request["choice"] in ("required", "named"):
        assert api == "/api/chat" or "call" in response.text or "tool_use" in response.text


def cut_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    for api in APIS[:3]:
        for choice in ("required", "named"):
            for names in (NAMES[:1], NAMES):
                yield api, body_of(api, choice, names, False, "", None, None)


@pytest.mark.parametrize(("api", "body"), cut_bodies())
def test_a_forced_call_needs_no_limit(serve: Serve, http: httpx.Client, api: str, body: dict[str, Any]) -> None:
    plays = ["Hm.<|end|>", f".{NAMES[-1]}<|channel|>", '{"place": "Bern"}<|call|>']
    single = len(body["tools"]) == 1 or NAMES[-1] in str(body["tool_choice"])
    live = serve(ScriptedSource(in_turn(*(plays[::2] if single else plays))))
    response = http.post(f"{live.url}{api}", json=body)
    assert response.status_code == 200, response.text
    assert "Bern" in response.text
    for request in live.source.requests:
        assert len(request.prompt) + request.sampling.max_tokens <= CONTEXT


TEXT = {"type": "string"}
NAMED = {"type": "object", "properties": {"a": TEXT}}
CLOSED = NAMED | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "forced"),
    [
        (NAMED, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        (NAMED | {"additionalProperties": TEXT}, NAMED | {"additionalProperties": TEXT}),
        (NAMED | {"required": ["b"]}, NAMED | {"required": ["b"]}),
        (NAMED | {"allOf": [NAMED]}, NAMED | {"allOf": [NAMED]}),
        (
            {"type": "object", "properties": {"properties": NAMED, "x": {"type": "array", "items": NAMED}}},
            {
                "type": "object",
                "properties": {"properties": CLOSED, "x": {"type": "array", "items": CLOSED}},
                "additionalProperties": False,
            },
        ),
        ({"type": "object", "properties": {"e": {"enum": [NAMED]}}, "additionalProperties": True},) * 2,
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_forced_call_has_no_properties_that_nobody_named(
    serve: Serve, http: httpx.Client, schema: dict[str, Any], forced: dict[str, Any], strict: bool
) -> None:
    live = serve(ScriptedSource(lambda request, index: Play(call("functions.f", "{}"))))
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
    body = {"model": "gpt-oss-test", "messages": [{"role": "user", "content": "Hi"}], "tool_choice": "required"}
    assert http.post(f"{live.url}/v1/chat/completions", json=body | {"tools": [tool]}).status_code == 200
    sources = [json.loads(r.constraint.source) for r in live.source.requests if r.constraint is not None]
    assert sources[-1] == (schema if strict else forced)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_an_answer_that_ends_at_its_limit_is_complete(serve: Serve, http: httpx.Client, spare: int) -> None:
    live = serve(ScriptedSource(in_turn('{"a":1}<|return|>')))
    needed = len(live.source.tokenizer.encode('{"a":1}<|return|>', allow_special=True))
    body = body_of(APIS[0], "auto", (), False, "json_object", "none", needed + spare)
    reason = http.post(f"{live.url}{APIS[0]}", json=body).json()["choices"][0]["finish_reason"]
    assert reason == ("length" if spare < 0 else "stop")


def test_an_answer_that_is_owed_but_has_no_room_is_cut(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(in_turn("Sure!<|return|>", "{}<|return|>")))
    body = body_of(APIS[0], "auto", (), False, "json_object", None, None)
    prompt = http.post(f"{live.url}{APIS[0]}", json=body).json()["usage"]["prompt_tokens"]
    live.source.max_context = prompt + 6  # the model's words fit, the header of the answer behind them does not
    live.source.requests.clear()
    live.source.script = in_turn("Sure!<|return|>", "{}<|return|>")
    answer = http.post(f"{live.url}{APIS[0]}", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(live.source.requests) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_min_tokens_that_do_not_fit_the_context_are_cut_to_it(serve: Serve, http: httpx.Client, path: str) -> None:
    live = serve(ScriptedSource(in_turn("word " * 500), max_context=200))
    body = {"model": "gpt-oss-test", "min_tokens": 400, "max_tokens": 1000}
    prompt = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    response = http.post(f"{live.url}{path}", json=body | prompt)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["total_tokens"] == 200
    wrong = http.post(f"{live.url}{path}", json=body | prompt | {"min_tokens": 30, "max_tokens": 20})
    assert wrong.status_code == 400
