"""From options to a running core: the model, its KV pages sized from real memory, the proposer, the runner."""

from __future__ import annotations

from typing import Any

import torch

from halfbyte.engine.config import EngineConfig
from halfbyte.engine.cpu_runner import CpuRunner
from halfbyte.engine.device_runner import DeviceRunner
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.graphs import Graphs
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import SourceInfo
from halfbyte.engine.runner import HiddenStateObserver, ModelRunner
from halfbyte.engine.sampling.device import choose_device_sampler
from halfbyte.engine.sizing import (
    check_start,
    keeps_cached,
    longest_context,
    memory_account,
    page_limits,
    rows_beside_decode,
    rows_per_step,
)
from halfbyte.engine.speculative.eagle3 import Eagle3Proposer
from halfbyte.engine.speculative.methods import make_proposer
from halfbyte.engine.step_buffer import padded_blocks
from halfbyte.errors import UsageError
from halfbyte.memory import GIB, read_memory
from halfbyte.model.gpt_oss import GptOss, arch_of
from halfbyte.model.load import config_of, load_model, resolve_device, resolve_model, tokenizer_of, weight_bytes
from halfbyte.model.tokenizer import Tokenizer


def build_core(options: EngineOptions) -> tuple[EngineCore, SourceInfo, Tokenizer]:
    name, device = resolve_model(options.model), resolve_device(options.device)
    memory = read_memory(device)
    weights = weight_bytes(name, options.gates)
    check_start(config_of(name), options, memory, arch_of(device), weights, own_process=False)
    model = load_model(
        name, options.gates, device=device, page_size=options.page_size, allow_nan=options.allow_nan,
        self_test=options.self_test, keep_cached=keeps_cached(options, memory),
    )  # fmt: skip
    tokenizer = tokenizer_of(name)
    return core_for(model, tokenizer, options, name.label)


def core_for(
    model: GptOss, tokenizer: Tokenizer, options: EngineOptions, label: str = "gpt-oss"
) -> tuple[EngineCore, SourceInfo, Tokenizer]:
    config = model.config
    if options.page_size != model.spec.page_size:
        raise UsageError(f"the model was planned for pages of {model.spec.page_size} tokens, not {options.page_size}.")
    context = longest_context(config, options)
    proposer = make_proposer(
        options.gates.speculate, model, options.draft, options.max_draft, options.max_seqs, context
    )
    observer = proposer if isinstance(proposer, Eagle3Proposer) else None
    page_bytes = model.page_bytes + (observer.page_bytes if observer is not None else 0)
    memory = read_memory(model.device)  # after the proposer has taken its share
    rows = rows_per_step(options, memory)
    limits = page_limits(config, options, memory, page_bytes)
    pages = memory_account(config, options, memory).pages(page_bytes, least=limits.least, most=limits.most)
    model.allocate_kv(pages)
    if observer is not None:
        observer.allocate(pages)
    eos = tuple(dict.fromkeys((*config.eos_tokens, *(t for t in tokenizer.eos_tokens if t < config.vocab))))
    on_host = model.device.type == "cpu"
    engine_config = EngineConfig(
        pages=pages, page_size=options.page_size, window=config.window, vocab=config.vocab, max_context=context,
        eos_tokens=eos, max_seqs=options.max_seqs, max_tokens=rows,
        beside_decode=rows_beside_decode(options, rows, memory), max_waiting=options.max_waiting,
        run_ahead=options.run_ahead and not on_host, prefix_cache=options.prefix_cache, host_steps=on_host,
    )  # fmt: skip
    runner, sampler = _runner_for(model, options, observer, context, rows)
    core = EngineCore(runner, engine_config, tokenizer, proposer)
    details: dict[str, Any] = {
        "gates": options.gates.as_dict(),
        "device": _device_name(model.device),
        "device_id": str(model.device),
        "plan": {
            regime: list(dict.fromkeys(b.phase.name for b in bound)) for regime, bound in model.plan.bound.items()
        },
        "kv": {
            "pages": pages, "page_size": options.page_size, "gib": round(pages * page_bytes / GIB, 3),
            "longest_request": core.scheduler.longest,
        },
        "sampler": sampler,
        "max_seqs": options.max_seqs,
        "max_tokens_per_step": rows,
        "max_tokens_beside_decode": engine_config.beside_decode,
    }  # fmt: skip
    info = SourceInfo(label, min(context, core.scheduler.longest), config.vocab, eos, details)
    return core, info, tokenizer


def _runner_for(
    model: GptOss, options: EngineOptions, observer: HiddenStateObserver | None, context: int, rows: int
) -> tuple[ModelRunner, str]:
    """The runner, and who samples its tokens (with the reason, where torch does on a GPU)."""
    if model.device.type == "cpu":
        return CpuRunner(model, observer), "host"
    rows = max(rows, options.max_seqs * (options.max_draft + 1))
    blocks = padded_blocks(-(-context // options.page_size))
    sampler = choose_device_sampler(model.device, rows, model.config.vocab)
    graphs: Graphs | None = None
    if options.gates.graphs == "on":
        graphs = Graphs(model, blocks, sampler, None if observer is None else observer.tap)
    runner = DeviceRunner(model, sampler, observer, graphs, rows=rows, sequences=options.max_seqs, blocks=blocks)
    return runner, sampler.name


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
