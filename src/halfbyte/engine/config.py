"""What a core works with: the model's facts and the limits of a step and of the queue, all decided.

`halfbyte.engine.build` makes it from EngineOptions, where much is still open, and from a model and its memory; engine
and scheduler read the same record.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    pages: int
    page_size: int = 64
    window: int = 128
    vocab: int = 201088
    max_context: int = 131072
    eos_tokens: tuple[int, ...] = (200002,)
    max_seqs: int = 64  # running at once
    max_tokens: int = 2048  # rows in one step: the chunk size of a long prompt while nobody decodes
    beside_decode: int = 2048  # the same while others decode: they wait for it
    max_waiting: int = 4096
    run_ahead: bool = True
    prefix_cache: bool = True
    host_steps: bool = False  # steps are computed by this process itself, and a large one may take minutes
