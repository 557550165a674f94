"""Chat completions over real HTTP with OpenAI's own client."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from live_server import Live
from scripted import Play, ScriptedSource, always, call, in_turn, say

from halfbyte.ops.sampling_settings import FILTERS
from halfbyte.server.settings import ServerSettings

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
Serve = Callable[..., Live]


def ask(live: Live, **more: Any) -> Any:
    messages = more.pop("messages", [{"role": "user", "content": "Hi"}])
    return live.openai().chat.completions.create(model="gpt-oss-test", messages=messages, **more)


def test_answer_and_reasoning_are_apart(serve: Serve) -> None:
    live = serve(ScriptedSource(always(Play(say("Hello, world.", "A greeting."), cached=3))))
    out = ask(live)
    message = out.choices[0].message
    assert message.content == "Hello, world."
    assert message.reasoning_content == message.reasoning == "A greeting."
    assert out.choices[0].finish_reason == "stop"
    tokens = live.source.tokenizer.encode(say("Hello, world.", "A greeting."), allow_special=True)
    assert out.usage.completion_tokens == len(tokens)
    assert out.usage.prompt_tokens == len(live.source.requests[0].prompt)
    assert out.usage.prompt_tokens_details.cached_tokens == 3
    assert out.usage.completion_tokens_details.reasoning_tokens == len(live.source.tokenizer.encode("A greeting."))


def test_answers_carry_the_fingerprint_of_what_runs(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ScriptedSource(always(Play(say("Hi."))))
    info = replace(source.info, details={"fingerprint": "fp_0123"})
    monkeypatch.setattr(ScriptedSource, "info", info)
    live = serve(source)
    assert ask(live).system_fingerprint == "fp_0123"
    assert {chunk.system_fingerprint for chunk in ask(live, stream=True)} == {"fp_0123"}
    text = live.openai().completions.create(model="gpt-oss-test", prompt="Hi")
    assert text.system_fingerprint == "fp_0123"


@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_stream_says_the_same_as_the_whole(serve: Serve, per_step: int) -> None:
    text, thought = "Grüße 👩‍👩‍👧 und mehr.\n\n```py\nx = 1\n```", "Ein Gedanke: 🤔."
    live = serve(ScriptedSource(always(Play(say(text, thought), per_step=per_step))))
    chunks = list(ask(live, stream=True, stream_options={"include_usage": True}))
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == text
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == thought
    assert deltas[0].role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    whole = ask(live)
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].message.content == text
    assert len({c.id for c in chunks}) == 1


def test_running_usage_counts_tokens_not_chunks(serve: Serve) -> None:
    live = serve(ScriptedSource(always(Play(say("one two three four five six"), per_step=4))))
    chunks = list(ask(live, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(live.source.tokenizer.encode(say("one two three four five six"), allow_special=True))


def test_tool_round_trip(serve: Serve) -> None:
    first = call("functions.get_weather", '{"place":"Bern"}', "They want the weather.", "Let me look.")
    live = serve(ScriptedSource(in_turn(first, say("Sunny."))))
    messages: list[Any] = [{"role": "user", "content": "Weather in Bern?"}]
    out = ask(live, messages=messages, tools=[WEATHER])
    choice = out.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.tool_calls[0].function.name == "get_weather"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"place": "Bern"}
    # What the client library returned goes back as it is, reasoning included.
    messages.append(choice.message)
    messages.append({"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "sun"})
    out = ask(live, messages=messages, tools=[WEATHER])
    assert out.choices[0].message.content == "Sunny."
    prompt = live.source.prompts()[1]
    assert "They want the weather." in prompt
    assert '<|channel|>commentary <|constrain|>json<|message|>{"place":"Bern"}<|call|>' in prompt
    assert "functions.get_weather to=assistant<|channel|>commentary<|message|>sun<|end|>" in prompt
    assert prompt.endswith("<|start|>assistant")


def test_streamed_tool_call(serve: Serve) -> None:
    live = serve(ScriptedSource(always(call("functions.get_weather", '{"place": "Zürich"}', "hm"))))
    name, arguments, ids, finish = "", "", [], None
    for chunk in ask(live, tools=[WEATHER], stream=True):
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or []:
            assert part.index == 0
            ids += [part.id] if part.id else []
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, json.loads(arguments), finish, len(ids)) == ("get_weather", {"place": "Zürich"}, "tool_calls", 1)


def test_parallel_calls_come_through_unless_forbidden(serve: Serve) -> None:
    one = call("functions.get_weather", '{"place":"A"}').replace("<|call|>", "<|end|><|start|>assistant")
    live = serve(ScriptedSource(always(one + call("functions.get_time", ""))))
    out = ask(live, tools=[WEATHER, TIME])
    assert [c.function.name for c in out.choices[0].message.tool_calls] == ["get_weather", "get_time"]
    assert out.choices[0].message.tool_calls[1].function.arguments == "{}"
    out = ask(live, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert [c.function.name for c in out.choices[0].message.tool_calls] == ["get_weather"]


def test_tool_choice_none_hides_the_tools(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("ok"))))
    ask(live, tools=[WEATHER], tool_choice="none")
    assert "get_weather" not in live.source.prompts()[0]
    ask(live, tools=[WEATHER])
    assert "type get_weather = (_: {" in live.source.prompts()[1]


def test_named_tool_choice_is_enforced_and_keeps_the_reasoning(serve: Serve) -> None:
    live = serve(ScriptedSource(in_turn("I would rather chat.<|end|>", '{"place":"Bern"}<|call|>')))
    choice = {"type": "function", "function": {"name": "get_weather"}}
    out = ask(live, tools=[WEATHER, TIME], tool_choice=choice)
    message = out.choices[0].message
    assert out.choices[0].finish_reason == "tool_calls"
    assert message.reasoning_content == "I would rather chat."
    assert message.tool_calls[0].function.name == "get_weather"
    assert message.tool_calls[0].function.arguments == '{"place":"Bern"}'
    reason, arguments = live.source.requests
    assert live.source.prompts()[0].endswith("<|start|>assistant<|channel|>analysis<|message|>")
    assert live.source.prompts()[1].endswith(
        "I would rather chat.<|end|><|start|>assistant to=functions.get_weather"
        "<|channel|>commentary <|constrain|>json<|message|>"
    )
    assert reason.constraint is None
    assert arguments.constraint.kind == "json_schema"
    assert json.loads(arguments.constraint.source) == WEATHER["function"]["parameters"] | {
        "additionalProperties": False
    }
    assert arguments.prompt[: len(reason.prompt)] == reason.prompt  # so the prefix cache has it


def test_a_required_call_costs_the_same_where_only_one_call_is_allowed(serve: Serve) -> None:
    plays = ("Hm.<|end|>", '{"place":"Q"}<|call|>')
    bills = []
    for parallel in (True, False):
        live = serve(ScriptedSource(in_turn(*(Play(text, cached=4) for text in plays))))
        out = ask(live, tools=[WEATHER], tool_choice="required", parallel_tool_calls=parallel)
        assert out.choices[0].message.tool_calls[0].function.arguments == '{"place":"Q"}'
        bills.append((out.usage.completion_tokens, out.usage.prompt_tokens_details.cached_tokens))
    assert bills[0] == bills[1]
    assert bills[0] == (sum(len(live.source.tokenizer.encode(p, allow_special=True)) for p in plays), 4)


def test_required_choice_among_several(serve: Serve) -> None:
    live = serve(ScriptedSource(in_turn("hm<|end|>", ".get_time<|channel|>", "{}<|call|>")))
    out = ask(live, tools=[WEATHER, TIME], tool_choice="required")
    assert [c.function.name for c in out.choices[0].message.tool_calls] == ["get_time"]
    name = live.source.requests[1].constraint
    assert name.kind == "regex"
    assert name.source == r"(\.get_weather|\.get_time)"
    made = sum(
        len(live.source.tokenizer.encode(t, allow_special=True))
        for t in ("hm<|end|>", ".get_time<|channel|>", "{}<|call|>")
    )
    assert out.usage.completion_tokens == made
    streamed = serve(ScriptedSource(in_turn("hm<|end|>", ".get_time<|channel|>", '{"a":1}<|call|>')))
    parts = [
        c.choices[0].delta.tool_calls for c in ask(streamed, tools=[WEATHER, TIME], tool_choice="required", stream=True)
    ]
    assert "".join(p[0].function.arguments or "" for p in parts if p) == '{"a":1}'


def test_required_with_n_makes_n_calls(serve: Serve) -> None:
    live = serve(ScriptedSource(lambda r, i: Play("x<|end|>" if r.constraint is None else '{"place":"Q"}<|call|>')))
    out = ask(live, tools=[WEATHER], tool_choice="required", n=3, seed=5)
    assert len(out.choices) == 3
    assert all(c.message.tool_calls[0].function.arguments == '{"place":"Q"}' for c in out.choices)
    assert {r.sampling.seed for r in live.source.requests} == {5, 6, 7}


def test_effort_none_skips_the_reasoning(serve: Serve) -> None:
    live = serve(ScriptedSource(always("Quick.<|return|>")))
    out = ask(live, reasoning_effort="none")
    assert out.choices[0].message.content == "Quick."
    assert live.source.prompts()[0].endswith("<|start|>assistant<|channel|>final<|message|>")
    ask(live, reasoning_effort="none", tools=[WEATHER])
    assert live.source.prompts()[1].endswith("<|channel|>analysis<|message|><|end|><|start|>assistant")


@pytest.mark.parametrize(("effort", "line"), [("minimal", "low"), ("low", "low"), ("high", "high"), ("xhigh", "high")])
def test_effort_reaches_the_model(serve: Serve, effort: str, line: str) -> None:
    live = serve(ScriptedSource(always(say("ok"))))
    ask(live, reasoning_effort=effort)
    assert f"Reasoning: {line}\n" in live.source.prompts()[0]


def test_instructions_and_history(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("ok"))))
    ask(
        live,
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "reasoning_content": "old thought"},
            {"role": "user", "content": "d"},
        ],
    )
    prompt = live.source.prompts()[0]
    assert "# Instructions\n\nBe kind.\n\nBe brief.<|end|>" in prompt
    assert "<|start|>user<|message|>ab<|end|>" in prompt
    assert "<|start|>assistant<|channel|>final<|message|>c<|end|>" in prompt
    assert "old thought" not in prompt


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def schema_format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


def test_json_schema_goes_to_the_engine_as_a_triggered_constraint(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say('{"a": 1}', "think"))))
    out = ask(live, response_format=schema_format())
    assert out.choices[0].message.content == '{"a": 1}'
    assert out.choices[0].message.reasoning_content == "think"
    (request,) = live.source.requests
    constraint = request.constraint
    tokenizer = live.source.tokenizer
    assert json.loads(constraint.source) == SCHEMA
    assert tuple(tokenizer.encode("<|channel|>final<|message|>", allow_special=True)) in constraint.triggers
    assert (
        tuple(tokenizer.encode("<|channel|>final <|constrain|>json<|message|>", allow_special=True))
        in constraint.triggers
    )
    assert "# Response Formats\n\n## thing\n\n" in live.source.prompts()[0]


def test_json_answer_is_begun_for_a_model_that_never_begins_it(serve: Serve) -> None:
    live = serve(ScriptedSource(in_turn("Sure! Here it comes:<|return|>", '{"a": 2}<|return|>')))
    out = ask(live, response_format=schema_format())
    assert out.choices[0].message.content == '{"a": 2}'
    assert out.choices[0].message.reasoning_content == "Sure! Here it comes:"  # nothing lost, nothing in the JSON
    assert live.source.prompts()[1].endswith("<|channel|>final <|constrain|>json<|message|>")
    assert live.source.requests[1].constraint.triggers == ()


def test_json_object_and_effort_none(serve: Serve) -> None:
    live = serve(ScriptedSource(always("{}<|return|>")))
    out = ask(live, response_format={"type": "json_object"}, reasoning_effort="none")
    assert out.choices[0].message.content == "{}"
    assert live.source.requests[0].constraint.kind == "json_object"
    assert len(live.source.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_match_visible_content_across_tokens(serve: Serve, stream: bool) -> None:
    live = serve(ScriptedSource(always(say("one two STOP three", "STOP is in my thoughts"))))
    out = ask(live, stop=["wo STO", "zzz"], stream=stream)
    if stream:
        chunks = [c.choices[0] for c in out]
        text, finish = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
    else:
        text, finish = out.choices[0].message.content, out.choices[0].finish_reason
    assert (text, finish) == ("one t", "stop")
    assert live.source.requests[0].sampling.stop == ()


def test_stop_that_never_comes_loses_nothing(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("ends with EN"))))
    assert ask(live, stop="END").choices[0].message.content == "ends with EN"


def test_length(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("one two three four", "thinking"))))
    out = ask(live, max_completion_tokens=9)
    assert out.choices[0].finish_reason == "length"
    assert out.usage.completion_tokens == 9
    assert ask(live, max_tokens=2).choices[0].message.content == ""


def test_a_cut_answer_is_continued(serve: Serve) -> None:
    rest = " 42.<|return|>"
    live = serve(ScriptedSource(in_turn(rest, f" so 42.<|end|><|start|>assistant{say('It is 42.')}")))
    user = {"role": "user", "content": "Sum?"}
    cut = {"role": "assistant", "content": "It is", "reasoning_content": "17 + 25"}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    out = ask(live, messages=[user, cut], extra_body=more)
    assert (out.choices[0].message.content, out.choices[0].finish_reason) == (" 42.", "stop")
    thought = "<|channel|>analysis<|message|>17 + 25"
    assert live.source.prompts()[-1].endswith(
        f"<|start|>assistant{thought}<|end|><|start|>assistant<|channel|>final<|message|>It is"
    )
    out = ask(live, messages=[user, {**cut, "content": ""}], extra_body=more)
    assert (out.choices[0].message.reasoning_content, out.choices[0].message.content) == (" so 42.", "It is 42.")
    assert live.source.prompts()[-1].endswith(f"<|start|>assistant{thought}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": False, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    serve: Serve, http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    live = serve(ScriptedSource(always("x")))
    messages = [{"role": "assistant", "content": "It"}]
    body = {"model": "gpt-oss-test", "messages": messages, "continue_final_message": True, **fields}
    out = http.post(f"{live.url}/v1/chat/completions", json=body)
    assert (out.status_code, out.json()["error"]["param"]) == (400, param)


def test_n_choices(serve: Serve) -> None:
    live = serve(ScriptedSource(lambda r, i: Play(say(f"answer {i}"))))
    out = ask(live, n=3)
    assert [c.message.content for c in out.choices] == ["answer 0", "answer 1", "answer 2"]
    texts = ["", "", ""]
    for chunk in ask(live, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["answer 0", "answer 1", "answer 2"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_visible_tokens(serve: Serve, stream: bool) -> None:
    live = serve(ScriptedSource(always(Play(say("Hé 👍 there END more", "thought"), per_step=5))))
    out = ask(live, logprobs=True, top_logprobs=2, stop=" END", stream=stream)
    if stream:
        entries = [e for c in out if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    else:
        entries = out.choices[0].logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == "Hé 👍 there"
    assert all(e.logprob == -0.25 and len(e.top_logprobs) == 2 for e in entries)


def test_sampling_parameters_reach_the_engine(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("ok"))))
    ask(
        live,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        seed=7,
        logit_bias={"100": -5},
        max_tokens=50,
        extra_body={
            "top_k": 40, "min_p": 0.05, "top_n_sigma": 1.5, "repetition_penalty": 1.1, "ignore_eos": True,
            "min_tokens": 3,
        },
    )  # fmt: skip
    s = live.source.requests[0].sampling
    assert (s.temperature, s.top_p, s.presence_penalty, s.frequency_penalty) == (0.5, 0.9, 0.1, 0.2)
    assert (s.seed, s.logit_bias, s.max_tokens, s.top_k) == (7, {100: -5.0}, 50, 40)
    assert (s.min_p, s.repetition_penalty, s.ignore_eos, s.min_tokens) == (0.05, 1.1, True, 3)
    assert s.top_n_sigma == 1.5


@pytest.mark.parametrize("name", FILTERS)
def test_every_api_with_extensions_takes_every_filter(serve: Serve, http: httpx.Client, name: str) -> None:
    """A setting of the table that an API's body lacks would be refused as unknown."""
    live = serve(ScriptedSource(always(say("ok"))))
    value = 0.25 if name != "top_k" else 3
    message = [{"role": "user", "content": "x"}]
    bodies = {
        "/v1/chat/completions": {"messages": message, name: value},
        "/v1/completions": {"prompt": "x", name: value},
        "/v1/responses": {"input": "x", name: value},
        "/api/chat": {"messages": message, "stream": False, "options": {name: value}},
    }
    for path, body in bodies.items():
        answer = http.post(f"{live.url}{path}", json={"model": "gpt-oss-test", **body})
        assert answer.status_code == 200, answer.text
        assert getattr(live.source.requests[-1].sampling, name) == value, path


