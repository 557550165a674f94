"""`doctor`: what is wrong with this machine, why, and the commands that would change it."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte.cli.options import SHORT_SECONDS, Activity, JsonOption, err, out, print_json
from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from halfbyte.doctor.finding import Finding
    from halfbyte.doctor.machine import Machine

COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The model to serve: its files, size and disk are checked as well."),
    ] = None,
    json: JsonOption = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Also check what two machines need: network, RDMA.")
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Print the commands that would help, without running any.")
    ] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer", help="Another machine of the cluster: the file of its record, or a host to ask over ssh."
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="The port that the server would listen on.", min=1, max=65535)] = 8000,
    max_context: Annotated[
        int | None, typer.Option(help="The context that the server would have, checked against the model's.", min=1)
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(help="Write this machine's answers to this file, for --replay elsewhere (-: standard output)."),
    ] = None,
    replay: Annotated[Path | None, typer.Option(help="Judge a record of another machine instead of this one.")] = None,
) -> None:
    """Say what is wrong with this machine, with evidence and the fix; exit status 1 if it could not serve."""
    from halfbyte.doctor.diagnosis import diagnose, exit_status
    from halfbyte.doctor.finding import CHECKS, Purpose
    from halfbyte.doctor.live import this_machine
    from halfbyte.doctor.machine import read_records

    if peer and not cluster:
        raise UsageError("--peer compares the machines of a cluster; add --cluster.")
    if model is not None and replay is None:
        model = _place_of(model)
    machine, *others = [this_machine()] if replay is None else read_records(replay)
    peers = (*others, *(_ask_peer(name) for name in peer or ()))
    purpose = Purpose(model, port, cluster, max_context, peers)
    with Activity("looking at this machine", after=SHORT_SECONDS):
        findings = diagnose(machine, purpose)
    if record is not None:
        _write(machine, record)
        if record == "-":
            raise typer.Exit(0)
    counts = {s: sum(f.severity == s for f in findings) for s in COLOURS}
    if json:
        listed = [asdict(f) for f in findings]
        ran = [c.id for c in CHECKS.values() if cluster or not c.cluster]
        print_json({"schema": 1, "findings": listed, "counts": counts, "checks": ran, "status": exit_status(findings)})
    elif fix:
        _print_commands(findings)
    else:
        for f in findings:
            out.print(f"[{COLOURS[f.severity]}]{f.severity:<8}[/] [bold]{f.id}[/bold]  ", end="")
            out.print(f"{f.evidence}\n         → {f.fix}", markup=False)
        summary = (
            ", ".join(f"{n} {s}{'s' if n != 1 else ''}" for s, n in counts.items() if n) or "nothing to complain of"
        )
        out.print(
            f"{len(CHECKS)} checks: {summary}"
            + ("; --fix prints commands" if any(f.commands for f in findings) else "")
        )
    raise typer.Exit(exit_status(findings))


def _place_of(model: str) -> str:
    """The model's folder or file; its name where only its size is known."""
    if Path(model).expanduser().exists() or model.startswith("random:"):
        return model
    if model == "tiny":
        from halfbyte.model.load import EMBEDDED

        return str(EMBEDDED)
    from halfbyte.gates import models_folder
    from halfbyte.model import pulled

    repo = pulled.repository(pulled.named_file(model)[0])
    if repo is None or model.startswith((".", "~")):
        raise UsageError(
            f"{model} does not exist; give a model folder, a .gguf file or the name of a model that was pulled, or "
            "leave it out."
        )
    path = pulled.path_of(model, models_folder()) or pulled.default_folder(repo, models_folder())
    if path.exists():  # whole or not
        return str(path)
    err.print(f"{model} has not been pulled: its files are not checked (`halfbyte pull {model}`)", markup=False)
    return model


def _ask_peer(name: str) -> Machine:
    """Its record: a file's, or what halfbyte says on that host."""
    import json as json_

    from halfbyte.doctor.machine import from_record, read_records

    if Path(name).is_file():
        return read_records(Path(name))[0]
    command = ["ssh", "-o", "BatchMode=yes", name, "halfbyte doctor --cluster --record -"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL)
        report: dict[str, Any] = json_.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        raise UsageError(
            f"--peer {name} is no file, and `ssh {name} halfbyte doctor --cluster --record -` gave no record; make one "
            "there with --record FILE and name the file."
        ) from None
    return from_record(report, where=f"the record of {name}")


def _write(machine: Machine, record: str) -> None:
    import json as json_

    content = machine.record("what `halfbyte doctor` asked")
    text = json_.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if record == "-":
        typer.echo(text, nl=False)
        return
    try:
        Path(record).write_text(text, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"{record} cannot be written ({e.strerror}).") from None
    err.print(f"what was asked is in {record}")


def _print_commands(findings: list[Finding]) -> None:
    """For a person to read, change and run."""
    for f in findings:
        if f.commands:
            out.print(f"# {f.id} ({f.severity}): {f.fix}", markup=False)
            for line in f.commands:
                out.print(line, markup=False)
    if not any(f.commands for f in findings):
        out.print("# nothing to do")


def register(app: typer.Typer) -> None:
    app.command()(doctor)
