"""`run`: ask a model one thing, or talk to it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from halfbyte.cli.chat import Chat
from halfbyte.cli.conversation import PREFIX_OPTIONS, EngineChoice, Manner, Reasoning, open_answers
from halfbyte.cli.options import MODEL, model_argument, out, refuse_question, with_gates, with_record
from halfbyte.engine.options import EngineOptions
from halfbyte.errors import UsageError
from halfbyte.gates import Gates


@with_gates
@with_record("manner", Manner)
@with_record("choice", EngineChoice)
@with_record("options", EngineOptions, only=PREFIX_OPTIONS)
def run(
    model: Annotated[str, model_argument("MODEL", f"{MODEL}; tiny is the embedded model.")],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="What to ask; whatever is piped in is added. Without either, a conversation starts.",
            show_default=False,
        ),
    ] = None,
    reasoning: Reasoning = False,
    *,
    choice: EngineChoice,
    manner: Manner,
    options: EngineOptions,
    gates: Gates,
) -> None:
    """Ask a model one thing, or talk to it if nothing is asked."""
    from halfbyte.cli.screen import show

    if not prompt:
        refuse_question(model, "run tiny")
    parts = [" ".join(prompt)] if prompt else []
    if not sys.stdin.isatty():
        parts += [text] if (text := sys.stdin.read()).strip() else []
        if not parts:
            raise UsageError("the prompt is empty; write it after the model, or pipe it in.")
    with open_answers(model, choice, gates, options) as answers:
        if not parts:
            Chat(answers, manner, reasoning).run()
            return
        for _ in show(answers.pieces((), "\n\n".join(parts), manner), out, reasoning=reasoning):
            pass


def register(app: typer.Typer) -> None:
    app.command()(run)
