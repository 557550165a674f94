"""The Python API that people know from OpenAI's package: messages as dicts or objects, tools, streams, async."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import halfbyte
from halfbyte import Answer, Engine, Gates, SamplingParams
from halfbyte.engine.answers import AnswerReader, ToolCall
from halfbyte.engine.request import Delta
from halfbyte.errors import ContextError, GateError, RequestError, StepError, UsageError
from halfbyte.harmony.chat_messages import read_messages, read_tools
from halfbyte.harmony.messages import Message, Tool, opening
from halfbyte.harmony.render import render_message
from halfbyte.model.load import EMBEDDED
from halfbyte.model.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(
    not (EMBEDDED / "config.json").exists(), reason="the embedded model is not in this installation"
)
QUESTION = "What is 17 + 25?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(preset="balanced", max_seqs=8, kv_gib=0.2) as engine:
        yield engine


def test_preset_is_the_gates_of_that_name(engine: Engine) -> None:
    assert engine.info.details["gates"]["layers"] == "qkv=q8,o=q8,lm_head=q8"
    with pytest.raises(GateError, match="'fastest'"):
        Engine(preset="fastest")
    with pytest.raises(UsageError, match="preset and gates"):
        Engine(preset="fast", gates=Gates())


@pytest.mark.parametrize(
    "messages",
    [
        QUESTION,
        [{"role": "user", "content": QUESTION}],
        [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        [SimpleNamespace(role="user", content=QUESTION)],
        [Message.user(QUESTION)],
    ],
)
def test_a_question_in_any_form(engine: Engine, messages: Any) -> None:
    answer = engine.chat(messages)
    assert answer.text == "17 + 25 = 42."
    assert "42" in answer.reasoning
    assert (answer.finish, answer.tool_calls) == ("stop", [])
    assert answer.usage.completion_tokens == len(answer.tokens)
    assert answer.message["content"] == answer.text


def test_limits_and_temperature(engine: Engine) -> None:
    cut = engine.chat(QUESTION, max_tokens=5)
    assert (len(cut.tokens), cut.finish) == (5, "length")
    hot = [engine.chat("Tell me a story.", temperature=5.0, seed=s, max_tokens=8).tokens for s in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    own = engine.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=50), max_tokens=3)
    assert len(own.tokens) == 3
    with pytest.raises(RequestError, match="temperature"):
        engine.chat(QUESTION, temperature=-1.0)
    with pytest.raises(RequestError, match=r"max_tokens is -1; ask for at least 1, or for prompt_logprobs\.$"):
        engine.chat(QUESTION, max_tokens=-1)


def test_a_stream_adds_up_to_the_answer(engine: Engine) -> None:
    whole, stream = engine.chat(QUESTION), engine.chat(QUESTION, stream=True)
    pieces = list(stream)
    assert len(pieces) > 10
    assert "".join(p.text for p in pieces if p.kind == "content") == whole.text
    assert "".join(p.text for p in pieces if p.kind == "reasoning") == whole.reasoning
    assert stream.answer.tokens == whole.tokens
    with engine.chat("Tell me a joke.", stream=True) as left:
        next(left)
    assert left.answer.finish == "cancelled"


def test_async_answers_and_streams(engine: Engine) -> None:
    async def ask() -> tuple[list[Answer], str, str]:
        answers = await asyncio.gather(*(engine.achat(QUESTION) for _ in range(3)))
        stream = await engine.achat(QUESTION, stream=True)
        text = "".join([p.text async for p in stream if p.kind == "content"])
        async with await engine.achat(QUESTION, stream=True) as left:
            await anext(left)
        return list(answers), text, left.answer.finish

    answers, text, finish = asyncio.run(ask())
    assert {a.text for a in answers} == {text} == {"17 + 25 = 42."}
    assert finish == "cancelled"


def test_a_stop_string_ends_the_text_and_not_the_reasoning(engine: Engine) -> None:
    whole = engine.chat(QUESTION)
    assert " = " in whole.reasoning
    for stop in (" = ", ["never", " = "]):
        cut = engine.chat(QUESTION, stop=stop)
        assert (cut.text, cut.reasoning) == ("17 + 25", whole.reasoning)
        assert (cut.finish, cut.stop_match, cut.usage.completion_tokens) == ("stop", " = ", len(cut.tokens))
        assert whole.tokens[: len(cut.tokens)] == cut.tokens
    stream = engine.chat(QUESTION, SamplingParams(temperature=0.0, stop=("= 42.",)), stream=True)
    assert "".join(p.text for p in stream if p.kind == "content") == "17 + 25 "
    assert engine.chat(QUESTION, stop="42!").text == whole.text  # what was held back is shown
    assert asyncio.run(engine.achat(QUESTION, stop=" = ", top_p=0.5)).text == "17 + 25"
    assert engine.stats().running == 0


def test_a_tool_is_called_and_answered(engine: Engine) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    answer = engine.chat(messages, tools=[WEATHER])
    (call,) = answer.tool_calls
    assert (call.name, call.arguments) == ("get_weather", {"city": "Lisbon"})
    messages += [
        answer.message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "sunny"}'},
    ]
    assert engine.chat(messages, tools=[WEATHER]).text == "In Lisbon it is sunny and 21 degrees."
    stream = engine.chat(messages[:1], tools=[WEATHER], stream=True)
    (piece,) = [p for p in stream if p.kind == "call"]
    assert piece.call is not None
    assert piece.call.arguments == {"city": "Lisbon"}


def test_only_offered_functions_are_called(engine: Engine) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    name = "getWeatherGetWeatherGetWeather"  # which this model writes too short unless it is bound
    tool = {"name": name, "description": "Get the weather in a city.", "parameters": city}
    answer = engine.chat("What is the weather in Rome?", tools=[tool], max_tokens=200)
    assert name not in answer.reasoning
    assert "I call getWeather" in answer.reasoning
    assert [call.name for call in answer.tool_calls] == [name]


def test_a_call_of_a_function_that_was_not_offered_is_text() -> None:
    tokenizer = Tokenizer.gpt_oss()
    ids = render_message(tokenizer, Message.call("look", '{"q": 1}'))[2:]
    for functions, text, calls in (((), '{"q": 1}', 0), (("other",), '{"q": 1}', 0), (("other", "look"), "", 1)):
        reader = AnswerReader(tokenizer, functions=functions)
        for token in ids[:-1]:
            reader.read(Delta([token]))
        reader.read(Delta(ids[-1:], finish="stop"))
        assert (reader.answer.text, len(reader.answer.tool_calls)) == (text, calls)


def test_arguments_that_are_no_object_are_an_error() -> None:
    for text in ("{", "[1]", "word"):
        with pytest.raises(StepError, match="look"):
            _ = ToolCall("1", "look", text).arguments
    assert ToolCall("1", "look", "").arguments == {}


def test_a_conversation_becomes_harmony_messages() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": 1}'}}
    instructions, messages = read_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
            {"role": "developer", "content": "Be longer."},
        ]
    )
    assert instructions == "Be brief."
    assert messages == [
        Message.user("Look."), Message.analysis("I look."), Message.call("look", '{"q": 1}'),
        Message.result("look", "found"), Message.developer("Be longer."),
    ]  # fmt: skip
    (tool,) = read_tools([WEATHER])
    assert (tool, read_tools([WEATHER["function"]])) == (Tool(**WEATHER["function"]), [tool])  # type: ignore[arg-type]
    assert len(opening("low", None, [tool])) == 2


@pytest.mark.parametrize(
    ("messages", "tools", "value"),
    [
        ([{"role": "robot", "content": "x"}], (), "robot"),
        (["hello"], (), "hello"),
        ({"role": "user", "content": "x"}, (), "dict"),
        ([], (), "empty"),
        (QUESTION, {"name": "x"}, "tools is of type dict"),
        (QUESTION, 7, "tools is of type int"),
        (QUESTION, [{"name": "a b"}], r"tools\[0\].name"),
        (7, (), "int"),
        ([{"role": "user", "content": 7}], (), r"messages\[0\].content"),
        ([{"role": "user"}], (), r"messages\[0\] has no content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], (), "image_url"),
        ([{"role": "tool", "tool_call_id": "c9", "content": "x"}], (), "c9"),
        (QUESTION, [{"type": "function"}], r"tools\[0\]"),
        (QUESTION, [WEATHER, WEATHER], "get_weather"),
        (QUESTION, [{"name": "x", "parameters": "y"}], r"tools\[0\].parameters"),
    ],
)
def test_wrong_input_is_one_sentence(engine: Engine, messages: Any, tools: Any, value: str) -> None:
    with pytest.raises(RequestError, match=value):
        engine.chat(messages, tools=tools)


def test_arguments_that_chat_does_not_take_are_named(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"top_k.*temperature, top_p"):
        engine.chat(QUESTION, top_k=3)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="of type dict"):
        engine.chat(QUESTION, {"temperature": 0})  # type: ignore[call-overload]
    assert engine.chat(QUESTION, tools=None, stop=None, temperature=None).text == "17 + 25 = 42."


def test_the_package_shows_its_interface() -> None:
    shown = [name for name in dir(halfbyte) if not name.startswith("_")]
    assert shown == sorted(name for name in halfbyte.__all__ if not name.startswith("_"))


def test_a_context_above_the_models_is_refused() -> None:
    with pytest.raises(UsageError, match=r"32769.*32768"):
        Engine(max_context=32769)


def test_a_prompt_above_the_context_is_refused(engine: Engine) -> None:
    with pytest.raises(ContextError):
        engine.chat("word " * 33_000)


def test_the_examples_of_the_page_run(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(first, PAGE.name, "exec"), {})
    assert capsys.readouterr().out == "17 + 25 = 42.\n"
    for example in others:
        exec(compile(example, PAGE.name, "exec"), {"engine": engine})
    assert capsys.readouterr().out.endswith("In Lisbon it is sunny and 21 degrees.\n")
