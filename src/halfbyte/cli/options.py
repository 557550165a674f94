"""Options that many commands share, and how results are printed.

`with_gates` gives a command one option per gate and hands it a checked Gates as its `gates` argument, so the list of
gates stays in `gates.py` alone. `with_record` does the same for a frozen record whose fields have a `flag`.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from halfbyte import gates as gates_
from halfbyte.errors import UsageError
from halfbyte.flags import Flag, flags_of
from halfbyte.gates import AXES, LAYER_GROUPS, PRESETS, Gates

if TYPE_CHECKING:
    from halfbyte.engine.python_api import Engine

err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)

MODEL = (
    "A model that was pulled (20b, openai/gpt-oss-20b), a model folder, a .gguf file, or random weights (random:20b)"
)
GATES = "Gates: switches that say which kernels and number formats may run"


def model_argument(metavar: str, help: str) -> Any:
    """MODEL of a command: a name the shell completes, and offers to pull where it is not here yet."""
    return typer.Argument(
        metavar=metavar, help=help, show_default=False, callback=pull_if_missing, autocompletion=model_names
    )


def pull_if_missing(ctx: typer.Context, text: str | None) -> str | None:
    if text is None or ctx.resilient_parsing:
        return text
    from halfbyte.cli.models import offer_to_pull

    return offer_to_pull(text)


def model_names(incomplete: str) -> list[str]:
    from halfbyte.cli.models import complete_model

    return complete_model(incomplete)


ModelArgument = Annotated[str | None, model_argument("MODEL", f"{MODEL}. Without it: the embedded model.")]
DEVICE = "cpu or cuda; by default cuda where there is a GPU."
DEVICES = ("cpu", "cuda")
SELF_TEST = "Test the GPU's kernels before the model is loaded: auto, always or off."
DeviceOption = Annotated[str | None, typer.Option("--device", help=DEVICE, autocompletion=lambda: DEVICES)]
SelfTestOption = Annotated[str, typer.Option("--self-test", help=SELF_TEST)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def with_gates(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the command's `gates` parameter with one option per axis, --preset and --mxfp4-layers."""
    named = f"A set of gates by name: {', '.join(PRESETS)}. Each flag below changes one of them (docs/env.md)."
    extra = [_option("preset", "--preset", named, PRESETS)]
    for axis in AXES:
        if axis.field == "graphs":
            extra.append(_switch("enforce_eager", "--enforce-eager", "Run without CUDA graphs."))
        else:
            meaning = f"{axis.meaning[:1].upper()}{axis.meaning[1:]}. Values: {', '.join(axis.values)}."
            extra.append(_option(axis.field, axis.flag, meaning, axis.values))
    short = f"Short for --layers: the groups to hold in MXFP4, of {', '.join(LAYER_GROUPS)}, or all."
    extra.append(_option("mxfp4_layers", "--mxfp4-layers", short, (*LAYER_GROUPS, "all")))

    def make(values: dict[str, Any]) -> Gates:
        preset = values.pop("preset")
        values["graphs"] = "off" if values.pop("enforce_eager") else None
        return gates_.parse(values, preset=preset)

    return _replace_parameter(command, "gates", extra, make)


