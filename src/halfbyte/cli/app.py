"""The application: registers the commands and turns errors into one sentence and an exit code."""

from __future__ import annotations

import logging
import os
import sys

import typer
from rich.logging import RichHandler

import halfbyte
from halfbyte.cli import bench, chat, demo, env, eval, explain, generate, profile, pull, quantize, receipts, serve
from halfbyte.cli.options import err
from halfbyte.errors import HalfbyteError

app = typer.Typer(
    help="Serve gpt-oss from MXFP4 weights on one machine, and prove which kernels ran.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (serve, chat, generate, demo, bench, eval, profile, receipts, explain, pull, quantize, env):
    module.register(app)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"halfbyte {halfbyte.__version__}")
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
