"""/v1/messages over real HTTP with Anthropic's own client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest
from live_server import Live
from scripted import Play, ScriptedSource, always, call, in_turn, say

Serve = Callable[..., Live]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather at a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
THINK = {"type": "enabled", "budget_tokens": 2048}


def ask(live: Live, **more: Any) -> Any:
    messages = more.pop("messages", [{"role": "user", "content": "Hi"}])
    body = {"model": "gpt-oss-test", "max_tokens": 500, "messages": messages, **more}
    return live.anthropic().messages.create(**body)


def test_answer(serve: Serve) -> None:
    live = serve(ScriptedSource(always(Play(say("Hello.", "A greeting."), cached=3))))
    out = ask(live, system="Be kind.")
    assert [b.type for b in out.content] == ["text"]
    assert (out.content[0].text, out.stop_reason) == ("Hello.", "end_turn")
    assert out.usage.cache_read_input_tokens == 3
    assert out.usage.input_tokens + 3 == len(live.source.requests[0].prompt)
    assert "# Instructions\n\nBe kind.<|end|>" in live.source.prompts()[0]


def test_thinking(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("Hello.", "A greeting."))))
    out = ask(live, thinking=THINK)
    assert [b.type for b in out.content] == ["thinking", "text"]
    assert out.content[0].thinking == "A greeting."
    assert "Reasoning: low" in live.source.prompts()[0]
    ask(live, thinking={"type": "disabled"})
    assert live.source.prompts()[1].endswith("<|channel|>final<|message|>")


@pytest.mark.parametrize("per_step", [1, 50])
def test_stream(serve: Serve, per_step: int) -> None:
    text = call("functions.get_weather", '{"place": "Zürich"}', "Look 🔎.", "One moment.")
    live = serve(ScriptedSource(always(Play(text, per_step=per_step))))
    with live.anthropic().messages.stream(
        model="gpt-oss-test",
        max_tokens=500,
        messages=[{"role": "user", "content": "Hi"}],
        tools=[WEATHER],
        thinking=THINK,
    ) as stream:
        kinds = [e.type for e in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [b.type for b in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[0].thinking == "Look 🔎."
    assert final.content[0].signature
    assert final.content[1].text == "One moment."
    assert final.content[2].input == {"place": "Zürich"}
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == len(live.source.tokenizer.encode(text, allow_special=True))


def test_tool_round_trip(serve: Serve) -> None:
    live = serve(ScriptedSource(in_turn(call("functions.get_weather", '{"place":"Bern"}', "Need it."), say("Sunny."))))
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    out = ask(live, messages=messages, tools=[WEATHER], thinking=THINK)
    use = out.content[-1]
    messages.append({"role": "assistant", "content": out.content})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "no data"}]}
    messages.append({"role": "user", "content": [{**result, "is_error": True}, {"type": "text", "text": "Well?"}]})
    out = ask(live, messages=messages, tools=[WEATHER])
    assert out.content[0].text == "Sunny."
    prompt = live.source.prompts()[1]
    assert "Need it." in prompt
    assert "<|message|>Error: no data<|end|><|start|>user<|message|>Well?<|end|>" in prompt


def test_tool_choice(serve: Serve) -> None:
    live = serve(ScriptedSource(in_turn("hm<|end|>", '{"place":"X"}<|call|>', say("no tools"))))
    out = ask(live, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}, thinking=THINK)
    assert [b.type for b in out.content] == ["thinking", "tool_use"]
    assert out.content[1].input == {"place": "X"}
    ask(live, tools=[WEATHER], tool_choice={"type": "none"})
    assert "get_weather" not in live.source.prompts()[2]


def test_stop_sequence_and_length(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("one two three four"))))
    out = ask(live, stop_sequences=["three"])
    assert (out.content[0].text, out.stop_reason, out.stop_sequence) == ("one two ", "stop_sequence", "three")
    assert ask(live, max_tokens=5).stop_reason == "max_tokens"


def test_prefill_is_continued(serve: Serve) -> None:
    live = serve(ScriptedSource(always(" 42}<|return|>")))
    messages = [{"role": "user", "content": "JSON"}, {"role": "assistant", "content": '{"a":'}]
    assert ask(live, messages=messages).content[0].text == " 42}"
    assert live.source.prompts()[0].endswith('<|start|>assistant<|channel|>final<|message|>{"a":')


def test_json_output(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say('{"a":1}', "hm"))))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    out = ask(live, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "high"})
    assert out.content[0].text == '{"a":1}'
    assert live.source.requests[0].constraint.kind == "json_schema"
    assert "Reasoning: high" in live.source.prompts()[0]


def test_count_tokens_agrees_with_usage(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER], "system": "Be kind."}
    count = live.anthropic().messages.count_tokens(model="gpt-oss-test", **body)
    assert count.input_tokens == ask(live, **body).usage.input_tokens


def test_errors_have_anthropics_shape(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(live, model="claude")
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="speed"):
        ask(live, extra_body={"speed": "fast"})
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        ask(live, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages.0.content.0.*text only"):
        ask(live, messages=[{"role": "user", "content": [image]}])


def test_failure_in_a_stream_is_an_error_event(serve: Serve) -> None:
    live = serve(ScriptedSource(always(Play(say("one two three"), fails_after=5))))
    stream = ask(live, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="scripted engine failed"):
        list(stream)


def test_models_in_anthropics_shape(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    assert [m.id for m in live.anthropic().models.list()] == ["gpt-oss-test"]


def test_the_fields_that_agents_send(serve: Serve) -> None:
    """As Claude Code sends them: a beta query, cache marks, a system message in the middle, its own bookkeeping."""
    live = serve(ScriptedSource(in_turn(call("functions.Bash", '{"command":"ls"}', "run", "Running."), say("done"))))
    body: dict[str, Any] = {
        "model": "gpt-oss-test",
        "max_tokens": 32000,
        "stream": True,
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "system", "content": "Remember the rules."},
        ],
        "tools": [{"name": "Bash", "input_schema": {"type": "object"}, "eager_input_streaming": True}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "x"},
    }
    with httpx.Client() as http:
        assert http.head(live.url).status_code == 200  # how it looks whether anybody is there
        answer = http.post(f"{live.url}/v1/messages?beta=true", json=body)
    assert answer.status_code == 200
    assert "event: message_stop" in answer.text
    prompt = live.source.prompts()[0]
    assert "Reasoning: high" in prompt
    assert "Remember the rules." in prompt


def test_tools_that_a_client_searches_for(serve: Serve) -> None:
    """Claude Code's way: most tools are shown only once a search has found them."""
    live = serve(ScriptedSource(in_turn(call("functions.ToolSearch", '{"query":"notes"}', "I need notes."), say("ok"))))
    tools: list[Any] = [
        {"name": "ToolSearch", "input_schema": {"type": "object"}},
        {"name": "add_note", "input_schema": {"type": "object"}, "defer_loading": True},
        {"name": "hidden", "input_schema": {"type": "object"}, "defer_loading": True},
    ]
    talk: list[Any] = [{"role": "user", "content": "Take a note"}]
    api = live.anthropic().messages
    first = api.create(model="gpt-oss-test", max_tokens=400, messages=talk, tools=tools)
    assert "type ToolSearch" in live.source.prompts()[0]
    assert "add_note" not in live.source.prompts()[0]
    found = {"type": "tool_reference", "tool_name": "add_note"}
    talk += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": first.content[-1].id, "content": [found]}]},
    ]
    api.create(model="gpt-oss-test", max_tokens=400, messages=talk, tools=tools)
    prompt = live.source.prompts()[1]
    assert "type add_note" in prompt
    assert "The tool add_note can be called now." in prompt
    assert "hidden" not in prompt
    assert "I need notes." in prompt  # although no thinking was asked for, and none sent back
