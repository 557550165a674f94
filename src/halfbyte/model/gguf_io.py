"""GGUF files of the architecture `gpt-oss`, as llama.cpp users have them, whole or split into `-00001-of-0000N`.

MXFP4 and Q8_0 stay packed and only change their layout; gate and up, which GGUF keeps apart, are interleaved again.
Other block types are read as q8 (`gguf_blocks.py`). Converters widen bf16 to F32 and F16: where that added nothing in
any layer, numbers are read back as the bf16 they were (`narrowing.py`). Types without weights in them are refused, and
so is Ollama's own `gptoss` dialect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats import layouts
from halfbyte.formats.stored import Stored, StoredRows
from halfbyte.formats.tensor import FormatName, MXTensor
from halfbyte.model.config import ModelConfig
from halfbyte.model.gguf_blocks import READ_AS_Q8, to_q8
from halfbyte.model.gguf_header import GgufEntry, config_from, read_all
from halfbyte.model.gguf_vocab import vocab_in
from halfbyte.model.narrowing import Narrowing, StoredNumbers
from halfbyte.model.plain_file import quote, refusing
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.model.weight_file import CHUNK, READERS, Reading
from halfbyte.model.weights import DTYPES, GROUPS, Matrix, WeightFormat, part_rows, roles, shape_of

FORMAT_OF_TYPE: dict[GGMLQuantizationType, WeightFormat] = {
    GGMLQuantizationType.F32: "f32",
    GGMLQuantizationType.F16: "f16",
    GGMLQuantizationType.BF16: "bf16",
    GGMLQuantizationType.Q8_0: "q8",
    GGMLQuantizationType.MXFP4: "mxfp4",
}
READ_TYPES: dict[GGMLQuantizationType, WeightFormat] = FORMAT_OF_TYPE | dict.fromkeys(READ_AS_Q8, "q8")

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
        header = read_all(path, reading)
        self.path = header.path
        self._first_file = header.file
        self._entries = header.tensors
        self.config = config_from(header)
        self._narrowing = Narrowing(self.config, self._numbers)
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

    def tokenizer(self) -> Tokenizer:
        with refusing(self.path):
            return Tokenizer.from_gguf(vocab_in(self.path, self._first_file.descriptor), str(self.path))

    def close(self) -> None:
        for file in (self._first_file, *(entry.file for entry in self._entries.values())):
            file.close()
        self.reading.close()

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        names = tensor_names(layer, role)
        stored = (self._stored_format(n) for n in (names[:1] if role in INTERLEAVED else names))
        return self._narrowing.formats(role, stored)

    def nbytes(self, layer: int | None, role: str) -> int:
        return sum(self._entries[name].nbytes for name in tensor_names(layer, role))

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        names = tensor_names(layer, role)
        if role == "gate_up":
            return [self._experts(*names)]
        tensors = [self._read(name) for name in names]
        if role == "gate_up_bias":
            gate, up = (t for t in tensors if isinstance(t, Tensor))
            tensors = [torch.stack((gate, up), dim=-1).flatten(-2)]
        return self._narrowing.parts(role, tensors)

    def origins(self, layer: int | None, role: str) -> Sequence[str]:
        names = tensor_names(layer, role)
        if role in INTERLEAVED:
            return [f"{self._entries[names[0]].file.path}: tensor {names[0]!r} or {names[1]!r}"]
        return [f"{self._entries[name].file.path}: tensor {name!r}" for name in names]

    def stored(self, layer: int | None, role: str) -> Stored | None:
        names = tensor_names(layer, role)
        entries, stored_formats = [self._entries[n] for n in names], {self._stored_format(n) for n in names}
        if len(stored_formats) > 1 or len(entries[0].shape) < 2 or self._narrowing.applies(role):
            return None
        if any(entry.type in READ_AS_Q8 for entry in entries):
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
        if form not in DTYPES or self._narrowing.applies(role):
            return None
        return entry.file.mapped(entry.offset, entry.shape, DTYPES[form])

    def forget(self, layer: int | None, role: str) -> None:
        for entry in (self._entries[name] for name in tensor_names(layer, role)):
            entry.file.forget(entry.offset, entry.nbytes)

    def _check(self, name: str, role: str, shape: tuple[int, ...]) -> None:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; fetch it again.")
        allowed = [t for t, k in READ_TYPES.items() if k in DTYPES or role in GROUPS or role == "embed"]
        if entry.type not in [int(t) for t in allowed]:
            raise CheckpointError(
                f"{entry.file.path}: tensor {name!r} has type {_type_name(entry.type)}, but halfbyte reads it as "
                f"{', '.join(t.name for t in allowed)}; get a file with one of those, such as ggml-org's MXFP4."
            )
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.file.path}: tensor {name!r} has shape {list(entry.shape)}, but its metadata asks for "
                f"{list(shape)}."
            )

    def _check_rest(self, expected: set[str]) -> None:
        """Refuse tensors that the model does not use: the metadata are another model's."""
        rest = sorted(self._entries.keys() - expected)
        if rest:
            raise CheckpointError(
                f"{self._entries[rest[0]].file.path}: tensor {quote(rest[0])} is not part of a model with"
                f" {self.config.layers} blocks as its metadata describe it ({len(rest)} such tensors in all); fetch it"
                " again."
            )

    def _stored_format(self, name: str) -> WeightFormat:
        return READ_TYPES[GGMLQuantizationType(self._entries[name].type)]

    def _numbers(self, layer: int | None, role: str) -> list[StoredNumbers]:
        entries = [(self._entries[name], self._stored_format(name)) for name in tensor_names(layer, role)]
        return [StoredNumbers(entry.file, entry.offset, entry.nbytes, form) for entry, form in entries]

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
        dest = torch.empty((experts, rows, 2, k), dtype=DTYPES[stored_format], device=self.reading.device)
        expert = torch.empty((rows, k), dtype=dest.dtype, device=self.reading.device)
        for e in range(experts):
            for i, name in enumerate((gate, up)):
                source = self._entries[name]
                dest[e, :, i].copy_(source.file.read(source.offset + e * expert.nbytes, expert))
        return dest.view(experts, 2 * rows, k)

    def _packed(self, names: Sequence[str]) -> MXTensor:
        """One tensor, or gate and up interleaved, from GGUF blocks to "plain", some leading rows at a time."""
        entries = [self._entries[name] for name in names]
        lead = entries[0].shape[0]
        row = max(math.prod(entry.shape[1:]) for entry in entries) * len(names)
        step = max(1, CHUNK // 4 // row)  # a piece is held about five times while it is repacked
        data: Tensor | None = None
        scales: Tensor | None = None
        shape = entries[0].shape
        ranges = [(start, min(step, lead - start)) for start in range(0, lead, step)]
        iterators = [self._pieces(entry, ranges) for entry in entries]
        for (start, count), *pieces in zip(ranges, *iterators):
            piece = pieces[0] if len(pieces) == 1 else layouts.interleave(*pieces)
            if data is None or scales is None:
                data = piece.data.new_empty((lead, *piece.data.shape[1:]))
                scales = piece.scales.new_empty((lead, *piece.scales.shape[1:]))
                shape = (lead, *piece.shape[1:])
            data[start : start + count] = piece.data
            scales[start : start + count] = piece.scales
        assert data is not None
        assert scales is not None
        return MXTensor(data=data, scales=scales, shape=shape, format=piece.format)

    def _pieces(self, entry: GgufEntry, ranges: Sequence[tuple[int, int]]) -> Iterator[MXTensor]:
        """Ranges (start, count) of leading rows of a tensor in blocks."""
        kind, per_lead = GGMLQuantizationType(entry.type), entry.nbytes // entry.shape[0]
        if kind in READ_AS_Q8:
            for some in (ranges[i : i + READERS] for i in range(0, len(ranges), READERS)):  # read here, computed there
                raw = [torch.empty(count * per_lead, dtype=torch.uint8) for _, count in some]
                for (start, _), dest in zip(some, raw):
                    entry.file.read(entry.offset + start * per_lead, dest)
                shapes = [(count, *entry.shape[1:]) for _, count in some]
                for piece in self.reading.pool().map(to_q8, raw, [kind] * len(some), shapes):
                    yield piece.to(self.reading.device)
            return
        format: FormatName = "mxfp4" if kind == GGMLQuantizationType.MXFP4 else "q8"
        row_bytes = entry.shape[-1] // 32 * layouts.GGUF_BLOCK_BYTES[format]
        for start, count in ranges:
            shape = (count, *entry.shape[1:-1], row_bytes)
            blocks = entry.file.new(entry.offset + start * per_lead, shape, torch.uint8)
            yield layouts.convert(layouts.from_gguf(blocks, format), "plain")


def _type_name(kind: int) -> str:
    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return f"number {kind}"
