"""Fields that other servers accept: each has a meaning here or is refused by its name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from live_server import Live
from scripted import Play, ScriptedSource, always, call, in_turn, say

Serve = Callable[..., Live]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def ask(live: Live, messages: Any = "Hi", **more: Any) -> Any:
    talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return live.openai().chat.completions.create(model="gpt-oss-test", messages=talk, extra_body=more)


@pytest.mark.parametrize(
    ("more", "kind", "source"),
    [
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "[a-f]+"}, "regex", "[a-f]+"),
        ({"guided_choice": ["yes", "no (at all)"]}, "regex", r"(yes)|(no\ \(at\ all\))"),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"structured_outputs": {"choice": ["x"]}}, "regex", "(x)"),
        ({"json_schema": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", None),
    ],
)
def test_a_form_under_another_servers_name(serve: Serve, more: Any, kind: str, source: str | None) -> None:
    live = serve(ScriptedSource(always(say('{"a":1}'))))
    ask(live, **more)
    constraint = live.source.requests[0].constraint
    assert constraint.kind == kind
    assert source is None or constraint.source == source
    assert ("# Response Formats" in live.source.prompts()[0]) == kind.startswith("json")


def test_a_form_of_plain_text_too(serve: Serve) -> None:
    live = serve(ScriptedSource(always("ab")))
    live.openai().completions.create(model="gpt-oss-test", prompt="x", extra_body={"guided_regex": "[ab]+"})
    constraint = live.source.requests[0].constraint
    assert (constraint.kind, constraint.source, constraint.triggers) == ("regex", "[ab]+", ())


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_json": "no schema"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"chat_template_kwargs": {"builtin_tools": ["python"]}}, "chat_template_kwargs.builtin_tools"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_what_cannot_be_is_named(serve: Serve, more: Any, param: str) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    with pytest.raises(openai.BadRequestError) as e:
        ask(live, **more)
    assert e.value.param == param
    assert live.source.requests == []


def test_template_arguments(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    ask(live, chat_template_kwargs={"reasoning_effort": "high", "model_identity": "You are Otto."})
    ask(live, chat_template_kwargs={"enable_thinking": False})
    high, none = live.source.prompts()
    assert "Reasoning: high" in high
    assert "You are Otto." in high
    assert "You are ChatGPT" not in high
    assert none.endswith("<|channel|>final<|message|>")


def test_options_fill_what_the_request_leaves_open(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("one STOP two"))))
    options = {"temperature": 0.25, "top_k": 7, "num_predict": 9, "num_ctx": 4096, "stop": ["STOP"], "seed": 3}
    out = ask(live, options=options, temperature=0.5, keep_alive="5m")
    sampling = live.source.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.seed) == (0.5, 7, 9, 3)
    assert out.choices[0].message.content == "one "


def test_minus_one_is_as_many_as_fit(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x")), max_context=900))
    ask(live, max_tokens=-1)
    live.openai().completions.create(model="gpt-oss-test", prompt="x", max_tokens=-1)
    chat, text = live.source.requests
    assert chat.sampling.max_tokens == 900 - len(chat.prompt)
    assert text.sampling.max_tokens == 900 - len(text.prompt)


def test_reasoning_that_a_client_dropped_is_there_all_the_same(serve: Serve) -> None:
    first = call("functions.get_weather", "{}", "It is about Bern.")
    live = serve(ScriptedSource(in_turn(first, first, say("Sunny."))))
    talk: list[Any] = [{"role": "user", "content": "Weather?"}]
    made = ask(live, talk, tools=[WEATHER]).choices[0].message
    (one,) = made.tool_calls
    bare = {"role": "assistant", "tool_calls": [one.to_dict()]}
    result = {"role": "tool", "tool_call_id": one.id, "content": "sun"}
    ask(live, [*talk, bare, result], tools=[WEATHER])
    assert "<|channel|>analysis<|message|>It is about Bern.<|end|>" in live.source.prompts()[1]
    # What the client does send counts, and after an answer nothing of it is left.
    ask(live, [*talk, {**bare, "reasoning": "Mine."}, result], tools=[WEATHER])
    assert "Mine." in live.source.prompts()[2]
    assert "It is about Bern." not in live.source.prompts()[2]
    over = [*talk, bare, result, {"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "And now?"}]
    ask(live, over, tools=[WEATHER])
    assert "It is about Bern." not in live.source.prompts()[3]


def test_a_part_that_carries_its_whole_message(serve: Serve) -> None:
    """As @openai/agents sends our own answers back: it was once refused as 'messages.2.content.0.text'."""
    live = serve(ScriptedSource(always(say("Hello.", "hm"))))
    message = ask(live).choices[0].message.to_dict()
    part = {"type": "text", "text": message.pop("content"), **message}
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [part]},
        {"role": "user", "content": "?"},
    ]
    ask(live, talk)
    assert "<|channel|>final<|message|>Hello.<|end|><|start|>user<|message|>?<|end|>" in live.source.prompts()[1]


# ---- a prompt's own log probabilities -------------------------------------------------------------


def complete(live: Live, **more: Any) -> Any:
    return live.openai().completions.create(model="gpt-oss-test", **more)


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(serve: Serve, max_tokens: int, stream: bool) -> None:
    live = serve(ScriptedSource(always(" five six seven")))
    ids = live.source.tokenizer.encode("one two three four")
    out = complete(live, prompt=ids, echo=True, logprobs=2, max_tokens=max_tokens, stream=stream)
    parts = [c for chunk in (out if stream else [out]) for c in chunk.choices]
    text = "".join(c.text for c in parts)
    tokens = [t for c in parts for t in c.logprobs.tokens]
    values = [v for c in parts for v in c.logprobs.token_logprobs]
    tops = [t for c in parts for t in c.logprobs.top_logprobs]
    offsets = [o for c in parts for o in c.logprobs.text_offset]
    assert text == "one two three four" + (" five six" if max_tokens else "")
    assert tokens == ["one", " two", " three", " four", *([" five", " six"] if max_tokens else [])]
    assert values == [None, *[-0.25] * (len(tokens) - 1)]
    assert tops[0] is None
    assert all(len(top) == 2 and max(top.values()) == -0.25 for top in tops[1:])
    assert offsets == [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    assert parts[-1].finish_reason == "length"


def test_echo_alone_generates_nothing_with_zero(serve: Serve) -> None:
    live = serve(ScriptedSource(always(" five")))
    out = complete(live, prompt="one two", echo=True, max_tokens=0)
    assert (out.choices[0].text, out.usage.completion_tokens) == ("one two", 0)
    assert live.source.requests[0].sampling.prompt_logprobs_from == len(live.source.requests[0].prompt)


def test_every_choice_of_every_prompt_has_them(serve: Serve) -> None:
    live = serve(ScriptedSource(always(" x")))
    out = complete(live, prompt=["one two", "three"], echo=True, logprobs=0, max_tokens=1, n=2)
    assert [c.logprobs.tokens for c in out.choices] == [["one", " two", " x"]] * 2 + [["three", " x"]] * 2


def test_zero_tokens_need_an_echo(serve: Serve) -> None:
    live = serve(ScriptedSource(always("x")))
    with pytest.raises(openai.BadRequestError, match="asks for nothing") as e:
        complete(live, prompt="one", max_tokens=0)
    assert e.value.param == "max_tokens"


def test_of_two_tokens_that_read_the_same_the_likelier_is_shown(serve: Serve) -> None:
    class Twins(ScriptedSource):
        def _scores(self, tokens: list[int], k: int) -> Any:
            first = super()._scores(tokens, 1)
            half = self.tokenizer.encode("é")[:1] + self.tokenizer.encode("👩")[:1]
            assert math.isfinite(first[0].logprob)
            top = tuple((t, -0.5 - i) for i, t in enumerate([tokens[0], *half, *half]))
            return [type(f)(f.token, f.logprob, top) for f in first]

    live = serve(Twins(always(Play("a"))))
    out = complete(live, prompt="x", max_tokens=1, logprobs=5)
    assert max(out.choices[0].logprobs.top_logprobs[0].values()) == -0.5


# ---- errors name the field of the API that was called ---------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 500}]}, "messages"),
        ("/v1/responses", {"input": "word " * 500}, "input"),
        ("/v1/completions", {"prompt": "word " * 500}, "prompt"),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "word " * 500}]}, "messages"),
        ("/api/chat", {"messages": [{"role": "user", "content": "word " * 500}]}, "messages"),
        ("/api/generate", {"prompt": "word " * 500}, "prompt"),
        ("/api/generate", {"prompt": "x", "options": {"stop": [""]}}, "options.stop"),
    ],
)
def test_errors_name_the_field(serve: Serve, http: httpx.Client, path: str, body: Any, param: str) -> None:
    live = serve(ScriptedSource(always(say("x")), max_context=300))
    answer = http.post(live.url + path, json={"model": "gpt-oss-test", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    if path.startswith("/api/"):
        assert param in error
    elif path == "/v1/messages":
        assert error["message"].startswith(f"{param}: ")
    else:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        ("chat/completions", {"verbosity": "low"}, "verbosity"),
        ("chat/completions", {"verbosity": "high", "cache_prompt": False}, "cache_prompt,verbosity"),
        ("chat/completions", {"verbosity": "medium"}, None),
        ("responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("responses", {"reasoning": {"context": "all_turns"}, "tools": [{"type": "web_search"}]},
         "tools.web_search,reasoning.context"),
        ("responses", {"reasoning": {"context": "current_turn"}, "text": {"verbosity": "medium"}}, None),
    ],
)  # fmt: skip
def test_what_gpt_oss_cannot_do_is_left_out_aloud(
    serve: Serve, http: httpx.Client, path: str, more: Any, said: str | None
) -> None:
    live = serve(ScriptedSource(always(say("ok"))))
    talk = {"input": "Hi"} if path == "responses" else {"messages": [{"role": "user", "content": "Hi"}]}
    answer = http.post(f"{live.url}/v1/{path}", json={"model": "gpt-oss-test", **talk, **more})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-halfbyte-left-out") == said
