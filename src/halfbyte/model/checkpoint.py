"""Models on disk: load one, write one, or rewrite one with more layers quantised.

A model is a Hugging Face folder (`safetensors_io.py`) or a GGUF file (`gguf_io.py`). Everything is streamed one role of
one layer at a time; MXFP4 stays packed from disk to the layout asked for. Numbers change only where `layer_formats`
asks for it, by group of layers; a folder or file appears whole or not at all and never replaces another.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats import DenseTiles
from halfbyte.formats.stored import Packer
from halfbyte.formats.tensor import GEOMETRY, FormatName, MXTensor
from halfbyte.model.config import ModelConfig
from halfbyte.model.direct import DirectReader
from halfbyte.model.nonfinite import FileSource, FiniteSource
from halfbyte.model.plain_file import MIB, read_whole, refusing
from halfbyte.model.safetensors_io import SafetensorsSource
from halfbyte.model.safetensors_writer import write_folder
from halfbyte.model.weight_file import Reading
from halfbyte.model.weights import (
    GROUPS,
    LayerWeights,
    Matrix,
    Source,
    WeightFormat,
    Weights,
    WeightTensor,
    format_of,
    join_rows,
    roles,
    shape_of,
    slice_rows,
)

Progress = Callable[[int, int, str], None]  # (bytes done, bytes in all, what)

TARGETS: dict[str, FormatName] = {"q8": "q8", "mxfp4": "mxfp4"}
REQUANTISE_ELEMENTS = 1 << 22
# What belongs to a model beside its weights, and travels with them.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


MAX_COMPANION = 64 * MIB


def load(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    layer_formats: Mapping[str, str] | None = None,
    layouts: Mapping[str, str] | None = None,
    packer: Packer | None = None,
    progress: Progress | None = None,
    allow_nan: bool = False,
    keep_cached: bool = True,
) -> Weights:
    """The weights of a model folder or GGUF file, on `device`; with `allow_nan` also if some are no numbers.

    `layer_formats` maps moe, qkv, o, lm_head to checkpoint, q8 or mxfp4; `layouts` maps roles to the layouts of
    `formats.layouts` that the plan wants; a `packer`, on a CPU, brings what it can from its file into place at once.
    Without `keep_cached` the page cache is as small after loading as before.
    """
    reading = Reading(torch.device(device), keep_cached=keep_cached)
    source = open_model(path, reading)
    try:
        finite = FiniteSource(source)
        direct = None if packer is None else DirectReader(finite, packer, layouts or {})
        weights = assemble(
            finite, layer_formats=layer_formats, layouts=layouts, direct=direct, progress=progress, reading=reading
        )
        reading.on_bytes = None  # what is read again is no progress
        finite.finish(allowed=allow_nan)
        return weights
    finally:
        source.close()


class Model(FileSource, Protocol):
    """A source that holds files open."""

    def close(self) -> None: ...


def open_model(path: str | Path, reading: Reading | None = None) -> Model:
    """The source of a path; its files are open and checked, and no tensor is read yet."""
    path = Path(path).expanduser()
    reading = reading or Reading(torch.device("cpu"))
    with refusing(path):
        if path.is_dir():
            files = sorted(path.glob("*.gguf"))
            if files and not (path / "config.json").exists():
                raise CheckpointError(
                    f"{path} is a folder of GGUF files; give one of them, for example {files[0].name}."
                )
            return SafetensorsSource(path, reading)
        if not path.exists():
            raise CheckpointError(f"{path} does not exist; give a Hugging Face model folder, or a .gguf file.")
        if path.suffix in (".safetensors", ".json"):
            raise CheckpointError(f"{path} is one file of a model folder; give the folder {path.parent}.")
        source: Model = gguf_module("gguf_io").GgufSource(path, reading)
        return source


def gguf_module(name: str) -> Any:
    """A module of this room that needs the gguf package: imported late (it takes a quarter of a second), and an error
    that says what to do where the package is missing."""
    try:
        return importlib.import_module(f"halfbyte.model.{name}")
    except ModuleNotFoundError as e:
        if e.name != "gguf":
            raise
        raise CheckpointError(
            "GGUF files need the package gguf, which is not installed here; pip install gguf, or use a model folder."
        ) from None


def read_config(path: str | Path) -> ModelConfig:
    """The configuration of a model, with its files checked but no tensor read."""
    source = open_model(path)
    try:
        return source.config
    finally:
        source.close()


def assemble(
    source: Source,
    *,
    layer_formats: Mapping[str, str] | None = None,
    layouts: Mapping[str, str] | None = None,
    direct: DirectReader | None = None,
    progress: Progress | None = None,
    reading: Reading | None = None,
) -> Weights:
    """Every tensor of a source, requantised and laid out as asked."""
    layouts = layouts or {}
    requantised = RequantisedSource(source, layer_formats or {})
    everything = list(roles(source.config))
    unknown = set(layouts) - {role for _, role in everything}
    if unknown:
        raise FormatError(f"there is no weight called {sorted(unknown)[0]!r} to lay out.")
    for role, group in GROUPS.items():
        stored_formats = {f for layer, r in everything if r == role for f in requantised.formats(layer, r)}
        if len(stored_formats) > 1:
            raise CheckpointError(
                f"this model has {role} in {' and '.join(sorted(stored_formats))}; give the group {group} one format, "
                f"for example --layers {group}=q8."
            )
    total = sum(source.nbytes(layer, role) for layer, role in everything)
    done, name = 0, ""

    def count_bytes(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total, name)

    if reading is not None:
        reading.on_bytes = count_bytes
    outside: dict[str, WeightTensor] = {}
    layers: list[dict[str, WeightTensor]] = [{} for _ in range(source.config.layers)]
    for layer, role in everything:
        name = role if layer is None else f"layer {layer} {role}"
        before = done
        tensor: WeightTensor | None = None
        if direct is not None and requantised.formats(layer, role) == source.formats(layer, role):
            tensor = direct.read(layer, role)
        if tensor is None:
            tensor = _in_layout(join_rows(requantised.parts(layer, role)), role, layouts.get(role, "plain"))
        assert tuple(tensor.shape) == shape_of(source.config, role), (name, tensor.shape)
        (outside if layer is None else layers[layer])[role] = tensor
        if done == before:  # a source that makes its tensors instead of reading them
            count_bytes(source.nbytes(layer, role))
    # Any: roles that are never block-scaled are plain tensors, and the fields' types say which.
    inside: list[Any] = layers
    top: Any = outside
    return Weights(config=source.config, layers=[LayerWeights(**fields) for fields in inside], **top)


def lay_out(weights: Weights, layouts: Mapping[str, str]) -> Weights:
    """The same weights with their matrices in these layouts; tensors that are there already are shared, not copied."""

    def in_place(owner: Any) -> dict[str, Any]:
        found = {role: getattr(owner, role) for role in layouts if hasattr(owner, role)}
        return {role: _in_layout(_plain(m), role, layouts[role]) for role, m in found.items()
                if getattr(m, "layout", "plain") != layouts[role]}  # fmt: skip

    inside = [replace(layer, **in_place(layer)) for layer in weights.layers]
    return replace(weights, layers=inside, **in_place(weights))


def _plain(m: WeightTensor) -> Matrix:
    if isinstance(m, DenseTiles):
        return m.plain()
    return formats.convert(m, "plain") if isinstance(m, MXTensor) else m


def _in_layout(m: Matrix, role: str, layout: str) -> WeightTensor:
    if isinstance(m, MXTensor):
        return formats.convert(m, layout)
    if DenseTiles.holds(m, layout):
        return DenseTiles.of(m, layout)
    if layout != "plain":
        raise FormatError(f"{role} is {m.dtype} and has no layout {layout!r}; quantise it with --layers first.")
    return m


# ---- sources that wrap --------------------------------------------------------------------------


class RequantisedSource:
    """A source with some groups of layers in other formats."""

    def __init__(self, inner: Source, layer_formats: Mapping[str, str]):
        self.inner = inner
        self.layer_formats = dict(layer_formats)
        for group, target in self.layer_formats.items():
            if group not in GROUPS.values():
                raise FormatError(f"there is no layer group {group!r}; the groups are moe, qkv, o and lm_head.")
            if target not in ("checkpoint", *TARGETS):
                raise FormatError(f"{group} cannot be {target!r}; use checkpoint, q8 or mxfp4.")

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    def target(self, role: str) -> FormatName | None:
        return TARGETS.get(self.layer_formats.get(GROUPS.get(role, ""), "checkpoint"))

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        stored_formats, target = self.inner.formats(layer, role), self.target(role)
        return stored_formats if target is None else tuple("q8" if target == "q8" else "mxfp4" for _ in stored_formats)

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        parts, target = self.inner.parts(layer, role), self.target(role)
        return parts if target is None else [requantise(p, target) for p in parts]

    def nbytes(self, layer: int | None, role: str) -> int:
        return self.inner.nbytes(layer, role)


class MemorySource:
    """Weights in memory as a source; layouts other than "plain" are undone."""

    def __init__(self, weights: Weights):
        self.weights = weights

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    def _get(self, layer: int | None, role: str) -> WeightTensor:
        tensor: WeightTensor = getattr(self.weights if layer is None else self.weights.layers[layer], role)
        return tensor

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        return (format_of(self._get(layer, role)),)

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        return [_plain(self._get(layer, role))]

    def nbytes(self, layer: int | None, role: str) -> int:
        return self._get(layer, role).nbytes


def requantise(m: Matrix, target: FormatName) -> MXTensor:
    """A matrix in another format, through float32 and some leading rows at a time; unchanged if it is there already."""
    if isinstance(m, Tensor):
        return formats.quantize_weight(m, target)
    if m.format == target:
        return m
    geometry = GEOMETRY[target]
    groups = geometry.padded(m.shape[-1]) // geometry.group
    data = torch.empty((*m.shape[:-1], groups * geometry.group_bytes), dtype=geometry.data_dtype, device=m.device)
    scales = torch.empty((*m.shape[:-1], groups), dtype=geometry.scale_dtype, device=m.device)
    step = max(1, REQUANTISE_ELEMENTS // math.prod(m.shape[1:]))
    for start in range(0, m.shape[0], step):
        rows = slice_rows(m, start, min(m.shape[0], start + step))
        assert isinstance(rows, MXTensor)
        piece = requantise(formats.dequantize(rows, torch.float32), target)
        data[start : start + step], scales[start : start + step] = piece.data, piece.scales
    return MXTensor(data=data, scales=scales, shape=m.shape, format=target)


# ---- writing ------------------------------------------------------------------------------------


def save_safetensors(
    weights: Weights, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000, progress: Progress | None = None
) -> None:
    """A new Hugging Face folder; refuses one that exists."""
    write_folder(MemorySource(weights), Path(folder), max_shard_bytes=max_shard_bytes, progress=progress)


def save_gguf(
    weights: Weights,
    file: str | Path,
    *,
    dense: WeightFormat | None = None,
    tokenizer: str | Path | None = None,
    progress: Progress | None = None,
) -> None:
    """A new GGUF file that llama.cpp runs. `dense` (bf16, f16, f32, q8) is the type of unquantised matrices; None
    keeps what they are. `tokenizer` is a `tokenizer.json`; without one the vocabulary is a placeholder."""
    tokenizer = Path(tokenizer) if tokenizer is not None else None
    source = MemorySource(weights)
    gguf_module("gguf_writer").write_file(source, Path(file), dense=dense, tokenizer=tokenizer, progress=progress)


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    layer_formats: Mapping[str, str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> None:
    """Stream a model into a new folder (or GGUF file, if `dst` ends in .gguf) with groups of layers in new formats.

    The tokenizer and chat template beside the source come along. See `safetensors_io.py` for how folders store it.
    """
    src, dst = Path(src).expanduser(), Path(dst).expanduser()
    inner = open_model(src, Reading(torch.device(device)))
    try:
        source = RequantisedSource(FiniteSource(inner, at_once=True), layer_formats)
        if dst.suffix == ".gguf":
            tokenizer = src / "tokenizer.json" if src.is_dir() else src
            writer = gguf_module("gguf_writer")
            writer.write_file(source, dst, tokenizer=tokenizer if tokenizer.exists() else None, progress=progress)
            return
        beside = src if src.is_dir() else src.parent
        copies = {name: read_whole(beside / name, MAX_COMPANION) for name in COMPANIONS if (beside / name).is_file()}
        write_folder(source, dst, max_shard_bytes=max_shard_bytes, copies=copies, progress=progress)
    finally:
        inner.close()
