"""What real programs sent, sent again: every request is understood, and the model is shown what was said before.

The files in data/transcripts were recorded by test_real_agents.py (`make test-agents`) from the programs that each
names, with long texts cut; `editors.json` was written after the requests that its programs' sources make.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import httpx
import pytest
from live_server import Live
from recorder import TRANSCRIPTS, read_fixture
from scripted import Play, ScriptedSource, always, in_turn, say

Serve = Callable[..., Live]
RECORDED = sorted(path.name for path in TRANSCRIPTS.glob("*.json") if path.name != "editors.json")


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_conversation(serve: Serve, http: httpx.Client, name: str) -> None:
    fixture = read_fixture(name)
    answers = fixture["answers"] or [say("x")]
    model = next((r["body"]["model"] for r in fixture["requests"] if "model" in r["body"]), "gpt-oss-test")
    live = serve(ScriptedSource(in_turn(*answers), max_context=131072, model=model))
    recorded, made_now = ids_in(json.dumps(fixture["requests"])), list[str]()
    for request in fixture["requests"]:
        body = json.dumps(request["body"])
        for then, now in zip(recorded, made_now):
            body = body.replace(then, now)  # the calls of this run
        headers = {"content-type": "application/json"}
        answer = http.request(request["method"], live.url + request["path"], content=body, headers=headers)
        made_now += [id for id in ids_in(answer.text) if id not in made_now]
        assert answer.status_code == 200, f"{request['path']}: {answer.text}"
        if "/api/" not in request["path"] or request["body"].get("stream"):
            assert "error" not in answer.text[:40]
    made = [r for r in live.source.requests if r.sampling.max_tokens]
    assert made
    thoughts = [text for text in map(thought, fixture["answers"]) if text]
    if thoughts and answers[0].endswith("<|call|>"):
        # The second request stands in the middle of the turn: it must hold what was thought before the call.
        assert thought(answers[0]) in live.source.tokenizer.decode(made[1].prompt)


def test_codex_sends_back_what_it_was_told(serve: Serve, http: httpx.Client) -> None:
    """Its second request holds our first answer, item by item, and the model is shown every part of it again."""
    fixture = read_fixture("codex_namespace.json")
    live = serve(ScriptedSource(in_turn(*fixture["answers"]), max_context=131072, model="gpt-oss-120b"))
    first, second = (request["body"] for request in fixture["requests"][:2])
    answer = http.post(f"{live.url}/v1/responses", json=first)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-halfbyte-left-out"] == "tools.web_search"
    told = [json.loads(block.split("\ndata: ", 1)[1]) for block in answer.text.split("\n\n") if block.strip()]
    items = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert [i["type"] for i in items] == ["reasoning", "message", "function_call"]
    assert told[-1]["type"] == "response.completed"
    reasoning, message, made = second["input"][-4:-1]
    assert reasoning["encrypted_content"] == items[0]["encrypted_content"]
    assert message["content"][0]["text"] == items[1]["content"][0]["text"]
    assert (made["name"], made["arguments"]) == (items[2]["name"], items[2]["arguments"])
    assert second["input"][-1]["type"] == "function_call_output"
    assert http.post(f"{live.url}/v1/responses", json=second).status_code == 200
    prompt = live.source.prompts()[1]
    assert "<|channel|>analysis<|message|>I should run it.<|end|>" in prompt
    assert "<|channel|>commentary<|message|>Running it now.<|end|>" in prompt
    assert '<|message|>{"cmd":"echo halfbyte-was-here"}<|call|>' in prompt
    assert "halfbyte-was-here" in prompt.rpartition("functions.exec_command to=assistant")[2]
    assert "namespace multi_agent_v1 {" in prompt


def ids_in(text: str) -> list[str]:
    """Of calls, in the order in which they first appear."""
    return list(dict.fromkeys(re.findall(r"call_[0-9a-f]{24}", text)))


def thought(answer: str) -> str:
    head, _, rest = answer.partition("<|channel|>analysis<|message|>")
    return rest.partition("<|end|>")[0] if not head else ""


@pytest.mark.parametrize("which", [r["program"] for r in read_fixture("editors.json")["requests"]])
def test_an_editors_request(serve: Serve, http: httpx.Client, which: str) -> None:
    request = next(r for r in read_fixture("editors.json")["requests"] if r["program"] == which)
    live = serve(ScriptedSource(always(Play(say("Done.", "hm"), per_step=100))))
    answer = http.post(live.url + request["path"], json=request["body"])
    if "refused" in request:
        assert answer.status_code == 400
        assert request["refused"] in answer.text
        return
    assert answer.status_code == 200, answer.text
    assert "Done." in answer.text or "raw" in request["program"]
    prompt = live.source.prompts()[0]
    for part in request["shown"]:
        assert part in prompt, f"{part!r} is not in what the model was shown"


def test_every_fixture_says_what_made_it() -> None:
    for name in RECORDED:
        assert "(npm)" in read_fixture(name)["program"] or "(PyPI)" in read_fixture(name)["program"]
        assert json.dumps(read_fixture(name)).count("api_key") == 0
