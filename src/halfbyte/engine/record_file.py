"""The file that an engine's process writes when it ends: which kernels ran, and where they differ from the plan.

`{"engine", "gates", "plan", "record", "differences", "values"}`: its gates, the phases chosen for every regime, the
record of `plan/record.py` as JSON, a sentence for every difference, and the state of the gates that choose no kernel,
read from the objects that ran (the cache's own dtype, the drafts that were verified, the threads that were started).
The lab reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import SourceInfo
from halfbyte.model.gpt_oss import GptOss
from halfbyte.ops.attention import STORE_DTYPES


def write_record(core: EngineCore, info: SourceInfo, path: str) -> None:
    """Write the file atomically. Writes nothing for a core whose runner has no GptOss model, as in tests."""
    model: Any = getattr(core.runner, "model", None)
    if not isinstance(model, GptOss):
        return
    plan = model.plan
    body = {
        "engine": "halfbyte",
        "gates": info.details["gates"],
        "plan": {regime: list(names) for regime, names in plan.selection.chosen.items()},
        "record": plan.record.as_dict(),
        "differences": [str(d) for d in plan.differences()],
        "values": gate_values(core, model),
    }
    part = Path(f"{path}.part")
    part.write_text(json.dumps(body), encoding="utf-8")
    part.replace(path)


def gate_values(core: EngineCore, model: GptOss) -> dict[str, Any]:
    """What ran, for gates that choose no kernel."""
    dtypes = {dtype: name for name, dtype in STORE_DTYPES.items()}
    stats, proposer = core.stats(), core.proposer
    separated = core.config.answer_rows > 0 or not model.arch.is_gpu  # answers from prompts, where kernels differ
    return {
        "kv_dtype": dtypes[model.kv_pool().dtype],
        "sinks": "on" if "sinks" in model.spec.features_of(("attention",)) else "off",
        "threads": sorted({n for bound in model.plan.bound.values() for b in bound for n in b.phase.thread_counts()}),
        "deterministic": "on" if model.gates.deterministic == "on" and separated else "off",
        "experts_in_host": str(model.spec.host_layers),
        "speculate": {
            "proposer": "" if proposer is None else type(proposer).__name__,
            "drafted": stats.drafted_tokens,
            "accepted": stats.accepted_tokens,
        },
    }
