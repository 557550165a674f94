"""`generate`: one answer to one prompt, and stop."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from halfbyte.cli.conversation import AnswerText, Manner, check_effort, deltas, pieces_of
from halfbyte.cli.options import (
    DeviceOption,
    JsonOption,
    ModelArgument,
    SelfTestOption,
    err,
    open_engine,
    out,
    print_json,
    refuse_question,
    with_gates,
    with_record,
)
from halfbyte.errors import UsageError
from halfbyte.gates import Gates

LEAST_TIMED = 16  # tokens after the first for which a speed is shown: fewer come almost at once


@with_gates
@with_record("manner", Manner)
def generate(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="What to answer; by default it is read from standard input.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text itself, without the chat format around it.")
    ] = False,
    reasoning: Annotated[
        bool,
        typer.Option(
            "--reasoning", help="Write the reasoning to standard error; only the answer goes to standard output."
        ),
    ] = False,
    device: DeviceOption = None,
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Go on even if some weights are not numbers.")] = False,
    self_test: SelfTestOption = "auto",
    json: JsonOption = False,
    *,
    manner: Manner,
    gates: Gates,
) -> None:
    """Answer one prompt and exit."""
    from halfbyte.engine.request import SamplingParams
    from halfbyte.harmony.messages import Message, opening
    from halfbyte.harmony.parse import Parser
    from halfbyte.harmony.render import render_prompt
    from halfbyte.model.tokenizer import Detokenizer

    if prompt is None:
        refuse_question(model, "generate --prompt")
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise UsageError("the prompt is empty; give --prompt or write it to standard input.")
    sampling = SamplingParams(temperature=manner.temperature, max_tokens=manner.max_tokens, seed=manner.seed)
    with open_engine(model, device, gates, allow_nan=allow_nan, self_test=self_test) as engine:
        messages = [*opening(check_effort(manner.effort), manner.system), Message.user(text)]
        ids = engine.tokenizer.encode(text) if raw else render_prompt(engine.tokenizer, messages)
        start, first, tokens, with_first = time.perf_counter(), 0.0, [], 0
        parser = Parser(engine.tokenizer)
        plain = Detokenizer(engine.tokenizer, skip_special=True)
        printer = Printer(silent=json, reasoning=reasoning)
        finish = None
        most = None if raw else manner.max_reasoning_tokens
        limit = None if most is None else engine.reasoning_limit(most)
        for delta in deltas(engine.iterate(ids, sampling, reasoning=limit)):
            first, with_first = first or time.perf_counter(), with_first or len(delta.tokens)
            tokens += delta.tokens
            finish = delta.finish or finish
            printer.take(
                [AnswerText("content", plain.add(delta.tokens))] if raw else pieces_of(parser.feed(delta.tokens))
            )
        printer.take([AnswerText("content", plain.flush())] if raw else pieces_of(parser.finish()))
        seconds = time.perf_counter() - first
    timed = len(tokens) - with_first
    speed = timed / seconds if timed >= LEAST_TIMED else None
    if json:
        print_json(
            {
                "text": printer.texts["content"], "reasoning": printer.texts["reasoning"], "tokens": tokens,
                "finish": finish, "prompt_tokens": len(ids), "ttft_s": first - start, "tokens_per_second": speed,
            }
        )  # fmt: skip
        return
    out.print()
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    err.print(f"[dim]{len(ids)} prompt tokens, {len(tokens)} generated{rate}, finish: {finish}[/dim]")


class Printer:
    """The answer on standard output, the reasoning, if it is asked for, on standard error, with a line between them."""

    def __init__(self, *, silent: bool, reasoning: bool) -> None:
        self.silent = silent
        self.reasoning = reasoning
        self.texts = {"reasoning": "", "content": ""}
        self.thinking = False

    def take(self, pieces: list[AnswerText]) -> None:
        for kind, text in pieces:
            self.texts[kind] += text
            if self.silent:
                continue
            if kind == "reasoning" and self.reasoning:
                err.print(text, end="", style="dim", markup=False, emoji=False)
                self.thinking = True
            elif kind == "content" and text:
                if self.thinking:
                    err.print("\n")
                    self.thinking = False
                out.print(text, end="", markup=False, emoji=False)


def register(app: typer.Typer) -> None:
    app.command()(generate)
