"""Writes Hugging Face folders: `config.json` and `model.safetensors`, or shards with an index.

How a matrix is stored is in `safetensors_io.py`. One role is in memory at a time, and the folder appears under its name
when it is whole. Refuses a folder that exists.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats import layouts
from halfbyte.formats.tensor import MXTensor
from halfbyte.gates import LAYER_GROUPS
from halfbyte.model.config_json import to_config_json
from halfbyte.model.safetensors_io import INDEX, SINGLE, TORCH_DTYPES, base_names, is_experts, transposed
from halfbyte.model.weight_file import write_tensor, write_then_rename
from halfbyte.model.weights import DTYPES, GROUPS, Matrix, Source, part_rows, roles, shape_of, split_parts

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that will be written: its name, dtype, shape, and how to cut it from the role's parts."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layer: int | None
    role: str
    part: int
    cut: Callable[[Matrix], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(
    source: Source,
    folder: Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    copies: Mapping[str, bytes] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Stream a source into a new folder, one role in memory at a time. `copies` are small files to add."""
    tensors = list(output_tensors(source))
    shards: list[list[OutputTensor]] = [[]]
    for p in tensors:
        if shards[-1] and sum(q.nbytes for q in shards[-1]) + p.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(p)
    total = sum(p.nbytes for p in tensors)
    names = [
        SINGLE if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]
    cache: tuple[tuple[int | None, str] | None, Sequence[Matrix]] = (None, ())
    done = 0
    with write_then_rename(folder, folder=True, needs=total) as hidden:
        for name, data in (copies or {}).items():
            (hidden / name).write_bytes(data)
        (hidden / "config.json").write_text(json.dumps(folder_config(source), indent=2) + "\n", encoding="utf-8")
        for file_name, shard in zip(names, shards):
            with (hidden / file_name).open("wb") as file:
                file.write(_header(shard))
                for p in shard:
                    if cache[0] != (p.layer, p.role):
                        cache = (None, ())  # let the last role go before the next is made
                        cache = ((p.layer, p.role), split_parts(source.config, p.role, source.parts(p.layer, p.role)))
                    tensor = p.cut(cache[1][p.part])
                    assert tensor.dtype == p.dtype, (p.name, tensor.dtype, p.dtype)
                    assert tuple(tensor.shape) == p.shape, (p.name, tensor.shape, p.shape)
                    write_tensor(file, tensor)
                    done += p.nbytes
                    if progress is not None:
                        progress(done, total, p.name)
        if len(shards) > 1:
            weight_map = {p.name: n for n, shard in zip(names, shards) for p in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (hidden / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def output_tensors(source: Source) -> Iterator[OutputTensor]:
    """The tensors of a folder with this source's weights, in the order of its files."""
    for layer, role in roles(source.config):
        names, rows = base_names(layer, role), part_rows(source.config, role)
        stored_formats = source.formats(layer, role)
        for i, (base, n) in enumerate(zip(names, rows)):
            shape = (n, *shape_of(source.config, role)[1:])
            format = stored_formats[i if len(stored_formats) == len(names) else 0]
            groups = shape[-1] // 32
            if format not in DTYPES and shape[-1] % 32:
                raise CheckpointError(f"{base} cannot be {format}: its rows of {shape[-1]} are not whole groups of 32.")
            if format in DTYPES:
                if is_experts(role):
                    yield OutputTensor(base, DTYPES[format], transposed(shape), layer, role, i, lambda m: _dense(m).mT)
                else:
                    yield OutputTensor(base, DTYPES[format], shape, layer, role, i, _dense)
            elif format == "mxfp4":
                lead = (*shape[:-1], groups)
                yield OutputTensor(f"{base}_blocks", torch.uint8, (*lead, 16), layer, role, i, _blocks)
                yield OutputTensor(f"{base}_scales", torch.uint8, lead, layer, role, i, _scales)
            else:
                yield OutputTensor(f"{base}_q8", torch.int8, shape, layer, role, i, _data)
                yield OutputTensor(f"{base}_q8_scales", torch.float16, (*shape[:-1], groups), layer, role, i, _scales)


def _dense(m: Matrix) -> Tensor:
    assert isinstance(m, Tensor)
    return m


def _blocks(m: Matrix) -> Tensor:
    assert isinstance(m, MXTensor)
    return layouts.to_checkpoint(m)[0]


def _scales(m: Matrix) -> Tensor:
    assert isinstance(m, MXTensor)
    return m.scales


def _data(m: Matrix) -> Tensor:
    assert isinstance(m, MXTensor)
    return m.data


def _header(shard: Sequence[OutputTensor]) -> bytes:
    items: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for p in shard:
        items[p.name] = {
            "dtype": DTYPE_NAMES[p.dtype],
            "shape": list(p.shape),
            "data_offsets": [offset, offset + p.nbytes],
        }
        offset += p.nbytes
    raw = json.dumps(items, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # tensors start aligned
    return len(raw).to_bytes(8, "little") + raw


def folder_config(source: Source) -> dict[str, Any]:
    """config.json, with the formats that are not OpenAI's."""
    raw = to_config_json(source.config)
    raw["torch_dtype"] = str(DTYPES[source.formats(None, "embed")[0]]).removeprefix("torch.")
    by_group = _formats_by_group(source)
    dense = [g for g, format in by_group.items() if format in DTYPES]
    if by_group["moe"] == "mxfp4" and set(dense) == {"qkv", "o", "lm_head"} and len(by_group) == len(LAYER_GROUPS):
        return raw  # exactly OpenAI's layout
    if len(dense) == len(by_group):
        raw.pop("quantization_config")  # a plain transformers folder
        return raw
    raw["quantization_config"] = {"quant_method": "halfbyte"}
    raw["halfbyte"] = {"formats": by_group}
    return raw


def _formats_by_group(source: Source) -> dict[str, str]:
    """The format of each group, and by its number (qkv.3) of each layer that has another."""
    by_layer: dict[str, dict[int | None, str]] = {}
    for layer, role in roles(source.config):
        for format in source.formats(layer, role) if role in GROUPS else ():
            if by_layer.setdefault(GROUPS[role], {}).setdefault(layer, format) != format:
                raise CheckpointError(
                    f"layer group {GROUPS[role]} mixes {by_layer[GROUPS[role]][layer]} and {format} in layer {layer}; "
                    "give it one format."
                )
    groups = {group: Counter(layers.values()).most_common(1)[0][0] for group, layers in by_layer.items()}
    others = {
        f"{group}.{layer}": format
        for group, layers in by_layer.items()
        for layer, format in layers.items()
        if format != groups[group]
    }
    return groups | others
