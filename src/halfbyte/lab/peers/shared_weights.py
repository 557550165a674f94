"""One GGUF file that both engines read: the embedded model, or random weights of a true shape, streamed to disk.

A synthetic file is kept under HALFBYTE_CACHE_DIR and made again when the code that draws or writes it has changed. Its
numbers are no zeros and its router favours no expert (`model/synthetic.py`), so that nothing is faster than it would be
with a real model. Needs the package `gguf`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from halfbyte.errors import UsageError
from halfbyte.gates import cache_folder
from halfbyte.lab import receipts
from halfbyte.model import checkpoint, load, synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.weights import WeightFormat

DENSE = ("qkv", "o", "lm_head")
SOURCES = ("synthetic.py", "gguf_writer.py")  # of the room `model`: what decides a synthetic file's bytes
TIMES_IN_MEMORY = 1.15  # of a file: its pages or its repacked copy, KV and an interpreter
CHUNK = 1 << 24


@dataclass(frozen=True)
class SharedModel:
    """A name of the comparison. `dense` is the format of attention and head; None keeps the model's own."""

    name: str
    shape: str | None  # of `NAMED`; None is the embedded model
    dense: WeightFormat | None


MODELS = {
    m.name: m
    for m in (
        SharedModel("tiny", None, None),
        SharedModel("tiny-q8", None, "q8"),
        SharedModel("tiny-mxfp4", None, "mxfp4"),
        SharedModel("20b-q8", "20b", "q8"),
        SharedModel("20b-mxfp4", "20b", "mxfp4"),
        SharedModel("120b-q8", "120b", "q8"),
        SharedModel("120b-mxfp4", "120b", "mxfp4"),
    )
}
Progress = Callable[[str], None]


def model_named(name: str) -> SharedModel:
    if name not in MODELS:
        raise UsageError(f"there is no model {name!r} to compare; there are {', '.join(MODELS)}.")
    return MODELS[name]


def write(model: SharedModel, progress: Progress = lambda _: None) -> Path:
    """The file, made if it is not there. A file that this machine's memory or disk cannot hold is refused first."""
    folder = cache_folder("peers")
    folder.mkdir(parents=True, exist_ok=True)
    if model.shape is None:
        path = folder / f"{model.name}.gguf"
        path.unlink(missing_ok=True)  # small, and the embedded model may be another one since
        formats = {} if model.dense is None else dict.fromkeys(DENSE, str(model.dense))
        checkpoint.quantize_checkpoint(load.EMBEDDED, path, formats)
        return path
    room = receipts.PACKAGE / "model"
    made_by = "".join(receipts.file_hash(room / name)[:4] for name in SOURCES)
    path = folder / f"{model.name}-{made_by}.gguf"
    if path.is_file():
        return path
    size = _size(model)
    memory, disk = psutil.virtual_memory().total, shutil.disk_usage(folder).free
    for old in folder.glob(f"{model.name}-*.gguf"):
        disk += old.stat().st_size
    if size * TIMES_IN_MEMORY > memory or size > disk:
        raise UsageError(
            f"{model.name} is a file of {size / 1e9:.1f} GB, too large for this machine ({memory / 1e9:.0f} GB of "
            f"memory, {disk / 1e9:.0f} GB free under {folder}); leave it out of --models."
        )
    for old in folder.glob(f"{model.name}-*.gguf"):
        old.unlink()

    def report(done: int, total: int, name: str) -> None:
        progress(f"writing {path.name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

    synthetic.write_gguf(NAMED[model.shape], 0, path, dense=model.dense, progress=report, character=synthetic.REAL)
    return path


def _size(model: SharedModel) -> int:
    from halfbyte.gates import parse

    assert model.shape is not None
    layers = ",".join(f"{role}={model.dense}" for role in DENSE) if model.dense else None
    return load.weight_bytes(load.resolve_model(f"{load.RANDOM}{model.shape}"), parse({"layers": layers}))


def warm(path: Path) -> None:
    """Every byte into the page cache."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(CHUNK)
        while file.readinto(buffer):
            pass
