"""The Responses API over real HTTP with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from live_server import Live
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from scripted import Play, ScriptedSource, always, call, in_turn, say

Serve = Callable[..., Live]
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place",
    "strict": False,
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}}],
}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files."}


def ask(live: Live, input: Any = "Hi", **more: Any) -> Any:
    return live.openai().responses.create(model="gpt-oss-test", input=input, **more)


def test_answer_items(serve: Serve) -> None:
    live = serve(ScriptedSource(always(Play(say("Hello.", "A greeting."), cached=4))))
    out = ask(live, instructions="Be kind.", metadata={"k": "v"})
    assert [item.type for item in out.output] == ["reasoning", "message"]
    assert out.output[0].content[0].text == "A greeting."
    assert out.output_text == "Hello."
    assert (out.status, out.metadata, out.instructions) == ("completed", {"k": "v"}, "Be kind.")
    assert out.usage.input_tokens_details.cached_tokens == 4
    assert out.usage.output_tokens_details.reasoning_tokens == 3
    assert "# Instructions\n\nBe kind.<|end|>" in live.source.prompts()[0]


STRICT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events(live: Live, **more: Any) -> list[Any]:
    """The stream as the client reads it; every event also fits the client's own types, strictly."""
    out = []
    with live.openai().responses.with_streaming_response.create(
        model="gpt-oss-test", input="Hi", stream=True, **more
    ) as raw:
        for block in raw.read().decode().split("\n\n"):
            if block.strip():
                name, data = block.split("\n", 1)
                body = json.loads(data.removeprefix("data: "))
                assert name == f"event: {body['type']}"
                STRICT.validate_python(body)
                out.append(body)
    assert [e["sequence_number"] for e in out] == list(range(len(out)))
    return out


def test_stream_events_in_order(serve: Serve) -> None:
    first = call("functions.get_weather", '{"place":"Bern"}', "Look it up.", "One moment.")
    live = serve(ScriptedSource(always(Play(first, per_step=100))))
    seen = events(live, tools=[WEATHER])
    assert [e["type"] for e in seen] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    final = seen[-1]["response"]["output"]
    assert [i["type"] for i in final] == ["reasoning", "message", "function_call"]
    assert final == [e["item"] for e in seen if e["type"] == "response.output_item.done"]
    assert final[1]["phase"] == "commentary"


def test_the_stream_helper_of_the_client(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("Grüße 👋", "denk"))))
    with live.openai().responses.stream(model="gpt-oss-test", input="Hi") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Grüße 👋"


def test_previous_response_carries_the_conversation(serve: Serve) -> None:
    live = serve(ScriptedSource(in_turn(call("functions.get_weather", '{"place":"Bern"}', "Need it."), say("Sunny."))))
    first = ask(live, "Weather?", tools=[WEATHER], instructions="First.")
    made = first.output[-1]
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "sun"}
    second = ask(live, [result], previous_response_id=first.id, tools=[WEATHER], instructions="Second.")
    assert second.output_text == "Sunny."
    assert second.previous_response_id == first.id
    prompt = live.source.prompts()[1]
    assert "Weather?" in prompt
    assert "Need it." in prompt
    assert "functions.get_weather to=assistant<|channel|>commentary<|message|>sun<|end|>" in prompt
    assert "Second." in prompt
    assert "First." not in prompt  # instructions are not carried over
    # Both answers can branch off the same one, and stored ones can be read and deleted.
    api = live.openai().responses
    assert api.retrieve(first.id).output[-1].call_id == made.call_id
    assert [i.type for i in api.input_items.list(second.id)] == ["function_call_output"]
    api.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="There is no response"):
        ask(live, "x", previous_response_id=first.id)


