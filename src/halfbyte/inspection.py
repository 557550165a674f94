"""Inspects a checkpoint: formats, ranges, scale codes, and what each preset would make of it.

Scales come from `model/scales.py`; every dense tensor outside of the experts is read once, one at a time. Experts that
are not MXFP4 are listed by format and not read. The weight error of a preset is measured on a sample of rows, quantised
as loading would quantise them, and weighted by the norm in front of the matrix. Prints nothing; `cli/inspect.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import UsageError
from halfbyte.formats.tensor import MXTensor
from halfbyte.gates import LAYER_GROUPS, PRESETS, Gates
from halfbyte.model import load
from halfbyte.model.checkpoint import CheckpointSource, RequantisedSource
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import formats_after
from halfbyte.model.scales import ScaleSummary, scan_model, summarise
from halfbyte.model.weights import GROUPS, Matrix, WeightFormat, join_rows, roles, shape_of, slice_rows
from halfbyte.roofline import Gpu, decode_ceiling, decode_traffic

SCHEMA = "halfbyte.inspection/1"
EXPERTS = ("gate_up", "down")
NORM_IN_FRONT = {"qkv": "attn_norm", "lm_head": "final_norm"}
SAMPLE_ROWS = 64  # of each part of a layer's matrix
SAMPLE_HEAD_ROWS = 1024  # of lm_head, which there is one of
LOUD = 8.0  # times the median: a row (or column) whose largest value exceeds that is loud
CONTEXT = 2048  # of the expected speed
PIECE = 1 << 21  # elements at once
LEAST_NORMAL_HALF = 2.0**-14
INFINITE_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # of infinity; NaN are above

Progress = Callable[[int, int, str], None]  # (bytes done, bytes in all, tensor)


@dataclass(frozen=True)
class TensorGroup:
    """All tensors of one role."""

    role: str
    formats: tuple[str, ...]
    shape: tuple[int, ...]
    tensors: int
    bytes: int


@dataclass(frozen=True)
class LoudVectors:
    """Rows or columns of a matrix that are far larger than the median one."""

    count: int
    ratio: float  # of the loudest: its largest value over the median of all largest values
    layer: int | None
    index: int


@dataclass(frozen=True)
class Range:
    """The values of one role over all layers; values that are not finite are counted and left out."""

    role: str
    low: float
    high: float
    smallest: float  # magnitude other than zero
    rms: float
    high_layer: int | None  # where the largest magnitude is
    nonfinite: int
    loud_rows: LoudVectors | None = None
    loud_columns: LoudVectors | None = None
    denormal_scales: float | None = None  # the share of q8 scales that float16 holds as denormals


@dataclass(frozen=True)
class GroupError:
    """Relative rms error of one layer group's weights, each row weighted by the norm in front of the matrix."""

    mean: float  # root of the mean square over layers
    worst: float
    worst_layer: int | None


@dataclass(frozen=True)
class PresetForecast:
    preset: str
    meaning: str
    weight_bytes: int
    context_bytes: int  # KV cache of one sequence of the largest context
    tokens_per_second: float  # the most that the machine's memory allows at CONTEXT tokens
    errors: Mapping[str, GroupError | None]  # layer group -> None: it keeps the numbers of the file, or was not read


@dataclass(frozen=True)
class Inspection:
    model: str
    config: Mapping[str, Any]
    files: int
    bytes: int
    parameters: int
    tensors: tuple[TensorGroup, ...]
    scales: tuple[ScaleSummary, ...]
    ranges: tuple[Range, ...]
    zero_tensors: tuple[str, ...]
    presets: tuple[PresetForecast, ...]
    machine: str  # whose memory bandwidth the expected speed is from
    notes: tuple[str, ...] = ()
    schema: str = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"scales": [asdict(s) | {"zero_share": s.zero_share} for s in self.scales]}


