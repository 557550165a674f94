"""The MXFP4 scale codes of a checkpoint, counted in one pass before any weight is laid out.

A code c is the scale 2^(c - 127); code 0, 2^-127, is what writers of MXFP4 give to groups of zeros, and code 255 is
NaN. A Hugging Face folder keeps scales apart from the nibbles, so that 1/17 of its expert bytes are read; the blocks of
a GGUF file hold both and are read whole, which also tells groups of zeros under any code. Reads go in pieces of at most
`PIECE` bytes for each thread. `scan_model` keeps its result in the cache folder, under the identity of the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halfbyte import records
from halfbyte.errors import CheckpointError
from halfbyte.formats.layouts import GGUF_BLOCK_BYTES
from halfbyte.formats.mxfp4 import GROUP
from halfbyte.formats.stored import Stored
from halfbyte.gates import cache_folder
from halfbyte.model.checksums import read_by_loading
from halfbyte.model.nonfinite import FileSource
from halfbyte.model.weights import GROUPS, roles

SCHEMA = 1
KIND = "scales"  # the folder of the cache
PIECE = 8 << 20
READERS = 8
FAR = 17  # octaves: what one NVFP4 scale and a factor per tensor can reach
LOUD_OCTAVES = 4  # above the median of a tensor's rows (or columns) one is loud
BULK = 0.999  # the share of groups that `bulk` counts the values of
ZERO, NAN = 0, 255

Progress = Callable[[int, int, str], None]  # (bytes done, bytes in all, tensor)


@dataclass(frozen=True)
class TensorScales:
    """The scale codes of one tensor."""

    layer: int | None
    role: str
    counts: tuple[int, ...]  # groups under each of the 256 codes
    row_spread: int  # octaves between the largest and smallest code of a row, zero codes left out; the widest row's
    loud_rows: int  # rows whose largest code is LOUD_OCTAVES above the median row's
    loud_columns: int  # groups of 32 columns, in the same way
    zero_groups: int | None = None  # groups whose elements are all zero, where these were read

    @property
    def groups(self) -> int:
        return sum(self.counts)

    @property
    def zero_codes(self) -> int:
        return self.counts[ZERO]

    @property
    def nan_codes(self) -> int:
        return self.counts[NAN]

    @property
    def largest(self) -> int:
        """Largest code of a finite scale; 0 where there is none."""
        return max((code for code in range(1, NAN) if self.counts[code]), default=ZERO)

    @property
    def smallest(self) -> int:
        """Smallest code above 0; 0 where there is none."""
        return min((code for code in range(1, NAN) if self.counts[code]), default=ZERO)

    @property
    def far(self) -> int:
        """Groups more than FAR octaves under the tensor's largest, zero codes left out."""
        return sum(self.counts[1 : max(1, self.largest - FAR)])


@dataclass(frozen=True)
class ScaleSummary:
    """The tensors of one role together."""

    role: str
    tensors: int
    groups: int
    largest: int
    largest_layer: int | None
    smallest: int
    row_spread: int
    bulk: int  # distinct codes that hold BULK of the groups, zero codes left out
    zero_codes: int
    nan_codes: int
    zero_groups: int | None
    far: int
    far_tensors: int
    loud_rows: int
    loud_columns: int

    @property
    def zero_share(self) -> float:
        return (self.zero_codes if self.zero_groups is None else self.zero_groups) / max(1, self.groups)


def summarise(tensors: Sequence[TensorScales]) -> list[ScaleSummary]:
    """One summary for each role, in the order of the tensors."""
    by_role: dict[str, list[TensorScales]] = {}
    for t in tensors:
        by_role.setdefault(t.role, []).append(t)
    return [_summary(role, own) for role, own in by_role.items()]


def _summary(role: str, tensors: Sequence[TensorScales]) -> ScaleSummary:
    loudest = max(tensors, key=lambda t: t.largest)
    counts = [sum(column) for column in zip(*(t.counts for t in tensors))]
    zero_groups = [t.zero_groups for t in tensors if t.zero_groups is not None]
    return ScaleSummary(
        role=role, tensors=len(tensors), groups=sum(counts), largest=loudest.largest, largest_layer=loudest.layer,
        smallest=min((t.smallest for t in tensors if t.smallest), default=ZERO),
        row_spread=max(t.row_spread for t in tensors), bulk=_bulk(counts), zero_codes=counts[ZERO],
        nan_codes=counts[NAN], zero_groups=sum(zero_groups) if len(zero_groups) == len(tensors) else None,
        far=sum(t.far for t in tensors), far_tensors=sum(t.far > 0 for t in tensors),
        loud_rows=sum(t.loud_rows for t in tensors), loud_columns=sum(t.loud_columns for t in tensors),
    )  # fmt: skip


def _bulk(counts: Sequence[int]) -> int:
    counted, total = 0, sum(counts[1:NAN])
    for number, count in enumerate(sorted(counts[1:NAN], reverse=True)):
        if counted >= BULK * total:
            return number
        counted += count
    return NAN - 1


# ---- scanning --------------------------------------------------------------------------------------------------------


