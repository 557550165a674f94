"""Models on disk: load one, write one, or rewrite one with more layers quantised.

A model is a Hugging Face folder (`safetensors_io.py`) or a GGUF file (`gguf_io.py`). Everything is streamed one role of
one layer at a time; MXFP4 stays packed from disk to the layout asked for. Numbers change only where `layer_formats`
asks for it, by group of layers; a folder or file appears whole or not at all and never replaces another.

Where qkv or lm_head is quantised here, the norm in front of it moves into its columns first (`ops/folding.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats import DenseTiles, blocks
from halfbyte.formats.stored import Packer
from halfbyte.formats.tensor import GEOMETRY, FormatName, MXTensor
from halfbyte.gates import check_layer_names, format_of_layer
from halfbyte.model.config import ModelConfig
from halfbyte.model.direct import HOST_LAYOUT, DirectReader, HostExperts
from halfbyte.model.half_rows import HALF_ROW_ROLES, HalfRowSource
from halfbyte.model.head_scales import SCALED_ROLES, HeadScaledSource
from halfbyte.model.host_copy import in_host_memory
from halfbyte.model.model_files import ANY_MODEL, model_path
from halfbyte.model.nonfinite import FileSource, FiniteSource, check_tails
from halfbyte.model.plain_file import MIB, read_whole, refusing
from halfbyte.model.safetensors_io import SafetensorsSource
from halfbyte.model.safetensors_writer import write_folder
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.model.weight_file import Reading
from halfbyte.model.weights import (
    DTYPES,
    GROUPS,
    NORM_OF,
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
from halfbyte.ops.folding import column_maxima, fold_norm
from halfbyte.ops.linear import dense

Progress = Callable[[int, int, str], None]  # (bytes done, bytes in all, what)

Q8_LARGEST = 127 * torch.finfo(torch.float16).max
TARGETS: dict[str, FormatName] = {"q8": "q8", "mxfp4": "mxfp4"}
MATRIX_BEHIND = {norm: matrix for matrix, norm in NORM_OF.items()}
# The files of a model other than its weights, copied with them.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


MAX_COMPANION = 64 * MIB


def load(
    model: str | Path | CheckpointSource,
    *,
    device: torch.device | str = "cpu",
    layer_formats: Mapping[str, str] | None = None,
    layouts: Mapping[str, str] | None = None,
    packer: Packer | None = None,
    progress: Progress | None = None,
    allow_nan: bool = False,
    keep_cached: bool = True,
    scale_heads: bool = False,
    half_rows: bool = False,
    host: HostExperts | None = None,
) -> Weights:
    """The weights of a model folder, a GGUF file or an open one, on `device`; with `allow_nan` also if some are not
    finite or matrices are all zeros. A model that was open before stays open.

    `layer_formats` maps moe, qkv, o, lm_head, or some layers of a group (qkv.full, qkv.0), to checkpoint, q8 or mxfp4,
    and embed to what a block-scaled token embedding becomes (bf16, if it is not named); `layouts` maps roles to the
    layouts of `formats.layouts` that the plan wants; a `packer`, on a CPU, brings what it can from its file into place
    at once; `host` names experts that stay in host memory. Without `keep_cached` the page cache is as small after
    loading as before.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(model, str | Path):
            model = stack.enter_context(contextlib.closing(open_model(model)))
        reading = model.reading
        reading.device, reading.keep_cached = torch.device(device), keep_cached
        check_tails(reading.zero_tails, allowed=allow_nan)
        finite = FiniteSource(model)
        direct = None if packer is None else DirectReader(finite, packer, layouts or {})
        weights = assemble(
            finite, layer_formats=layer_formats, layouts=layouts, direct=direct, progress=progress, reading=reading,
            scale_heads=scale_heads, half_rows=half_rows, host=host,
            host_direct=None if host is None else host.reader(finite),
        )  # fmt: skip
        reading.on_bytes = None  # tensors that are read a second time are not counted
        finite.finish(allowed=allow_nan)
        return weights


class CheckpointSource(FileSource, Protocol):
    """A source that holds files open."""

    reading: Reading

    def tokenizer(self) -> Tokenizer: ...

    def close(self) -> None: ...


def open_model(path: str | Path) -> CheckpointSource:
    """The source of a path; its files are open and checked, and no tensor is read yet."""
    path = Path(path).expanduser()
    reading = Reading(torch.device("cpu"))
    with refusing(path):
        path = model_path(path)
        if path.is_dir():
            return SafetensorsSource(path, reading)
        if not path.exists():
            raise CheckpointError(f"{path} does not exist; {ANY_MODEL}.")
        if path.suffix in (".safetensors", ".json"):
            raise CheckpointError(f"{path} is one file of a model folder; give the folder {path.parent}.")
        from halfbyte.model.gguf_io import GgufSource  # here: the gguf package takes a quarter of a second

        return GgufSource(path, reading)


