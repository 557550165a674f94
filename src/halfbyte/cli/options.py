"""Options that many commands share, and how results are printed.

`with_gates` gives a command one option per gate and hands it a checked Gates as its `gates` argument, so the list of
gates stays in `gates.py` alone. `with_record` does the same for a frozen record whose fields have a `flag`.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from halfbyte import gates as gates_
from halfbyte.errors import GateError, UsageError
from halfbyte.flags import Flag, flags_of
from halfbyte.gates import AXES, LAYER_GROUPS, PRESETS, Gates

if TYPE_CHECKING:
    import torch

    from halfbyte.engine.python_api import Engine
    from halfbyte.model.load import CheckpointFacts

err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)

MODEL = (
    "A model that was pulled (20b, openai/gpt-oss-20b), a model folder, a .gguf file, or random weights (random:20b)"
)
LINE_SECONDS = 10.0  # between two lines that say what a command is busy with
SHORT_SECONDS = 2.0  # of work that need not be named
GATES = "Gates: switches that say which kernels and number formats may run"


def model_argument(metavar: str, help: str) -> Any:
    """MODEL of a command: a name the shell completes, and offers to pull where it is not here yet."""
    return typer.Argument(
        metavar=metavar, help=help, show_default=False, callback=pull_if_missing, autocompletion=model_names
    )


def refuse_question(model: str | None, command: str) -> None:
    """Refuse a question that stands where a model should. `command` is what stands before the question if it is put
    to the embedded model."""
    if model is not None and " " in model and not Path(model).exists():
        question = shlex.quote(model)
        raise UsageError(
            f"{question:.60} is no model; write one before the question: `halfbyte {command} {question}` asks the "
            "embedded one."
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
    named = (
        f"A set of gates by name: {', '.join(PRESETS)}; by default {gates_.DEFAULT_ON_GPU} on a GPU and "
        f"{gates_.DEFAULT_ON_CPU} on a CPU. docs/env.md explains them."
    )
    extra = [_option("preset", "--preset", named, PRESETS)]
    for axis in AXES:
        if axis.field == "graphs":
            extra.append(_switch("enforce_eager", "--enforce-eager", "Run without CUDA graphs."))
            continue
        meaning = f"{axis.meaning[:1].upper()}{axis.meaning[1:]}."
        if axis.switch:
            extra.append(_switch(axis.field, axis.flag, meaning))
        else:
            meaning += f" Values: {', '.join(axis.values)}."
            extra.append(_option(axis.field, axis.flag, meaning, axis.values, *axis.spellings))
    short = f"Short for --layers: the groups to hold in MXFP4, of {', '.join(LAYER_GROUPS)}, or all."
    extra.append(_option("mxfp4_layers", "--mxfp4-layers", short, (*LAYER_GROUPS, "all")))

    extra.append(_switch("cpu_moe", "--cpu-moe", "Short for --experts-in-host all."))

    def make(values: dict[str, Any]) -> Gates:
        preset = values.pop("preset")
        if values.pop("cpu_moe"):
            if values["experts_in_host"] is not None:
                raise GateError("--cpu-moe and --experts-in-host set the same option; use only one of them.")
            values["experts_in_host"] = "all"
        values["graphs"] = "off" if values.pop("enforce_eager") else None
        values["deterministic"] = "on" if values["deterministic"] else None
        return gates_.parse(values, preset=preset)

    return _replace_parameter(command, "gates", extra, make)


def with_record(
    parameter: str, record: type[Any], only: Sequence[str] = (), *, panel: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace the command's `parameter`, of type `record`, with one option for each of the record's flags, or of `only`
    those fields that are named. `panel` is the heading of those that have none."""
    types = get_type_hints(record)
    flags = {name: flag for name, flag in flags_of(record).items() if not only or name in only}
    extra = [
        _record_option(name, replace(flag, panel=flag.panel or panel), default, types[name])
        for name, (flag, default) in flags.items()
    ]

    def make(values: dict[str, Any]) -> Any:
        return record(**{name: _record_value(value, *flags[name]) for name, value in values.items()})

    return lambda command: _replace_parameter(command, parameter, extra, make)


