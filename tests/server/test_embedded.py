"""The embedded model behind the real server: it reasons, calls tools, fills schemas and remembers, over every API."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch
from live_server import Live

from halfbyte import Engine
from halfbyte.cli import demo
from halfbyte.engine.offered_functions import offered_recipient
from halfbyte.engine.request import Constraint, Request, SamplingParams
from halfbyte.evals import calling, reading
from halfbyte.evals.words import invented
from halfbyte.model.load import EMBEDDED
from halfbyte.server.answer.tools import Function
from halfbyte.server.settings import ServerSettings

pytestmark = pytest.mark.skipif(
    not (EMBEDDED / "config.json").exists(), reason="the embedded model is not in this installation"
)
MODEL = "tiny"
SUM = "What is 17 + 25?"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Engine(max_seqs=16) as engine:
        server = Live(engine.source, ServerSettings(min_available_bytes=0), engine.tokenizer)
        yield server
        server.close()
    torch.set_num_threads(threads)


def chat(live: Live, messages: Any, **more: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 400, **more}
    return live.openai().chat.completions.create(**body)


def test_the_demo_has_a_conversation_and_calls_a_function_for_any_day(
    live: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in range(8):
        city = invented(Random(f"2027-03-{day:02d}"))
        demo.converse(live.url, city)
        shown = capsys.readouterr().out
        assert re.findall(r"^assistant  (.*)$", shown, re.M) == [
            "17 + 25 = 42.", "42 + 3 = 45.", f"In {city} it is sunny and 21 degrees.",
        ]  # fmt: skip
        (call,) = re.findall(r"^call +(\w+) (.*)$", shown, re.M)
        assert (call[0], json.loads(call[1])) == ("get_weather", {"city": city})


def test_reasoning_that_does_not_end_is_ended_and_answered(live: Live) -> None:
    special = live.service.tokenizer.special
    bias = {str(special[name]): -100 for name in ("<|end|>", "<|call|>")}
    longer = chat(live, SUM, reasoning_effort="high", logit_bias=bias, max_tokens=58)
    assert (longer.choices[0].message.content, longer.choices[0].finish_reason) == ("", "length")
    for choices in (1, 3):
        body = {"reasoning": {"max_tokens": 50}}
        out = chat(live, SUM, reasoning_effort="high", logit_bias=bias, max_tokens=100, n=choices, extra_body=body)
        assert [c.message.content for c in out.choices] == ["17 + 25 = 42."] * choices
        assert {c.finish_reason for c in out.choices} == {"stop"}
        assert out.usage.completion_tokens_details.reasoning_tokens == 50 * choices
        assert out.usage.reasoning_cut


def test_chat_and_stream(live: Live) -> None:
    whole = chat(live, SUM)
    message = whole.choices[0].message
    assert "42" in message.content
    assert message.reasoning_content
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(chat(live, SUM, stream=True, stream_options={"include_usage": True}))
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == message.content
    assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == message.reasoning
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0


def test_an_answer_that_is_cut_and_continued_is_the_whole_one(live: Live) -> None:
    whole = chat(live, SUM)
    total = whole.usage.completion_tokens
    for limit in (total // 4, total // 2, total - 3):
        cut = chat(live, SUM, max_tokens=limit)
        assert cut.choices[0].finish_reason == "length"
        half = cut.choices[0].message
        begun = {"role": "assistant", "content": half.content, "reasoning_content": getattr(half, "reasoning", None)}
        question = {"role": "user", "content": SUM}
        rest = chat(live, [question, begun], extra_body={"continue_final_message": True}).choices[0]
        assert rest.finish_reason == "stop"
        assert (half.content or "") + rest.message.content == whole.choices[0].message.content


@pytest.fixture(scope="module")
def shop() -> tuple[list[Any], str, dict[str, Any], str]:
    """Tools in OpenAI's form, a question for the first of them, what it returns, and the model's own name for it."""
    draw = Random(3)
    offered = calling.offers(draw, 3)
    first = offered[0]
    values = first.ability.draw(draw)
    tools = [
        {"name": o.tool.name, "description": o.tool.description, "parameters": dict(o.tool.parameters or {})}
        for o in offered
    ]
    return tools, first.ability.asks[0].format(**values), first.ability.answer(draw), first.tool.name


def test_tool_round_trip(live: Live, shop: Any) -> None:
    functions, question, result, name = shop
    tools = [{"type": "function", "function": f} for f in functions]
    first = chat(live, question, tools=tools).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert call.function.name == name
    assert json.loads(call.function.arguments)
    messages = [
        {"role": "user", "content": question},
        first.message,
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)},
    ]
    said = chat(live, messages, tools=tools).choices[0].message.content
    assert any(str(value) in said for value in result.values())


def test_a_tool_can_be_required(live: Live, shop: Any) -> None:
    functions, _, _, name = shop
    tools = [{"type": "function", "function": {**f, "strict": True}} for f in functions]
    choice = {"type": "function", "function": {"name": name}}
    out = chat(live, "Hello!", tools=tools, tool_choice=choice).choices[0]  # nobody would call a tool for that
    assert out.finish_reason == "tool_calls"
    assert out.message.tool_calls[0].function.name == name
    assert out.message.reasoning_content


def test_a_required_tool_needs_no_limit(live: Live, shop: Any) -> None:
    functions, _, _, _ = shop
    names = {f["name"] for f in functions}
    messages: list[Any] = [{"role": "user", "content": "Hello!"}]
    tools = [{"type": "function", "function": f} for f in functions]
    said = chat(live, messages, tools=tools, tool_choice="required", max_tokens=None, temperature=0)
    assert said.choices[0].message.tool_calls[0].function.name in names
    flat: list[Any] = [{"type": "function", "strict": False, **f} for f in functions]
    response = live.openai().responses.create(
        model=MODEL, input="Hello!", tools=flat, tool_choice="required", temperature=0
    )
    assert {item.name for item in response.output if item.type == "function_call"} <= names
    assert "function_call" in [item.type for item in response.output]
    own: list[Any] = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
    message = live.anthropic().messages.create(
        model=MODEL,
        messages=messages,
        tools=own,
        tool_choice={"type": "any"},
        extra_body={"temperature": 0},
        max_tokens=live.source.info.max_context,
        timeout=600,
    )
    assert message.stop_reason == "tool_use"
    assert message.content[-1].name in names


def test_only_offered_tools_are_called(live: Live, shop: Any) -> None:
    """In a header that is about to name a recipient, the model names any function unless it is bound to the offer."""
    functions, question, _, missing = shop
    harmony = live.app.state.service.harmony
    header = f"<|start|>user<|message|>{question}<|end|><|start|>assistant<|channel|>commentary to"
    prompt = harmony.tokenizer.encode(header, allow_special=True)
    others = [Function(f["name"]) for f in functions if f["name"] != missing]

    def written(constraint: Constraint | None) -> str:
        end = (harmony.controls.message, harmony.controls.constrain, harmony.controls.channel)
        sampling = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=end)
        tokens = asyncio.run(collected(Request(list(prompt), sampling, constraint)))
        return harmony.tokenizer.decode(t for t in tokens if t not in end).strip().removeprefix("=")

    async def collected(request: Request) -> list[int]:
        return [token async for delta in live.source.stream(request) for token in delta.tokens]

    recipients = {f.recipient for f in others}
    assert written(offered_recipient(harmony.tokenizer, sorted(recipients))) in recipients
    assert written(None) not in recipients


@pytest.mark.parametrize("form", ["text", "json_object", "json_schema"])
def test_only_offered_tools_are_called_whatever_the_answer_must_look_like(live: Live, form: str) -> None:
    """Such a name this model writes too short unless it is bound, as its thoughts show."""
    name = "getWeatherGetWeatherGetWeather"
    weather = {**demo.WEATHER, "name": name}
    schema = {"json_schema": {"name": "thing", "schema": {"type": "object"}}} if form == "json_schema" else {}
    tools = [{"type": "function", "function": weather}]
    question = "What is the weather in Rome?"
    choice = chat(live, question, tools=tools, response_format={"type": form, **schema}).choices[0]
    assert name not in choice.message.reasoning_content
    assert "I call getWeather" in choice.message.reasoning_content
    assert [call.function.name for call in choice.message.tool_calls or ()] == [name]


def test_responses_with_previous_id(live: Live, shop: Any) -> None:
    functions, question, result, name = shop
    tools: list[Any] = [{"type": "function", "strict": False, **f} for f in functions]
    api = live.openai().responses
    with api.stream(model=MODEL, input=question, tools=tools, temperature=0) as stream:
        first = stream.until_done().get_final_response()
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    call: Any = first.output[-1]
    assert call.name == name
    back: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(result)}]
    second = api.create(model=MODEL, input=back, previous_response_id=first.id, tools=tools, temperature=0)
    assert any(str(value) in second.output_text for value in result.values())


def test_anthropic(live: Live, shop: Any) -> None:
    functions, question, result, name = shop
    tools: list[Any] = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions
    ]
    messages: list[Any] = [{"role": "user", "content": question}]
    api = live.anthropic().messages
    thinking: Any = {"type": "adaptive"}
    greedy = {"temperature": 0}
    with api.stream(
        model=MODEL, max_tokens=400, messages=messages, tools=tools, thinking=thinking, extra_body=greedy
    ) as stream:
        first = stream.get_final_message()
    assert [b.type for b in first.content] == ["thinking", "tool_use"]
    use: Any = first.content[-1]
    assert use.name == name
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": json.dumps(result)}]},
    ]
    second = api.create(model=MODEL, max_tokens=400, messages=messages, tools=tools, extra_body=greedy)
    text = "".join(b.text for b in second.content if b.type == "text")
    assert any(str(value) in text for value in result.values())


def order(live: Live, seed: int) -> tuple[dict[str, Any], Any]:
    """One order in prose and a schema for some of its fields: the schema, and the answer to it."""
    draw = Random(seed)
    name, text = reading.order_schema(draw)
    schema = {**json.loads(text), "additionalProperties": False}
    prose = "Extract the data: Anna would like {q} lamps. The price is {p} coins. Send them to Paris on Monday."
    wanted = {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}
    question = prose.format(q=draw.randint(2, 60), p=draw.randint(5, 999))
    # At this temperature the model strays: only the grammar keeps the answer valid, and only the limit ends a thought
    # that goes round and round, as one in some hundreds does.
    limit = {"reasoning": {"max_tokens": 200}}
    return schema, chat(live, question, response_format=wanted, temperature=1.0, seed=seed, extra_body=limit)


def check(schema: dict[str, Any], out: Any) -> None:
    kinds = {"string": str, "integer": int}
    value = json.loads(out.choices[0].message.content)
    assert out.choices[0].finish_reason == "stop"
    assert set(value) == set(schema["required"])
    for key, given in value.items():
        assert isinstance(given, kinds[schema["properties"][key]["type"]])
    assert out.choices[0].message.reasoning_content


def test_json_schema(live: Live) -> None:
    for seed in range(3):
        check(*order(live, seed))


@pytest.mark.slow
def test_json_schema_200_times(live: Live) -> None:
    with ThreadPoolExecutor(16) as pool:
        for schema, out in pool.map(lambda seed: order(live, seed), range(200)):
            check(schema, out)