def read_config(path: str | Path) -> ModelConfig:
    """The configuration of a model, with its files checked but no tensor read."""
    with contextlib.closing(open_model(path)) as source:
        return source.config


def assemble(
    source: Source,
    *,
    layer_formats: Mapping[str, str] | None = None,
    layouts: Mapping[str, str] | None = None,
    direct: DirectReader | None = None,
    progress: Progress | None = None,
    reading: Reading | None = None,
    scale_heads: bool = False,
    half_rows: bool = False,
    host: HostExperts | None = None,
    host_direct: DirectReader | None = None,
) -> Weights:
    """Every tensor of a source, requantised and laid out as the arguments say; with `scale_heads`, keys and values have
    the size that an fp8 cache holds (`head_scales.py`); with `half_rows`, norms and values one that float16 holds in
    front of q8 (`half_rows.py`); with `host`, the experts of the first layers are in host memory."""
    layouts = layouts or {}
    requantised = RequantisedSource(source, layer_formats or {})
    supply: Source = HeadScaledSource(requantised) if scale_heads else requantised
    supply = HalfRowSource(supply) if half_rows else supply
    everything = list(roles(source.config))
    unknown = set(layouts) - {role for _, role in everything}
    if unknown:
        raise FormatError(f"there is no weight called {sorted(unknown)[0]!r} to lay out.")
    for layer, role in everything:
        stored_formats = set(requantised.formats(layer, role)) if role in GROUPS else set()
        if len(stored_formats) > 1:
            group = GROUPS[role]
            raise CheckpointError(
                f"this model has {role} of layer {layer} in {' and '.join(sorted(stored_formats))}; give the group "
                f"{group} one format, for example --layers {group}=q8."
            )
    total = sum(source.nbytes(layer, role) for layer, role in everything)
    done, expected, name = 0, 0, ""

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
        expected += source.nbytes(layer, role)
        tensor: WeightTensor | None = None
        widened = role == "embed" and requantised.embedding == "f32"  # which the reader does, too
        unchanged = requantised.formats(layer, role) == source.formats(layer, role)
        unchanged &= not scale_heads or role not in SCALED_ROLES
        unchanged &= not half_rows or role not in HALF_ROW_ROLES
        if host is not None and host.holds(layer, role):
            if host_direct is not None and unchanged:
                tensor = host_direct.read(layer, role)
            if tensor is None:
                tensor = _in_host_memory(supply, layer, role, reading)
        elif direct is not None and (widened or unchanged):
            tensor = direct.read(layer, role)
        if tensor is None:
            tensor = _in_layout(join_rows(supply.parts(layer, role)), role, layouts.get(role, "plain"))
        assert tuple(tensor.shape) == shape_of(source.config, role), (name, tensor.shape)
        (outside if layer is None else layers[layer])[role] = tensor
        if done < expected:  # a source that makes its tensors instead of reading them
            count_bytes(expected - done)
    folded_norm = requantised.folded_norm
    if folded_norm is None and isinstance(supply, HalfRowSource):
        folded_norm = supply.unmoved_norm
    # Any: roles that are never block-scaled are plain tensors, and the fields' types say which.
    inside: list[Any] = layers
    top: Any = outside
    return Weights(
        config=source.config,
        layers=[LayerWeights(**fields) for fields in inside],
        folded_norm=folded_norm,
        expert_error=requantised.expert_error,
        **top,
    )


def _in_host_memory(source: Source, layer: int | None, role: str, reading: Reading | None) -> WeightTensor:
    """Read a matrix into host memory, and lay it out for the CPU kernels."""
    device = None if reading is None else reading.device
    if reading is not None:
        reading.device = torch.device("cpu")
    try:
        matrix = join_rows(source.parts(layer, role))
    finally:
        if reading is not None and device is not None:
            reading.device = device
    return _for_host(matrix, role)


def _for_host(m: Matrix, role: str) -> WeightTensor:
    """Laid out where it is, which a GPU does sooner, then moved."""
    if isinstance(m, MXTensor):
        laid_out = formats.convert(m, HOST_LAYOUT)
        return replace(laid_out, data=in_host_memory(laid_out.data), scales=laid_out.scales.cpu())
    return _in_layout(in_host_memory(m), role, HOST_LAYOUT)


