"""Hugging Face folders: `config.json`, `model.safetensors` or an index with shards, as OpenAI ships gpt-oss.

How a matrix is stored, by its base name B (`model.layers.0.mlp.experts.down_proj`, `lm_head.weight`):

    B                   bf16, f16 or f32 [rows, K]; experts as transformers saves them, transposed: [experts, K, rows]
    B_blocks, B_scales  mxfp4: uint8 [..., rows, K/32, 16], low nibble first, and UE8M0 uint8 [..., rows, K/32]
    B_q8, B_q8_scales   q8: int8 [..., rows, K] and float16 [..., rows, K/32]

OpenAI stores experts as `_blocks` and `_scales` and everything else dense. `_blocks` of other matrices and `_q8` are
halfbyte's own, written by `halfbyte quantize`; `config.json` then says so under `halfbyte.formats`, and names
`quant_method` "halfbyte" so that no other loader takes such a folder for OpenAI's. This module never dequantises and
never pickles: `.bin` and `.pt` files are refused.
"""

from __future__ import annotations

import logging
import math
import mmap
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats import layouts
from halfbyte.formats.stored import Stored, StoredRows
from halfbyte.formats.tensor import MXTensor
from halfbyte.gates import format_of_layer
from halfbyte.model.config_json import read_config_json
from halfbyte.model.json_records import convert, parse_json, read_json
from halfbyte.model.model_files import ADAPTER, adapter_folder
from halfbyte.model.narrowing import Narrowing, StoredNumbers
from halfbyte.model.plain_file import MIB, quote, truncated
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.model.weight_file import Reading, WeightFile
from halfbyte.model.weights import DTYPES, GROUPS, Matrix, WeightFormat, part_rows, roles, shape_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_RANK = 8
MAX_HEADER = 8 * MIB  # gpt-oss's have 100 kB; the format's own limit of 100 MB would be a gigabyte once parsed

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8, "I8": torch.int8}
_DENSE: dict[str, WeightFormat] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}

# Tensors that change no logit: buffers that the configuration implies, and the heads of reward and value models.
HARMLESS = re.compile(r"(^|\.)rotary_emb\.(original_)?inv_freq$|^(v_head|value_head|score)\.|\.self_attn\.[kv]_scale$")
# Unsloth's names for experts as modules of their own, and bitsandbytes' companions of a quantised weight.
LINEARS = re.compile(r"\.experts\.(gate_up_projs|down_projs)\.\d+\.|\.weight\.(absmax|quant_map|quant_state\.)")

log = logging.getLogger("halfbyte")

_LAYER_NAMES: dict[str, tuple[str, ...]] = {
    "attn_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "sinks": ("self_attn.sinks",),
    "o": ("self_attn.o_proj.weight",),
    "o_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "router": ("mlp.router.weight",),
    "router_bias": ("mlp.router.bias",),
    "gate_up": ("mlp.experts.gate_up_proj",),
    "gate_up_bias": ("mlp.experts.gate_up_proj_bias",),
    "down": ("mlp.experts.down_proj",),
    "down_bias": ("mlp.experts.down_proj_bias",),
}
_MODEL_NAMES = {
    "embed": ("model.embed_tokens.weight",),
    "final_norm": ("model.norm.weight",),
    "lm_head": ("lm_head.weight",),
}


