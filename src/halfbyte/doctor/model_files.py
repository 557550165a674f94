"""Inspects a model's folder without torch: which shards the index names, which of them exist and which are complete.

A safetensors header says where the last tensor ends; a shorter file is truncated. The tensors and
their numbers are examined by `halfbyte.model.file_check`, in a process that has torch.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

HEADER_BYTES = 100 << 20  # more than any header has; a file that claims more is not safetensors
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def look_at(path: Path) -> dict[str, Any] | None:
    """Facts about a model's files; None if the path does not exist."""
    if path.is_file():
        with path.open("rb") as file:
            good = file.read(4) == b"GGUF"
        return {"kind": "gguf" if good else "unknown", "bytes": path.stat().st_size, "largest": path.name}
    if not path.is_dir():
        return None
    shards = sorted(path.glob("*.safetensors"))
    expected = _shards_in_index(path / "model.safetensors.index.json")
    if not (path / "config.json").is_file() or not (shards or expected):
        # GGUF files, a cache, an adapter: the loader knows what such a folder means
        files = [*shards, *sorted(path.rglob("*.gguf"))]
        largest = max(files, key=lambda f: f.stat().st_size, default=None)
        return {
            "kind": "folder", "bytes": sum(f.stat().st_size for f in files),
            "largest": None if largest is None else str(largest.relative_to(path)),
        }  # fmt: skip
    return {
        "kind": "safetensors",
        "bytes": sum(s.stat().st_size for s in shards),
        "largest": max(shards, key=lambda s: s.stat().st_size).name if shards else None,
        "missing": sorted(expected - {s.name for s in shards}),
        "cut_off": [s.name for s in shards if not _is_complete(s)],
        "unfinished": sorted(p.name for p in path.glob("*.part")) + sorted(p.name for p in path.glob("*.incomplete")),
        "vocabulary": any((path / name).is_file() for name in VOCABULARIES),
    }


def _shards_in_index(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return set()


def _is_complete(shard: Path) -> bool:
    size = shard.stat().st_size
    try:
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, HEADER_BYTES):
                return False
            header = json.loads(file.read(length))
        ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return False
    return bool(size == 8 + length + max(ends, default=0))
