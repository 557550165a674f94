"""How much memory an engine takes: rows of a step, workspace and KV pages, from its options and what the machine has.

`serve` asks before anything is loaded, `build` once the weights are there; the same functions answer both, so that a
start which was let through does not fail after minutes of loading. Reads nothing and allocates nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.engine.options import EngineOptions
from halfbyte.errors import UsageError
from halfbyte.kv.pages import PagePool
from halfbyte.memory import GIB, MIB, MemoryAccount, MemoryState
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, choose, page_bytes
from halfbyte.plan.phase import Arch

GPU_CONTEXT = 512 * MIB  # the CUDA context and the kernels in it, until they are there and missing from what is free
ENGINE_PROCESS = 384 * MIB  # interpreter, torch and tokenizer of an engine in a process of its own, until it is there
LARGE_GPU = 64 * GIB
CPU_ROWS, CPU_ROWS_BESIDE_DECODE = 256, 64
LARGE_GPU_ROWS_BESIDE_DECODE = 704  # of 120b on an H200: 30 ms, and gaps of about 35 for clients (docs/LOG.md)
SCRATCH = 1  # page 0 is nobody's


@dataclass(frozen=True)
class PageLimits:
    least: int
    most: int


def longest_context(config: ModelConfig, options: EngineOptions) -> int:
    return min(config.max_context, options.max_context or config.max_context)


def rows_per_step(options: EngineOptions, memory: MemoryState) -> int:
    """A large GPU is best used by large chunks, and has room for their activations; on others chunks of 2048 keep a
    step short. A CPU takes seconds for a few hundred rows of a large model, and gains nothing from more."""
    if options.max_tokens is not None:
        return options.max_tokens
    if not memory.on_gpu:
        return CPU_ROWS
    return 8192 if not memory.shared and memory.size > LARGE_GPU else 2048


def rows_beside_decode(options: EngineOptions, rows: int, memory: MemoryState) -> int:
    """Of a step in which others decode, who wait for it: more rows give more tokens a second and longer gaps."""
    if options.beside_decode is not None:
        return min(rows, options.beside_decode)
    if not memory.on_gpu:
        return min(rows, CPU_ROWS_BESIDE_DECODE)
    return min(rows, LARGE_GPU_ROWS_BESIDE_DECODE if not memory.shared and memory.size > LARGE_GPU else 2048)


def workspace(config: ModelConfig, rows: int) -> int:
    """What the activations of a step take: everything one layer makes of a row, in float32."""
    c = config
    dense = 3 * c.hidden + c.qkv_dim + c.q_dim  # the stream, its norm, what o adds; qkv; attention
    experts = c.top_k * (3 * c.intermediate + c.hidden)  # gate and up, their product, down
    return 4 * rows * (dense + experts)


def memory_account(
    config: ModelConfig,
    options: EngineOptions,
    memory: MemoryState,
    *,
    weights: int | None = None,
    own_process: bool = False,
) -> MemoryAccount:
    """`weights`: bytes still to be loaded, None once they are there; `own_process`: into one that is still to start."""
    context = GPU_CONTEXT if weights is not None and memory.on_gpu else 0
    process = ENGINE_PROCESS if own_process and memory.shared else 0
    return MemoryAccount(
        memory,
        weights or 0,
        workspace(config, rows_per_step(options, memory)) + context + process,
        memory.reserve if options.reserve_gib is None else int(options.reserve_gib * GIB),
    )


def page_limits(config: ModelConfig, options: EngineOptions, memory: MemoryState, page_bytes: int) -> PageLimits:
    """Scratch included: at least one whole context, at most what max_seqs of them could use."""
    per_context = PagePool(2, options.page_size, config.window).peak_pages(longest_context(config, options), 2)
    least, most = SCRATCH + per_context, SCRATCH + per_context * options.max_seqs
    if options.kv_gib is not None:
        most = int(options.kv_gib * GIB) // page_bytes
        if most < 3:
            raise UsageError(f"--kv-memory {options.kv_gib} GiB holds no page of {page_bytes / MIB:.1f} MiB.")
        least = min(least, most)
    elif not memory.on_gpu:
        # A CPU shares its memory with everything else: four contexts are plenty, and never more than a quarter of it.
        most = min(most, SCRATCH + 4 * per_context, max(least, memory.free // 4 // page_bytes))
    return PageLimits(least, most)


def keeps_cached(options: EngineOptions, memory: MemoryState) -> bool:
    """Whether the model's files may stay in the page cache once they are read."""
    return options.page_cache == "keep" or (options.page_cache == "auto" and not memory.crowded)


def check_start(
    config: ModelConfig,
    options: EngineOptions,
    memory: MemoryState,
    arch: Arch,
    weights: int,
    *,
    own_process: bool = True,
) -> MemoryAccount:
    """Refuse a start that would not fit, before anything is loaded. A speculator's own weights are not counted."""
    spec, _, _ = choose(config, options.gates, arch, CHECKPOINT_FORMATS, options.page_size)
    account = memory_account(config, options, memory, weights=weights, own_process=own_process)
    size = page_bytes(config, spec)
    limits = page_limits(config, options, memory, size)
    account.check((limits.least if options.kv_gib is None else limits.most) * size)
    return account
