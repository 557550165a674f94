"""A model with idle query heads and idle experts added: another shape, the same function.

Kernels written for gpt-oss want its proportions (eight query heads to a kv head, experts by the dozen), and a small
trained model may have others. An idle head has zero rows in q and zero columns in o, so whatever it attends to counts
for nothing; an idle expert has a router bias so low that it is never among the chosen. Nothing is rounded. For tests
and benchmarks that want to see meaning go through those kernels; serving a model never needs this.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats import DenseTiles
from halfbyte.formats.tensor import MXTensor
from halfbyte.gates import Gates
from halfbyte.model import checkpoint, load
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import GptOss, arch_of, choose, resolved
from halfbyte.model.weights import Matrix, Source, WeightFormat, join_rows

NEVER = -10000.0  # bias of an idle expert's router row

EXPERT_ROLES = ("router", "router_bias", "gate_up", "gate_up_bias", "down", "down_bias")


class PaddedSource:
    """A source whose config has `group` query heads to a kv head and experts in multiples of `experts`."""

    def __init__(self, inner: Source, *, group: int = 8, experts: int = 32) -> None:
        c = inner.config
        if c.heads % c.kv_heads or c.heads // c.kv_heads > group:
            raise CheckpointError(f"{c.heads} query heads over {c.kv_heads} kv heads cannot be padded to {group} each.")
        self.inner = inner
        self.config: ModelConfig = c.with_(
            heads=group * c.kv_heads, experts=-(-c.experts // experts) * experts, name=f"{c.name}-padded"
        )

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        return self.inner.formats(layer, role)[:1]

    def nbytes(self, layer: int | None, role: str) -> int:
        return self.inner.nbytes(layer, role)

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        m = join_rows(self.inner.parts(layer, role))
        if role in ("qkv", "qkv_bias", "sinks", "o"):
            return [self._heads(m, role)]
        if role in EXPERT_ROLES:
            return [self._experts(m, role)]
        return [m]

    def _heads(self, m: Matrix, role: str) -> Tensor:
        if isinstance(m, MXTensor):
            raise CheckpointError(f"{role} is {m.format}; idle heads are added before it is quantised.")
        old, new, d = self.inner.config, self.config, self.inner.config.head_dim
        size = 1 if role == "sinks" else d
        count = old.heads * size
        if role == "o":
            m, rest = m.T, m.T[count:]
        else:
            rest = m[count:]
        groups = m[:count].reshape(old.kv_heads, count // old.kv_heads, *m.shape[1:])
        idle = torch.zeros((old.kv_heads, (new.heads - old.heads) * size // old.kv_heads, *m.shape[1:]), dtype=m.dtype)
        wide = torch.cat((groups, idle.to(m.device)), 1).flatten(0, 1)
        wide = torch.cat((wide, rest))
        return wide.T.contiguous() if role == "o" else wide

    def _experts(self, m: Matrix, role: str) -> Matrix:
        more = self.config.experts - self.inner.config.experts
        if isinstance(m, MXTensor):
            data = torch.cat((m.data, torch.zeros_like(m.data[:1]).expand(more, *m.data.shape[1:])))
            scales = torch.cat((m.scales, m.scales[:1].expand(more, *m.scales.shape[1:])))
            return MXTensor(data, scales, (self.config.experts, *m.shape[1:]), m.format)
        value = NEVER if role == "router_bias" else 0.0
        return torch.cat((m, torch.full((more, *m.shape[1:]), value, dtype=m.dtype, device=m.device)))


def load_padded(gates: Gates, device: torch.device | str, folder: Path = load.EMBEDDED) -> GptOss:
    """The embedded model, or a variant of it, padded, on a device in its plan's layouts."""
    source = checkpoint.open_model(folder)
    arch = arch_of(device)
    try:
        padded, stored = PaddedSource(source), load.formats_in(source)
        gates = resolved(gates, stored, arch)
        choice = choose(padded.config, gates, arch, stored)
        weights = checkpoint.assemble(
            padded, layer_formats=gates.layer_formats, scale_heads=choice.spec.kv_dtype == "fp8",
            half_rows=load.half_rows(choice, arch),
        )  # fmt: skip
    finally:
        source.close()
    for layer, role, tensor in list(weights.items()):
        assert not isinstance(tensor, DenseTiles)
        setattr(weights if layer is None else weights.layers[layer], role, tensor.to(device))
    weights = checkpoint.assemble(checkpoint.MemorySource(weights), layouts=choice.selection.layouts)
    return GptOss(weights, gates, choice=choice)
