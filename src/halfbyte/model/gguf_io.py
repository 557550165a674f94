"""GGUF files of the architecture `gpt-oss`, as llama.cpp users have them, whole or split into `-00001-of-0000N`.

MXFP4 and Q8_0 stay packed and only change their layout; gate and up, which GGUF keeps apart, are interleaved again.
llama.cpp's converter widens norms, biases, sinks and the router to F32: where that widening added nothing in any layer
they are read back as the bf16 they were. A quantised token embedding is the one thing dequantised (to bf16), since the
network looks rows up in it. Every other ggml type is refused, and so is Ollama's own `gptoss` dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import CheckpointError
from halfbyte.formats import layouts
from halfbyte.formats.stored import Stored, StoredRows
from halfbyte.formats.tensor import FormatName, MXTensor
from halfbyte.model.config import ModelConfig
from halfbyte.model.gguf_header import config_from, read_all
from halfbyte.model.plain_file import shown
from halfbyte.model.weight_file import CHUNK, Reading
from halfbyte.model.weights import DTYPES, GROUPS, Matrix, WeightFormat, part_rows, roles, shape_of

FORMAT_OF_TYPE: dict[GGMLQuantizationType, WeightFormat] = {
    GGMLQuantizationType.F32: "f32",
    GGMLQuantizationType.F16: "f16",
    GGMLQuantizationType.BF16: "bf16",
    GGMLQuantizationType.Q8_0: "q8",
    GGMLQuantizationType.MXFP4: "mxfp4",
}

_LAYER_NAMES: dict[str, tuple[str, ...]] = {
    "attn_norm": ("attn_norm.weight",),
    "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "sinks": ("attn_sinks.weight",),
    "o": ("attn_output.weight",),
    "o_bias": ("attn_output.bias",),
    "mlp_norm": ("post_attention_norm.weight",),
    "router": ("ffn_gate_inp.weight",),
    "router_bias": ("ffn_gate_inp.bias",),
    "gate_up": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "gate_up_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "down": ("ffn_down_exps.weight",),
    "down_bias": ("ffn_down_exps.bias",),
}
_MODEL_NAMES = {"embed": ("token_embd.weight",), "final_norm": ("output_norm.weight",), "lm_head": ("output.weight",)}
INTERLEAVED = ("gate_up", "gate_up_bias")


def tensor_names(layer: int | None, role: str) -> tuple[str, ...]:
    if layer is None:
        return _MODEL_NAMES[role]
    return tuple(f"blk.{layer}.{name}" for name in _LAYER_NAMES[role])


def stored_shapes(config: ModelConfig, role: str) -> tuple[tuple[int, ...], ...]:
    """The logical shape of each tensor of `tensor_names`, outermost first."""
    shape = shape_of(config, role)
    if role in INTERLEAVED:
        half = (shape[0], shape[1] // 2, *shape[2:])
        return (half, half)
    return tuple((rows, *shape[1:]) for rows in part_rows(config, role))


class GgufSource:
    """A GGUF model, checked whole (names, types, shapes, file sizes) before the first tensor is read."""

    def __init__(self, path: Path, reading: Reading):
        self.reading = reading
        self.device = reading.device
        header = read_all(path, reading)
        self.path = header.path
        self._entries = header.tensors
        self._was_bf16: dict[str, bool] = {}
        self.config = config_from(header)
        for layer, role in roles(self.config):
            for name, shape in zip(tensor_names(layer, role), stored_shapes(self.config, role)):
                self._check(name, role, shape)
            stored_formats = {self._stored_format(name) for name in tensor_names(layer, role)}
            if role in INTERLEAVED and len(stored_formats) > 1:
                raise CheckpointError(
                    f"{self.path}: gate and up of layer {layer} have different types "
                    f"({', '.join(sorted(stored_formats))}); convert the model again."
                )
        self._check_rest({name for layer, role in roles(self.config) for name in tensor_names(layer, role)})

    def close(self) -> None:
        for entry in self._entries.values():
            entry.file.close()
        self.reading.close()

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        if role == "embed":
            stored_format = self._stored_format("token_embd.weight")
            return (stored_format if stored_format in DTYPES else "bf16",)
        names = tensor_names(layer, role)
        if role not in GROUPS and self._narrow(role):
            narrowed: WeightFormat = "bf16"
            return (narrowed,) * (1 if role in INTERLEAVED else len(names))
        return tuple(self._stored_format(n) for n in (names[:1] if role in INTERLEAVED else names))

    def nbytes(self, layer: int | None, role: str) -> int:
        return sum(self._entries[name].nbytes for name in tensor_names(layer, role))

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        names = tensor_names(layer, role)
        if role == "embed":
            (embed,) = (self._read(name) for name in names)
            return [formats.dequantize(embed, torch.bfloat16) if isinstance(embed, MXTensor) else embed]
        if role == "gate_up":
            return [self._experts(*names)]
        tensors = [self._read(name) for name in names]
        if role == "gate_up_bias":
            gate, up = (t for t in tensors if isinstance(t, Tensor))
            tensors = [torch.stack((gate, up), dim=-1).flatten(-2)]
        if role not in GROUPS and self._narrow(role):
            return [t.to(torch.bfloat16) for t in tensors if isinstance(t, Tensor)]
        return tensors

    def origins(self, layer: int | None, role: str) -> Sequence[str]:
        names = tensor_names(layer, role)
        if role in INTERLEAVED:
            return [f"{self._entries[names[0]].file.path}: tensor {names[0]!r} or {names[1]!r}"]
        return [f"{self._entries[name].file.path}: tensor {name!r}" for name in names]

    def stored(self, layer: int | None, role: str) -> Stored | None:
        names = tensor_names(layer, role)
        entries, stored_formats = [self._entries[n] for n in names], {self._stored_format(n) for n in names}
        if len(stored_formats) > 1 or len(entries[0].shape) < 2:
            return None
        (form,) = stored_formats
        interleaved = role in INTERLEAVED
        parts, rows = [], 0
        for i, entry in enumerate(entries):
            count = entry.shape[-2]
            first, step = (i, len(entries)) if interleaved else (rows, 1)
            parts.append(StoredRows(entry.file.descriptor, entry.offset, count, first, step))
            rows += count
        return Stored(form, shape_of(self.config, role), tuple(parts), gguf=form not in DTYPES)

    def mapped(self, layer: int | None, role: str) -> Tensor | None:
        (name,) = tensor_names(layer, role)
        entry, form = self._entries[name], self._stored_format(name)
        return entry.file.mapped(entry.offset, entry.shape, DTYPES[form]) if form in DTYPES else None

    def forget(self, layer: int | None, role: str) -> None:
        for entry in (self._entries[name] for name in tensor_names(layer, role)):
            entry.file.forget(entry.offset, entry.nbytes)

    def _check(self, name: str, role: str, shape: tuple[int, ...]) -> None:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; fetch it again.")
        allowed = [t for t, k in FORMAT_OF_TYPE.items() if k in DTYPES or role in GROUPS or role == "embed"]
        if entry.type not in [int(t) for t in allowed]:
            raise CheckpointError(
                f"{entry.file.path}: tensor {name!r} has type {_type_name(entry.type)}, but halfbyte reads it as "
                f"{', '.join(t.name for t in allowed)}."
            )
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.file.path}: tensor {name!r} has shape {list(entry.shape)}, but its metadata asks for "
                f"{list(shape)}."
            )

    def _check_rest(self, expected: set[str]) -> None:
        """A tensor that nobody asks for means that the metadata are another model's."""
        rest = sorted(self._entries.keys() - expected)
        if rest:
            raise CheckpointError(
                f"{self._entries[rest[0]].file.path}: tensor {shown(rest[0])} is not part of a model with"
                f" {self.config.layers} blocks as its metadata describe it ({len(rest)} such tensors in all); fetch it"
                " again."
            )

    def _stored_format(self, name: str) -> WeightFormat:
        return FORMAT_OF_TYPE[GGMLQuantizationType(self._entries[name].type)]

    def _narrow(self, role: str) -> bool:
        """Whether every layer's tensor of this role is F32 that was bf16 before: its low 16 bits are zero."""
        if role not in self._was_bf16:
            names = [n for layer, r in roles(self.config) if r == role for n in tensor_names(layer, r)]
            for entry in (self._entries[n] for n in names):
                entry.file.announce(entry.offset, entry.nbytes)
            self._was_bf16[role] = all(
                self._stored_format(n) == "f32" and not bool((self._peek(n).view(torch.int32) & 0xFFFF).any())
                for n in names
            )
        return self._was_bf16[role]

    def _peek(self, name: str) -> Tensor:
        entry = self._entries[name]
        raw = bytearray(entry.file.bytes_at(entry.offset, entry.nbytes))
        return torch.frombuffer(raw, dtype=torch.float32)

    def _read(self, name: str) -> Matrix:
        entry, stored_format = self._entries[name], self._stored_format(name)
        if stored_format in DTYPES:
            return entry.file.new(entry.offset, entry.shape, DTYPES[stored_format])
        return self._packed([name])

    def _experts(self, gate: str, up: str) -> Matrix:
        entry, stored_format = self._entries[gate], self._stored_format(gate)
        if stored_format not in DTYPES:
            return self._packed([gate, up])
        experts, rows, k = entry.shape
        dest = torch.empty((experts, rows, 2, k), dtype=DTYPES[stored_format], device=self.device)
        expert = torch.empty((rows, k), dtype=dest.dtype, device=self.device)
        for e in range(experts):
            for i, name in enumerate((gate, up)):
                source = self._entries[name]
                dest[e, :, i].copy_(source.file.read(source.offset + e * expert.nbytes, expert))
        return dest.view(experts, 2 * rows, k)

    def _packed(self, names: Sequence[str]) -> MXTensor:
        """One tensor, or gate and up interleaved, from GGUF blocks to "plain", some leading rows at a time."""
        entry, stored_format = self._entries[names[0]], self._stored_format(names[0])
        assert stored_format in ("mxfp4", "q8")
        format: FormatName = "mxfp4" if stored_format == "mxfp4" else "q8"
        lead = entry.shape[0]
        per_lead = entry.nbytes // lead
        row_bytes = entry.shape[-1] // 32 * layouts.GGUF_BLOCK_BYTES[format]
        step = max(1, CHUNK // 4 // (per_lead * len(names)))  # a piece is held about five times while it is repacked
        data: Tensor | None = None
        scales: Tensor | None = None
        shape = entry.shape
        for start in range(0, lead, step):
            count = min(step, lead - start)
            pieces = []
            for name in names:
                source = self._entries[name]
                raw_shape = (count, *entry.shape[1:-1], row_bytes)
                raw = source.file.new(source.offset + start * per_lead, raw_shape, torch.uint8)
                pieces.append(layouts.convert(layouts.from_gguf(raw, format), "plain"))
            piece = pieces[0] if len(pieces) == 1 else layouts.interleave(*pieces)
            if data is None or scales is None:
                data = piece.data.new_empty((lead, *piece.data.shape[1:]))
                scales = piece.scales.new_empty((lead, *piece.scales.shape[1:]))
                shape = (lead, *piece.shape[1:])
            data[start : start + count] = piece.data
            scales[start : start + count] = piece.scales
        assert data is not None
        assert scales is not None
        return MXTensor(data=data, scales=scales, shape=shape, format=format)


def _type_name(kind: int) -> str:
    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return f"number {kind}"
