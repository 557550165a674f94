"""The server on a real engine: random weights, the embedded model's vocabulary, every token really computed.

What such a model says is noise, which is the point: grammars, stops, counts and shapes must hold whatever it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from live_server import Live, wait_until

from halfbyte.engine.build import core_for
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.thread import EngineThread
from halfbyte.gates import Gates
from halfbyte.model import synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.load import EMBEDDED
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server.settings import ServerSettings

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(EMBEDDED / "tokenizer.json")
    config = replace(
        NAMED["small"],
        layers=2,
        layer_kinds=(),
        vocab=tokenizer.vocab_size,
        eos_tokens=tokenizer.eos_tokens,
        pad_token=0,
        name="noise",
    )
    model = GptOss(synthetic.make(config, 0), Gates())
    options = EngineOptions(max_context=4096, max_seqs=16, max_rows_per_step=512, kv_gib=0.2, reserve_gib=0.0)
    core, info, _ = core_for(model, tokenizer, options, "noise")
    engine = EngineThread(core, info)
    server = Live(engine, ServerSettings(min_available_bytes=0), tokenizer)
    yield server
    server.close()
    engine.shutdown()
    torch.set_num_threads(threads)


def chat(live: Live, **more: Any) -> Any:
    body = {"model": "noise", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24, "seed": 1, **more}
    return live.openai().chat.completions.create(**body)


def fits(value: Any) -> bool:
    sizes = value["sizes"]
    return (
        set(value) == {"colour", "sizes"}
        and value["colour"] in ("red", "green", "blue")
        and len(sizes) <= 3
        and all(isinstance(s, int) and 0 <= s <= 99 for s in sizes)
    )


def test_stream_and_whole_agree_and_tokens_are_counted(live: Live) -> None:
    whole = chat(live, extra_body={"return_token_ids": True})
    chunks = list(chat(live, stream=True, stream_options={"include_usage": True}))
    message = whole.choices[0].message
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (message.content or "")
    used, streamed = whole.usage, chunks[-1].usage
    assert len(whole.choices[0].token_ids) == used.completion_tokens == streamed.completion_tokens <= 24
    assert streamed.prompt_tokens == used.prompt_tokens
    assert streamed.prompt_tokens_details.cached_tokens > 0  # the second request found the first one's pages


def test_the_same_seed_says_the_same_and_choices_differ(live: Live) -> None:
    extra = {"reasoning_effort": "none", "n": 3, "temperature": 1.0}
    first, again = chat(live, **extra), chat(live, **extra)
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in again.choices]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("seed", range(2))
def test_json_schema_holds_whatever_the_model_is(live: Live, seed: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA, "strict": True}}
    # The bias makes this model stop as soon as it may. With reasoning that is before it has begun an answer.
    stop = {str(live.app.state.service.harmony.controls.return_): 30}
    for effort in ("none", "low"):
        out = chat(live, response_format=wanted, max_tokens=300, seed=seed, logit_bias=stop, reasoning_effort=effort)
        assert out.choices[0].finish_reason == "stop"
        assert fits(json.loads(out.choices[0].message.content)), out


def test_a_required_call_is_made(live: Live) -> None:
    end = {str(live.app.state.service.harmony.controls.end): 30}
    for seed in range(2):
        out = chat(live, tools=TOOLS, tool_choice="required", max_tokens=400, seed=seed, logit_bias=end)
        (call,) = out.choices[0].message.tool_calls
        given = json.loads(call.function.arguments)
        assert fits(given) if call.function.name == "paint" else given == {}
        assert out.choices[0].finish_reason == "tool_calls"


def test_logprobs_are_probabilities(live: Live) -> None:
    out = chat(live, reasoning_effort="none", logprobs=True, top_logprobs=3, temperature=0, max_tokens=8)
    entries = out.choices[0].logprobs.content
    assert entries
    for entry in entries:
        assert entry.logprob <= 0
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)  # greedy takes the likeliest


def test_the_other_apis(live: Live) -> None:
    out = live.openai().responses.create(model="noise", input="Hi", max_output_tokens=20)
    again = live.openai().responses.create(
        model="noise", input="More", max_output_tokens=20, previous_response_id=out.id
    )
    assert again.usage.input_tokens > out.usage.input_tokens
    message = live.anthropic().messages.create(
        model="noise", max_tokens=20, messages=[{"role": "user", "content": "Hi"}], thinking={"type": "disabled"}
    )
    assert message.stop_reason in ("max_tokens", "end_turn", "tool_use")
    text = live.openai().completions.create(model="noise", prompt="Hi", max_tokens=5, temperature=0)
    assert text.usage.completion_tokens <= 5


def test_a_schema_that_no_grammar_can_hold_is_a_400(live: Live) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"type": "nonsense"}}}
    answer = live.openai().chat.completions.with_raw_response
    with pytest.raises(Exception) as e:
        answer.create(model="noise", messages=[{"role": "user", "content": "x"}], response_format=bad)  # type: ignore[arg-type]
    assert getattr(e.value, "status_code", None) == 400


HOSTILE: dict[str, Any] = {
    "a reference to itself": {"$ref": "#"},
    "a cycle of references": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a nested pattern": {"type": "string", "pattern": "(" * 300 + "a" + ")" * 300},
    "patterns that meet": {"type": "string", "allOf": [{"pattern": f"{a}.*{b}"} for a in "abcdef" for b in "ghijkl"]},
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("stream", [False, True])
def test_a_hostile_schema_is_a_400_in_a_sentence(live: Live, http: httpx.Client, what: str, stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "t", "schema": HOSTILE[what], "strict": True}}
    body = {"model": "noise", "messages": [{"role": "user", "content": "x"}], "response_format": wanted}
    answer = http.post(f"{live.url}/v1/chat/completions", json=body | {"stream": stream, "max_tokens": 40})
    text = answer.text.removeprefix("data: ").strip() if answer.status_code == 200 else answer.text  # a slow trial
    error = json.loads(text.removeprefix(": keep-alive").strip().removeprefix("data: "))["error"]
    assert (answer.status_code == 400) or stream
    assert error["type"] == "invalid_request_error"
    assert "of this request" in error["message"]
    assert len(error["message"]) < 300
    assert not any(word in error["message"] for word in ("state", "Parser", "rows", "panic", "And (And"))


LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
CYCLE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": LOOP, "required": ["a"]}
LATE: dict[str, dict[str, Any]] = {
    "a pattern that costs too much under way": {"guided_regex": "((a){50,100}){50,100}"},
    "bounds within bounds": {"guided_regex": "(a{1,1000}){1,50}b"},
    "a choice of a megabyte": {"guided_choice": ["a" * 1_000_000, "b"]},
    "a cycle in an answer": {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": CYCLE}}},
    "a cycle in a tool": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": CYCLE}}], "tool_choice": "required",
    },
    "a cycle in a strict tool": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": CYCLE, "strict": True}}],
        "tool_choice": "required",
    },
    "a bias for a token of 5,000 digits": {"logit_bias": {"1" * 5000: 1}},
}  # fmt: skip


@pytest.mark.parametrize("what", LATE)
def test_what_turns_out_to_be_wrong_under_way_is_a_400(live: Live, http: httpx.Client, what: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = {"model": "noise", "messages": messages, "max_tokens": 300, "reasoning_effort": "none", "temperature": 0}
    answer = http.post(f"{live.url}/v1/chat/completions", json=body | LATE[what])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == ("tools" if "tools" in LATE[what] else next(iter(LATE[what])))
    assert len(error["message"]) < 300


def test_leaving_frees_the_engine(live: Live) -> None:
    stream = chat(live, stream=True, max_tokens=3000, extra_body={"ignore_eos": True})
    next(iter(stream))  # which names the role, before the first step
    wait_until(lambda: live.source.stats().running == 1)
    stream.close()
    wait_until(lambda: live.source.stats().running == 0)
    assert live.source.stats().kv_pages_used == 0
