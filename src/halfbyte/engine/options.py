"""Everything an engine is made from, in one frozen record of plain values.

Whoever starts an engine (`halfbyte serve`, the Python API, a benchmark) makes it once; it travels unchanged to where
the engine is built, also into another process. What a field means for memory and kernels is decided in
`halfbyte.engine.build`, not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from halfbyte.gates import Gates
from halfbyte.model.gpt_oss import PAGE_SIZE


@dataclass(frozen=True)
class EngineOptions:
    model: str | None = None  # a folder, a .gguf file, random:20b; None: the embedded model
    gates: Gates = field(default_factory=Gates)
    device: str | None = None
    max_context: int | None = None  # default: the model's
    max_seqs: int = 64
    max_tokens: int | None = None  # rows in one step while nobody decodes; default: by the device
    max_waiting: int = 4096
    page_size: int = PAGE_SIZE
    kv_gib: float | None = None  # of KV pages; default: what is free beside the reserve, at most for max_seqs contexts
    reserve_gib: float | None = None
    run_ahead: bool = True
    prefix_cache: bool = True
    draft: str | None = None  # model of --speculate draft, or head of --speculate eagle3
    max_draft: int = 8