def with_record(parameter: str, record: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace the command's `parameter`, of type `record`, with one option for each of the record's flags."""
    types, flags = get_type_hints(record), flags_of(record)
    extra = [_record_option(name, flag, default, types[name]) for name, (flag, default) in flags.items()]

    def make(values: dict[str, Any]) -> Any:
        return record(**{name: _record_value(value, *flags[name]) for name, value in values.items()})

    return lambda command: _replace_parameter(command, parameter, extra, make)


def _replace_parameter(
    command: Callable[..., Any],
    parameter: str,
    options: list[inspect.Parameter],
    make: Callable[[dict[str, Any]], Any],
) -> Callable[..., Any]:
    """The command with `options` in place of one parameter, which is made from their values."""
    names = [option.name for option in options]

    @functools.wraps(command)
    def wrapped(**kwargs: Any) -> Any:
        values = {name: kwargs.pop(name) for name in names}
        return command(**kwargs, **{parameter: make(values)})

    signature = inspect.signature(command)
    hints = {n: h for n, h in inspect.get_annotations(command, eval_str=True).items() if n != parameter}
    others = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values() if p.name != parameter]
    wrapped.__signature__ = signature.replace(parameters=others + options)  # type: ignore[attr-defined]
    wrapped.__annotations__ = hints | {option.name: option.annotation for option in options}
    return wrapped


def _record_option(name: str, flag: Flag, default: Any, type_: Any) -> inspect.Parameter:
    if flag.unit is not None:
        type_, default = float, default / flag.unit
    elif flag.parse is not None:
        type_ = str
    elif default == ():
        type_, default = list[str] | None, None
    option = typer.Option(
        flag.name, *flag.spellings, help=flag.help, min=flag.minimum, max=flag.maximum, rich_help_panel=flag.panel,
        autocompletion=(lambda: list(flag.values)) if flag.values else None,
    )  # fmt: skip
    hint = Annotated[type_, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def check_number(value: float, name: str) -> float:
    """`nan` and `inf` are floats to Python, and pass every comparison with a bound or none."""
    if not math.isfinite(value):
        raise UsageError(f"{name} is {value}, which is not a number; give one.")
    return value


def _record_value(value: Any, flag: Flag, default: Any) -> Any:
    if isinstance(value, float):
        check_number(value, flag.name)
    if flag.unit is not None:
        return int(value * flag.unit)
    if flag.parse is not None:
        return flag.parse(value)
    return tuple(value or ()) if default == () else value


def _option(name: str, flag: str, text: str, values: Iterable[str]) -> inspect.Parameter:
    option = typer.Option(
        flag, help=text, rich_help_panel=GATES, show_default=False, autocompletion=lambda: list(values)
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _switch(name: str, flag: str, text: str) -> inspect.Parameter:
    hint = Annotated[bool, typer.Option(flag, help=text, rich_help_panel=GATES)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=hint)


def announce(gates: Gates, text: str, *, cpu: bool = False) -> None:
    """What will run and what the gates change against `exact`, on stderr; on a CPU, with which kernels."""
    changes = gates.changes()
    listed = ", ".join(f"{k} {v}" for k, v in changes.items())
    err.print(f"[dim]{text}{f' · against exact: {listed}' if listed else ''}[/dim]")
    if cpu:
        from halfbyte.kernels.cpu.phase import remark

        with err.status("looking for the CPU kernels"):  # compiled now, where they never were
            said = remark(gates)
        if said:
            err.print(f"[dim]{said}[/dim]")


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=None, default=str) + "\n")
    sys.stdout.flush()


def print_table(rows: Sequence[Mapping[str, str]], title: str | None = None, *, left: int = 1) -> None:
    """The first `left` columns are words, the others figures."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(rows[0] if rows else ()):
        table.add_column(name, justify="left" if i < left else "right")
    for row in rows:
        table.add_row(*row.values())
    out.print(table)


def open_engine(model: str | None, device: str | None, gates: Gates, **options: Any) -> Engine:
    """The engine in this process, and a line that says what was opened."""
    from halfbyte.engine.python_api import Engine
    from halfbyte.model import load

    name = load.resolve_model(model)
    where = load.resolve_device(device)
    load.config_of(name)  # what is no model is refused before kernels are compiled for it
    announce(gates, f"{name.label} on {where}", cpu=where.type == "cpu")
    with err.status(f"loading {name.label}"):
        return Engine(model, gates=gates, device=str(where), **options)


class LoadingBar:
    """A progress bar for `load`, on stderr and only where a person watches."""

    def __init__(self, title: str) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

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
