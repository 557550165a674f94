"""Options that many commands share, and how results are printed.

`with_gates` gives a command one option per gate and hands it a checked Gates as its `gates` argument, so the list of
gates stays in `gates.py` alone.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from halfbyte import gates as gates_
from halfbyte.gates import AXES, PRESETS, Gates

err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A Hugging Face model folder, a .gguf file, or random:20b / random:120b. Without it: the embedded model.",
        show_default=False,
    ),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; default: cuda if there is one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def with_gates(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the command's `gates` parameter with one option per axis, --preset and --mxfp4-layers."""
    signature = inspect.signature(command)
    extra = [_option("preset", "--preset", f"{', '.join(PRESETS)}.", "Gates")]
    for axis in AXES:
        if axis.field == "graphs":
            extra.append(_flag("enforce_eager", "--enforce-eager", "Run without CUDA graphs.", "Gates"))
        else:
            extra.append(_option(axis.field, axis.flag, f"{axis.meaning}: {', '.join(axis.values)}.", "Gates"))
    extra.append(_option("mxfp4_layers", "--mxfp4-layers", "Short form of --layers: groups to hold in MXFP4.", "Gates"))
    names = [p.name for p in extra]

    @functools.wraps(command)
    def wrapped(**kwargs: Any) -> Any:
        given = {n: kwargs.pop(n) for n in names}
        preset = given.pop("preset")
        given["graphs"] = "off" if given.pop("enforce_eager") else None
        return command(**kwargs, gates=gates_.parse(given, preset=preset))

    hints = {n: h for n, h in inspect.get_annotations(command, eval_str=True).items() if n != "gates"}
    kept = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values() if p.name != "gates"]
    wrapped.__signature__ = signature.replace(parameters=kept + extra)  # type: ignore[attr-defined]
    wrapped.__annotations__ = hints | {p.name: p.annotation for p in extra}
    return wrapped


def _option(name: str, flag: str, text: str, panel: str) -> inspect.Parameter:
    hint = Annotated[str | None, typer.Option(flag, help=text, rich_help_panel=panel, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)


def _flag(name: str, flag: str, text: str, panel: str) -> inspect.Parameter:
    hint = Annotated[bool, typer.Option(flag, help=text, rich_help_panel=panel)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=hint)


def announce(gates: Gates, text: str) -> None:
    """What will run and what the gates change against `exact`, on stderr."""
    changes = gates.changes()
    said = ", ".join(f"{k} {v}" for k, v in changes.items())
    err.print(f"[dim]{text}{f' · against exact: {said}' if said else ''}[/dim]")


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=None, default=str) + "\n")
    sys.stdout.flush()


def print_table(rows: Sequence[Mapping[str, str]], title: str | None = None) -> None:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(rows[0] if rows else ()):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row.values())
    out.print(table)


class LoadingBar:
    """A progress bar for `load`, on stderr and only where a person watches."""

    def __init__(self, title: str) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self.task = self.bar.add_task(title, total=None)

    def __enter__(self) -> Callable[[int, int, str], None]:
        self.bar.start()
        return lambda done, total, _: self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
