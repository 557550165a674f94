"""`quantize`: a checkpoint with more layers quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.options import JsonOption, LoadingBar, err, print_json, with_gates
from halfbyte.errors import UsageError
from halfbyte.gates import Gates


@with_gates
def quantize(
    source: Annotated[Path, typer.Argument(help="A model folder or GGUF file.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The folder to make; must not exist.", show_default=False)],
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """Write a checkpoint with more layers quantised, as --layers or --mxfp4-layers say."""
    from halfbyte.model import checkpoint

    asked = {g: f for g, f in gates.layer_formats.items() if f != "checkpoint"}
    if not asked:
        raise UsageError("say what to quantise, for example --layers qkv=q8,o=q8,lm_head=q8 or --mxfp4-layers all.")
    with LoadingBar(f"quantising {source.name}") as progress:
        checkpoint.quantize_checkpoint(source, target, asked, progress=progress)
    size = sum(p.stat().st_size for p in target.rglob("*") if p.is_file())
    if json:
        print_json({"folder": str(target), "bytes": size, "layers": gates.layer_formats})
    else:
        err.print(f"wrote {target} ({size / 1e9:.3f} GB): {gates.layers}")


def register(app: typer.Typer) -> None:
    app.command()(quantize)
