"""A measurement: one function, registered once with its name, its needs, its time limit and its rows of README's table.

    @dataclass(frozen=True)
    class Options:
        steps: int = option(2000, "timed steps")

    @measurement("host", seconds=120, rows=(Row("host work per step", "host work", "step", path="engine"),))
    def host(run: Run, options: Options) -> None:
        run.sources |= receipts.hashes(...)
        run.add(Result(...))

The second parameter's type is a frozen dataclass whose fields are the options. `settings` of the decorator are other
defaults for the same function under another name. A command is a measurement that another program makes (`halfbyte
bench`, pytest, a script of training/). `Run` is the only writer of receipts in the workshop. `bench/runner.py` runs
measurements, `bench/table.py` reads their rows.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.errors import PeerError, UsageError
from halfbyte.gates import child_environment
from halfbyte.lab import receipts
from halfbyte.lab.child import output_of
from halfbyte.lab.result import Cell, Result, ResultFile, from_json, measure_cell

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
ANSWERS = ROOT / "build" / "embedded-answers.json"  # the embedded model's answers on a CPU
TOOL = "python -m bench"
HALFBYTE = (sys.executable, "-c", "from halfbyte.cli import main; main()")


@dataclass(frozen=True)
class Row:
    """One line of the table of results: figures of cells that differ in one word of their shape, or of the cell."""

    label: str
    kind: str
    figure: str
    path: str = ""
    model: str = ""
    preset: str = ""
    shape: Mapping[str, Any] = field(default_factory=dict)
    over: str = ""  # the word that differs
    values: tuple[Any, ...] = ("",)
    gates: Mapping[str, Any] | None = None
    command: str = ""  # empty: the measurement's own
    headline: bool = False  # in README too, not in docs/results.md alone


@dataclass(frozen=True)
class Column:
    """A column of such a table: what its cells are, and its figure where that is not the row's."""

    label: str
    engine: str = ""  # how the cell's engine begins; empty: halfbyte itself
    path: str = ""
    preset: str = ""
    moe_kernel: str = ""
    figure: str = ""


@dataclass(frozen=True)
class SideBySide:
    """A table of docs/results.md with a column for each engine or format."""

    name: str  # of its markers in the page
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    ceilings: bool = False  # show the share of each figure's ceiling


@dataclass(frozen=True)
class NoOptions:
    """For a measurement without options."""


