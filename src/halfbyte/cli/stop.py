"""`stop`: end a server of this machine."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated

import typer

from halfbyte.cli.options import JsonOption, err, print_json
from halfbyte.errors import CapacityError, UsageError


def stop(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="SERVER",
            help="Its model, process number or port, as `halfbyte ps` shows them. Without it: the only one.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop every server on this machine.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the requests it is answering.")] = False,
    wait: Annotated[float, typer.Option("--wait", min=0.0, help="How many seconds to wait for it to end.")] = 60.0,
    json: JsonOption = False,
) -> None:
    """Stop a server, once the requests it is answering have ended."""
    from halfbyte.cli import servers

    if every and name is not None:
        raise UsageError("--all stops every server; leave out the name, or leave out --all.")
    meant = servers.running() if every else [servers.choose(name)]
    for server in meant:
        _signal(server.pid)
    deadline = time.monotonic() + wait
    left = meant
    with err.status("waiting for requests to end" if not now else "stopping") as _:
        if now:
            time.sleep(0.2)  # a second signal means: do not wait
            for server in meant:
                if servers.is_alive(server):
                    _signal(server.pid)
        while (left := [s for s in left if servers.is_alive(s)]) and time.monotonic() < deadline:
            time.sleep(0.05)
    if left:
        still = ", ".join(f"{s.model} (process {s.pid})" for s in left)
        raise CapacityError(f"still running after {wait:g} s: {still}; wait for its requests, or add --now.")
    if json:
        print_json({"stopped": [s.pid for s in meant]})
        return
    for s in meant:
        err.print(f"stopped {s.model} (process {s.pid})", markup=False)


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise UsageError(f"process {pid} belongs to another user, who has to stop it.") from None


def register(app: typer.Typer) -> None:
    app.command()(stop)
