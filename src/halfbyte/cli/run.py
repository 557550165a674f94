"""`run`: ask a model one thing, or talk to it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from halfbyte.cli.chat import Chat
from halfbyte.cli.conversation import Here, Manner, Reasoning, open_answers
from halfbyte.cli.options import MODEL, DeviceOption, SelfTestOption, model_argument, out, with_gates, with_record
from halfbyte.errors import UsageError
from halfbyte.gates import Gates


@with_gates
@with_record("manner", Manner)
def run(
    model: Annotated[str, model_argument("MODEL", f"{MODEL}; tiny is the embedded model.")],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]...",
            help="What to ask; what is piped in is added to it. Without either: a conversation.",
            show_default=False,
        ),
    ] = None,
    reasoning: Reasoning = False,
    here: Here = False,
    device: DeviceOption = None,
    self_test: SelfTestOption = "auto",
    *,
    manner: Manner,
    gates: Gates,
) -> None:
    """Ask a model one thing, or talk to it if nothing is asked."""
    from halfbyte.cli.screen import show

    parts = [" ".join(prompt)] if prompt else []
    if not sys.stdin.isatty():
        parts += [text] if (text := sys.stdin.read()).strip() else []
        if not parts:
            raise UsageError("the prompt is empty; write it after the model, or pipe it in.")
    with open_answers(model, device, gates, here=here, self_test=self_test) as answers:
        if not parts:
            Chat(answers, manner, reasoning).run()
            return
        for _ in show(answers.pieces((), "\n\n".join(parts), manner), out, reasoning=reasoning):
            pass


def register(app: typer.Typer) -> None:
    app.command()(run)
