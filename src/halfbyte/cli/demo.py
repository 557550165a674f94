"""`demo`: start the real server on the embedded model, ask it with a real HTTP client, measure, stop (`make demo`)."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import typer

from halfbyte.errors import EngineError
from halfbyte.evals.words import invented
from halfbyte.lab.child import start_child

QUESTIONS = ("What is 17 + 25?", "And plus 3?")  # one conversation
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HALFBYTE = (sys.executable, "-m", "halfbyte")


def say(text: str) -> None:
    print(f"\n==> {text}", flush=True)


def wait_for_url(server: subprocess.Popen[str]) -> str:
    """The address is the last word of the line the server prints when it accepts connections."""
    assert server.stderr is not None
    for line in server.stderr:
        print(f"    {line.rstrip()}", flush=True)
        if "serving" in line and "http://" in line:
            return line.split()[-1]
    raise EngineError("the server stopped before it was ready; run `halfbyte serve` to see why.")


def ask(url: str, messages: list[dict[str, Any]], tools: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """The assistant's message to a conversation, printed while it comes."""
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if tools:
        body["tools"] = [{"type": "function", "function": function} for function in tools]
    import httpx

    start, first, tokens = time.perf_counter(), 0.0, 0
    role, content = messages[-1]["role"], messages[-1]["content"]
    print(f"\n{role:10} {content}\nreasoning  ", end="", flush=True)
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            first = first or time.perf_counter()
            for choice in chunk["choices"]:
                print(_add(answer, choice["delta"]), end="", flush=True)
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    seconds = time.perf_counter() - start
    print(f"\n           ({tokens} tokens in {seconds:.1f} s, first after {1000 * (first - start):.0f} ms)")
    return answer


def _add(answer: dict[str, Any], delta: dict[str, Any]) -> str:
    """Add a part of a stream to the message; what to print of it."""
    spoken = delta.get("reasoning") or ""
    if text := delta.get("content"):
        spoken += text if answer["content"] else f"\nassistant  {text}"
        answer["content"] += text
    for part in delta.get("tool_calls") or ():
        calls = answer.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            spoken += "\ncall       "
        for name, text in part["function"].items():
            calls[part["index"]]["function"][name] += text
            spoken += f"{text} " if name == "name" else text
    return spoken


def converse(url: str, city: str) -> None:
    """Two turns of a conversation; then a question about a city that answers through a function, and its result."""
    messages: list[dict[str, Any]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        messages.append(ask(url, messages))
    say(f"asking with a function at hand ({WEATHER['name']}), about a city that was made up today")
    messages = [{"role": "user", "content": f"What is the weather in {city}?"}]
    messages.append(ask(url, messages, (WEATHER,)))
    for call in messages[-1].get("tool_calls", ()):
        content = json.dumps({"temperature": 21, "sky": "sunny"})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        ask(url, messages, (WEATHER,))


def shell_command() -> str:
    """The words that run halfbyte from a shell in this folder; its name alone where PATH leads to this installation."""
    script = Path(sys.executable).parent / "halfbyte"
    on_path = shutil.which("halfbyte")
    if on_path is not None and Path(on_path).resolve() == script.resolve():
        return "halfbyte"
    if not script.is_file():
        return shlex.join([sys.executable, "-m", "halfbyte"])
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


def demo() -> None:
    """Serve the embedded model, ask it something, print the answer and a table of speeds, and stop."""
    say("serving the embedded model (halfbyte serve --port 0)")
    server = start_child([*HALFBYTE, "serve", "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        url = wait_for_url(server)
        say("asking it, as any OpenAI client would")
        converse(url, invented(Random(date.today().isoformat())))
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(30)
    say(f"server stopped (exit code {code})")
    say("speed on this machine, beside what its memory could do (halfbyte bench)")
    subprocess.run([*HALFBYTE, "bench", "--pp", "256", "--tg", "32", "--repeats", "2"], check=True)
    command = shell_command()
    say(f"next: {command} chat · {command} serve MODEL · {command} explain --arch sm121")


def register(app: typer.Typer) -> None:
    app.command()(demo)