def place_experts(weights: Weights, layers: int) -> Weights:
    """A copy of weights with the experts of the first layers in host memory; everything else is shared."""

    moved = [
        replace(layer, gate_up=_for_host(_plain(layer.gate_up), "gate_up"), down=_for_host(_plain(layer.down), "down"))
        for layer in weights.layers[:layers]
    ]
    return replace(weights, layers=[*moved, *weights.layers[layers:]])


def lay_out(weights: Weights, layouts: Mapping[str, str]) -> Weights:
    """A copy of the weights with matrices in these layouts; tensors that have theirs already are shared."""

    def converted(owner: Any) -> dict[str, Any]:
        matrices = {role: getattr(owner, role) for role in layouts if hasattr(owner, role)}
        return {role: _in_layout(_plain(m), role, layouts[role]) for role, m in matrices.items()
                if getattr(m, "layout", "plain") != layouts[role]}  # fmt: skip

    inside = [replace(layer, **converted(layer)) for layer in weights.layers]
    return replace(weights, layers=inside, **converted(weights))


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


class _Fold(NamedTuple):
    """A matrix as the file has it, the factors of its columns, and the norm that stays in front of it."""

    parts: Sequence[Matrix]
    columns: Tensor
    norm: Tensor


class RequantisedSource:
    """A source with some groups of layers in other formats, norms folded into the matrices that are quantised here."""

    def __init__(self, inner: Source, layer_formats: Mapping[str, str]):
        self.inner = inner
        self.folded_norm = inner.weights.folded_norm if isinstance(inner, MemorySource) else None
        self._fold: tuple[tuple[int | None, str], _Fold] | None = None  # of the matrix whose norm was read last
        self._lost = self._size = 0.0  # squares of the experts' errors, and of their weights
        self.layer_formats = dict(layer_formats)
        for group, target in self.layer_formats.items():
            if group == "embed" and target in DTYPES:
                continue
            if group.partition(".")[0] not in GROUPS.values():
                raise FormatError(f"there is no layer group {group!r}; the groups are moe, qkv, o and lm_head.")
            if target not in ("checkpoint", *TARGETS):
                raise FormatError(f"{group} cannot be {target!r}; use checkpoint, q8 or mxfp4.")
        check_layer_names(self.layer_formats, inner.config.layers)

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    @property
    def embedding(self) -> WeightFormat:
        """What a block-scaled token embedding becomes, since steps look up rows of numbers in it."""
        return cast(WeightFormat, self.layer_formats.get("embed", "bf16"))

    def target(self, layer: int | None, role: str) -> FormatName | None:
        kind = None if layer is None else self.config.layer_kinds[layer]
        return TARGETS.get(format_of_layer(self.layer_formats, GROUPS.get(role, ""), layer, kind))

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        stored_formats, target = self.inner.formats(layer, role), self.target(layer, role)
        if role == "embed" and stored_formats[0] not in DTYPES:
            return (self.embedding,)
        return stored_formats if target is None else tuple("q8" if target == "q8" else "mxfp4" for _ in stored_formats)

    def folds(self, layer: int | None, role: str) -> bool:
        """Whether the norm in front of this matrix moves into it: all of it is quantised here, not in the file."""
        target = self.target(layer, role)
        return role in NORM_OF and target is not None and target not in self.inner.formats(layer, role)

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        matrix, target = MATRIX_BEHIND.get(role), self.target(layer, role)
        if role == "embed":
            parts = self.inner.parts(layer, role)
            return [_dense_rows(p, DTYPES[self.embedding]) if isinstance(p, MXTensor) else p for p in parts]
        if matrix is not None and self.folds(layer, matrix):
            self._fold = (layer, matrix), (fold := self._folded(layer, matrix))
            return [fold.norm]
        if target is None:
            return self.inner.parts(layer, role)
        if not self.folds(layer, role):
            parts = self.inner.parts(layer, role)
            rounded = [self._requantise(layer, role, p, target) for p in parts]
            if GROUPS[role] == "moe":
                self._add_error(parts, rounded)
            return rounded
        last, self._fold = self._fold, None
        folded = last[1] if last is not None and last[0] == (layer, role) else self._folded(layer, role)
        return [self._requantise(layer, role, p, target, folded.columns) for p in folded.parts]

    def _requantise(
        self, layer: int | None, role: str, part: Matrix, target: FormatName, columns: Tensor | None = None
    ) -> MXTensor:
        """Like `requantise`, but finite weights that q8's scales do not reach are refused."""
        after = requantise(part, target, columns)
        if target == "q8" and bool(after.scales.isnan().any()) and bool(dense(part).isfinite().all()):
            name, group = role if layer is None else f"layer {layer} {role}", GROUPS[role]
            raise CheckpointError(
                f"{name} has weights past {Q8_LARGEST:.0f}, which q8 does not hold; use --layers {group}=mxfp4 or "
                "--preset exact."
            )
        return after

    @property
    def expert_error(self) -> float | None:
        """Relative rms error of the experts that were requantised, by the first expert of each layer."""
        return math.sqrt(self._lost / self._size) if self._size else None

    def _add_error(self, parts: Sequence[Matrix], requantised: Sequence[Matrix]) -> None:
        for before, after in zip(parts, requantised):
            if after is not before:
                exact, rounded = (dense(slice_rows(m, 0, 1)) for m in (before, after))
                self._lost += float((rounded - exact).norm()) ** 2
                self._size += float(exact.norm()) ** 2

    def _folded(self, layer: int | None, role: str) -> _Fold:
        """A matrix that is quantised here, and what its norm becomes."""
        norm, parts = join_rows(self.inner.parts(layer, NORM_OF[role])), self.inner.parts(layer, role)
        assert isinstance(norm, Tensor)
        if role == "lm_head":
            self.folded_norm = norm
        all_rows = (rows for part in parts for rows in row_blocks(part))
        largest = torch.stack([column_maxima(r if isinstance(r, Tensor) else dense(r)) for r in all_rows]).amax(0)
        return _Fold(parts, *fold_norm(norm, largest))

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


