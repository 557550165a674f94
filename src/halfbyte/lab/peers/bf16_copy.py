"""A copy of a model folder with every matrix in bf16, as transformers saves one: for engines that cannot multiply
MXFP4 on a CPU. It has the same numbers, since bf16 holds every value of MXFP4. Kept under HALFBYTE_CACHE_DIR, one for
each content. A quantised copy is `halfbyte quantize`'s to make.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from halfbyte import formats
from halfbyte.formats.tensor import MXTensor
from halfbyte.gates import cache_folder
from halfbyte.lab import receipts
from halfbyte.model import checkpoint
from halfbyte.model.config import ModelConfig
from halfbyte.model.safetensors_writer import write_folder
from halfbyte.model.weights import DTYPES, Matrix, Source, WeightFormat


@dataclass(frozen=True)
class DenseSource:
    """A source whose block-scaled matrices are bf16."""

    inner: Source

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        return tuple(f if f in DTYPES else "bf16" for f in self.inner.formats(layer, role))

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        return [
            formats.dequantize(part, torch.bfloat16) if isinstance(part, MXTensor) else part
            for part in self.inner.parts(layer, role)
        ]

    def nbytes(self, layer: int | None, role: str) -> int:
        return self.inner.nbytes(layer, role)


def bf16_copy(model: Path) -> Path:
    """The folder, made if it is not there."""
    files = sorted(model.glob("*.safetensors"))
    content = hashlib.sha256("".join(receipts.file_hash(f) for f in files).encode()).hexdigest()[:8]
    folder = cache_folder("peers") / f"{model.name}-bf16-{content}"
    if not folder.is_dir():
        write_bf16(model, folder)
    return folder


def write_bf16(model: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    source = checkpoint.open_model(model)
    try:
        beside = {name: model / name for name in checkpoint.COMPANIONS if (model / name).is_file()}
        write_folder(DenseSource(source), folder, copies={name: path.read_bytes() for name, path in beside.items()})
    finally:
        source.close()
