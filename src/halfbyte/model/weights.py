"""The weights of a gpt-oss model as the network and every phase consume them, and the sources they come from.

A `Source` hands out one role of one layer at a time, so that loading, writing and requantising never hold more than
one tensor in addition to the result. Nothing here reads a file, quantises or changes a layout: `checkpoint.py` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.formats.matrices import Formats
from halfbyte.model.config import ModelConfig
from halfbyte.ops.linear import dense
from halfbyte.plan.phase import GROUP

Matrix = Tensor | MXTensor  # as sources hand it out
WeightTensor = Matrix | DenseTiles  # as a plan's layouts hold it
WeightFormat = Literal["f32", "f16", "bf16", "mxfp4", "q8"]  # what the numbers of a tensor are

DENSE: dict[torch.dtype, WeightFormat] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
DTYPES: dict[WeightFormat, torch.dtype] = {form: dtype for dtype, form in DENSE.items()}

LAYER_ROLES = (
    "attn_norm", "qkv", "qkv_bias", "sinks", "o", "o_bias",
    "mlp_norm", "router", "router_bias", "gate_up", "gate_up_bias", "down", "down_bias",
)  # fmt: skip
HEAD_ROLES = ("embed",)  # before the layers in files, as checkpoints have them
TAIL_ROLES = ("final_norm", "lm_head")
GROUPS = GROUP  # the roles that may be block-scaled, and the group of `--layers` each belongs to
# Matrices whose input is a norm's output and nothing else reads it: the norm's weight can move into their columns.
NORM_OF = {"qkv": "attn_norm", "lm_head": "final_norm"}


@dataclass
class LayerWeights:
    """One layer; the field names are the roles that phases and `Phase.layouts()` use."""

    attn_norm: Tensor  # [hidden]
    qkv: WeightTensor  # [qkv_dim, hidden]: the rows of q, then k, then v
    qkv_bias: Tensor  # [qkv_dim]
    sinks: Tensor  # [heads], natural-log space
    o: WeightTensor  # [hidden, q_dim]
    o_bias: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    router: Tensor  # [experts, hidden]
    router_bias: Tensor  # [experts]
    gate_up: WeightTensor  # [experts, 2 * intermediate, hidden]: rows alternate gate, up
    gate_up_bias: Tensor  # [experts, 2 * intermediate]
    down: WeightTensor  # [experts, hidden, intermediate]
    down_bias: Tensor  # [experts, hidden]


@dataclass
class Weights:
    config: ModelConfig
    embed: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    lm_head: WeightTensor  # [vocab, hidden]
    folded_norm: Tensor | None = None  # the file's final_norm, where lm_head was folded (`ops/folding.py`)
    expert_error: float | None = None  # relative rms error of experts that loading requantised

    def items(self) -> Iterator[tuple[int | None, str, WeightTensor]]:
        """(layer, role, tensor) in the order of `roles`."""
        for layer, role in roles(self.config):
            yield layer, role, getattr(self if layer is None else self.layers[layer], role)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for _, _, t in self.items())

    def formats(self) -> Formats:
        """The number format of every matrix."""
        by_role: dict[str, list[str]] = {}
        for _, role, tensor in self.items():
            if role in GROUPS:
                by_role.setdefault(role, []).append(format_of(tensor))
        return Formats({}, by_role)

    @property
    def output_norm(self) -> Tensor:
        """The final norm as the file has it."""
        return self.final_norm if self.folded_norm is None else self.folded_norm

    def output_head(self) -> Tensor:
        """The head in float32 without a norm in it, for draft heads, which have a norm of their own in front of it.
        The columns of a folded head whose norm is 0 are lost, and stay 0."""
        head = dense(self.lm_head)
        if self.folded_norm is None:
            return head
        norm = self.folded_norm.float()
        return head.mul_(self.final_norm.float() / norm.masked_fill(norm == 0, 1.0))

    def wide(self) -> dict[str, WeightFormat]:
        """Role -> f32 for vectors and routers that hold more bits than bf16 has, in any layer."""
        vectors = [(role, t) for _, role, t in self.items() if role not in (*GROUPS, *HEAD_ROLES)]
        return {role: "f32" for role, t in vectors if isinstance(t, Tensor) and not fits_bf16(t)}


def fits_bf16(values: Tensor) -> bool:
    """True if rounding to bf16 changes no number. NaN is not compared: the scan for such values names it."""
    if values.dtype == torch.bfloat16:
        return True
    bits, beyond = (
        (values.view(torch.int16), 7) if values.dtype == torch.float16 else (values.view(torch.int32), 0xFFFF)
    )
    rest = values[(bits & beyond) != 0]  # of float16: numbers below 2^-14 may still fit
    changed = rest.to(torch.bfloat16).to(rest.dtype) != rest
    return not bool((changed & ~rest.isnan()).any())


assert tuple(f.name for f in fields(LayerWeights)) == LAYER_ROLES


def format_of(tensor: WeightTensor) -> WeightFormat:
    if isinstance(tensor, MXTensor):
        if tensor.format not in ("mxfp4", "q8"):
            raise FormatError(f"a gpt-oss weight cannot be {tensor.format}; its block formats are mxfp4 and q8.")
        return tensor.format
    return DENSE[tensor.dtype]


def roles(config: ModelConfig) -> Iterator[tuple[int | None, str]]:
    """Every (layer, role) of a model; the layer is None outside the layers."""
    yield from ((None, role) for role in HEAD_ROLES)
    for layer in range(config.layers):
        yield from ((layer, role) for role in LAYER_ROLES)
    yield from ((None, role) for role in TAIL_ROLES)


def shape_of(config: ModelConfig, role: str) -> tuple[int, ...]:
    c = config
    return {
        "embed": (c.vocab, c.hidden),
        "attn_norm": (c.hidden,),
        "qkv": (c.qkv_dim, c.hidden),
        "qkv_bias": (c.qkv_dim,),
        "sinks": (c.heads,),
        "o": (c.hidden, c.q_dim),
        "o_bias": (c.hidden,),
        "mlp_norm": (c.hidden,),
        "router": (c.experts, c.hidden),
        "router_bias": (c.experts,),
        "gate_up": (c.experts, 2 * c.intermediate, c.hidden),
        "gate_up_bias": (c.experts, 2 * c.intermediate),
        "down": (c.experts, c.hidden, c.intermediate),
        "down_bias": (c.experts, c.hidden),
        "final_norm": (c.hidden,),
        "lm_head": (c.vocab, c.hidden),
    }[role]


def part_rows(config: ModelConfig, role: str) -> tuple[int, ...]:
    """Rows of the parts that files keep apart: q, k and v; everything else is one part."""
    if role in ("qkv", "qkv_bias"):
        return (config.q_dim, config.kv_dim, config.kv_dim)
    return (shape_of(config, role)[0],)


class Source(Protocol):
    """A supply of tensors, one (layer, role) at a time."""

    @property
    def config(self) -> ModelConfig: ...

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        """The formats of `parts`, without reading them."""

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        """The tensor, as the parts of `part_rows` or as one; block-scaled parts are in the layout "plain"."""

    def nbytes(self, layer: int | None, role: str) -> int:
        """Bytes that `parts` reads or makes, for progress."""


def slice_rows(m: Matrix, start: int, end: int) -> Matrix:
    """Leading rows of a dense tensor, or of a block-scaled one in the layout "plain", as a view."""
    if isinstance(m, Tensor):
        return m[start:end]
    assert m.layout == "plain", m.layout
    shape = (end - start, *m.shape[1:])
    return MXTensor(data=m.data[start:end], scales=m.scales[start:end], shape=shape, format=m.format)


def join_rows(parts: Sequence[Matrix]) -> Matrix:
    """The inverse, for parts of one kind."""
    if len(parts) == 1:
        return parts[0]
    dense = [p for p in parts if isinstance(p, Tensor)]
    if len(dense) == len(parts):
        return torch.cat(dense)
    packed = [p for p in parts if isinstance(p, MXTensor)]
    assert len(packed) == len(parts), "dense and block-scaled parts"
    return MXTensor(
        data=torch.cat([p.data for p in packed]),
        scales=torch.cat([p.scales for p in packed]),
        shape=(sum(p.shape[0] for p in packed), *packed[0].shape[1:]),
        format=packed[0].format,
    )


def split_parts(config: ModelConfig, role: str, parts: Sequence[Matrix]) -> Sequence[Matrix]:
    """The parts that files keep apart, from a source that may hand them out joined."""
    rows = part_rows(config, role)
    if len(parts) == len(rows):
        return parts
    (joined,) = parts
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    return [slice_rows(joined, end - n, end) for end, n in zip(ends, rows)]