def row_blocks(m: Matrix) -> Iterator[Matrix]:
    """Some leading rows at a time, few enough to be held in float32."""
    step = max(1, blocks.chunk_elements(m.device) // math.prod(m.shape[1:]))
    for start in range(0, m.shape[0], step):
        yield slice_rows(m, start, min(m.shape[0], start + step))


def requantise(m: Matrix, target: FormatName, columns: Tensor | None = None) -> MXTensor:
    """A matrix, its columns times `columns`, in another format: through float32 and some rows at a time. Unchanged
    where it has that format already. `columns` is float32, and so is the product."""
    if isinstance(m, Tensor) and columns is None:
        return formats.quantize_weight(m, target)
    if isinstance(m, MXTensor) and m.format == target:
        assert columns is None, "a matrix that the file holds quantised takes no norm in"
        return m
    geometry = GEOMETRY[target]
    groups = geometry.padded(m.shape[-1]) // geometry.group
    data = torch.empty((*m.shape[:-1], groups * geometry.group_bytes), dtype=geometry.data_dtype, device=m.device)
    scales = torch.empty((*m.shape[:-1], groups), dtype=geometry.scale_dtype, device=m.device)
    at = 0
    for rows in row_blocks(m):
        values = rows if isinstance(rows, Tensor) else dense(rows)
        piece = formats.quantize_weight(values if columns is None else values * columns, target)
        end = at + rows.shape[0]
        data[at:end], scales[at:end] = piece.data, piece.scales
        at = end
    return MXTensor(data=data, scales=scales, shape=m.shape, format=target)


def _dense_rows(m: MXTensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a table, some rows at a time."""
    out = torch.empty(m.shape, dtype=dtype, device=m.device)
    step = max(1, blocks.chunk_elements(m.device) // m.shape[-1])
    for start in range(0, m.shape[0], step):
        rows = slice_rows(m, start, min(m.shape[0], start + step))
        assert isinstance(rows, MXTensor)
        out[start : start + step] = formats.dequantize(rows, dtype)
    return out


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
    keeps their own type. `tokenizer` is a `tokenizer.json`; without one the vocabulary is a placeholder."""
    from halfbyte.model import gguf_writer

    tokenizer = Path(tokenizer) if tokenizer is not None else None
    source = MemorySource(weights)
    gguf_writer.write_file(source, Path(file), dense=dense, tokenizer=tokenizer, progress=progress)


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
    src, dst = model_path(Path(src).expanduser()), Path(dst).expanduser()
    with contextlib.closing(open_model(src)) as inner:
        inner.reading.device = torch.device(device)
        check_tails(inner.reading.zero_tails, allowed=False)
        source = RequantisedSource(FiniteSource(inner, at_once=True), layer_formats)
        if dst.suffix == ".gguf":
            tokenizer = src / "tokenizer.json" if src.is_dir() else src
            from halfbyte.model import gguf_writer

            gguf_writer.write_file(source, dst, tokenizer=tokenizer if tokenizer.exists() else None, progress=progress)
            return
        folder = src if src.is_dir() else src.parent
        copies = {name: read_whole(folder / name, MAX_COMPANION) for name in COMPANIONS if (folder / name).is_file()}
        write_folder(source, dst, max_shard_bytes=max_shard_bytes, copies=copies, progress=progress)
