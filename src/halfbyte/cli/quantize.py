"""`quantize`: a checkpoint with more layers quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.options import MODEL, JsonOption, LoadingBar, err, model_argument, print_json, with_gates
from halfbyte.errors import UsageError
from halfbyte.gates import Gates


@with_gates
def quantize(
    source: Annotated[str, model_argument("SOURCE", f"{MODEL}; tiny is the embedded model.")],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The folder to write; it must not exist yet.", show_default=False)
    ],
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """Write a checkpoint with more layers quantised: those that --layers or --mxfp4-layers name."""
    from halfbyte.model import checkpoint, load

    formats = {g: f for g, f in gates.layer_formats.items() if f != "checkpoint"}
    if not formats:
        raise UsageError("say what to quantise, for example --layers qkv=q8,o=q8,lm_head=q8 or --mxfp4-layers all.")
    model = load.resolve_model(source)
    if model.path is None:
        raise UsageError(f"{source} has no files to quantise; name a model that has.")
    with LoadingBar(f"quantising {model.label}") as progress:
        checkpoint.quantize_checkpoint(model.path, target, formats, progress=progress)
    size = sum(p.stat().st_size for p in target.rglob("*") if p.is_file())
    if json:
        print_json({"folder": str(target), "bytes": size, "layers": gates.layer_formats})
    else:
        err.print(f"wrote {target} ({size / 1e9:.3f} GB): {gates.layers}")


def register(app: typer.Typer) -> None:
    app.command()(quantize)
