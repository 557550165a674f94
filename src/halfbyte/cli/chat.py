"""`chat`: talk to a model in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from halfbyte.cli.conversation import Effort, MaxTokens, Seed, System, Temperature, conversation, deltas
from halfbyte.cli.options import DeviceOption, ModelArgument, SelfTestOption, err, open_engine, out, with_gates
from halfbyte.errors import UsageError
from halfbyte.gates import Gates

if TYPE_CHECKING:
    from halfbyte.harmony.parse import Event


@with_gates
def chat(
    model: ModelArgument = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    effort: Effort = "medium",
    system: System = None,
    device: DeviceOption = None,
    self_test: SelfTestOption = "auto",
    *,
    gates: Gates,
) -> None:
    """Talk to the model. An empty line or end of input ends it; /new starts over, /effort LEVEL switches."""
    from halfbyte.engine.request import SamplingParams
    from halfbyte.harmony.messages import Message
    from halfbyte.harmony.parse import Parser
    from halfbyte.harmony.render import render_prompt

    history = conversation(effort, system)
    opening = len(history)
    with open_engine(model, device, gates, self_test=self_test) as engine:
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


def _show(events: list[Event]) -> None:
    for e in events:
        if e.type == "start" and e.header.kind == "call":
            out.print(f"\n[dim]call {e.header.recipient}[/dim] ", end="")
        if e.type == "start" and e.header.kind == "content":
            out.print()
        if e.text:
            out.print(e.text, end="", style="dim" if e.header.kind == "reasoning" else None, markup=False)


def register(app: typer.Typer) -> None:
    app.command()(chat)