def test_store_false_is_not_stored(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    out = ask(live, store=False)
    with pytest.raises(openai.NotFoundError):
        live.openai().responses.retrieve(out.id)


def test_items_sent_back_by_a_client_that_keeps_its_own_history(serve: Serve) -> None:
    live = serve(ScriptedSource(in_turn(call("functions.get_weather", '{"place":"B"}', "Need it."), say("ok"))))
    include = ["reasoning.encrypted_content"]
    first = ask(live, "Weather?", tools=[WEATHER], store=False, include=include)
    reasoning, made = first.output
    assert reasoning.encrypted_content
    sealed = {"type": "reasoning", "id": reasoning.id, "summary": [], "encrypted_content": reasoning.encrypted_content}
    items = [
        {"role": "user", "content": "Weather?"},
        sealed,
        made.to_dict(),
        {"type": "function_call_output", "call_id": made.call_id, "output": [{"type": "input_text", "text": "sun"}]},
    ]
    ask(live, items, tools=[WEATHER], store=False)
    assert "Need it." in live.source.prompts()[1]


def test_namespaces_and_custom_tools(serve: Serve) -> None:
    plays = (call("agents.close", "{}"), call("functions.apply_patch", '{"input": "*** Begin\\n"}'), say("done"))
    live = serve(ScriptedSource(in_turn(*plays)))
    tools = [WEATHER, AGENTS, PATCH, {"type": "web_search", "external_web_access": False}]
    one = ask(live, tools=tools)
    closed = one.output[0]
    assert (closed.type, closed.name, closed.namespace) == ("function_call", "close", "agents")
    assert "namespace agents {" in live.source.prompts()[0]
    two = ask(live, tools=tools)
    patch = two.output[0]
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", "*** Begin\n")
    back = [
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Success"},
    ]
    three = ask(live, back, previous_response_id=two.id, tools=tools)
    assert three.output_text == "done"
    assert '<|message|>{"input": "*** Begin\\n"}<|call|>' in live.source.prompts()[2]
    raw = live.openai().responses.with_raw_response.create(model="gpt-oss-test", input="x", tools=tools)
    assert raw.headers["x-halfbyte-left-out"] == "tools.web_search"


SEARCH: dict[str, Any] = {
    "type": "tool_search",
    "execution": "client",
    "description": "Searches for tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
FOUND: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__notes",
    "description": "Notes.",
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "defer_loading": True}],
}


@pytest.mark.parametrize("stored", [False, True])
def test_tools_that_a_client_searches_for(serve: Serve, stored: bool) -> None:
    """Codex's way: the model asks for tools, the client finds them, the model calls one of them."""
    plays = (
        call("functions.tool_search", '{"query":"notes"}', "I need notes."),
        call("mcp__notes.add", "{}"),
        say("ok"),
    )
    live = serve(ScriptedSource(in_turn(*plays)))
    one = ask(live, "Take a note", tools=[SEARCH, WEATHER], store=stored)
    search = one.output[-1]
    assert (search.type, search.execution, search.arguments) == ("tool_search_call", "client", {"query": "notes"})
    found = {
        "type": "tool_search_output",
        "call_id": search.call_id,
        "status": "completed",
        "execution": "client",
        "tools": [FOUND],
    }
    asked = [{"role": "user", "content": "Take a note"}, *(item.to_dict() for item in one.output)]
    if stored:
        two = ask(live, [found], tools=[SEARCH, WEATHER], previous_response_id=one.id)
    else:
        two = ask(live, [*asked, found], tools=[SEARCH, WEATHER])
    made = two.output[-1]
    assert (made.type, made.namespace, made.name) == ("function_call", "mcp__notes", "add")
    prompt = live.source.prompts()[1]
    assert "namespace mcp__notes {" in prompt
    assert "I need notes." in prompt
    assert '<|message|>{"query":"notes"}<|call|>' in prompt
    assert 'functions.tool_search to=assistant<|channel|>commentary<|message|>{"tools":["mcp__notes.add"]}' in prompt
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "noted"}
    if stored:
        three = ask(live, [result], tools=[SEARCH, WEATHER], previous_response_id=two.id)
    else:
        three = ask(live, [*asked, found, made.to_dict(), result], tools=[SEARCH, WEATHER])
    assert three.output_text == "ok"
    assert "mcp__notes.add to=assistant<|channel|>commentary<|message|>noted<|end|>" in live.source.prompts()[2]


