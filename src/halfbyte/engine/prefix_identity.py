"""The identity of KV pages: a hash of everything on which their bits depend. Programs exchange pages only if it is
equal.

It covers the fingerprint of the loaded model (content, numerics, phases, kernels' build), the times of its large files,
of which the fingerprint reads samples only, the sources of kernels and operations, and the layout of a page.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from halfbyte.kv.segments import VERSION
from halfbyte.model.fingerprint import fingerprint
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.quality_record import SMALL
from halfbyte.model.scales import file_identity

PACKAGE = Path(__file__).parents[1]
FOLDERS = ("formats", "kernels", "model", "ops", "plan")
SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh", ".inc"}


def prefix_identity(model: GptOss, path: Path | None, label: str, extra: str = "") -> bytes:
    """16 bytes. `path` is None for random weights, whose `label` says all; `extra` names what else is in a page."""
    times = [] if path is None else [entry for entry in file_identity(path).values() if entry[0] > SMALL]
    shape = list(model.kv_pool().shape[1:])
    facts: list[Any] = [VERSION, fingerprint(model, path, label), times, shape, extra, _sources()]
    return hashlib.sha256(json.dumps(facts).encode()).digest()[:16]


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted(p for p in (PACKAGE / folder).rglob("*") if p.suffix in SUFFIXES):
            digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
