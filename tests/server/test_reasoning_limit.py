"""A limit on reasoning over every API: a model that reasons without end is made to answer, and usage says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from live_server import Live
from scripted import Play, ScriptedSource, always, call, in_turn, say

from halfbyte.server.settings import ServerSettings

Serve = Callable[..., Live]
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
HEADER = "<|channel|>analysis<|message|>"
ENDLESS = HEADER + "Wait, again. " * 300
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PLACE}} for name in ("get_weather", "get_time")]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "thing", "schema": PLACE, "strict": True}}
ANSWER = "<|channel|>final<|message|>It is 42.<|return|>"


def looping(after: str = ANSWER, per_step: int = 1) -> ScriptedSource:
    return ScriptedSource(always(Play(ENDLESS, per_step=per_step, after_limit=after)))


def body_of(api: str, **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    if api == RESPONSES:
        said = {"input": "Hi"}
    if api == MESSAGES:
        said["max_tokens"] = 4000
    if api == OLLAMA:
        said["stream"] = False
    return {"model": "gpt-oss-test", **said, **more}


def post(live: Live, api: str, **more: Any) -> dict[str, Any]:
    reply = httpx.post(live.url + api, json=body_of(api, **more), timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def cut_after(answer: dict[str, Any], details: str) -> int:
    """The tokens of reasoning after which the limit has ended it."""
    assert answer["usage"]["reasoning_cut"] is True
    return int(answer["usage"][details]["reasoning_tokens"])


FIELDS: list[tuple[str, dict[str, Any], int | None]] = [
    (CHAT, {}, 77),
    (CHAT, {"reasoning": {"max_tokens": 5}}, 5),
    (CHAT, {"reasoning": {"max_tokens": 5, "effort": "high"}}, 5),
    (CHAT, {"reasoning": {"max_tokens": -1}}, None),
    (CHAT, {"reasoning": {"max_tokens": 0}}, 0),
    (CHAT, {"reasoning": {"enabled": False}}, 0),
    (CHAT, {"reasoning": {"enabled": True}}, 77),
    (CHAT, {"reasoning_effort": "none"}, 0),
    (CHAT, {"thinking_token_budget": 6}, 6),
    (CHAT, {"thinking_budget_tokens": 7}, 7),
    (CHAT, {"thinking_budget": 8}, 8),
    (CHAT, {"reasoning_budget": 9}, 9),
    (CHAT, {"reasoning_budget": -1}, None),
    (CHAT, {"chat_template_kwargs": {"thinking_budget": 10}}, 10),
    (RESPONSES, {}, 77),
    (RESPONSES, {"reasoning": {"max_tokens": 11}}, 11),
    (RESPONSES, {"reasoning": {"max_tokens": -1, "effort": "low"}}, None),
    (MESSAGES, {}, 77),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
    (MESSAGES, {"thinking": {"type": "adaptive"}}, 77),
    (MESSAGES, {"thinking": {"type": "disabled"}}, 0),
    (OLLAMA, {}, 77),
    (OLLAMA, {"think": "high"}, 77),
    (OLLAMA, {"think": False}, 0),
]


def test_every_name_of_the_limit_and_the_default_of_the_server(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("Hello."))), ServerSettings(min_available_bytes=0, max_reasoning_tokens=77))
    for api, fields, limit in FIELDS:
        post(live, api, **fields)
        reasoning = live.source.requests[-1].reasoning
        assert (reasoning and reasoning.tokens) == limit, (api, fields)
    live = serve(ScriptedSource(always(say("Hello."))))
    for api in (CHAT, RESPONSES, MESSAGES, OLLAMA):
        post(live, api)
        assert live.source.requests[-1].reasoning is None


@pytest.mark.parametrize("value", [-2, "many", 1.5])
def test_a_limit_that_is_no_count_is_refused(serve: Serve, value: Any) -> None:
    live = serve(looping())
    for api in (CHAT, RESPONSES):
        reply = httpx.post(live.url + api, json=body_of(api, reasoning={"max_tokens": value}))
        assert reply.status_code == 400
        assert "max_tokens" in reply.json()["error"]["param"]


@pytest.mark.parametrize("per_step", [1, 7])
def test_a_loop_ends_and_the_answer_follows(serve: Serve, per_step: int) -> None:
    live = serve(looping(per_step=per_step))
    out = post(live, CHAT, reasoning={"max_tokens": 12})
    choice = out["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It is 42.", "stop")
    assert choice["message"]["reasoning"].startswith("Wait, again. Wait")
    assert cut_after(out, "completion_tokens_details") == 12
    client = live.openai()
    stream = client.chat.completions.create(
        model="gpt-oss-test", messages=[{"role": "user", "content": "Hi"}], stream=True,
        stream_options={"include_usage": True}, extra_body={"reasoning": {"max_tokens": 12}},
    )  # fmt: skip
    chunks = list(stream)
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == "It is 42."
    assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == choice["message"]["reasoning"]
    assert chunks[-1].usage.model_dump(exclude_none=True) == out["usage"]

    out = post(live, RESPONSES, reasoning={"max_tokens": 12})
    assert out["status"] == "completed"
    assert [item["type"] for item in out["output"]] == ["reasoning", "message"]
    assert cut_after(out, "output_tokens_details") == 12

    message = live.anthropic().messages.create(
        model="gpt-oss-test", max_tokens=4000, messages=[{"role": "user", "content": "Hi"}],
        thinking={"type": "enabled", "budget_tokens": 12},
    )  # fmt: skip
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[1].text, message.stop_reason) == ("It is 42.", "end_turn")
    usage = message.usage.model_dump()
    assert (usage["output_tokens_details"], usage["thinking_cut"]) == ({"thinking_tokens": 12}, True)
    page = httpx.get(live.url + "/metrics").text
    assert "halfbyte_reasoning_cuts_total 4.0" in page


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES])
def test_details_of_usage_hold_numbers_alone(serve: Serve, api: str) -> None:
    """OpenAI's own agents for JavaScript end with an error at anything else in them."""
    play = Play(ENDLESS, after_limit=ANSWER, cached=9, from_memory=4, from_disk=2)
    limit = (
        {"thinking": {"type": "enabled", "budget_tokens": 12}} if api == MESSAGES else {"reasoning": {"max_tokens": 12}}
    )
    usage = post(serve(ScriptedSource(always(play))), api, **limit)["usage"]
    details = {name: value for name, value in usage.items() if name.endswith("_details")}
    assert details
    assert {type(value) for fields in details.values() for value in fields.values()} == {int}
    if api != MESSAGES:
        assert usage["cached_tokens_by_tier"] == {"pages": 3, "memory": 4, "disk": 2}


