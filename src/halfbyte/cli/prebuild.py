"""`prebuild`: compile the CUDA kernels ahead, for machines without a compiler."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.architectures import GPU_ARCHES
from halfbyte.cli.options import Activity, JsonOption, err, print_json
from halfbyte.errors import PlanError, UsageError
from halfbyte.gates import PRESETS


def prebuild(
    arch: Annotated[str, typer.Option(help="The architectures to compile for.")] = ",".join(GPU_ARCHES),
    shape: Annotated[str, typer.Option(help="The models to compile for.")] = "20b,120b",
    preset: Annotated[str, typer.Option(help="The presets to compile for.")] = "exact,balanced,fast",
    to: Annotated[
        Path | None, typer.Option(help="The folder to write to; by default where kernels are looked for.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compile the CUDA kernels ahead, without a GPU; machines that have the result need no compiler."""
    from halfbyte.gates import cache_folder
    from halfbyte.kernels.prebuilt import prebuild as build
    from halfbyte.kernels.prebuilt import programs_of
    from halfbyte.model.config import NAMED
    from halfbyte.model.gpt_oss import choose

    archs, shapes = _names("--arch", arch, GPU_ARCHES), _names("--shape", shape, NAMED)
    plans = []
    for name in _names("--preset", preset, PRESETS):
        for a in archs:
            for s in shapes:
                try:
                    choice = choose(NAMED[s], PRESETS[name].gates, GPU_ARCHES[a])
                except PlanError as e:
                    raise UsageError(f"{name} cannot run {s} on {a}; leave one of them out. {e}") from None
                plans.append((choice.spec, choice.chosen, GPU_ARCHES[a]))
    programs = programs_of(plans)
    folder = to or cache_folder("prebuilt")
    # NVRTC holds the interpreter while it compiles: Python would see Ctrl-C a minute later, so the system ends the
    # process. For the same reason no spinner would turn.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with Activity("compiling", spinner=False) as status:
        paths = build(programs, folder, lambda name, done, of: status.update(f"compiling, {done} of {of}: {name}"))
    size = sum(p.stat().st_size for p in paths)
    if json:
        print_json({"folder": str(folder), "cubins": len(paths), "bytes": size})
    else:
        err.print(f"{len(paths)} cubins, {size / 2**20:.1f} MiB, are in {folder}")


def _names(flag: str, text: str, choices: Mapping[str, object]) -> list[str]:
    names = [n.strip() for n in text.split(",") if n.strip()]
    unknown = [n for n in names if n not in choices]
    if unknown or not names:
        raise UsageError(f"{flag} names {', '.join(unknown) or 'nothing'}; use {', '.join(choices)}.")
    return names


def register(app: typer.Typer) -> None:
    app.command()(prebuild)