def _replace_parameter(
    command: Callable[..., Any], parameter: str, options: list[inspect.Parameter], make: Callable[[dict[str, Any]], Any]
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
        type_, default = str, ",".join(map(str, default)) if isinstance(default, tuple) else default
    elif default == ():
        type_, default = list[str] | None, None
    option = typer.Option(
        flag.name, *flag.spellings, help=flag.help, min=flag.minimum, max=flag.maximum, rich_help_panel=flag.panel,
        metavar=flag.metavar, autocompletion=(lambda: list(flag.values)) if flag.values else None,
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


def _option(name: str, flag: str, text: str, values: Iterable[str], *spellings: str) -> inspect.Parameter:
    option = typer.Option(
        flag, *spellings, help=text, rich_help_panel=GATES, show_default=False, autocompletion=lambda: list(values)
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _switch(name: str, flag: str, text: str) -> inspect.Parameter:
    hint = Annotated[bool, typer.Option(flag, help=text, rich_help_panel=GATES)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=hint)


def announce(
    gates: Gates,
    text: str,
    *,
    cpu: bool = False,
    verbose: bool = False,
    stored: Mapping[str, str] | None = None,
    quality: str = "",
) -> None:
    """What will run, in one line on stderr: the preset, or the gates that were set; on a CPU, its kernels as well.

    `stored` are the formats in the file, on which the default depends; `quality` is what was measured of these gates.
    """
    parts = [text]
    if cpu:
        from halfbyte.kernels.cpu.phase import remark

        with Activity("looking for the CPU kernels", after=SHORT_SECONDS):  # compiled now, where they never were
            parts.append(remark(gates, verbose=verbose))
    name = gates_.preset_name(gates, gpu=not cpu, stored=stored)
    changes = gates.changes()
    if name:
        default = not {"activation", "layers", "kv_dtype"} & set(changes)
        parts.append(f"preset {name}{', the default here' if default else ''}: {PRESETS[name].meaning}")
        if default and name == gates_.DEFAULT_ON_GPU:
            parts.append("--preset exact keeps every weight as the file has it")
    else:
        values = {"activation": "int8"} if cpu else {}  # what auto is there
        values |= {"layers": str(gates_.layers_on(gates, gpu=not cpu, stored=stored))}
        values = {name: value for name, value in (values | changes).items() if value != "checkpoint"}
        parts.append(", ".join(f"{k} {v}" for k, v in values.items()))
    if name and gates.deterministic == "on":
        parts.append("deterministic")
    parts.append(quality)
    err.print(f"[dim]{' · '.join(filter(None, parts))}[/dim]")


def announce_model(facts: CheckpointFacts, gates: Gates, device: torch.device, *, verbose: bool = False) -> None:
    """`announce` for a model that is open, with the verdict on these gates."""
    quality = measured_quality(facts, gates, device, verbose=verbose)
    text, cpu = f"{facts.name.label} on {device}", device.type == "cpu"
    announce(gates, text, cpu=cpu, verbose=verbose, stored=facts.formats.coarsest(), quality=quality)


class Activity:
    """What a command is busy with: a spinner on a terminal; elsewhere, and with `spinner` off, a line for each change.

    The lines come ten seconds apart at least, the first one `after` so many seconds: work that is usually short says
    nothing. A command turns the spinner off while another process writes to the same terminal: their output would share
    a line with it.
    """

    def __init__(self, text: str, *, spinner: bool = True, after: float = 0.0) -> None:
        self.text = text
        self._status = err.status(text) if spinner and err.is_terminal else None
        self._due = 0.0
        self._first = threading.Timer(after, self._show_first) if self._status is None and after else None
        self._after = after

    def update(self, text: str) -> None:
        if text != self.text:
            self.text = text
            self._show()

    def _show(self) -> None:
        if self._status is not None:
            self._status.update(self.text)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_SECONDS
            err.print(self.text, style="dim", markup=False)

    def _show_first(self) -> None:
        self._due = 0.0  # a timer may be early by less than a clock's step
        self._show()

    def __enter__(self) -> Activity:
        if self._status is not None:
            self._status.start()
        if self._first is not None:
            self._due = time.monotonic() + self._after
            self._first.daemon = True
            self._first.start()
        else:
            self._show()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
        if self._first is not None:
            self._first.cancel()


def measured_quality(facts: CheckpointFacts, gates: Gates, device: torch.device, *, verbose: bool = False) -> str:
    """The verdict of `halfbyte check quality` on these gates for this very model, with its figures if `verbose`. Where
    none is stored: how to get one, unless these gates are `exact` or the default."""
    from halfbyte.model import quality_record
    from halfbyte.model.gpt_oss import arch_of, choose

    arch, path = arch_of(device), facts.name.path
    entry = quality_record.find(path, choose(facts.config, gates, arch, facts.formats).spec, arch)
    if entry is not None:
        return f"{entry.label} {entry.sentence() if verbose else entry.summary()}"
    plans = (choose(facts.config, g, arch, facts.formats).spec for g in (gates, PRESETS["exact"].gates, Gates()))
    own, *others = (quality_record.numerics(spec, arch) for spec in plans)
    return (
        "" if path is None or own in others else f"not measured on this model: halfbyte check quality {facts.name.text}"
    )


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


def open_engine(
    model: str | None, device: str | None, gates: Gates, *, verbose: bool = False, **options: Any
) -> Engine:
    """The engine in this process, and a line that says what was opened."""
    from halfbyte.engine.python_api import Engine
    from halfbyte.model import load

    name = load.resolve_model(model)
    where = load.resolve_device(device)
    checkpoint = load.OpenCheckpoint(name)  # a damaged model is refused before kernels are compiled for it
    announce_model(checkpoint.facts, gates, where, verbose=verbose)
    with Activity(f"loading {name.label}", after=SHORT_SECONDS):
        return Engine(model, gates=gates, device=str(where), checkpoint=checkpoint, **options)


class LoadingBar:
    """A progress bar for `load`, on stderr; where no terminal is, a line now and then."""

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
        self.title = title
        self.lines = None if sys.stderr.isatty() else Activity(title, spinner=False)

    def __enter__(self) -> Callable[[int, int, str], None]:
        if self.lines is not None:
            self.lines.__enter__()
        self.bar.start()
        return self.update

    def update(self, done: int, total: int, _: str) -> None:
        if self.lines is not None:
            self.lines.update(f"{self.title}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")
        else:
            self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
