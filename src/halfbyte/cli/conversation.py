"""What `chat` and `generate` share: their options, the messages a conversation begins with, and reading a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from halfbyte.cli.options import check_number
from halfbyte.errors import StepError, UsageError

if TYPE_CHECKING:
    from halfbyte.engine.request import Delta
    from halfbyte.harmony.messages import Message

EFFORTS = ("low", "medium", "high")
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", min=1, help="Default: until the model ends.")]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", "-t", min=0.0, help="0 is greedy.", callback=lambda t: check_number(t, "--temperature")
    ),
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same tokens.")]
Effort = Annotated[str, typer.Option(help="Reasoning effort: low, medium, high.")]
System = Annotated[str | None, typer.Option("--system", help="Instructions to the model.")]


def conversation(effort: str, instructions: str | None) -> list[Message]:
    if effort.lower() not in EFFORTS:
        raise UsageError(f"there is no effort {effort!r}; use low, medium or high.")
    from halfbyte.harmony.messages import Message, SystemContent

    level = cast(Literal["low", "medium", "high"], effort.lower())
    messages = [Message.system(SystemContent(reasoning_effort=level))]
    if instructions:
        messages.append(Message.developer(instructions))
    return messages


def deltas(stream: Iterator[Delta]) -> Iterator[Delta]:
    for delta in stream:
        if delta.finish == "error":
            raise StepError(delta.error or "the engine failed on this request.")
        yield delta
