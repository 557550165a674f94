"""What lies in a model's folder, read without torch: which shards the index names, which are there, and whole.

A safetensors file says in its header where its last tensor ends; one that is shorter was cut off. Says nothing about
the weights themselves: `halfbyte serve --verify` hashes them, loading looks at every number.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

HEADER_BYTES = 100 << 20  # more than any header; what claims more is no safetensors file
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def look_at(path: Path) -> dict[str, Any] | None:
    """None: nothing is there."""
    if path.is_file():
        with path.open("rb") as file:
            good = file.read(4) == b"GGUF"
        return {"kind": "gguf" if good else "unknown", "bytes": path.stat().st_size, "largest": path.name}
    if not path.is_dir():
        return None
    shards = sorted(path.glob("*.safetensors"))
    named = _named(path / "model.safetensors.index.json")
    return {
        "kind": "safetensors" if shards or named else "unknown",
        "bytes": sum(s.stat().st_size for s in shards),
        "largest": max(shards, key=lambda s: s.stat().st_size).name if shards else None,
        "missing": sorted(named - {s.name for s in shards}),
        "cut_off": [s.name for s in shards if not _whole(s)],
        "unfinished": sorted(p.name for p in path.glob("*.part")) + sorted(p.name for p in path.glob("*.incomplete")),
        "config": (path / "config.json").is_file(),
        "vocabulary": any((path / name).is_file() for name in VOCABULARIES),
    }


def _named(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return set()


def _whole(shard: Path) -> bool:
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
