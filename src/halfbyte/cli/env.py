"""`env`: the reproducibility record of this machine and build."""

from __future__ import annotations

import typer

from halfbyte.cli.options import JsonOption, out, print_json, with_gates
from halfbyte.gates import Gates


@with_gates
def env(json: JsonOption = False, *, gates: Gates) -> None:
    """Print the record of this machine and build that makes a result reproducible."""
    from halfbyte.lab import environment

    record = environment.collect(gates)
    if json:
        print_json(record)
        return
    for key, value in record.items():
        if isinstance(value, dict):
            for name, inner in value.items():
                out.print(f"{key + '.' + name:<28} {inner if inner is not None else '–'}", markup=False)
        else:
            out.print(f"{key:<28} {value if value not in (None, []) else '–'}", markup=False)


def register(app: typer.Typer) -> None:
    app.command()(env)