def inspect_model(model: str | None, roof: Gpu, progress: Progress | None = None) -> Inspection:
    """Everything about the model that reading scales and dense tensors can tell."""
    name = load.resolve_model(model)
    if name.path is None:
        raise UsageError(f"{name.text} has no files to inspect; name a model folder or a .gguf file.")
    with load.OpenCheckpoint(name) as opened:
        source, facts = opened.source, opened.facts
        assert source is not None
        scales = scan_model(name.path, source, progress)
        dense = _read_dense(source, progress)
        config = facts.config
        tensors = _tensor_groups(source)
        unread = [g for g in tensors if g.role in EXPERTS and set(g.formats) != {"mxfp4"}]
        return Inspection(
            model=name.label, config=asdict(config),
            files=len({origin.partition(": tensor")[0] for at in roles(config) for origin in source.origins(*at)}),
            bytes=sum(g.bytes for g in tensors),
            parameters=sum(math.prod(shape_of(config, role)) for _, role in roles(config)),
            tensors=tuple(tensors), scales=tuple(summarise(scales)), ranges=dense.ranges(),
            zero_tensors=tuple(dense.zero_tensors),
            presets=tuple(_forecast(p, facts, dense.sample, roof) for p in compared_presets()),
            machine=f"{roof.name}, {roof.read / 1e9:.0f} GB/s",
            notes=tuple(f"{g.role} is {' and '.join(g.formats)}, and its values were not read" for g in unread),
        )  # fmt: skip


def compared_presets() -> list[str]:
    """Presets that differ in the formats of weights, `exact` first; the others name kernels or activations."""
    return ["exact", *(name for name, p in PRESETS.items() if p.gates == Gates(layers=p.gates.layers))]


def _tensor_groups(source: CheckpointSource) -> list[TensorGroup]:
    groups: dict[str, list[int | None]] = {}
    for layer, role in roles(source.config):
        groups.setdefault(role, []).append(layer)
    return [
        TensorGroup(
            role, tuple(sorted({f for layer in layers for f in source.formats(layer, role)})),
            shape_of(source.config, role), len(layers), sum(source.nbytes(layer, role) for layer in layers),
        )
        for role, layers in groups.items()
    ]  # fmt: skip


# ---- dense tensors ---------------------------------------------------------------------------------------------------


@dataclass
class _RoleStatistics:
    """What `Range` says of one role, while its tensors are read."""

    low: float = math.inf
    high: float = -math.inf
    smallest: float = math.inf
    squares: float = 0.0
    count: int = 0
    high_layer: int | None = None
    nonfinite: int = 0
    scales: int = 0
    denormal: int = 0
    rows: list[LoudVectors] = field(default_factory=list)
    columns: list[LoudVectors] = field(default_factory=list)

    def range(self, role: str) -> Range:
        seen = self.count > 0
        return Range(
            role, self.low if seen else 0.0, self.high if seen else 0.0,
            self.smallest if math.isfinite(self.smallest) else 0.0, math.sqrt(self.squares / max(1, self.count)),
            self.high_layer, self.nonfinite, _loudest(self.rows), _loudest(self.columns),
            self.denormal / self.scales if self.scales else None,
        )  # fmt: skip


def _loudest(layers: Sequence[LoudVectors]) -> LoudVectors | None:
    loudest = max(layers, key=lambda v: v.ratio, default=None)
    if loudest is None:
        return None
    return LoudVectors(sum(v.count for v in layers), loudest.ratio, loudest.layer, loudest.index)


@dataclass
class _Dense:
    statistics: dict[str, _RoleStatistics]
    zero_tensors: list[str]
    sample: SampledSource

    def ranges(self) -> tuple[Range, ...]:
        return tuple(s.range(role) for role, s in self.statistics.items())


def _read_dense(source: CheckpointSource, progress: Progress | None) -> _Dense:
    read = _Dense({}, [], SampledSource(source.config))
    places = [(layer, role) for layer, role in roles(source.config) if role not in EXPERTS]
    done, total = 0, sum(source.nbytes(*at) for at in places)
    for layer, role in places:
        name = role if layer is None else f"layer {layer} {role}"
        parts = source.parts(layer, role)
        statistics = read.statistics.setdefault(role, _RoleStatistics())
        if _add(statistics, layer, parts):
            read.zero_tensors.append(name)
        read.sample.add(layer, role, parts, source.formats(layer, role))
        source.forget(layer, role)
        done += source.nbytes(layer, role)
        if progress is not None:
            progress(done, total, name)
    return read