def test_usage_says_nothing_of_a_limit_that_was_not_reached(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("Hello.", "A greeting."))))
    out = post(live, CHAT, reasoning={"max_tokens": 500})
    assert "reasoning_cut" not in out["usage"]
    assert list(out["usage"]["completion_tokens_details"]) == ["reasoning_tokens"]
    assert out["choices"][0]["message"]["reasoning"] == "A greeting."


def test_each_of_several_choices_has_the_whole_limit(serve: Serve) -> None:
    live = serve(looping())
    out = post(live, CHAT, n=3, reasoning={"max_tokens": 12})
    assert [c["message"]["content"] for c in out["choices"]] == ["It is 42."] * 3
    assert out["usage"]["completion_tokens_details"]["reasoning_tokens"] == 36
    assert len(live.source.requests) == 1


def test_a_limit_of_nothing_goes_straight_to_the_answer(serve: Serve) -> None:
    live = serve(ScriptedSource(always("Hello.<|return|>")))
    out = post(live, CHAT, reasoning={"max_tokens": 0, "effort": "high"})
    assert out["choices"][0]["message"]["content"] == "Hello."
    assert live.source.prompts()[0].endswith("<|start|>assistant<|channel|>final<|message|>")
    assert "Reasoning: high" in live.source.prompts()[0]
    # With tools the model chooses, and reasoning that it begins all the same ends at once.
    weather = call("functions.get_weather", '{"place":"Bern"}')
    live = serve(looping(weather))
    out = post(live, CHAT, tools=TOOLS, reasoning={"max_tokens": 0})
    assert live.source.prompts()[0].endswith(f"{HEADER}<|end|><|start|>assistant")
    assert out["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"place":"Bern"}'
    assert out["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize(
    "after",
    [
        call("functions.get_weather", '{"place":"Bern"}'),
        ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"place":"Bern"}<|call|>',
        call("functions.get_weather", '{"place":"Bern"}', preamble="One moment."),
        ANSWER,
    ],
)
def test_with_tools_the_model_still_chooses_between_a_call_and_an_answer(serve: Serve, after: str) -> None:
    live = serve(looping(after))
    out = post(live, CHAT, tools=TOOLS, reasoning={"max_tokens": 12})
    choice = out["choices"][0]
    if "call" in after:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {
            "name": "get_weather",
            "arguments": '{"place":"Bern"}',
        }
    else:
        assert choice["message"]["content"] == "It is 42."
    assert cut_after(out, "completion_tokens_details") == 12
    lines = httpx.get(live.url + "/metrics").text.splitlines()
    assert {line.split()[-1] for line in lines if line.startswith("halfbyte_harmony_repairs_total{")} == {"0.0"}


