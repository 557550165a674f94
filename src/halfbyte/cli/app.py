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
from functools import partial
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

import halfbyte
from halfbyte.errors import HalfbyteError
from halfbyte.installed import commit

# Heading of the help -> command, which is also its module here -> function. Only the one that runs is imported.
PANELS: dict[str, dict[str, str]] = {
    "Talk to a model": {"run": "run", "chat": "chat", "generate": "generate", "demo": "demo"},
    "Serve it": {"serve": "serve", "ps": "ps", "stop": "stop", "top": "top"},
    "Models on this machine": {"pull": "pull", "list": "list_models", "rm": "rm", "quantize": "quantize"},
    "Measure": {
        "bench": "bench", "eval": "evaluate", "profile": "profile", "compare": "compare", "receipts": "receipts",
        "report": "report",
    },
    "Kernels and their proof": {"explain": "explain", "check": "check", "matrix": "matrix", "prebuild": "prebuild"},
    "This machine": {"doctor": "doctor", "cache": "cache", "env": "env", "bundle": "bundle"},
}  # fmt: skip
COMMANDS = {command: function for commands in PANELS.values() for command, function in commands.items()}


class PlainTypes:
    """In the help, a value is N, PATH or TEXT, and a flag has none: `<list[str]>` and `<bool>` are Python's words."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            word = param.metavar if isinstance(param, TyperOption) else ""
            param.display_type_rich = partial(lambda shown, ctx: shown, plain_type(param) if word is None else word)
        return params


def plain_type(option: TyperOption) -> str:
    if option.is_flag:
        return ""
    kind = getattr(option, "type_descriptor", None)
    if kind is None:  # an older typer, with TEXT and INTEGER of its own, that does not ask here
        return "TEXT"
    return "N" if kind.is_ranged or kind.annotation in (int, float) else "PATH" if kind.is_path else "TEXT"


class PlainCommand(PlainTypes, TyperCommand):
    pass


class OneCommand(typer.Typer):
    """An application of one command, as its module registers it."""

    def command(self, *names: Any, **settings: Any) -> Any:
        return super().command(*names, **{"cls": PlainCommand, **settings})


class Commands(PlainTypes, TyperGroup):
    """Imports a command when it runs. A list of commands shows the first line of each one's docstring, read unrun."""

    listing = False

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
        sys.exit(130)
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