def _add(statistics: _RoleStatistics, layer: int | None, parts: Sequence[Matrix]) -> bool:
    """Add one tensor; whether all of it is zero."""
    rows: list[Tensor] = []
    columns: Tensor | None = None
    largest = 0.0
    for part in parts:
        if isinstance(part, MXTensor) and part.format == "q8":
            magnitude = part.scales.float().abs()
            statistics.scales += magnitude.numel()
            statistics.denormal += int(((magnitude > 0) & (magnitude < LEAST_NORMAL_HALF)).sum())
        for piece in _pieces(part):
            p = _piece_of_bits(piece) or _piece_of_numbers(piece)
            statistics.nonfinite += p.nonfinite
            statistics.low, statistics.high = min(statistics.low, p.low), max(statistics.high, p.high)
            statistics.smallest = min(statistics.smallest, p.smallest)
            statistics.squares += p.squares
            statistics.count += math.prod(piece.shape) - p.nonfinite
            largest = max(largest, abs(p.low), abs(p.high))
            if p.rows is not None and p.columns is not None:
                rows.append(p.rows)
                columns = p.columns if columns is None else torch.maximum(columns, p.columns)
    if largest >= max(abs(statistics.low), abs(statistics.high)):
        statistics.high_layer = layer
    if columns is not None:
        statistics.rows.append(_loud(torch.cat(rows), layer))
        statistics.columns.append(_loud(columns, layer))
    return largest == 0.0


class _Piece(NamedTuple):
    """Some rows of a tensor, or a vector; numbers that are not finite are left out."""

    low: float
    high: float
    smallest: float  # magnitude other than zero; infinity where there is none
    squares: float
    nonfinite: int
    rows: Tensor | None  # largest magnitudes of rows and of columns, of what has both
    columns: Tensor | None


def _piece_of_numbers(piece: Matrix) -> _Piece:
    x = in_float(piece)
    finite = torch.isfinite(x)
    nonfinite = x.numel() - int(finite.sum())
    if nonfinite:
        x = torch.where(finite, x, 0.0)
    magnitude = x.abs()
    low, high = (float(v) for v in torch.aminmax(x))
    smallest = float(torch.where(magnitude > 0, magnitude, math.inf).min())
    rows, columns = (magnitude.amax(1), magnitude.amax(0)) if x.dim() == 2 else (None, None)
    return _Piece(low, high, smallest, _squares(x), nonfinite, rows, columns)


def _piece_of_bits(piece: Matrix) -> _Piece | None:
    """Like `_piece_of_numbers`, several times as fast, for a dense matrix of 16-bit numbers: without the sign, their
    bits are ordered as their magnitudes. None for other tensors, and where a number is not finite."""
    if not isinstance(piece, Tensor) or piece.element_size() != 2 or piece.dim() != 2:
        return None
    bits = piece.contiguous().view(torch.int16) & 0x7FFF
    rows, columns = bits.amax(1), bits.amax(0)
    if int(rows.max()) >= INFINITE_BITS[piece.dtype]:
        return None
    smallest = int((bits.numpy() - 1).view(np.uint16).min()) + 1  # zeros wrap around, behind every other
    low, high = (float(v) for v in torch.aminmax(piece))
    none = smallest > 0x7FFF
    return _Piece(
        low, high, math.inf if none else float(_of_bits(torch.tensor([smallest], dtype=torch.int16), piece.dtype)),
        _squares(piece.float()), 0, _of_bits(rows, piece.dtype), _of_bits(columns, piece.dtype),
    )  # fmt: skip


def _of_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.view(dtype).float()


def _squares(x: Tensor) -> float:
    return float(x.double().square().sum()) if x.numel() < 1 << 16 else float(x.norm()) ** 2