def base_names(layer: int | None, role: str) -> tuple[str, ...]:
    if layer is None:
        return _MODEL_NAMES[role]
    return tuple(f"model.layers.{layer}.{name}" for name in _LAYER_NAMES[role])


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor of one file."""

    file: WeightFile
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsSource:
    """A folder, checked whole (names, dtypes, shapes, file sizes) before the first tensor is read."""

    def __init__(self, folder: Path, reading: Reading):
        self.folder = folder
        self.reading = reading
        file = read_config_json(folder)
        self.config = file.config
        self._entries = read_folder(folder, reading)
        expected: set[str] = set()
        for layer, role in roles(self.config):
            for name, rows in zip(base_names(layer, role), part_rows(self.config, role)):
                expected |= self._check(name, role, rows)
        self._check_rest(expected)
        self._check_claim(file.formats)
        self._narrowing = Narrowing(self.config, self._numbers)

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        return self._narrowing.formats(role, (self._format(name) for name in base_names(layer, role)))

    def nbytes(self, layer: int | None, role: str) -> int:
        return sum(self._entries[n].nbytes for base in base_names(layer, role) for n in self._stored(base))

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        named_rows = zip(base_names(layer, role), part_rows(self.config, role))
        return self._narrowing.parts(role, [self._read(name, role, rows) for name, rows in named_rows])

    def origins(self, layer: int | None, role: str) -> Sequence[str]:
        names = [self._stored(base)[-1] for base in base_names(layer, role)]
        return [f"{self._entries[name].file.path}: tensor {name!r}" for name in names]

    def stored(self, layer: int | None, role: str) -> Stored | None:
        names, counts = base_names(layer, role), part_rows(self.config, role)
        forms, shape = {self._format(name) for name in names}, shape_of(self.config, role)
        if len(forms) > 1 or len(shape) < 2 or self._narrowing.applies(role):
            return None
        (form,) = forms
        if form in DTYPES and is_experts(role):
            return None  # by columns
        parts, first = [], 0
        for base, rows in zip(names, counts):
            entries = [self._entries[name] for name in self._stored(base)]
            files = [entry.file.descriptor for entry in entries]
            rows = rows if len(shape) == 2 else shape[-2]  # a stack is one part
            scales = (files[1], entries[1].offset) if len(entries) > 1 else (-1, 0)
            parts.append(StoredRows(files[0], entries[0].offset, rows, first, 1, *scales))
            first += rows
        return Stored(form, shape, tuple(parts))

    def mapped(self, layer: int | None, role: str) -> Tensor | None:
        (base,) = base_names(layer, role)
        entry = self._entries.get(base)
        if entry is None or self._narrowing.applies(role):
            return None
        return entry.file.mapped(entry.offset, entry.shape, TORCH_DTYPES[entry.dtype])

    def forget(self, layer: int | None, role: str) -> None:
        for base in base_names(layer, role):
            for entry in (self._entries[name] for name in self._stored(base)):
                entry.file.forget(entry.offset, entry.nbytes)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of_folder(self.folder, self.config.vocab)

    def close(self) -> None:
        for entry in self._entries.values():
            entry.file.close()
        self.reading.close()

    def _stored(self, base: str) -> tuple[str, ...]:
        if base in self._entries:
            return (base,)
        if f"{base}_blocks" in self._entries:
            return f"{base}_blocks", f"{base}_scales"
        if f"{base}_q8" in self._entries:
            return f"{base}_q8", f"{base}_q8_scales"
        raise self._absent(base)

    def _absent(self, name: str) -> CheckpointError:
        if any(LINEARS.search(other) for other in self._entries):
            return CheckpointError(
                f"{self.folder} holds each expert as a Linear of its own, as Unsloth's bitsandbytes folders do; save it"
                " with save_pretrained_merged(..., save_method='merged_16bit'), or get the model that it was made from."
            )
        return CheckpointError(f"{self.folder} has no tensor {name!r}; fetch the model again.")

    def _format(self, base: str) -> WeightFormat:
        first = self._stored(base)[0]
        if first == base:
            return _DENSE[self._entries[base].dtype]
        return "q8" if first.endswith("_q8") else "mxfp4"

    def _numbers(self, layer: int | None, role: str) -> list[StoredNumbers]:
        entries = [(self._entries[self._stored(base)[0]], self._format(base)) for base in base_names(layer, role)]
        return [StoredNumbers(entry.file, entry.offset, entry.nbytes, form) for entry, form in entries]

    def _check(self, base: str, role: str, rows: int) -> set[str]:
        """The names of the tensors that hold it."""
        stored = self._stored(base)
        if stored[0] != base and role not in GROUPS:
            raise CheckpointError(f"{self.folder}: {base!r} is block-scaled, but halfbyte keeps it dense.")
        shape = (rows, *shape_of(self.config, role)[1:])
        groups = shape[-1] // 32
        if stored[0] != base and shape[-1] % 32:
            raise CheckpointError(f"{self.folder}: rows of {shape[-1]} in {base!r} are not whole groups of 32.")
        if stored[0] == base:
            tensors = {base: (tuple(_DENSE), transposed(shape) if is_experts(role) else shape)}
        elif stored[0].endswith("_q8"):
            tensors = {stored[0]: (("I8",), shape), stored[1]: (("F16",), (*shape[:-1], groups))}
        else:
            tensors = {
                stored[0]: (("U8",), (*shape[:-1], groups, 16)),
                stored[1]: (("U8",), (*shape[:-1], groups)),
            }
        for name, (dtypes, expected) in tensors.items():
            entry = self._entries.get(name)
            if entry is None:
                raise self._absent(name)
            if entry.dtype not in dtypes:
                raise CheckpointError(
                    f"{entry.file.path}: tensor {name!r} has dtype {quote(entry.dtype)}, but gpt-oss needs"
                    f" {' or '.join(dtypes)}."
                )
            if entry.shape != expected:
                raise CheckpointError(
                    f"{entry.file.path}: tensor {name!r} has shape {list(entry.shape)}, but config.json asks for "
                    f"{list(expected)}."
                )
        return set(tensors)

    def _check_rest(self, expected: set[str]) -> None:
        """Refuse tensors that the model does not use: the configuration is another model's."""
        extra = sorted(self._entries.keys() - expected)
        harmless = [name for name in extra if HARMLESS.search(name)]
        if harmless:
            log.info("%s: %s and the like are no part of the network and are ignored.", self.folder, quote(harmless[0]))
        rest = [name for name in extra if name not in harmless]
        if rest:
            entry = self._entries[rest[0]]
            raise CheckpointError(
                f"{entry.file.path}: tensor {quote(rest[0])} is not part of a model with {self.config.layers} layers as"
                f" config.json describes it ({len(rest)} such tensors in all); fetch both again."
            )

    def _check_claim(self, claimed: dict[str, str]) -> None:
        """Refuse a folder whose files have other formats than config.json claims."""
        for layer, role in roles(self.config):
            if (group := GROUPS.get(role)) not in claimed:
                continue
            stored = [self._format(name) for name in base_names(layer, role)]
            form = format_of_layer(claimed, group, layer, None if layer is None else self.config.layer_kinds[layer])
            if set(stored) != {form}:
                raise CheckpointError(
                    f"{self.folder}: config.json says {group} is {form}, but {base_names(layer, role)[0]!r} is "
                    f"{stored[0]}."
                )

    def _read(self, base: str, role: str, rows: int) -> Matrix:
        shape = (rows, *shape_of(self.config, role)[1:])
        stored_format = self._format(base)
        if stored_format in DTYPES:
            return self._transposed(base, shape) if is_experts(role) else self._tensor(base)
        data, scales = (self._tensor(name) for name in self._stored(base))
        if stored_format == "mxfp4":
            return layouts.from_checkpoint(data, scales)
        return MXTensor(data=data, scales=scales, shape=shape, format="q8")

    def _tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        return entry.file.new(entry.offset, entry.shape, TORCH_DTYPES[entry.dtype])

    def _transposed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Dense experts, turned one at a time."""
        entry = self._entries[name]
        dest = torch.empty(shape, dtype=TORCH_DTYPES[entry.dtype], device=self.reading.device)
        expert = torch.empty(entry.shape[1:], dtype=dest.dtype, device=self.reading.device)
        for e in range(shape[0]):
            dest[e].copy_(entry.file.read(entry.offset + e * expert.nbytes, expert).mT)
        return dest


def is_experts(role: str) -> bool:
    return role in ("gate_up", "down")


def transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


class Index(Struct, frozen=True):
    weight_map: dict[str, str]


class Item(Struct, frozen=True):
    """One tensor as a file's header describes it."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_folder(folder: Path, reading: Reading | None = None) -> dict[str, SafetensorsEntry]:
    """Tensor name -> where it lies, over all shards, with every file's size checked."""
    index = folder / INDEX
    if index.exists():
        weight_map = read_json(index, Index, MAX_HEADER).weight_map
        files = sorted(set(weight_map.values()))
        for name in files:
            if Path(name).name != name or len(name) > 255:
                raise CheckpointError(f"{index} names {quote(name)}, which is not a file of its own folder.")
            if not (folder / name).exists():
                raise CheckpointError(f"{index} names {quote(name)}, which is not there; fetch the missing file.")
        entries: dict[str, SafetensorsEntry] = {}
        for file in files:
            for name, entry in read_header(folder / file, reading).items():
                if name in entries:
                    other = entries[name].file.path.name
                    raise CheckpointError(
                        f"{folder / file}: tensor {quote(name)} is in {other}, too; fetch both again."
                    )
                entries[name] = entry
        for name, file in weight_map.items():
            if name not in entries or entries[name].file.path.name != file:
                raise CheckpointError(
                    f"{index} says {quote(name)} is in {quote(file)}, but it is not; fetch both again."
                )
        return entries
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE, reading)
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        raise CheckpointError(
            f"{folder} has {pickled[0]}, which halfbyte does not unpickle; get the safetensors files."
        )
    if (folder / ADAPTER).exists():
        raise adapter_folder(folder)
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; fetch the model again.")


