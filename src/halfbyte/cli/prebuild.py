"""`prebuild`: compile the CUDA kernels ahead, for machines without a compiler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.options import JsonOption, err, print_json
from halfbyte.errors import PlanError, UsageError
from halfbyte.gates import PRESETS


def prebuild(
    arch: Annotated[str, typer.Option(help="The architectures to compile for.")] = "sm90,sm100,sm120,sm121",
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
    from halfbyte.plan.phase import ARCHES

    gpus = {name: a for name, a in ARCHES.items() if a.is_gpu}
    archs, shapes = _names("--arch", arch, gpus), _names("--shape", shape, NAMED)
    plans = []
    for name in _names("--preset", preset, PRESETS):
        for a in archs:
            for s in shapes:
                try:
                    spec, chosen, _ = choose(NAMED[s], PRESETS[name].gates, gpus[a])
                except PlanError as e:
                    raise UsageError(f"{name} cannot run {s} on {a}; leave one of them out. {e}") from None
                plans.append((spec, chosen, gpus[a]))
    programs = programs_of(plans)
    folder = to or cache_folder("prebuilt")
    with err.status("compiling") as status:
        paths = build(programs, folder, lambda name, done, of: status.update(f"compiling, {done} of {of}: {name}"))
    size = sum(p.stat().st_size for p in paths)
    if json:
        print_json({"folder": str(folder), "cubins": len(paths), "bytes": size})
    else:
        err.print(f"{len(paths)} cubins, {size / 2**20:.1f} MiB, are in {folder}")


def _names(flag: str, text: str, known: Mapping[str, object]) -> list[str]:
    names = [n.strip() for n in text.split(",") if n.strip()]
    unknown = [n for n in names if n not in known]
    if unknown or not names:
        raise UsageError(f"{flag} names {', '.join(unknown) or 'nothing'}; use {', '.join(known)}.")
    return names


def register(app: typer.Typer) -> None:
    app.command()(prebuild)
