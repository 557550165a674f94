"""The application: registers the commands and turns errors into one sentence and an exit code."""

from __future__ import annotations

import ast
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import typer
from rich.logging import RichHandler
from typer.core import TyperCommand, TyperGroup

import halfbyte
from halfbyte.cli.options import err
from halfbyte.errors import HalfbyteError
from halfbyte.installed import commit

# Command, which is also its module here -> function. Only the one that runs is imported: torch takes seconds.
COMMANDS = {
    "serve": "serve", "chat": "chat", "generate": "generate", "demo": "demo", "bench": "bench", "eval": "evaluate",
    "check": "check", "matrix": "matrix", "compare": "compare", "profile": "profile", "receipts": "receipts",
    "report": "report", "explain": "explain", "pull": "pull", "quantize": "quantize", "prebuild": "prebuild",
    "env": "env", "doctor": "doctor", "cache": "cache",
}  # fmt: skip


class Commands(TyperGroup):
    """Imports a command when it runs. A list of commands shows the first line of each one's docstring, read unrun."""

    listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self.listing:
            return TyperCommand(cmd_name, help=docstring_of(cmd_name))
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        importlib.import_module(f"halfbyte.cli.{cmd_name}").register(alone)
        command = typer.main.get_command(alone)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
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
    add_completion=False,
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
    pass


def main() -> None:
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=err, show_time=False, show_path=False)],
    )
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except HalfbyteError as e:
        err.print(f"halfbyte: {e}", markup=False)
        sys.exit(e.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
