"""What an engine's own process leaves when it ends: which kernels ran, and where that is not what was chosen.

`{"engine", "gates", "plan", "record", "differences"}`: the gates it was given, the phases chosen for every regime, the
record of `plan/record.py` as JSON, and a sentence for everything that ran otherwise. The lab reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import SourceInfo
from halfbyte.model.gpt_oss import GptOss


def write_record(core: EngineCore, info: SourceInfo, path: str) -> None:
    """Whole or not at all. A core whose runner has no model of ours (a test's) leaves nothing."""
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
    }
    part = Path(f"{path}.part")
    part.write_text(json.dumps(body), encoding="utf-8")
    part.replace(path)