@pytest.mark.parametrize("tools", [TOOLS[:1], TOOLS])
def test_a_required_call_is_made_after_a_loop(serve: Serve, tools: list[Any]) -> None:
    name = [] if len(tools) == 1 else [".get_weather<|channel|>"]
    plays = [Play("Wait, again. " * 300), *name, '{"place":"Bern"}<|call|>']
    live = serve(ScriptedSource(in_turn(*plays)))
    out = post(live, CHAT, tools=tools, tool_choice="required", reasoning={"max_tokens": 12})
    choice = out["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"place":"Bern"}'}
    assert cut_after(out, "completion_tokens_details") == 12
    live = serve(ScriptedSource(in_turn(*plays[1:])))
    post(live, CHAT, tools=tools, tool_choice="required", reasoning={"max_tokens": 0})
    assert HEADER not in live.source.prompts()[0]


def test_a_json_answer_follows_a_loop(serve: Serve) -> None:
    live = serve(looping('<|channel|>final <|constrain|>json<|message|>{"place":"Bern"}<|return|>'))
    out = post(live, CHAT, response_format=SCHEMA, reasoning={"max_tokens": 12})
    assert json.loads(out["choices"][0]["message"]["content"]) == {"place": "Bern"}
    (request,) = live.source.requests
    assert request.constraint is not None
    assert request.reasoning is not None
    closing = request.reasoning.closings[0]
    assert any(closing[-len(t) :] == t for t in request.constraint.triggers)  # the grammar wakes behind it


def test_strict_tools_and_a_limit_that_several_messages_share(serve: Serve) -> None:
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    loop = Play(
        "Wait, again. " * 300, after_limit="<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    )
    plays = [
        HEADER,
        "One two three.<|end|><|start|>assistant<|channel|>commentary<|message|>",
        f"A preamble that is not reasoning.<|end|><|start|>assistant{HEADER}",
        loop,
        '{"place":"Bern"}<|call|>',
    ]
    live = serve(ScriptedSource(in_turn(*plays)))
    out = post(live, CHAT, tools=strict, reasoning={"max_tokens": 10})
    choice = out["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"place":"Bern"}'}
    assert choice["message"]["content"] == "A preamble that is not reasoning."
    assert cut_after(out, "completion_tokens_details") == 10
    assert [r.reasoning.tokens for r in live.source.requests if r.reasoning] == [10, 10, 6, 6, 0]


def test_stop_strings_and_max_tokens_hold_after_the_limit(serve: Serve) -> None:
    live = serve(looping("<|channel|>final<|message|>one two three four<|return|>"))
    out = post(live, CHAT, stop=["three"], reasoning={"max_tokens": 12})
    assert (out["choices"][0]["message"]["content"], out["choices"][0]["finish_reason"]) == ("one two ", "stop")
    for most in range(1, 26):
        out = post(live, CHAT, max_tokens=most, reasoning={"max_tokens": 12})
        assert out["usage"]["completion_tokens"] == most
        assert out["choices"][0]["finish_reason"] == "length"
        assert out["choices"][0]["message"]["content"] in ("", "one", "one two", "one two three", "one two three four")


def test_a_conversation_goes_on_after_reasoning_that_was_cut(serve: Serve) -> None:
    weather = call("functions.get_weather", '{"place":"Bern"}')
    live = serve(ScriptedSource(in_turn(Play(ENDLESS, after_limit=weather), Play(ENDLESS, after_limit=ANSWER))))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    first = post(live, CHAT, messages=messages, tools=TOOLS, reasoning={"max_tokens": 12})["choices"][0]["message"]
    messages += [first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "Sunny"}]
    second = post(live, CHAT, messages=messages, tools=TOOLS, reasoning={"max_tokens": 12})
    assert second["choices"][0]["message"]["content"] == "It is 42."
    assert second["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    assert f"{HEADER}{first['reasoning']}<|end|><|start|>assistant" in live.source.prompts()[1]