def read_header(path: Path, reading: Reading | None = None) -> dict[str, SafetensorsEntry]:
    """Tensor name -> where it lies in the file, which stays open. The tensors must fill it without gap or overlap."""
    file = WeightFile(path, reading)
    if file.size < 8:
        raise truncated(path, 8, file.size)
    length = int.from_bytes(file.bytes_at(0, 8), "little")
    if length > MAX_HEADER:
        raise CheckpointError(f"{path} is not a safetensors file of gpt-oss (its header has {length} bytes).")
    if 8 + length > file.size:
        raise truncated(path, 8 + length, file.size)
    raw, size = file.bytes_at(8, length), file.size
    if raw[:1] != b"{":
        raise CheckpointError(f"{path} is not a safetensors file; fetch it again.")
    entries: dict[str, SafetensorsEntry] = {}
    for name, item in parse_json(raw, dict[str, Any], str(path)).items():
        if name != "__metadata__":
            record = convert(item, Item, f"{path}: tensor {quote(name)}")
            entries[name] = _entry(file, name, record, 8 + length)
    last, before = 8 + length, ""
    for name, entry in sorted(entries.items(), key=lambda e: (e[1].offset, e[1].nbytes)):
        if entry.offset != last:
            follows = f"tensor {quote(before)}" if before else "the header"
            problem = "overlaps" if entry.offset < last else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {quote(name)} {problem} {follows}; fetch the file again.")
        last, before = entry.offset + entry.nbytes, name
    if last > size:
        raise truncated(path, last, size)
    if last < size:
        raise CheckpointError(f"{path} has {size - last} bytes that belong to no tensor; fetch it again.")
    if file.zero_tail and _is_cut(entries, size - file.zero_tail):
        file.reading.zero_tails[path] = file.zero_tail
    return entries


