"""From options to a running core: the model, its KV pages sized from real memory, the proposer, the runner."""

from __future__ import annotations

from typing import Any

import torch

from halfbyte.engine.engine import EngineConfig, EngineCore
from halfbyte.engine.graphs import Graphs
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import SourceInfo
from halfbyte.engine.runner import make_runner
from halfbyte.engine.speculative.eagle3 import Eagle3Proposer
from halfbyte.engine.speculative.methods import make_proposer
from halfbyte.engine.step_buffer import padded_blocks
from halfbyte.errors import UsageError
from halfbyte.kv.pages import PagePool
from halfbyte.kv.store import GIB, default_reserve, memory, pages_that_fit
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.load import load_model, resolve_device, resolve_model, tokenizer_of
from halfbyte.model.tokenizer import Tokenizer


def kv_pages(model: GptOss, options: EngineOptions, context: int, page_bytes: int) -> int:
    """Pages, scratch included: at least one whole context, at most what max_seqs of them could use."""
    one = PagePool(2, options.page_size, model.config.window).peak_pages(context, 2)
    found = memory(model.device)
    reserve = default_reserve(model.device, found) if options.reserve_gib is None else int(options.reserve_gib * GIB)
    most = 1 + one * options.max_seqs
    if options.kv_gib is not None:
        most = int(options.kv_gib * GIB) // page_bytes
        if most < 3:
            raise UsageError(f"--kv-memory {options.kv_gib} GiB holds no page of {page_bytes / 2**20:.1f} MiB.")
    elif model.device.type == "cpu":
        # A CPU shares its memory with everything else: four contexts are plenty, and never more than a quarter of it.
        most = min(most, 1 + 4 * one, max(1 + one, found.free // 4 // page_bytes))
    least = min(1 + one, most) if options.kv_gib is not None else 1 + one
    return pages_that_fit(page_bytes, found, reserve, least=least, most=most)


def rows_per_step(model: GptOss) -> int:
    """A large GPU is best used by large chunks, and 8192 rows of activations take 2 GiB of it; elsewhere chunks of 2048
    keep a step short."""
    found = memory(model.device)
    return 8192 if model.device.type == "cuda" and found.source != "MemAvailable" and found.total > 64 * GIB else 2048


def build_core(options: EngineOptions) -> tuple[EngineCore, SourceInfo, Tokenizer]:
    name = resolve_model(options.model)
    model = load_model(name, options.gates, device=resolve_device(options.device), page_size=options.page_size)
    tokenizer = tokenizer_of(name)
    return core_for(model, tokenizer, options, name.label)


def core_for(
    model: GptOss, tokenizer: Tokenizer, options: EngineOptions, label: str = "gpt-oss"
) -> tuple[EngineCore, SourceInfo, Tokenizer]:
    config = model.config
    if options.page_size != model.spec.page_size:
        raise UsageError(f"the model was planned for pages of {model.spec.page_size} tokens, not {options.page_size}.")
    context = min(config.max_context, options.max_context or config.max_context)
    rows = rows_per_step(model) if options.max_tokens is None else options.max_tokens
    proposer = make_proposer(
        options.gates.speculate, model, options.draft, options.max_draft, options.max_seqs, context
    )
    observer = proposer if isinstance(proposer, Eagle3Proposer) else None
    page_bytes = model.page_bytes + (observer.page_bytes if observer is not None else 0)
    pages = kv_pages(model, options, context, page_bytes)
    model.allocate_kv(pages)
    if observer is not None:
        observer.allocate(pages)
    eos = tuple(dict.fromkeys((*config.eos_tokens, *(t for t in tokenizer.eos_tokens if t < config.vocab))))
    engine = EngineConfig(
        pages=pages, page_size=options.page_size, window=config.window, vocab=config.vocab, max_context=context,
        eos_tokens=eos, max_seqs=options.max_seqs, max_tokens=rows, max_waiting=options.max_waiting,
        run_ahead=options.run_ahead, prefix_cache=options.prefix_cache,
    )  # fmt: skip
    graphs: Graphs | None = None
    blocks = padded_blocks(-(-context // options.page_size))
    if model.device.type == "cuda" and options.gates.graphs == "on":
        graphs = Graphs(model, blocks, None if observer is None else observer.tap)
    runner = make_runner(
        model, observer, graphs, sequences=options.max_seqs, blocks=blocks,
        rows=max(rows, options.max_seqs * (options.max_draft + 1)),
    )  # fmt: skip
    core = EngineCore(runner, engine, tokenizer, proposer)
    details: dict[str, Any] = {
        "gates": options.gates.as_dict(),
        "device": _device_name(model.device),
        "plan": {
            regime: list(dict.fromkeys(b.phase.name for b in bound)) for regime, bound in model.plan.bound.items()
        },
        "kv": {
            "pages": pages, "page_size": options.page_size, "gib": round(pages * page_bytes / GIB, 3),
            "longest_request": core.scheduler.longest,
        },
        "sampler": runner.sampler,
        "max_seqs": options.max_seqs,
        "max_tokens_per_step": rows,
    }  # fmt: skip
    info = SourceInfo(label, min(context, core.scheduler.longest), config.vocab, eos, details)
    return core, info, tokenizer


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
