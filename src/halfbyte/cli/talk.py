"""`generate` and `chat`: the engine in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Literal, cast

import typer

from halfbyte.cli.options import DeviceOption, JsonOption, ModelArgument, announce, err, out, print_json, with_gates
from halfbyte.engine.python_api import Engine
from halfbyte.engine.request import Delta, SamplingParams
from halfbyte.errors import StepError, UsageError
from halfbyte.gates import Gates
from halfbyte.harmony.messages import Message, SystemContent
from halfbyte.harmony.parse import Event, Parser
from halfbyte.harmony.render import render_prompt
from halfbyte.model import load
from halfbyte.model.tokenizer import Detokenizer

EFFORTS = ("low", "medium", "high")
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", min=1, help="Default: until the model ends.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", min=0.0, help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same tokens.")]
Effort = Annotated[str, typer.Option(help="Reasoning effort: low, medium, high.")]
System = Annotated[str | None, typer.Option("--system", help="Instructions to the model.")]


def conversation(effort: str, instructions: str | None) -> list[Message]:
    if effort.lower() not in EFFORTS:
        raise UsageError(f"there is no effort {effort!r}; use low, medium or high.")
    level = cast(Literal["low", "medium", "high"], effort.lower())
    messages = [Message.system(SystemContent(reasoning_effort=level))]
    if instructions:
        messages.append(Message.developer(instructions))
    return messages


def open_engine(model: str | None, device: str | None, gates: Gates) -> Engine:
    name = load.resolve_model(model)
    where = load.resolve_device(device)
    announce(gates, f"{name.label} on {where}")
    with err.status(f"loading {name.label}"):
        return Engine(model, gates=gates, device=str(where))


def deltas(stream: Iterator[Delta]) -> Iterator[Delta]:
    for delta in stream:
        if delta.finish == "error":
            raise StepError(delta.error or "the engine failed on this request.")
        yield delta


@with_gates
def generate(
    model: ModelArgument = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Default: standard input.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat format: continue the text itself.")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    effort: Effort = "medium",
    system: System = None,
    reasoning: Annotated[bool, typer.Option("--reasoning", help="Show the model's reasoning too.")] = False,
    device: DeviceOption = None,
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """One answer to one prompt, and stop."""
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise UsageError("the prompt is empty; give --prompt or write it to standard input.")
    messages = conversation(effort, system)
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    with open_engine(model, device, gates) as engine:
        ids = engine.tokenizer.encode(text) if raw else render_prompt(engine.tokenizer, [*messages, Message.user(text)])
        start, first, tokens = time.perf_counter(), 0.0, []
        parser = Parser(engine.tokenizer)
        plain = Detokenizer(engine.tokenizer, skip_special=True)
        finish, said = None, {"analysis": "", "final": ""}
        for delta in deltas(engine.iterate(ids, sampling)):
            first = first or time.perf_counter()
            tokens += delta.tokens
            finish = delta.finish or finish
            pieces = [("final", plain.add(delta.tokens))] if raw else _texts(parser.feed(delta.tokens))
            for kind, piece in pieces:
                said[kind] += piece
                if not json and (kind == "final" or reasoning):
                    out.print(piece, end="", style="dim" if kind == "analysis" else None, markup=False)
        tail = [("final", plain.flush())] if raw else _texts(parser.finish())
        for kind, piece in tail:
            said[kind] += piece
            if not json and (kind == "final" or reasoning):
                out.print(piece, end="", markup=False)
        seconds = time.perf_counter() - first
    speed = (len(tokens) - 1) / seconds if len(tokens) > 1 else 0.0
    if json:
        print_json(
            {
                "text": said["final"], "reasoning": said["analysis"], "tokens": tokens, "finish": finish,
                "prompt_tokens": len(ids), "ttft_s": first - start, "tokens_per_second": speed,
            }
        )  # fmt: skip
        return
    out.print()
    err.print(f"[dim]{len(ids)} prompt tokens, {len(tokens)} generated, {speed:.1f} t/s, finish {finish}[/dim]")


@with_gates
def chat(
    model: ModelArgument = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    effort: Effort = "medium",
    system: System = None,
    device: DeviceOption = None,
    *,
    gates: Gates,
) -> None:
    """Talk to the model. An empty line or end of input ends it; /new starts over, /effort LEVEL switches."""
    history = conversation(effort, system)
    opening = len(history)
    with open_engine(model, device, gates) as engine:
        while True:
            try:
                line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
            except EOFError:
                break
            line = line.strip()
            if not line:
                break
            if line == "/new":
                history = history[:opening]
                continue
            if line.startswith("/effort"):
                try:
                    history = conversation(line.removeprefix("/effort").strip(), system) + history[opening:]
                except UsageError as e:
                    err.print(f"[red]{e}[/red]")
                continue
            history.append(Message.user(line))
            sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
            parser = Parser(engine.tokenizer)
            try:
                for delta in deltas(engine.iterate(render_prompt(engine.tokenizer, history), sampling)):
                    _show(parser.feed(delta.tokens))
            except KeyboardInterrupt:
                err.print("[dim](stopped)[/dim]")
            _show(parser.finish())
            out.print()
            history += parser.messages


def _texts(events: list[Event]) -> list[tuple[str, str]]:
    """(analysis or final, text): everything that is not reasoning is shown."""
    return [("analysis" if e.header.kind == "reasoning" else "final", e.text) for e in events if e.text]


def _show(events: list[Event]) -> None:
    for e in events:
        if e.type == "start" and e.header.kind == "call":
            out.print(f"\n[dim]call {e.header.recipient}[/dim] ", end="")
        if e.type == "start" and e.header.kind == "content":
            out.print()
        if e.text:
            out.print(e.text, end="", style="dim" if e.header.kind == "reasoning" else None, markup=False)


def register(app: typer.Typer) -> None:
    app.command()(generate)
    app.command()(chat)