def _is_cut(entries: Mapping[str, SafetensorsEntry], start: int) -> bool:
    """Whether zeros from here on begin inside a matrix, and not where one of its experts or tokens begins."""
    for name, entry in entries.items():
        begin = start - entry.offset
        if 0 < begin < entry.nbytes and not name.endswith(("bias", "sinks")):
            in_parts = len(entry.shape) > 2 or any(part in name for part in ("embed", "lm_head", "router"))
            part = entry.nbytes // entry.shape[0] if in_parts else entry.nbytes
            return -begin % part >= mmap.PAGESIZE
    return False


def _entry(file: WeightFile, name: str, item: Item, base: int) -> SafetensorsEntry:
    path = file.path
    start, end = item.data_offsets
    if len(item.shape) > MAX_RANK:
        raise CheckpointError(f"{path}: tensor {quote(name)} has {len(item.shape)} dimensions; fetch the file again.")
    if not 0 <= start <= end or min(item.shape, default=0) < 0:
        raise CheckpointError(
            f"{path}: tensor {quote(name)} has a shape or an offset below zero; fetch the file again."
        )
    dtype = TORCH_DTYPES.get(item.dtype)  # a tensor of another type is refused by name if the model uses it
    if dtype is not None and end - start != math.prod(item.shape) * dtype.itemsize:
        raise CheckpointError(f"{path}: tensor {quote(name)} does not fit its own shape; fetch the file again.")
    return SafetensorsEntry(file, item.dtype, tuple(item.shape), base + start, end - start)