@dataclass(frozen=True)
class Measurement:
    name: str
    function: Callable[..., None]
    module: str  # that registers it
    seconds: float  # after which `run --stale` stops it
    needs: tuple[str, ...] = ()  # names of NEEDS
    rows: tuple[Row, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # defaults that differ from those of the options
    command_line: tuple[str, ...] = ()  # where another program measures
    receipt: bool = True  # False: it passes or fails, or makes a file
    routine: bool = True  # whether `run --stale` includes it
    side_by_side: tuple[SideBySide, ...] = ()

    @property
    def options(self) -> type[Any]:
        parameters = list(inspect.signature(self.function).parameters)
        hints = typing.get_type_hints(self.function)
        return typing.cast(type[Any], hints[parameters[1]]) if len(parameters) > 1 else NoOptions

    @property
    def command(self) -> str:
        """What a person types to make its receipt."""
        return shlex.join(self.command_line) if self.command_line else f"{TOOL} run {self.name}"

    def parse(self, settings: Sequence[str]) -> Any:
        """The record of options from `name=value` settings; UsageError for a setting that names no option."""
        record = self.options
        hints, values = typing.get_type_hints(record), dict(self.settings)
        for setting in settings:
            name, sign, text = setting.partition("=")
            name = name.replace("-", "_")
            if not sign or name not in hints:
                names = ", ".join(f.name for f in dataclasses.fields(record)) or "no options"
                raise UsageError(f"{self.name} does not take {setting!r}; --set takes NAME=VALUE, and it has {names}.")
            values[name] = parse_value(text, hints[name], f"{self.name}: {name}")
        return record(**values)

    def missing(self, options: Any = None) -> str:
        """What this machine lacks for it; empty where it can run. With `device=cpu` or a `url` no GPU is needed."""
        elsewhere = getattr(options, "device", None) == "cpu" or getattr(options, "url", None)
        needs = [need for need in self.needs if not (need == "gpu" and elsewhere)]
        return next((reason for need in needs if (reason := NEEDS[need]())), "")

    @property
    def is_check(self) -> bool:
        """Whether it asks for correctness; `run --stale` asks for that before it times anything."""
        return self.module.startswith("bench.checks.") or self.name == "gpu-tests"


def option(default: Any, help: str) -> Any:
    """A field of a record of options, with the sentence that `python -m bench list NAME` prints."""
    return field(default=default, metadata={"help": help})


def parse_value(text: str, hint: Any, name: str) -> Any:
    """`1,8` for tuple[int, ...], `yes` for bool, nothing for None where the type allows it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (t for t in typing.get_args(hint) if t is not type(None))
        if not text:
            return None
    if typing.get_origin(hint) is tuple:
        return tuple(parse_value(t.strip(), typing.get_args(hint)[0], name) for t in text.split(",") if t.strip())
    try:
        return {"yes": True, "no": False}[text] if hint is bool else hint(text)
    except (KeyError, ValueError):
        kind = "yes or no" if hint is bool else hint.__name__
        raise UsageError(f"{name} takes {kind}, not {text!r}.") from None


def value_text(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(value_text, value))
    return "" if value is None else str(value)


# ---- the registry ---------------------------------------------------------------------------------------------------

MEASUREMENTS: dict[str, Measurement] = {}


def measurement(
    name: str, *, seconds: float, needs: tuple[str, ...] = (), rows: tuple[Row, ...] = (), receipt: bool = True,
    routine: bool = True, side_by_side: tuple[SideBySide, ...] = (), **settings: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:  # fmt: skip
    def register(function: Callable[..., None]) -> Callable[..., None]:
        _add(
            Measurement(
                name, function, function.__module__, seconds, needs, rows, settings, (), receipt, routine, side_by_side
            )
        )
        return function

    return register


def commands(module: str) -> Callable[..., None]:
    """`command` for the module of this name: a measurement by another program, to which `--out FILE` is added where it
    writes a receipt."""

    def command(
        name: str, text: str, *, seconds: float, needs: tuple[str, ...] = (), rows: tuple[Row, ...] = (),
        receipt: bool = True, routine: bool = True,
    ) -> None:  # fmt: skip
        typed = tuple(shlex.split(text))
        _add(Measurement(name, run_command, module, seconds, needs, rows, {}, typed, receipt, routine))

    return command


def _add(added: Measurement) -> None:
    assert added.name not in MEASUREMENTS, added.name
    MEASUREMENTS[added.name] = added


def run_command(run: Run) -> None:
    arguments = list(run.measurement.command_line)
    program = [*HALFBYTE, *arguments[1:]] if arguments[0] == "halfbyte" else [sys.executable, *arguments[1:]]
    if run.out is not None and run.measurement.receipt:
        program += ["--out", str(run.out.resolve())]
    run.status = subprocess.run(program, cwd=ROOT, env=child_environment()).returncode


# ---- what a machine must have ---------------------------------------------------------------------------------------


def _gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "it needs a CUDA GPU, and torch sees none"


def _package(name: str) -> Callable[[], str]:
    return lambda: "" if importlib.util.find_spec(name) else f"it needs the package {name}, which is not installed"


def _sanitizer() -> str:
    program = shutil.which("compute-sanitizer")
    return "" if program else "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit"


def _answers() -> str:
    return "" if ANSWERS.is_file() else f"it needs the CPU's answers; `{TOOL} run embedded-answers` makes them"


NEEDS: dict[str, Callable[[], str]] = {
    "gpu": _gpu,
    "cores": lambda: "",  # beside a GPU: it computes on the CPU as well, with all of its cores
    "vllm": _package("vllm"),
    "llama-benchy": _package("llama_benchy"),
    "openai": _package("openai"),
    "anthropic": _package("anthropic"),
    "compute-sanitizer": _sanitizer,
    "answers": _answers,
    "compiler": lambda: "" if shutil.which("c++") or shutil.which("g++") else "it needs a C++ compiler",
    "network": lambda: "",  # nothing to look at before it is used
}


# ---- one run --------------------------------------------------------------------------------------------------------


def line_of(result: Result) -> str:
    cell = result.cell
    name = " ".join(t for t in (cell.model, cell.preset, cell.path, cell.label) if t)
    if result.refused:
        return f"{name}: REFUSED, {result.refused}"
    figures = (f"{f.name} {f.value:.4g} {f.unit}" + (f" ({f.share:.0%})" if f.share else "") for f in result.figures)
    missed = [t.what for t in result.targets if not t.ok]
    notes = [f"\n    {c.what}: {'' if c.ok else 'WRONG: '}{c.note}" for c in result.checks if c.note]
    return f"{name}: {', '.join(figures)}" + (f"; MISSED: {', '.join(missed)}" if missed else "") + "".join(notes)


class Run:
    """The results of one measurement as they come, the sources behind them, and the receipt of both.

    With `out` the receipt is written after every result, so that a run that is stopped keeps what it has."""

    def __init__(self, measurement: Measurement, out: Path | None = None, settings: Sequence[str] = ()) -> None:
        self.measurement, self.out = measurement, out
        self.results: list[Result] = []
        self.sources: dict[str, str] = {}  # file -> hash
        self.status = 0  # of a command, or of what leaves no receipt
        self._settings = tuple(settings)
        self._empty: ResultFile | None = None

    def add(self, *results: Result) -> None:
        for result in results:
            self.results.append(result)
            print(line_of(result), flush=True)
            if self.out is not None:
                self.file().write(self.out)

    def measure(self, cell: Cell, work: Callable[[], Result]) -> Result:
        """A cell that raises is refused with that reason, and the next one goes on."""
        result = measure_cell(cell, work)
        self.add(result)
        return result

    def file(self) -> ResultFile:
        if self._empty is None:  # the machine's record takes a second, and is taken once
            arguments = ["run", self.measurement.name, *(w for s in self._settings for w in ("--set", s))]
            self._empty = receipts.result_file(TOOL, (), {}, arguments)
        return dataclasses.replace(self._empty, measured=dict(self.sources), results=tuple(self.results))

    def finish(self) -> int:
        """Prints the receipt as the last line; 1 where a result was refused, a target missed, or nothing measured."""
        if self.measurement.command_line or not self.measurement.receipt:
            return self.status
        if self.out is not None:
            self.file().write(self.out)
        print(json.dumps(self.file().as_json(), default=str), flush=True)
        bad = any(r.refused or not all(t.ok for t in r.targets) for r in self.results)
        return 1 if bad or not self.results else 0


# ---- functions in a process of their own ----------------------------------------------------------------------------


def child_command(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Calls a function of the workshop in another process, whose last line of output is what it returns, as JSON."""
    qualified_name = f"{function.__module__}:{function.__qualname__}"
    return [sys.executable, "-m", "bench", "child", qualified_name, json.dumps(arguments, default=str)]


def last_line(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


@dataclass(frozen=True)
class CaseOutcome:
    """What one case's process wrote, and why it failed; empty where it did not."""

    case: tuple[Any, ...]
    records: list[dict[str, Any]]
    failed: str


def run_cases(
    function: Callable[..., None], cases: Sequence[tuple[Any, ...]], *shared: Any, jobs: int, seconds: float
) -> Iterator[CaseOutcome]:
    """Every case in a process of its own (compilers run beside each other), `jobs` at a time, in the order in which
    they end. `function(*case, out, *shared)` calls `write_records(out, ...)` as often as it likes; what it had written
    before it failed is kept. After `seconds` no case goes on."""
    until = time.monotonic() + seconds
    waiting = list(cases)
    running: list[tuple[tuple[Any, ...], subprocess.Popen[bytes], Path]] = []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                case = waiting.pop(0)
                out = Path(folder) / f"{len(waiting)}.json"
                command = child_command(function, *case, out, *shared)
                running.append((case, subprocess.Popen(command, stdout=subprocess.DEVNULL), out))
            time.sleep(0.2)
            if time.monotonic() > until:
                for case in waiting:
                    yield CaseOutcome(case, [], "not begun, no time was left")
                waiting.clear()
                for _, process, _ in running:
                    process.kill()
                    process.wait()
            for entry in [r for r in running if r[1].poll() is not None]:
                running.remove(entry)
                case, process, out = entry
                records = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
                yield CaseOutcome(case, records, f"exit code {process.returncode}" if process.returncode else "")


def write_records(out: str, records: list[dict[str, Any]]) -> None:
    """A process that is stopped leaves a whole file or none."""
    unfinished = Path(out).with_suffix(".part")
    unfinished.write_text(json.dumps(records), encoding="utf-8")
    unfinished.replace(out)


def bench_results(arguments: Sequence[str]) -> ResultFile:
    """`halfbyte bench` with these words, in a process of its own; a cell that it refused is among its results."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "receipt.json"
        output = output_of([*HALFBYTE, "bench", *arguments, "--out", str(out)], may_fail=True)
        if not out.is_file():
            raise PeerError(f"`halfbyte bench` left no receipt; it said: {output[-600:].strip()}")
        return from_json(json.loads(out.read_text(encoding="utf-8")))


def engine_sources(phases: Iterable[Any]) -> dict[str, str]:
    """File -> hash, for an engine that ran these phases."""
    engine = receipts.sources_of([receipts.PACKAGE / "engine" / "build.py"], ("kernels", "engine"))
    return receipts.hashes(engine) | receipts.measured(phases)
