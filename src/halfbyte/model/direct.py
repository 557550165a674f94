"""Weights straight from their files into the layout of the kernels that read them, where a phase brings a packer.

One pass over the file, one copy in memory: no tensor is read first and laid out afterwards. The token embedding, of
which steps look up rows, stays in its file where it is made of numbers. What does not lie in rows, and what is
quantised anew while it is loaded, goes the way of every other device (`checkpoint.assemble`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.errors import CheckpointError
from halfbyte.formats.stored import Packer
from halfbyte.model.nonfinite import FiniteSource
from halfbyte.model.weights import WeightTensor


@dataclass(frozen=True)
class DirectReader:
    source: FiniteSource
    packer: Packer
    layouts: Mapping[str, str]

    def read(self, layer: int | None, role: str) -> WeightTensor | None:
        """The tensor in its layout, looked at on the way; None where it has to be read before it is laid out."""
        wanted = self.layouts.get(role, "plain")
        if wanted != self.packer.layout and role != "embed":
            return None
        stored = self.source.inner.stored(layer, role)
        if stored is None:
            return None
        tensor: WeightTensor | None
        try:
            if wanted == self.packer.layout:
                tensor, finite = self.packer.pack(stored)
            elif stored.gguf:
                tensor, finite = self.packer.widen(stored)
            else:
                tensor = self.source.inner.mapped(layer, role)
                if tensor is None:
                    return None
                finite = self.packer.look(stored)
        except OSError as e:
            raise CheckpointError(
                f"{self._origin(layer, role)} cannot be read ({e.strerror}); check the disk."
            ) from None
        except EOFError:
            raise CheckpointError(f"{self._origin(layer, role)} is truncated; fetch it again.") from None
        self.source.seen(layer, role, finite=finite)
        self.source.inner.forget(layer, role)
        return tensor

    def _origin(self, layer: int | None, role: str) -> str:
        return self.source.inner.origins(layer, role)[0]