def _pieces(part: Matrix) -> Iterator[Matrix]:
    """Some rows at a time; a vector is one piece."""
    if len(part.shape) == 1:
        yield part
        return
    step = max(1, PIECE // math.prod(part.shape[1:]))
    for start in range(0, part.shape[0], step):
        yield slice_rows(part, start, min(part.shape[0], start + step))


def in_float(m: Matrix) -> Tensor:
    return formats.dequantize(m, torch.float32) if isinstance(m, MXTensor) else m.float()


def _loud(largest: Tensor, layer: int | None) -> LoudVectors:
    """Rows (or columns) of zeros do not count towards the median."""
    if not bool((largest > 0).any()):
        return LoudVectors(0, 0.0, layer, 0)
    median = float(largest[largest > 0].median())
    return LoudVectors(
        int((largest > LOUD * median).sum()), float(largest.max()) / median, layer, int(largest.argmax())
    )


# ---- presets ---------------------------------------------------------------------------------------------------------


class SampledSource:
    """A source with some rows of every matrix that a preset may requantise, and the norms in front of them."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._parts: dict[tuple[int | None, str], list[Matrix]] = {}
        self._formats: dict[tuple[int | None, str], tuple[WeightFormat, ...]] = {}
        self.errors: dict[tuple[int | None, str, str | None], float] = {}  # layer, role, format -> relative error

    def add(
        self, layer: int | None, role: str, parts: Sequence[Matrix], stored_formats: tuple[WeightFormat, ...]
    ) -> None:
        if role in GROUPS:
            count = SAMPLE_ROWS if layer is not None else SAMPLE_HEAD_ROWS
            self._parts[layer, role] = [_some_rows(part, count) for part in parts]
        elif role in NORM_IN_FRONT.values():
            self._parts[layer, role] = list(parts)
        else:
            return
        self._formats[layer, role] = stored_formats

    def places(self, role: str) -> list[int | None]:
        return [layer for layer, r in self._parts if r == role]

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        return self._formats[layer, role]

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        return self._parts[layer, role]

    def nbytes(self, layer: int | None, role: str) -> int:
        return sum(part.nbytes for part in self._parts[layer, role])


def _some_rows(part: Matrix, count: int) -> Matrix:
    rows = part.shape[0]
    index = torch.linspace(0, rows - 1, min(rows, count)).round().long()
    if isinstance(part, Tensor):
        return part[index]
    shape = (index.numel(), *part.shape[1:])
    return MXTensor(data=part.data[index], scales=part.scales[index], shape=shape, format=part.format)


def weight_error(sample: SampledSource, role: str, layer_formats: Mapping[str, str]) -> GroupError | None:
    """The error of a matrix together with the norm in front of it: what quantising changes in the function."""
    after = RequantisedSource(sample, layer_formats)
    if not any(after.target(layer, role) for layer in sample.places(role)):
        return None
    errors: list[tuple[float, int | None]] = []
    for layer in sample.places(role):
        key = layer, role, after.target(layer, role)
        if key not in sample.errors:  # presets share formats
            exact, rounded = (_with_norm(source, layer, role) for source in (sample, after))
            size = float(exact.double().norm())
            sample.errors[key] = float((rounded - exact).double().norm()) / size if size else 0.0
        errors.append((sample.errors[key], layer))
    finite = [e for e in errors if math.isfinite(e[0])]
    if not finite:
        return None
    worst, layer = max(finite, key=lambda e: e[0])
    return GroupError(math.sqrt(sum(e * e for e, _ in finite) / len(finite)), worst, layer)


def _with_norm(source: SampledSource | RequantisedSource, layer: int | None, role: str) -> Tensor:
    matrix = torch.cat([in_float(part) for part in source.parts(layer, role)])
    norm = NORM_IN_FRONT.get(role)
    return matrix if norm is None else matrix * in_float(join_rows(source.parts(layer, norm)))


def _forecast(preset: str, facts: load.CheckpointFacts, sample: SampledSource, roof: Gpu) -> PresetForecast:
    gates, config = PRESETS[preset].gates, facts.config
    layer_formats, after = gates.layer_formats, formats_after(config, gates, facts.formats)
    errors = {}
    for group in LAYER_GROUPS:
        if group != "moe":
            errors[group] = weight_error(sample, group, layer_formats)
    speed = decode_ceiling(roof, config, after, min(CONTEXT, config.max_context))
    context = decode_traffic(config, after, config.max_context).kv
    return PresetForecast(
        preset, PRESETS[preset].meaning, facts.weight_bytes(gates), int(context), speed.tokens_per_second, errors
    )
