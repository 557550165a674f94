"""EngineConfig: facts about the model, and the limits of a step and of the queue, with every default resolved.

`halfbyte.engine.build` derives it from EngineOptions, the model and the memory that is free; engine and scheduler read
the same record.
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
    max_rows_per_step: int = 2048  # the chunk size of a long prompt while no sequence decodes
    max_rows_with_decode: int = 2048  # in a step that also decodes: those sequences wait for it
    max_rows_in_burst: int = 0  # in a step that also decodes, while many prompts wait (`bursts.py`); 0: no more
    max_waiting: int = 4096
    run_ahead: bool = True
    prefix_cache: bool = True
    # Where --deterministic is on and answers and prompts take different kernels: the most rows of generated tokens in a
    # step. Such a step holds no row of a prompt. 0: steps hold both.
    answer_rows: int = 0
    host_steps: bool = False  # this process computes the steps itself, and a large one may take minutes
