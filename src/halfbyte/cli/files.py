"""Commands about files and this machine: `pull`, `quantize`, `env`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte import gates as gates_
from halfbyte.cli.options import JsonOption, LoadingBar, err, out, print_json, with_gates
from halfbyte.errors import UsageError
from halfbyte.gates import Gates
from halfbyte.lab import environment
from halfbyte.model import checkpoint
from halfbyte.model import pull as pull_
from halfbyte.model.hub import Hub


@with_gates
def quantize(
    source: Annotated[Path, typer.Argument(help="A model folder or GGUF file.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The folder to make; must not exist.", show_default=False)],
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """Write a checkpoint with more layers quantised, as --layers or --mxfp4-layers say."""
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


@with_gates
def env(json: JsonOption = False, *, gates: Gates) -> None:
    """The reproducibility record of this machine and build."""
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


def pull(
    model: Annotated[str, typer.Argument(help="As openai/gpt-oss-20b; or 20b, 120b.", show_default=False)],
    folder: Annotated[Path | None, typer.Option("--to", help="Where to put it.")] = None,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    file: Annotated[str | None, typer.Option(help="One file by name, for GGUF repositories.")] = None,
    json: JsonOption = False,
) -> None:
    """Fetch a model: only the files it needs, resumed where it stopped, every file checked."""
    environ = gates_.child_environment()
    gates_.check_environment(environ)
    root = gates_.setting("HALFBYTE_MODELS_DIR")
    with LoadingBar(f"pulling {model}") as progress:
        where = pull_.pull(
            model,
            folder,
            models=Path(root).expanduser() if root else None,
            hub=Hub.from_environ(environ),
            revision=revision,
            file=file,
            report=lambda p: progress(p.done, p.total, p.file),
        )
    if json:
        print_json({"folder": str(where)})
    else:
        err.print(f"{model} is in {where}; next: halfbyte serve {where}")


def register(app: typer.Typer) -> None:
    app.command()(pull)
    app.command()(quantize)
    app.command()(env)