def test_a_streamed_search_for_tools(serve: Serve) -> None:
    live = serve(ScriptedSource(always(call("functions.tool_search", '{"query":"x"}'))))
    seen = events(live, tools=[SEARCH])
    assert [e["type"] for e in seen][2:] == [
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    assert seen[3]["item"]["arguments"] == {"query": "x"}


def test_tools_in_the_input(serve: Serve) -> None:
    live = serve(ScriptedSource(always(call("agents.close", "{}"))))
    more = {"type": "additional_tools", "role": "developer", "tools": [AGENTS, PATCH]}
    out = ask(live, [more, {"role": "user", "content": "Hi"}, more], tools=[PATCH])
    assert (out.output[0].namespace, out.output[0].name) == ("agents", "close")
    prompt = live.source.prompts()[0]
    assert prompt.count("namespace agents {") == 1
    assert prompt.count("type apply_patch") == 1


def test_a_search_that_openai_would_run_is_left_out(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    raw = live.openai().responses.with_raw_response.create(
        model="gpt-oss-test", input="x", tools=[{"type": "tool_search"}, {**WEATHER, "defer_loading": True}]
    )
    assert raw.headers["x-halfbyte-left-out"] == "tools.tool_search"
    assert "type get_weather" in live.source.prompts()[0]  # nothing is deferred


def test_a_local_shell(serve: Serve) -> None:
    run = '{"command":["ls","-l"],"working_directory":"/tmp"}'
    live = serve(ScriptedSource(in_turn(call("functions.local_shell", run, "Look."), say("Two files."))))
    one = ask(live, "What is there?", tools=[{"type": "local_shell"}])
    made = one.output[-1]
    assert (made.type, made.action.command, made.action.working_directory) == ("local_shell_call", ["ls", "-l"], "/tmp")
    output = {"type": "local_shell_call_output", "id": made.call_id, "output": "a b"}
    items = [{"role": "user", "content": "What is there?"}, *(item.to_dict() for item in one.output), output]
    assert ask(live, items, tools=[{"type": "local_shell"}]).output_text == "Two files."
    prompt = live.source.prompts()[1]
    assert '{"command":["ls","-l"],"working_directory":"/tmp"}<|call|>' in prompt
    assert "functions.local_shell to=assistant<|channel|>commentary<|message|>a b<|end|>" in prompt


def test_a_search_of_the_web_that_another_service_made_says_nothing(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    made = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Found it."}]}
    ask(live, [{"role": "user", "content": "Hi"}, made, said, {"role": "user", "content": "More"}])
    assert "Found it.<|end|><|start|>user<|message|>More" in live.source.prompts()[0]


def test_streamed_custom_call(serve: Serve) -> None:
    live = serve(ScriptedSource(always(call("functions.apply_patch", '{"input": "abc"}'))))
    seen = events(live, tools=[PATCH])
    done = next(e for e in seen if e["type"] == "response.custom_tool_call_input.done")
    assert done["input"] == "abc"
    assert seen[-1]["response"]["output"][0]["input"] == "abc"


def test_json_schema(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say('{"a": 1}', "hm"))))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    out = ask(live, text={"format": {"type": "json_schema", "name": "t", "schema": schema, "strict": True}})
    assert json.loads(out.output_text) == {"a": 1}
    assert json.loads(live.source.requests[0].constraint.source) == schema


def test_required_tool(serve: Serve) -> None:
    live = serve(ScriptedSource(in_turn("thinking<|end|>", '{"place":"X"}<|call|>')))
    out = ask(live, tools=[WEATHER, AGENTS], tool_choice={"type": "function", "name": "get_weather"})
    assert [i.type for i in out.output] == ["reasoning", "function_call"]
    assert out.output[1].arguments == '{"place":"X"}'


@pytest.mark.parametrize("stream", [False, True])
def test_length_is_incomplete(serve: Serve, stream: bool) -> None:
    live = serve(ScriptedSource(always(say("one two three four five"))))
    if stream:
        last = events(live, max_output_tokens=5)[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["response"]["output"][0]["status"] == "incomplete"
    else:
        out = ask(live, max_output_tokens=5)
        assert (out.status, out.output[0].status) == ("incomplete", "incomplete")


def test_engine_failure_in_a_stream_is_an_event(serve: Serve) -> None:
    live = serve(ScriptedSource(always(Play(say("one two three"), fails_after=5))))
    last = events(live)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"


def test_logprobs(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("Hi there", "x"))))
    out = ask(live, top_logprobs=2, include=["message.output_text.logprobs"])
    entries = out.output[1].content[0].logprobs
    assert "".join(e.token for e in entries) == "Hi there"
    assert len(entries[0].top_logprobs) == 2


def test_input_tokens(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    count = live.openai().responses.input_tokens.count(model="gpt-oss-test", input="Hi").input_tokens
    assert count == ask(live).usage.input_tokens


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "no", "output": ""}]}, "input.0.call_id"),
        ({"input": []}, "input"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools.0"),
        ({"input": [{"type": "mcp_call", "id": "x", "name": "y"}]}, "input.0"),
        ({"input": [{"type": "tool_search_output", "call_id": "no", "tools": []}]}, "input.0.call_id"),
    ],
)
def test_what_cannot_be_served_is_named(serve: Serve, more: dict[str, Any], param: str) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    with pytest.raises(openai.BadRequestError) as e:
        live.openai().responses.create(**{"model": "gpt-oss-test", "input": "Hi", **more})
    assert param in (e.value.param or "")
    assert live.source.requests == []
