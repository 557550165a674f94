"""Ollama's API with its own Python client, and the shapes of what it streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from live_server import Live
from scripted import Play, ScriptedSource, always, call, in_turn, say

ollama = pytest.importorskip("ollama")
Serve = Callable[..., Live]
MODEL = "gpt-oss-test"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def get_weather(place: str) -> str:
    """The weather at a place.

    Args:
      place: Where.
    """
    return "sun"


def client(live: Live) -> Any:
    made = ollama.Client(host=live.url)
    live.clients.append(made._client)
    return made


def lines(http: httpx.Client, live: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(live.url + path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_chat(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("Hello.", "A greeting."))))
    out = client(live).chat(
        MODEL,
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        options={"temperature": 0.5, "num_predict": 50, "num_ctx": 8192},
        think="high",
        keep_alive="5m",
    )
    assert (out.message.content, out.message.thinking) == ("Hello.", "A greeting.")
    assert (out.done, out.done_reason) == (True, "stop")
    assert out.prompt_eval_count == len(live.source.requests[0].prompt)
    assert out.eval_count > 5
    assert out.total_duration >= out.eval_duration
    sampling = live.source.requests[0].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 50)
    prompt = live.source.prompts()[0]
    assert "Reasoning: high" in prompt
    assert "# Instructions\n\nBe kind." in prompt


def test_streamed_chat(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("Grüße 👋\nund mehr", "denk"))))
    parts = list(client(live).chat(MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True))
    assert "".join(p.message.content or "" for p in parts) == "Grüße 👋\nund mehr"
    assert "".join(p.message.thinking or "" for p in parts) == "denk"
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]


def test_tools_round_trip(serve: Serve) -> None:
    first = call("functions.get_weather", '{"place":"Bern"}', "They want the weather.")
    live = serve(ScriptedSource(in_turn(first, say("Sunny."))))
    talk: list[Any] = [{"role": "user", "content": "Weather in Bern?"}]
    out = client(live).chat(MODEL, messages=talk, tools=[get_weather])
    (made,) = out.message.tool_calls
    assert (made.function.name, made.function.arguments) == ("get_weather", {"place": "Bern"})
    assert "type get_weather = (_: {" in live.source.prompts()[0]
    talk += [
        out.message,
        {"role": "tool", "tool_name": "get_weather", "content": get_weather(**made.function.arguments)},
    ]
    out = client(live).chat(MODEL, messages=talk, tools=[get_weather])
    assert out.message.content == "Sunny."
    prompt = live.source.prompts()[1]
    assert "They want the weather." in prompt
    assert '<|message|>{"place": "Bern"}<|call|>' in prompt
    assert "functions.get_weather to=assistant<|channel|>commentary<|message|>sun<|end|>" in prompt


def test_streamed_calls_come_whole(serve: Serve, http: httpx.Client) -> None:
    two = call("functions.a", '{"x":1}').removesuffix("<|call|>") + "<|end|><|start|>assistant"
    two += call("functions.b", "[1]", preamble="Both.")
    live = serve(ScriptedSource(always(two)))
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    got = lines(http, live, "/api/chat", messages=[{"role": "user", "content": "Hi"}], tools=tools)
    calls = [c["function"] for line in got for c in line["message"].get("tool_calls", [])]
    assert calls == [
        {"index": 0, "name": "a", "arguments": {"x": 1}},
        {"index": 1, "name": "b", "arguments": {"_unparsed": "[1]"}},
    ]
    assert got[-1]["done_reason"] == "stop"


def test_results_without_a_name_belong_to_the_calls_in_order(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    client(live).chat(MODEL, messages=talk)
    prompt = live.source.prompts()[0]
    assert "functions.a to=assistant<|channel|>commentary<|message|>one" in prompt
    assert "functions.b to=assistant<|channel|>commentary<|message|>two" in prompt
    with pytest.raises(ollama.ResponseError, match="no earlier message made that call"):
        client(live).chat(MODEL, messages=[{"role": "tool", "content": "one"}])


def test_a_form(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say('{"a": 1}', "hm"))))
    out = client(live).chat(MODEL, messages=[{"role": "user", "content": "Hi"}], format=SCHEMA)
    assert json.loads(out.message.content) == {"a": 1}
    client(live).generate(MODEL, prompt="Hi", format="json")
    one, two = (r.constraint for r in live.source.requests)
    assert json.loads(one.source) == SCHEMA
    assert two.kind == "json_object"


def test_generate(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("Hello.", "hm"))))
    out = client(live).generate(MODEL, prompt="Hi", system="Be kind.", think=False)
    assert (out.response, out.thinking, out.done_reason) == ("Hello.", None, "stop")
    assert "Be kind." in live.source.prompts()[0]
    parts = list(client(live).generate(MODEL, prompt="Hi", stream=True))
    assert "".join(p.response for p in parts) == "Hello."
    assert "".join(p.thinking or "" for p in parts) == "hm"


@pytest.mark.parametrize("stream", [False, True])
def test_a_raw_prompt_is_the_models_input(serve: Serve, stream: bool) -> None:
    live = serve(ScriptedSource(always(" two three")))
    out = client(live).generate(MODEL, prompt="<|start|>one", raw=True, stream=stream, options={"num_predict": 2})
    text = "".join(p.response for p in out) if stream else out.response
    assert text == " two three"
    assert live.source.requests[0].prompt == live.source.tokenizer.encode("<|start|>one", allow_special=True)
    with pytest.raises(ollama.ResponseError, match="'system' cannot be used with 'raw'"):
        client(live).generate(MODEL, prompt="x", raw=True, system="y")


def test_about_the_model(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("x")), model="gpt-oss-20b"))
    assert [m.model for m in client(live).list().models] == ["gpt-oss-20b"]
    (running,) = client(live).ps().models
    assert (running.model, running.context_length) == ("gpt-oss-20b", 8192)
    shown = client(live).show("gpt-oss:20b")
    assert set(shown.capabilities) == {"completion", "tools", "thinking"}
    assert shown.modelinfo["gptoss.context_length"] == 8192
    assert http.get(f"{live.url}/api/version").json()["version"].count(".") == 2
    for name in ("gpt-oss:20b", "gpt-oss-20b:latest"):
        assert client(live).chat(name, messages=[{"role": "user", "content": "Hi"}]).message.content == "x"


def test_nothing_to_say_only_loads(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    assert client(live).generate(MODEL).done_reason == "load"
    assert client(live).chat(MODEL).done_reason == "load"
    assert live.source.requests == []


def test_refusals_are_sentences_in_ollamas_shape(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(Play(say("one two three"), fails_after=5))))
    with pytest.raises(ollama.ResponseError, match="'other' is not served here") as e:
        client(live).chat("other", messages=[{"role": "user", "content": "x"}])
    assert e.value.status_code == 404
    for body, words in (
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": "x"}], "options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"messages": [{"role": "user", "content": "x"}], "template": "y"}, "'template'"),
    ):
        answer = http.post(f"{live.url}/api/chat", json={"model": MODEL, **body})
        assert answer.status_code == 400
        assert words in answer.json()["error"]
    *_, last = lines(http, live, "/api/chat", messages=[{"role": "user", "content": "x"}])
    assert last == {"error": "the scripted engine failed"}


def test_silence_is_filled_with_empty_lines_of_the_same_kind(serve: Serve, http: httpx.Client) -> None:
    from halfbyte.server.settings import ServerSettings

    settings = ServerSettings(min_available_bytes=0, keepalive_seconds=0.1, headers_after=0.0)
    live = serve(ScriptedSource(always(Play(say("x"), first_delay=0.5))), settings)
    first, *_ = lines(http, live, "/api/chat", messages=[{"role": "user", "content": "x"}])
    assert first["message"] == {"role": "assistant", "content": ""}
    assert first["done"] is False


def test_llama_cpps_props(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    props = http.get(f"{live.url}/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 8192
    assert props["model_alias"] == MODEL
    assert props["total_slots"] == 1
