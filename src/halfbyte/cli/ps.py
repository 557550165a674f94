"""`ps`: the servers that run on this machine."""

from __future__ import annotations

import time
from dataclasses import asdict

import typer

from halfbyte.cli.options import JsonOption, err, print_json, print_table


def ps(json: JsonOption = False) -> None:
    """List the servers running on this machine."""
    from halfbyte.cli.servers import running

    servers = running()
    if json:
        print_json({"servers": [asdict(s) | {"state": s.state} for s in servers]})
        return
    if not servers:
        err.print("no server is running; `halfbyte serve` starts one")
        return
    rows = [
        {
            "model": s.model, "process": str(s.pid), "state": s.state, "device": s.device,
            "up": duration(time.time() - s.since), "address": s.url or "",
        }
        for s in servers
    ]  # fmt: skip
    print_table(rows)


def duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def register(app: typer.Typer) -> None:
    app.command()(ps)
