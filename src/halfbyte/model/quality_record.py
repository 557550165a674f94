"""What `halfbyte check quality` measured on a model, stored beside it and found again by what it depends on.

The record of a folder is `.halfbyte-quality.json` in it, that of a GGUF file a hidden neighbour; where neither may be
written, and for the embedded model, it is in the cache folder. It holds for one content of the files, and each entry
for the numerics of one plan. Nothing here measures.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfbyte import records
from halfbyte.gates import cache_folder
from halfbyte.model.load import EMBEDDED
from halfbyte.model.plain_file import MIB, open_regular
from halfbyte.model.scales import file_identity, write_json
from halfbyte.plan.phase import Arch, Spec
from halfbyte.plan.step import REGIMES

SCHEMA = 1
KIND = "quality"  # the folder of the cache
NAME = "halfbyte-quality.json"
SMALL, SAMPLE, STRIDE = 64 * MIB, MIB, 64 * MIB  # a larger file counts by MIB-long samples


@dataclass(frozen=True)
class Measure:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class QualityEntry:
    """One plan's verdict against `exact`. `kl`, `same` and `perplexity` are those of the worst text."""

    label: str  # a preset's name, or the gates that differ
    verdict: str  # PASS, FAIL, INCONCLUSIVE
    worst: str  # the check that decided, as a sentence
    kl: Measure  # nats a token
    same: Measure  # share of positions with the same likeliest token
    perplexity: Measure  # over that of `exact`
    needles: tuple[int, int, int]  # right, right of `exact`, problems
    answers: tuple[int, int, int]  # the same as `exact` word for word, right, problems
    date: str
    machine: str

    def summary(self) -> str:
        return f"on this model: {self.verdict}, {self.same.value:.1%} the same likeliest token, {self.date}"

    def sentence(self) -> str:
        kl, needles = self.kl, self.needles
        return (
            f"measured on this model: KL {kl.value:.2g} nats a token ({kl.low:.2g} to {kl.high:.2g}), same token "
            f"{self.same.value:.1%}, perplexity {self.perplexity.value - 1:+.2%}, needles {needles[0]} of {needles[2]} "
            f"(exact {needles[1]}): {self.verdict}, {self.date}"
        )


@dataclass(frozen=True)
class QualityRecord:
    content: str
    files: dict[str, tuple[int, int]]
    entries: dict[str, QualityEntry]  # by `numerics_key`
    schema: int = SCHEMA


def numerics(spec: Spec, arch: Arch) -> dict[str, Any]:
    """Everything about a plan that changes numbers by design."""
    return {
        "arch": arch.name, "formats": dict(sorted(spec.matrices.texts().items())), "dtype": spec.dtype,
        "kv": "fp8 by head" if spec.kv_dtype == "fp8" else spec.kv_dtype,
        "activations": {regime: spec.at(regime).activation for regime in REGIMES},
        "attention": sorted(spec.features["attention"]),
    } | ({"experts in host memory": [spec.host_layers, spec.host_activation]} if spec.host_layers else {})  # fmt: skip


def numerics_key(spec: Spec, arch: Arch) -> str:
    return hashlib.sha256(json.dumps(numerics(spec, arch), sort_keys=True).encode()).hexdigest()[:24]


_hashed: dict[Path, tuple[dict[str, tuple[int, int]], str]] = {}  # model -> its files as they were, their hash


def content_id(model: Path) -> str:
    """Hash of the names, sizes and bytes of a model's files; of a large file, of samples at equal distances. A process
    reads them once, unless a file has changed since."""
    identity = file_identity(model)
    if model in _hashed and _hashed[model][0] == identity:
        return _hashed[model][1]
    folder = model if model.is_dir() else model.parent
    digest = hashlib.sha256()
    for name in identity:
        fd, size = open_regular(folder / name)
        try:
            digest.update(f"{name if model.is_dir() else ''}\0{size}\0".encode())
            step, count = (SMALL, SMALL) if size <= SMALL else (STRIDE, SAMPLE)
            for start in [*range(0, size, step), *([size - SAMPLE] if size > SMALL else [])]:
                digest.update(os.pread(fd, count, start))
        finally:
            os.close(fd)
    content = digest.hexdigest()[:24]
    _hashed[model] = identity, content
    return content


def path_beside(model: Path) -> Path:
    return model / f".{NAME}" if model.is_dir() else model.parent / f".{model.name}.{NAME}"


def path_in_cache(content: str) -> Path:
    return cache_folder(KIND) / f"{content}.json"


def store(model: Path, entries: dict[str, QualityEntry]) -> Path | None:
    """Add entries to the model's record; where it is now, or None where it can be written nowhere."""
    content = content_id(model)
    record_before = read(model)
    record = QualityRecord(
        content, file_identity(model), {**(record_before.entries if record_before else {}), **entries}
    )
    places = [path_in_cache(content)] if model == EMBEDDED else [path_beside(model), path_in_cache(content)]
    return next((path for path in places if write_json(path, asdict(record))), None)


def read(model: Path) -> QualityRecord | None:
    """The record of this model, if there is one for what its files hold now."""
    content = ""
    beside = _read(path_beside(model))
    if beside is not None:
        if beside.files == file_identity(model):
            return beside
        content = content_id(model)
        if beside.content == content:
            return beside
    if not any(cache_folder(KIND).glob("*.json")):
        return None
    return _read(path_in_cache(content or content_id(model)))


def find(model: Path | None, spec: Spec, arch: Arch) -> QualityEntry | None:
    """What was measured of this plan on this model."""
    record = None if model is None else read(model)
    return None if record is None else record.entries.get(numerics_key(spec, arch))


def _read(path: Path) -> QualityRecord | None:
    try:
        record = records.convert(json.loads(path.read_text(encoding="utf-8")), QualityRecord)
    except (OSError, ValueError):
        return None
    return record if record.schema == SCHEMA else None
