"""The application: registers the commands and turns errors into one sentence and an exit code.

Nothing that takes time is imported here: `--help` and the shell's completion answer at once.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

import halfbyte
from halfbyte.cli import INTERRUPTED
from halfbyte.errors import HalfbyteError
from halfbyte.installed import commit

# Heading of the help -> command, which is also its module here -> function. Only the one that runs is imported.
PANELS: dict[str, dict[str, str]] = {
    "Talk to a model": {"run": "run", "chat": "chat", "generate": "generate", "demo": "demo"},
    "Serve it": {"serve": "serve", "ps": "ps", "stop": "stop", "top": "top"},
    "Models on this machine": {
        "pull": "pull", "list": "list_models", "rm": "rm", "quantize": "quantize", "inspect": "inspect",
    },
    "Measure": {
        "bench": "bench", "eval": "evaluate", "profile": "profile", "compare": "compare", "receipts": "receipts",
        "report": "report",
    },
    "Kernels and their proof": {"explain": "explain", "check": "check", "matrix": "matrix", "prebuild": "prebuild"},
    "This machine": {"doctor": "doctor", "cache": "cache", "env": "env", "bundle": "bundle"},
}  # fmt: skip
COMMANDS = {command: function for commands in PANELS.values() for command, function in commands.items()}
# Of a command with many options, those that its --help shows; --help-all shows every one.
_TALK = (
    "--preset", "--max-tokens", "--temperature", "--seed", "--effort", "--system", "--reasoning", "--here", "--device",
    "--verbose",
)  # fmt: skip
MAIN_OPTIONS: dict[str, tuple[str, ...]] = {
    "run": _TALK,
    "chat": _TALK,
    "serve": (
        "--host", "--port", "--api-key-file", "--name", "--max-context", "--max-seqs", "--preset", "--device",
        "--engine", "--verbose",
    ),
    "bench": (
        "--pp", "--tg", "--depth", "--concurrency", "--repeats", "--served", "--engine", "--preset", "--device",
        "--json",
    ),
    "check": (
        "--model", "--engine", "--preset", "--device", "--suite", "--minutes", "--kit", "--resume", "--out", "--json",
    ),
    "generate": (
        "--prompt", "--raw", "--preset", "--max-tokens", "--temperature", "--seed", "--effort", "--reasoning",
        "--device", "--json",
    ),
    "eval": (
        "--suite", "--per-task", "--tasks", "--seed", "--wrong", "--out", "--preset", "--layers", "--device", "--json",
    ),
    "profile": (
        "--tokens", "--depth", "--batch", "--pp", "--predict", "--trace", "--preset", "--device", "--json",
    ),
    "explain": ("--arch", "--prove", "--why", "--engine", "--preset", "--layers", "--json"),
    "quantize": ("--layers", "--mxfp4-layers", "--preset", "--json"),
    "env": ("--preset", "--layers", "--activation", "--json"),
}  # fmt: skip
HELP_ALL = "--help-all"


def plain_type(option: TyperOption) -> str:
    """The value of an option in the help: N, PATH or TEXT, and of a flag none; `<list[str]>` and `<bool>` are Python's
    words."""
    if option.metavar is not None:
        return option.metavar
    if option.is_flag:
        return ""
    kind = getattr(option, "type_descriptor", None)
    if kind is None:  # an older typer, with TEXT and INTEGER of its own, that does not ask here
        return "TEXT"
    return "N" if kind.is_ranged or kind.annotation in (int, float) else "PATH" if kind.is_path else "TEXT"


class PlainCommand(TyperCommand):
    """A command whose help is plain text: no name of an option is ever cut, however narrow the terminal is."""

    every_option = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.name in MAIN_OPTIONS and HELP_ALL in args:
            self.every_option, args = True, ["--help"]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        items = super().shell_complete(ctx, incomplete)
        if self.name in MAIN_OPTIONS and incomplete.startswith("--") and HELP_ALL.startswith(incomplete):
            help_item = next((item for item in items if item.value == "--help"), None)
            if help_item is not None:
                items.append(type(help_item)(HELP_ALL, help="Show every option and exit."))
        return items

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        options = None if self.every_option else MAIN_OPTIONS.get(self.name or "")
        panels: dict[str, list[tuple[str, str]]] = {}
        params = self.get_params(ctx)
        if options is not None:
            params.sort(key=lambda p: options.index(p.opts[0]) if p.opts[0] in options else -1)
        for param in params:
            record = param.get_help_record(ctx)
            if record is None:
                continue
            text = record[1]
            if not isinstance(param, TyperOption):
                panels.setdefault("Arguments", []).append((param.metavar or (param.name or "").upper(), text))
                continue
            if options is not None and param.opts[0] not in options:
                continue
            panel = None if options is not None else getattr(param, "rich_help_panel", None)
            panels.setdefault(panel or "Options", []).append((_option_words(param, brief=options is not None), text))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)
        if options is not None:
            formatter.write_paragraph()
            formatter.write_text(f"`halfbyte {self.name} {HELP_ALL}` shows every option.")


def _option_words(option: TyperOption, *, brief: bool) -> str:
    """The names of an option and the word for its value; `brief` leaves out the names of other servers."""
    names = [*option.opts[:1], *(name for name in option.opts[1:] if not brief or len(name) == 2)]
    names = [*names, *option.secondary_opts]
    return " ".join(filter(None, (", ".join(names), plain_type(option))))


class OneCommand(typer.Typer):
    """An application of one command, as its module registers it."""

    def command(self, *names: Any, **settings: Any) -> Any:
        return super().command(*names, **{"cls": PlainCommand, **settings})


class Commands(TyperGroup):
    """Imports a command when it runs. A list of commands shows the first line of each one's docstring, read unrun."""

    listing = False

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        for param in params:
            param.display_type_rich = lambda ctx: ""  # its options are all flags; `<bool>` is a word of Python's
        return params

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self.listing:
            panel = next(name for name, commands in PANELS.items() if cmd_name in commands)
            return TyperCommand(cmd_name, help=docstring_of(cmd_name), rich_help_panel=panel)
        alone = OneCommand(add_completion=False, pretty_exceptions_enable=False)
        importlib.import_module(f"halfbyte.cli.{cmd_name}").register(alone)
        command = typer.main.get_command(alone)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._list():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._list():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _list(self) -> Iterator[None]:
        self.listing = True
        try:
            yield
        finally:
            self.listing = False


def docstring_of(command: str) -> str:
    tree = ast.parse((Path(__file__).parent / f"{command}.py").read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == COMMANDS[command])
    return ast.get_docstring(next(functions)) or ""


app = typer.Typer(
    cls=Commands,
    help="Serve gpt-oss from MXFP4 weights on one machine, and prove which kernels ran.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"halfbyte {halfbyte.__version__} (commit {commit() or 'unknown'})")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """A command is about to run: what is logged goes to the terminal."""
    import logging

    from rich.logging import RichHandler

    from halfbyte.cli.options import err

    handler = RichHandler(console=err, show_time=False, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])


def main() -> None:
    try:
        app(prog_name="halfbyte")
    except KeyboardInterrupt:
        # Threads that compile or compute cannot be interrupted, and the interpreter's own end would wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    except HalfbyteError as e:
        import logging

        from halfbyte.cli.options import err

        if err.quiet:  # machines read the log
            logging.getLogger("halfbyte").error("%s", e)
        else:
            err.print(f"halfbyte: {e}", markup=False)
        sys.exit(e.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
