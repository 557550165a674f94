"""Weights straight from their files into the layout of the kernels that read them, where a phase brings a packer.

One pass over the file, one copy in memory: no tensor is read first and laid out afterwards. The token embedding, of
which steps look up rows, stays in its file where it is dense. Tensors that are not stored in rows, and those that are
requantised while they are loaded, are assembled as for every other device (`checkpoint.assemble`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.errors import CheckpointError
from halfbyte.formats.stored import Packer
from halfbyte.model.nonfinite import FiniteSource
from halfbyte.model.weights import WeightTensor

HOST_ROLES = ("gate_up", "down")
HOST_LAYOUT = "rows16"  # the CPU kernels'


@dataclass(frozen=True)
class DirectReader:
    source: FiniteSource
    packer: Packer
    layouts: Mapping[str, str]

    def read(self, layer: int | None, role: str) -> WeightTensor | None:
        """The tensor in its layout, scanned on the way; None where it has to be read before it is laid out."""
        layout = self.layouts.get(role, "plain")
        if layout != self.packer.layout and role != "embed":
            return None
        stored = self.source.inner.stored(layer, role)
        if stored is None:
            return None
        tensor: WeightTensor | None
        try:
            if layout == self.packer.layout:
                tensor, sound = self.packer.pack(stored)
            elif stored.gguf:
                tensor, sound = self.packer.widen(stored)
            else:
                tensor = self.source.inner.mapped(layer, role)
                if tensor is None:
                    return None
                sound = self.packer.look(stored)
        except OSError as e:
            raise CheckpointError(
                f"{self._origin(layer, role)} cannot be read ({e.strerror}); check the disk."
            ) from None
        except EOFError:
            raise CheckpointError(f"{self._origin(layer, role)} is truncated; fetch it again.") from None
        self.source.record_scan(layer, role, sound=sound)
        self.source.inner.forget(layer, role)
        return tensor

    def _origin(self, layer: int | None, role: str) -> str:
        return self.source.inner.origins(layer, role)[0]


@dataclass(frozen=True)
class HostExperts:
    """The experts of the first layers, which stay in host memory in the CPU kernels' layout."""

    layers: int
    packer: Packer | None = None  # brings them from their files into place

    def holds(self, layer: int | None, role: str) -> bool:
        return layer is not None and layer < self.layers and role in HOST_ROLES

    def reader(self, source: FiniteSource) -> DirectReader | None:
        if self.packer is None:
            return None
        return DirectReader(source, self.packer, dict.fromkeys(HOST_ROLES, HOST_LAYOUT))