def scan_scales(source: FileSource, progress: Progress | None = None) -> list[TensorScales]:
    """The scales of every MXFP4 tensor of an open model, in the order of `roles`."""
    places = [(layer, role, stored) for layer, role in roles(source.config) if role in GROUPS
              if (stored := source.stored(layer, role)) is not None and stored.format == "mxfp4"]  # fmt: skip
    total, lock, done = sum(_bytes_read(stored) for _, _, stored in places), threading.Lock(), 0

    def scan(entry: tuple[int | None, str, Stored]) -> TensorScales:
        layer, role, stored = entry
        name = role if layer is None else f"layer {layer} {role}"

        def count_bytes(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                if progress is not None:
                    progress(done, total, name)

        try:
            return _scan(layer, role, stored, count_bytes)
        except (OSError, EOFError) as e:
            raise CheckpointError(f"{source.origins(layer, role)[0]} cannot be read ({e}); fetch it again.") from None
        finally:
            source.forget(layer, role)

    with ThreadPoolExecutor(READERS, thread_name_prefix="halfbyte-scan") as pool:
        return list(pool.map(scan, places))


def _scan(layer: int | None, role: str, stored: Stored, count_bytes: Callable[[int], None]) -> TensorScales:
    groups = stored.shape[-1] // GROUP
    counts = torch.zeros(256, dtype=torch.int64)
    columns = torch.zeros(groups, dtype=torch.uint8)
    row_largest: list[Tensor] = []
    spread, zero_groups = 0, 0 if stored.gguf else None
    for codes, zeros in _pieces(stored, groups, count_bytes):
        own = torch.bincount(codes.flatten(), minlength=256)
        counts += own
        if own[NAN]:
            codes = torch.where(codes == NAN, ZERO, codes)
        numbers = codes.numpy()  # whose reductions of bytes are several times as fast as torch's
        high = numbers.max(1)
        row_largest.append(torch.from_numpy(high))
        columns = torch.maximum(columns, torch.from_numpy(numbers.max(0)))
        if own[ZERO] or own[NAN]:
            low = (numbers - 1).min(1) + 1  # zero codes wrap around to 255, behind every other
        else:
            low = numbers.min(1)
        present = high > ZERO
        if present.any():
            spread = max(spread, int((high[present] - low[present]).max()))
        if zero_groups is not None:
            zero_groups += zeros
    return TensorScales(
        layer, role, tuple(counts.tolist()), spread, _loud(torch.cat(row_largest)), _loud(columns), zero_groups
    )


def _loud(largest: Tensor) -> int:
    """Entries LOUD_OCTAVES or more above the median of those with a scale."""
    codes = largest[largest > 0].int()
    return int((codes >= codes.median() + LOUD_OCTAVES).sum()) if codes.numel() else 0


def _pieces(stored: Stored, groups: int, count_bytes: Callable[[int], None]) -> Iterator[tuple[Tensor, int]]:
    """(codes [rows, groups], groups of zeros among them) of some rows at a time, in the order of the file."""
    stack = stored.shape[0] if len(stored.shape) == 3 else 1
    row = groups * (GGUF_BLOCK_BYTES["mxfp4"] if stored.gguf else 1)
    step = max(1, PIECE // row)
    for part in stored.parts:
        file, offset = (part.file, part.offset) if stored.gguf else (part.scale_file, part.scale_offset)
        rows = stack * part.rows
        for start in range(0, rows, step):
            count = min(step, rows - start)
            data = _read(file, offset + start * row, count * row)
            count_bytes(count * row)
            if not stored.gguf:
                yield data.view(count, groups), 0
                continue
            blocks = data.view(count, groups, -1)
            zeros = int((blocks[..., 1:] & 0x77).amax(-1).eq(0).sum())  # a nibble is 0 or -0
            yield blocks[..., 0].contiguous(), zeros


def _bytes_read(stored: Stored) -> int:
    stack = stored.shape[0] if len(stored.shape) == 3 else 1
    per_group = GGUF_BLOCK_BYTES["mxfp4"] if stored.gguf else 1
    return sum(part.rows for part in stored.parts) * stack * (stored.shape[-1] // GROUP) * per_group


def _read(file: int, offset: int, count: int) -> Tensor:
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        size = os.preadv(file, [view[done:]], offset + done)
        if size == 0:
            raise EOFError("it ends early")
        done += size
    return torch.frombuffer(buffer, dtype=torch.uint8)


# ---- the cache -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleRecord:
    """A scan as the cache keeps it."""

    schema: int
    files: dict[str, tuple[int, int]]
    tensors: tuple[TensorScales, ...]


def file_identity(model: Path) -> dict[str, tuple[int, int]]:
    """Name to (size, time of the last change in nanoseconds), for every file that loading the model reads."""
    folder = model if model.is_dir() else model.parent
    stats = {name: (folder / name).stat() for name in sorted(read_by_loading(model))}
    return {name: (s.st_size, s.st_mtime_ns) for name, s in stats.items()}


def scan_model(model: Path, source: FileSource, progress: Progress | None = None) -> list[TensorScales]:
    """`scan_scales` of the open model at this path, read from the cache where the files are as they were. A cache that
    cannot be written to is no error."""
    files = file_identity(model)
    path = cache_folder(KIND) / f"{hashlib.sha256(str(model.absolute()).encode()).hexdigest()[:24]}.json"
    cached = _read_record(path)
    if cached is not None and cached.files == files:
        return list(cached.tensors)
    tensors = scan_scales(source, progress)
    record = {"schema": SCHEMA, "files": files, "tensors": [vars(t) for t in tensors]}
    write_json(path, record)
    return tensors


def _read_record(path: Path) -> ScaleRecord | None:
    try:
        record = records.convert(json.loads(path.read_text(encoding="utf-8")), ScaleRecord)
    except (OSError, ValueError):
        return None
    complete = record.schema == SCHEMA and all(len(t.counts) == 256 for t in record.tensors)
    return record if complete else None


def write_json(path: Path, value: Mapping[str, object]) -> bool:
    """Replace the file as a whole; False where that is not allowed or there is no space."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(value), encoding="utf-8")
        part.replace(path)
    except OSError:
        return False
    return True
