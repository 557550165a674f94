"""bf16 numbers that a file stores in a wider type, as converters write them: found by value, read back without loss.

A role is narrowed only where every number of it, in every layer, is a bf16 number. Vectors and the router, which are
small, are otherwise float32 wherever they are float16, since kernels read float32 and bf16. Experts stay as stored:
they are most of a file, and nothing is gained before they are requantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfbyte.model.config import ModelConfig
from halfbyte.model.weight_file import CHUNK, WeightFile
from halfbyte.model.weights import DTYPES, GROUPS, Matrix, WeightFormat, fits_bf16, roles

EXPERTS = ("gate_up", "down")


@dataclass(frozen=True)
class StoredNumbers:
    """Where the numbers of one tensor lie."""

    file: WeightFile
    offset: int
    nbytes: int
    format: WeightFormat

    def are_bf16(self) -> bool:
        if self.format not in DTYPES:
            return False
        if self.format == "bf16":
            return True
        for start in range(0, self.nbytes, CHUNK):
            raw = bytearray(self.file.bytes_at(self.offset + start, min(CHUNK, self.nbytes - start)))
            if not fits_bf16(torch.frombuffer(raw, dtype=DTYPES[self.format])):
                return False
        return True


@dataclass
class Narrowing:
    """The formats in which a source hands out what its files store dense."""

    config: ModelConfig
    tensors: Callable[[int | None, str], Sequence[StoredNumbers]]  # of one role of one layer
    _narrowed: dict[str, bool] = field(default_factory=dict)

    def applies(self, role: str) -> bool:
        """Whether this role is stored in more bits than bf16 has, and uses none of them."""
        if role in EXPERTS:
            return False
        if role not in self._narrowed:
            tensors = [t for layer, r in roles(self.config) if r == role for t in self.tensors(layer, r)]
            wide = [t for t in tensors if t.format != "bf16"]
            for t in wide if role not in GROUPS else ():
                t.file.announce(t.offset, t.nbytes)
            self._narrowed[role] = bool(wide) and all(t.are_bf16() for t in wide)
        return self._narrowed[role]

    def formats(self, role: str, stored: Iterable[WeightFormat]) -> tuple[WeightFormat, ...]:
        """The formats of its parts, from those that the files have."""
        stored = tuple(stored)
        bf16: WeightFormat = "bf16"
        float32: WeightFormat = "f32"
        if self.applies(role):
            return (bf16,) * len(stored)
        if role in GROUPS or role == "embed":
            return stored
        return tuple(float32 if format == "f16" else format for format in stored)

    def parts(self, role: str, parts: Sequence[Matrix]) -> Sequence[Matrix]:
        if self.applies(role):
            return [p.to(torch.bfloat16) if isinstance(p, Tensor) else p for p in parts]
        if role in GROUPS or role == "embed":
            return parts
        return [p.float() if isinstance(p, Tensor) and p.dtype == torch.float16 else p for p in parts]
