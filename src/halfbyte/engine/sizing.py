"""How much memory an engine takes: rows of a step, workspace and KV pages, from its options and the machine's memory.

`serve` calls it before anything is loaded, `build` once the weights are loaded. Both use the same functions, so that a
start which passes the first check does not fail after minutes of loading. Reads nothing and allocates nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from halfbyte.engine.options import PREFIX_MEMORY, EngineOptions
from halfbyte.errors import UsageError
from halfbyte.formats import bytes_for
from halfbyte.gates import Gates
from halfbyte.kv.pages import PagePool
from halfbyte.memory import GIB, MIB, MemoryAccount, MemoryState
from halfbyte.model.config import ModelConfig
from halfbyte.model.direct import HOST_ROLES
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, choose, page_bytes
from halfbyte.model.weights import shape_of
from halfbyte.plan.phase import Arch

GPU_CONTEXT = 512 * MIB  # CUDA context and kernels, counted until they exist and free memory reflects them
ENGINE_PROCESS = 384 * MIB  # interpreter, torch and tokenizer of the engine's process, counted until it exists
LARGE_GPU = 64 * GIB
CPU_ROWS, CPU_ROWS_WITH_DECODE = 256, 64
LARGE_GPU_ROWS_WITH_DECODE = 704  # 120b on an H200: steps of 30 ms, gaps of about 35 ms for clients (docs/LOG.md)
LARGE_GPU_ROWS_IN_BURST = 2816  # the same by the model of its steps: 67 ms, at twice the speed of prompts
STREAMING_GPU = 20 * GIB  # has room for the activations of 8192 rows beside a layer of experts
FEWEST_STREAMED_ROWS = 1024  # of a step that copies experts from host memory
STREAMED_LAYER = 7 / 6  # a layer's experts as the GPU multiplies them, and the pieces that are on their way
SCRATCH = 1  # page 0 belongs to no sequence


@dataclass(frozen=True)
class PageLimits:
    least: int
    most: int


def longest_context(config: ModelConfig, options: EngineOptions) -> int:
    """Most tokens of a request: the model's context, or less where the options say so."""
    context = options.max_context or config.max_context
    if context > config.max_context:
        raise UsageError(
            f"the context (--max-context, max_context) is {context}, but this model holds {config.max_context} tokens; "
            "give at most that."
        )
    return context


def rows_per_step(options: EngineOptions, memory: MemoryState) -> int:
    """Row budget of a step. A large GPU needs large chunks for its full speed and has room for their activations; on
    others 2048 rows keep a step short. A CPU takes seconds for a few hundred rows of a large model and gains nothing
    from more. Experts in host memory are copied to the GPU for every step with many rows, so that few large steps are
    the fastest."""
    if options.max_rows_per_step is not None:
        return options.max_rows_per_step
    if not memory.on_gpu:
        return CPU_ROWS
    if keeps_experts_in_host(options.gates):
        return 8192 if memory.size >= STREAMING_GPU else 4096
    return 8192 if not memory.shared and memory.size > LARGE_GPU else 2048


def rows_with_decode(options: EngineOptions, rows: int, memory: MemoryState) -> int:
    """Row budget of a step that also decodes. Larger: more throughput, longer gaps between tokens."""
    if options.max_rows_with_decode is not None:
        return min(rows, options.max_rows_with_decode)
    if not memory.on_gpu:
        return min(rows, CPU_ROWS_WITH_DECODE)
    return min(rows, LARGE_GPU_ROWS_WITH_DECODE if not memory.shared and memory.size > LARGE_GPU else 2048)


def rows_in_burst(options: EngineOptions, rows: int, memory: MemoryState) -> int:
    """Row budget of a step that also decodes while prompts come in a burst. Who names the budget beside decoding has
    it in a burst, too."""
    beside = rows_with_decode(options, rows, memory)
    if options.max_rows_in_burst is not None:
        return max(beside, min(rows, options.max_rows_in_burst))
    if options.max_rows_with_decode is None and beside == LARGE_GPU_ROWS_WITH_DECODE:
        return min(rows, LARGE_GPU_ROWS_IN_BURST)
    return beside


