"""`demo`: start the real server on the embedded model, ask it with a real HTTP client, measure, stop (`make demo`)."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import typer

from halfbyte.errors import EngineError
from halfbyte.lab.child import start_child

QUESTIONS = ("What is 17 + 25?", "Sort these numbers from smallest to largest: 31, 4, 15.")
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


def ask(url: str, question: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    import httpx

    start, first, tokens = time.perf_counter(), 0.0, 0
    print(f"\nuser       {question}\nreasoning  ", end="", flush=True)
    answering = False
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            first = first or time.perf_counter()
            for choice in chunk["choices"]:
                if choice["delta"].get("content") and not answering:
                    answering = True
                    print("\nassistant  ", end="")
                text = choice["delta"].get("reasoning") or choice["delta"].get("content") or ""
                print(text, end="", flush=True)
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    seconds = time.perf_counter() - start
    print(f"\n           ({tokens} tokens in {seconds:.1f} s, first after {1000 * (first - start):.0f} ms)")


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
        for question in QUESTIONS:
            ask(url, question)
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
