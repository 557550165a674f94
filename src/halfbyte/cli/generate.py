"""`generate`: one answer to one prompt, and stop."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.conversation import Effort, MaxTokens, Seed, System, Temperature, conversation, deltas
from halfbyte.cli.options import (
    DeviceOption,
    JsonOption,
    ModelArgument,
    SelfTestOption,
    err,
    open_engine,
    out,
    print_json,
    with_gates,
)
from halfbyte.errors import UsageError
from halfbyte.gates import Gates

if TYPE_CHECKING:
    from halfbyte.harmony.parse import Event


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
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Even if some weights are no numbers.")] = False,
    self_test: SelfTestOption = "auto",
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """One answer to one prompt, and stop."""
    from halfbyte.engine.request import SamplingParams
    from halfbyte.harmony.messages import Message
    from halfbyte.harmony.parse import Parser
    from halfbyte.harmony.render import render_prompt
    from halfbyte.model.tokenizer import Detokenizer

    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise UsageError("the prompt is empty; give --prompt or write it to standard input.")
    messages = conversation(effort, system)
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    with open_engine(model, device, gates, allow_nan=allow_nan, self_test=self_test) as engine:
        ids = engine.tokenizer.encode(text) if raw else render_prompt(engine.tokenizer, [*messages, Message.user(text)])
        start, first, tokens = time.perf_counter(), 0.0, []
        parser = Parser(engine.tokenizer)
        plain = Detokenizer(engine.tokenizer, skip_special=True)
        finish, texts = None, {"analysis": "", "final": ""}
        for delta in deltas(engine.iterate(ids, sampling)):
            first = first or time.perf_counter()
            tokens += delta.tokens
            finish = delta.finish or finish
            pieces = [("final", plain.add(delta.tokens))] if raw else _texts(parser.feed(delta.tokens))
            for kind, piece in pieces:
                texts[kind] += piece
                if not json and (kind == "final" or reasoning):
                    out.print(piece, end="", style="dim" if kind == "analysis" else None, markup=False)
        tail = [("final", plain.flush())] if raw else _texts(parser.finish())
        for kind, piece in tail:
            texts[kind] += piece
            if not json and (kind == "final" or reasoning):
                out.print(piece, end="", markup=False)
        seconds = time.perf_counter() - first
    speed = (len(tokens) - 1) / seconds if len(tokens) > 1 else 0.0
    if json:
        print_json(
            {
                "text": texts["final"], "reasoning": texts["analysis"], "tokens": tokens, "finish": finish,
                "prompt_tokens": len(ids), "ttft_s": first - start, "tokens_per_second": speed,
            }
        )  # fmt: skip
        return
    out.print()
    err.print(f"[dim]{len(ids)} prompt tokens, {len(tokens)} generated, {speed:.1f} t/s, finish {finish}[/dim]")


def _texts(events: list[Event]) -> list[tuple[str, str]]:
    """(analysis or final, text): everything that is not reasoning is shown."""
    return [("analysis" if e.header.kind == "reasoning" else "final", e.text) for e in events if e.text]


def register(app: typer.Typer) -> None:
    app.command()(generate)
