"""The fingerprint of a loaded model: equal where the same request has the same tokens under --deterministic.

It covers the content of the model's files, the numbers that its plan makes by design, the phases of every regime, and
the build: halfbyte's version, torch's, the CPU kernels' binary or the GPU's name. It says nothing about threads, pages
or batch sizes, which change no token. Servers send it as `system_fingerprint`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from halfbyte import __version__
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.quality_record import content_id, numerics


def fingerprint(model: GptOss, path: Path | None, label: str) -> str:
    """`path`: the model's files; None: random weights, which their label names."""
    parts = {
        "content": label if path is None else content_id(path),
        "numerics": numerics(model.spec, model.arch),
        "phases": model.plan.selection.chosen,
        "deterministic": model.gates.deterministic,
        "build": [__version__, str(torch.__version__), *_kernels(model)],
    }
    return f"fp_{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]}"


def _kernels(model: GptOss) -> list[str]:
    if model.arch.is_gpu:
        return [torch.cuda.get_device_name(model.device)]
    phase = model.plan.bound["decode"][0].phase
    first = next(iter(phase.declares(model.spec.at("decode"), model.arch)))  # of several sets: the one that is used
    return [first.name, *sorted(first.modules)]
