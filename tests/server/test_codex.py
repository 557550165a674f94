"""The Codex CLI: its own requests replayed, and, where it is installed, the program itself.

`data/codex_turn.json` holds the two requests of a real turn (long texts cut): the question, and the same with the tool
call that our first answer made and its result.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Live
from scripted import ScriptedSource, call, in_turn, say

Serve = Callable[..., Live]
TURN = json.loads((Path(__file__).parent / "data" / "codex_turn.json").read_text(encoding="utf-8"))
FIRST = call("functions.exec_command", '{"cmd":"echo halfbyte-was-here"}', "I should run it.", "Running it now.")
SECOND = say("It printed `halfbyte-was-here`.", "The command worked.")


def source() -> ScriptedSource:
    return ScriptedSource(in_turn(FIRST, SECOND), max_context=131072, model="gpt-oss-120b")


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(block.split("\ndata: ", 1)[1]) for block in text.split("\n\n") if block.strip()]


def test_the_requests_of_a_real_turn(serve: Serve, http: httpx.Client) -> None:
    live = serve(source())
    first, second = TURN["requests"]
    answer = http.post(f"{live.url}/v1/responses", json=first)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-halfbyte-left-out"] == "tools.web_search"
    items = [e["item"] for e in events(answer.text) if e["type"] == "response.output_item.done"]
    assert [i["type"] for i in items] == ["reasoning", "message", "function_call"]
    assert events(answer.text)[-1]["type"] == "response.completed"
    # What Codex sent next is what we answered then, plus the tool's output.
    back = [i for i in second["input"] if i["type"] in ("reasoning", "function_call", "function_call_output")]
    assert [i["type"] for i in back] == ["reasoning", "function_call", "function_call_output"]
    assert back[0]["encrypted_content"] == items[0]["encrypted_content"]
    assert (back[1]["name"], back[1]["arguments"]) == (items[2]["name"], items[2]["arguments"])
    answer = http.post(f"{live.url}/v1/responses", json=second)
    assert events(answer.text)[-1]["response"]["output"][-1]["content"][0]["text"] == "It printed `halfbyte-was-here`."
    prompt = live.source.prompts()[1]
    assert "<|channel|>analysis<|message|>I should run it.<|end|>" in prompt
    assert "<|channel|>commentary<|message|>Running it now.<|end|>" in prompt
    assert '<|message|>{"cmd":"echo halfbyte-was-here"}<|call|>' in prompt
    assert "halfbyte-was-here" in prompt.rpartition("functions.exec_command to=assistant")[2]
    assert "namespace multi_agent_v1 {" in prompt


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("codex") is None, reason="the Codex CLI is not installed (npm install -g @openai/codex)"
)
def test_the_program_itself(serve: Serve, tmp_path: Path) -> None:
    live = serve(source())
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(
        f"""model = "gpt-oss-120b"
model_provider = "halfbyte"
[model_providers.halfbyte]
name = "halfbyte"
base_url = "{live.url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
    )
    flags = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", "Run echo")
    done = subprocess.run(
        ["codex", *flags],
        cwd=work,
        env={**os.environ, "CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    items = [line["item"] for line in lines if line["type"] == "item.completed"]
    ran = [i for i in items if i["type"] == "command_execution"]
    assert [i["aggregated_output"] for i in ran] == ["halfbyte-was-here\n"]
    assert [i["text"] for i in items if i["type"] == "agent_message"][-1] == "It printed `halfbyte-was-here`."