def with_fitting_steps(
    config: ModelConfig,
    options: EngineOptions,
    memory: MemoryState,
    page_bytes: int,
    *,
    weights: int | None = None,
    own_process: bool = False,
) -> EngineOptions:
    """The options, with smaller steps where only so the KV cache fits beside them. Large steps are wanted because they
    copy experts from host memory less often, not because a prompt needs them; a budget that somebody named stays."""
    if options.max_rows_per_step is not None or not (memory.on_gpu and keeps_experts_in_host(options.gates)):
        return options
    limits = page_limits(config, options, memory, page_bytes)
    needed = (limits.least if options.kv_gib is None else limits.most) * page_bytes
    rows = rows_per_step(options, memory)
    while rows >= FEWEST_STREAMED_ROWS:
        smaller = replace(options, max_rows_per_step=rows)
        if needed <= memory_account(config, smaller, memory, weights=weights, own_process=own_process).kv_room:
            return smaller
        rows //= 2
    return options


def workspace(config: ModelConfig, rows: int) -> int:
    """Bytes of a step's activations: everything one layer computes for a row, in float32."""
    c = config
    dense = 3 * c.hidden + c.qkv_dim + c.q_dim  # the stream, its norm, what o adds; qkv; attention
    experts = c.top_k * (3 * c.intermediate + c.hidden)  # gate and up, their product, down
    return 4 * rows * (dense + experts)


def keeps_experts_in_host(gates: Gates) -> bool:
    """True once the placement of experts is known (`placement.py`) and some are in host memory."""
    return gates.experts_in_host not in ("auto", "0")


def stream_buffer(config: ModelConfig, gates: Gates) -> int:
    """Bytes on the GPU for a layer of experts that is copied from host memory."""
    if not keeps_experts_in_host(gates):
        return 0
    return int(STREAMED_LAYER * sum(bytes_for(shape_of(config, role), "mxfp4") for role in HOST_ROLES))


def memory_account(
    config: ModelConfig,
    options: EngineOptions,
    memory: MemoryState,
    *,
    weights: int | None = None,
    own_process: bool = False,
) -> MemoryAccount:
    """`weights`: bytes still to be loaded, None once they are loaded. `own_process`: a process has yet to start."""
    context = GPU_CONTEXT + stream_buffer(config, options.gates) if weights is not None and memory.on_gpu else 0
    process = ENGINE_PROCESS if own_process and memory.shared else 0
    return MemoryAccount(
        memory,
        weights or 0,
        workspace(config, rows_per_step(options, memory)) + context + process,
        memory.reserve if options.reserve_gib is None else int(options.reserve_gib * GIB),
    )


def page_limits(config: ModelConfig, options: EngineOptions, memory: MemoryState, page_bytes: int) -> PageLimits:
    """Pages, scratch included: at least one full context, at most what max_seqs contexts could use."""
    per_context = PagePool(2, options.page_size, config.window).peak_pages(longest_context(config, options), 2)
    least, most = SCRATCH + per_context, SCRATCH + per_context * options.max_seqs
    if options.kv_gib is not None:
        most = int(options.kv_gib * GIB) // page_bytes
        if most < 3:
            raise UsageError(f"--kv-memory {options.kv_gib} holds no page of {page_bytes / MIB:.1f} MiB; give more.")
        least = min(least, most)
    elif not memory.on_gpu:
        # A CPU shares its memory with everything else: four contexts at most, and no more than a quarter of it.
        most = min(most, SCRATCH + 4 * per_context, max(least, memory.free // 4 // page_bytes))
        most += prefix_memory(options, memory) // page_bytes
    return PageLimits(least, most)


def prefix_memory(options: EngineOptions, memory: MemoryState) -> int:
    """Bytes of host memory for prefixes. Where a CPU computes, pages are host memory already: these bytes are further
    pages, unless --kv-memory says how many there are. On unified memory the pages take all that is free, so there is
    nothing below them but the disk."""
    if not options.prefix_cache or memory.unified:
        return 0
    if options.prefix_memory is not None:
        return options.prefix_memory
    return 0 if options.kv_gib is not None and not memory.on_gpu else min(PREFIX_MEMORY, memory.available // 4)


def host_tier(options: EngineOptions, memory: MemoryState) -> int:
    """Bytes of `prefix_memory` that hold copies of pages."""
    return prefix_memory(options, memory) if memory.on_gpu or options.kv_gib is not None else 0


def keeps_cached(options: EngineOptions, memory: MemoryState) -> bool:
    """True if the model's files may stay in the page cache after they are read."""
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
    """Refuse a start that would not fit, before anything is loaded. Does not count the weights of a draft model."""
    size = page_bytes(config, choose(config, options.gates, arch, CHECKPOINT_FORMATS, options.page_size).spec)
    options = with_fitting_steps(config, options, memory, size, weights=weights, own_process=own_process)
    account = memory_account(config, options, memory, weights=weights, own_process=own_process)
    limits = page_limits(config, options, memory, size)
    account.check((limits.least if options.kv_gib is None else limits.most) * size)
    return account