def test_minus_one_turns_a_filter_off_as_in_other_servers(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("ok"))))
    ask(live, extra_body={"top_k": -1, "top_n_sigma": -1})
    assert (live.source.requests[0].sampling.top_k, live.source.requests[0].sampling.top_n_sigma) == (0, 0.0)


def test_text_completions(serve: Serve) -> None:
    live = serve(ScriptedSource(lambda r, i: Play(f" world{i}<|return|>")))
    out = live.openai().completions.create(model="gpt-oss-test", prompt=["Hello", "Bye"], n=2, echo=True)
    assert [c.text for c in out.choices] == ["Hello world0", "Hello world1", "Bye world0", "Bye world1"]
    stream = live.openai().completions.create(
        model="gpt-oss-test", prompt="Hello", stream=True, logprobs=1, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == " world0"
    assert sum(len(c.choices[0].logprobs.tokens) for c in chunks if c.choices) == chunks[-1].usage.completion_tokens
    assert live.source.requests[-1].sampling.max_tokens == 16
    ids = live.source.tokenizer.encode("Hello")
    out = live.openai().completions.create(model="gpt-oss-test", prompt=ids, stop="rld")
    assert out.choices[0].text == " wo"
    assert live.source.requests[-1].prompt == ids


def test_token_ids_and_what_is_left_out(serve: Serve) -> None:
    text = say("one two three", "hm")
    live = serve(ScriptedSource(always(Play(text, per_step=2))))
    ids = live.source.tokenizer.encode(text, allow_special=True)
    extra = {"return_token_ids": True, "cache_prompt": False}
    assert ask(live, extra_body=extra).choices[0].token_ids == ids
    raw = live.openai().chat.completions.with_raw_response.create(
        model="gpt-oss-test", messages=[{"role": "user", "content": "Hi"}], stream=True, extra_body=extra
    )
    assert raw.headers["x-halfbyte-left-out"] == "cache_prompt"
    assert [t for chunk in raw.parse() for t in chunk.choices[0].token_ids] == ids
    out = live.openai().completions.create(model="gpt-oss-test", prompt="x", max_tokens=50, extra_body=extra)
    assert out.choices[0].token_ids == ids


def test_llama_benchy_counts_what_usage_says(serve: Serve, http: httpx.Client) -> None:
    """Its request, and its way of counting: the token ids of the chunks that carry text."""
    live = serve(ScriptedSource(always(Play(say("word " * 100, "thinking about it"), per_step=3))))
    body = {
        "model": "gpt-oss-test",
        "messages": [{"role": "system", "content": "context"}, {"role": "user", "content": "go on"}],
        "max_tokens": 64,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": False,
        "min_tokens": 64,
        "ignore_eos": True,
    }
    lines = http.post(f"{live.url}/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    counted = 0
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["delta"].get("content") or choice["delta"].get("reasoning_content"):
                counted += len(choice["token_ids"])
    assert counted == chunks[-1]["usage"]["completion_tokens"] == 64


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}


def test_strict_tools_are_held_to_their_schema(serve: Serve) -> None:
    plays = (
        "<|channel|>analysis<|message|>",
        "Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        '{"place":"Bern"}<|call|>',
    )
    live = serve(ScriptedSource(in_turn(*plays)))
    out = ask(live, tools=[STRICT, TIME])
    message = out.choices[0].message
    assert message.reasoning_content == "Need it."
    assert message.tool_calls[0].function.arguments == '{"place":"Bern"}'
    assert out.choices[0].finish_reason == "tool_calls"
    kinds = [r.constraint and r.constraint.kind for r in live.source.requests]
    assert kinds == ["regex", "regex", "json_schema"]  # a header's recipient, a call's arguments
    offered = live.source.requests[0].constraint
    assert re.fullmatch(offered.source, "=functions.get_weather")
    assert not re.fullmatch(offered.source, "=functions.get_whatever")
    for header in ("<|start|>assistant to", "<|channel|>commentary to"):
        assert tuple(live.source.tokenizer.encode(header, allow_special=True)) in offered.triggers
    assert json.loads(live.source.requests[-1].constraint.source) == WEATHER["function"]["parameters"]
    made = sum(len(live.source.tokenizer.encode(p, allow_special=True)) for p in plays)
    assert out.usage.completion_tokens == made


def test_strict_tools_leave_a_plain_answer_alone(serve: Serve) -> None:
    live = serve(ScriptedSource(in_turn("<|channel|>final<|message|>", "Hello.<|return|>")))
    out = ask(live, tools=[STRICT])
    assert (out.choices[0].message.content, out.choices[0].finish_reason) == ("Hello.", "stop")
    # With a structured answer as well, its grammar comes with its header.
    live = serve(ScriptedSource(in_turn("<|channel|>final<|message|>", '{"a":1}<|return|>')))
    out = ask(live, tools=[STRICT], response_format=schema_format())
    assert out.choices[0].message.content == '{"a":1}'
    assert [r.constraint.kind for r in live.source.requests] == ["regex", "json_schema"]
    # And a model that never begins one is still made to.
    live = serve(ScriptedSource(in_turn("<|return|>", '{"a":2}<|return|>')))
    out = ask(live, tools=[STRICT], response_format=schema_format())
    assert out.choices[0].message.content == '{"a":2}'


HEADERS = (
    "<|start|>assistant<|channel|>commentary to",
    "<|start|>assistant<|channel|>analysis to",
    "<|start|>assistant to",
    "<|start|>assistant<|channel|>commentary<|constrain|>json to",
    "<|start|>assistant<|channel|>commentaryto",
)


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("more", [{}, {"response_format": {"type": "json_object"}}, {"n": 2}])
def test_a_call_is_bound_to_the_offer_unless_switched_off(serve: Serve, bound: bool, more: dict[str, Any]) -> None:
    live = serve(ScriptedSource(always(say("{}"))), ServerSettings(min_available_bytes=0, bind_tools=bound))
    ask(live, tools=[WEATHER, TIME], **more)
    first = live.source.requests[0].constraint
    regex = "" if first is None or first.kind != "regex" else first.source
    assert bool(regex) == bound
    if bound:
        assert re.fullmatch(regex, "=functions.get_weather")
        assert not re.fullmatch(regex, "=functions.get_whatever")
        for header in HEADERS:
            ids = tuple(live.source.tokenizer.encode(header, allow_special=True))
            assert any(ids[-len(trigger) :] == trigger for trigger in first.triggers), header


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary functions.get_whatever<|message|>",
        "<|channel|>commentary <|constrain|>functions.get_whatever<|message|>",
        "<|channel|>commentary to= functions.get_whatever<|message|>",
        "<|channel|>commentary to=functions.get_whatever json",
    ],
)
def test_a_malformed_header_calls_nothing_that_was_not_offered(
    serve: Serve, header: str, stream: bool, bound: bool
) -> None:
    """The grammar sleeps in such a header. What the model wrote is shown, since nobody could answer the call."""
    live = serve(
        ScriptedSource(always(header + '{"a": 1}<|call|>')), ServerSettings(min_available_bytes=0, bind_tools=bound)
    )
    if stream:
        deltas = [c.choices[0].delta for c in ask(live, tools=[WEATHER], stream=True)]
        names = [call.function.name for d in deltas for call in d.tool_calls or [] if call.function.name]
        text = "".join(d.content or "" for d in deltas)
    else:
        (choice,) = ask(live, tools=[WEATHER]).choices
        names = [call.function.name for call in choice.message.tool_calls or []]
        text = choice.message.content or ""
        assert choice.finish_reason == ("stop" if bound else "tool_calls")
    assert (names, text) == (([], '{"a": 1}') if bound else (["get_whatever"], ""))


def test_a_call_is_an_answer_where_json_was_asked_for(serve: Serve) -> None:
    plays = (
        "<|channel|>analysis<|message|>",
        "hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        '{"place":"B"}<|call|>',
    )
    live = serve(ScriptedSource(in_turn(*plays)))
    out = ask(live, tools=[WEATHER], response_format=schema_format())
    assert out.choices[0].finish_reason == "tool_calls"
    assert out.choices[0].message.tool_calls[0].function.arguments == '{"place":"B"}'
    assert len(live.source.requests) == 3
