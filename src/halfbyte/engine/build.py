"""From options to a running core: the model, its KV pages sized from real memory, the proposer, the runner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from halfbyte.engine.config import EngineConfig
from halfbyte.engine.cpu_runner import CpuRunner
from halfbyte.engine.device_runner import DeviceRunner
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.graphs import Graphs
from halfbyte.engine.options import PREFIX_DISK, EngineOptions
from halfbyte.engine.page_memory import PageMemory
from halfbyte.engine.placement import find_placement
from halfbyte.engine.prefix_identity import prefix_identity
from halfbyte.engine.prefix_tiers import PrefixTiers
from halfbyte.engine.request import SourceInfo
from halfbyte.engine.runner import HiddenStateObserver
from halfbyte.engine.sampling.device import choose_device_sampler
from halfbyte.engine.saturation import SaturationCount
from halfbyte.engine.sizing import (
    GPU_CONTEXT,
    check_start,
    host_tier,
    keeps_cached,
    longest_context,
    memory_account,
    page_limits,
    rows_in_burst,
    rows_per_step,
    rows_with_decode,
    with_fitting_steps,
)
from halfbyte.engine.speculative.eagle3 import Eagle3Proposer
from halfbyte.engine.speculative.methods import make_proposer
from halfbyte.engine.step_buffer import padded_blocks
from halfbyte.errors import UsageError
from halfbyte.kv.prefix_store import PrefixStore
from halfbyte.kv.segments import PageLayout
from halfbyte.memory import GIB, read_memory
from halfbyte.model.fingerprint import fingerprint
from halfbyte.model.gpt_oss import GptOss, arch_of
from halfbyte.model.load import EMBEDDED, RANDOM, OpenCheckpoint, load_model, resolve_device, resolve_model
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.plan.step import Regime
from halfbyte.roofline import doubling_depth


def build_core(
    options: EngineOptions, checkpoint: OpenCheckpoint | None = None
) -> tuple[EngineCore, SourceInfo, Tokenizer]:
    """The core of `options.model`, or of a checkpoint that the caller has opened; it is closed here."""
    device = resolve_device(options.device)
    with checkpoint or OpenCheckpoint(resolve_model(options.model)) as opened:
        facts, memory = opened.facts, read_memory(device).limited_to(options.gpu_memory)
        placement = find_placement(facts, options, memory, arch_of(device))
        options = replace(options, gates=placement.gates)
        check_start(facts.config, options, memory, arch_of(device), placement.device_bytes, own_process=False)
        model = load_model(
            opened, options.gates, device=device, page_size=options.page_size, allow_nan=options.allow_nan,
            self_test=options.self_test, keep_cached=keeps_cached(options, memory),
        )  # fmt: skip
        tokenizer = opened.tokenizer()
    name = facts.name
    path = None if name.random else name.path or EMBEDDED
    core, info, _ = core_for(model, tokenizer, options, name.label, path)
    info.details["fingerprint"] = fingerprint(model, path, name.label)
    return core, info, tokenizer


def core_for(
    model: GptOss, tokenizer: Tokenizer, options: EngineOptions, label: str = "gpt-oss", path: Path | None = None
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
    if options.gpu_memory is not None:
        memory = memory.limited_to(options.gpu_memory, torch.cuda.memory_reserved(model.device) + GPU_CONTEXT)
    options = with_fitting_steps(config, options, memory, page_bytes)
    rows = rows_per_step(options, memory)
    limits = page_limits(config, options, memory, page_bytes)
    pages = memory_account(config, options, memory).pages(page_bytes, least=limits.least, most=limits.most)
    model.allocate_kv(pages)
    if observer is not None:
        observer.allocate(pages)
    eos = tuple(dict.fromkeys((*config.eos_tokens, *(t for t in tokenizer.eos_tokens if t < config.vocab))))
    on_host = model.device.type == "cpu"
    answer_rows = model.plan.limits.batch if separates_steps(model) else 0
    if answer_rows and options.max_seqs > answer_rows:
        raise UsageError(
            f"--deterministic decodes at most {answer_rows} requests at once on {model.arch.name}; "
            f"use --max-seqs {answer_rows}."
        )
    engine_config = EngineConfig(
        pages=pages, page_size=options.page_size, window=config.window, vocab=config.vocab, max_context=context,
        eos_tokens=eos, max_seqs=options.max_seqs, max_rows_per_step=rows,
        max_rows_with_decode=rows_with_decode(options, rows, memory),
        max_rows_in_burst=rows_in_burst(options, rows, memory), max_waiting=options.max_waiting,
        run_ahead=options.run_ahead and not on_host, prefix_cache=options.prefix_cache, host_steps=on_host,
        answer_rows=answer_rows,
    )  # fmt: skip
    runner, sampler = runner_for(model, options, observer, context, rows)
    core = EngineCore(runner, engine_config, tokenizer, proposer)
    tiers = tiers_for(model, runner, options, host_tier(options, memory), label, path)
    if tiers is not None:
        core.attach(tiers)
    if model.spec.kv_dtype == "fp8":
        core.count_saturated(SaturationCount(model.kv_pool()))
    details: dict[str, Any] = {
        "gates": replace(options.gates, layers=model.gates.layers).as_dict(),
        "device": _device_name(model.device),
        "device_id": str(model.device),
        "plan": {
            regime: list(dict.fromkeys(b.phase.name for b in bound)) for regime, bound in model.plan.bound.items()
        },
        "kv": {
            "pages": pages, "page_size": options.page_size, "gib": round(pages * page_bytes / GIB, 3),
            "longest_request": core.scheduler.longest,
        },
        "prefixes": {
            "memory_gib": round(host_tier(options, memory) / GIB, 3),
            "folder": options.prefix_folder,
        },
        "sampler": sampler,
        "max_seqs": options.max_seqs,
        "max_tokens_per_step": rows,
        "max_tokens_beside_decode": engine_config.max_rows_with_decode,
        "max_tokens_in_burst": engine_config.max_rows_in_burst,
    }  # fmt: skip
    info = SourceInfo(label, min(context, core.scheduler.longest), config.vocab, eos, details)
    return core, info, tokenizer


def separates_steps(model: GptOss) -> bool:
    """Whether --deterministic keeps rows of answers apart from rows of prompts: on a GPU, where they take different
    kernels. A CPU has one kernel for both."""
    return model.gates.deterministic == "on" and model.arch.is_gpu


def runner_for(
    model: GptOss, options: EngineOptions, observer: HiddenStateObserver | None, context: int, rows: int
) -> tuple[CpuRunner | DeviceRunner, str]:
    """The runner, and who samples its tokens (with the reason, where torch does on a GPU)."""
    memory = PageMemory([model.kv_pool()] if observer is None else [model.kv_pool(), observer.pool()])
    if model.device.type == "cpu":
        return CpuRunner(model, observer, memory), "host"
    rows = max(rows, options.max_seqs * (options.max_draft + 1))
    blocks = padded_blocks(-(-context // options.page_size))
    sampler = choose_device_sampler(model.device, rows, model.config.vocab)
    graphs: Graphs | None = None
    if options.gates.graphs == "on":
        regime: Regime | None = "batch" if separates_steps(model) else None
        graphs = Graphs(model, blocks, sampler, None if observer is None else observer.tap, regime)
    runner = DeviceRunner(
        model, sampler, observer, graphs, rows=rows, sequences=options.max_seqs, blocks=blocks, memory=memory
    )
    return runner, sampler.name


def tiers_for(
    model: GptOss, runner: CpuRunner | DeviceRunner, options: EngineOptions, memory: int, label: str, path: Path | None
) -> PrefixTiers | None:
    """Host memory and the folder for prefixes, or None if there is neither."""
    assert runner.memory is not None
    page_bytes = runner.memory.page_bytes
    store = None
    if options.prefix_folder is not None and options.prefix_cache:
        if path is None and not label.startswith(RANDOM):
            raise UsageError("--prefix-folder needs a model that is loaded from files, so that it can be recognised.")
        drafts = f"{page_bytes} bytes with {options.gates.speculate}"  # a head that drafts has its part of a page
        layout = PageLayout(prefix_identity(model, path, label, drafts), page_bytes, options.page_size)
        most = PREFIX_DISK if options.prefix_disk is None else options.prefix_disk
        store = PrefixStore(Path(options.prefix_folder).expanduser(), layout, most)
    if store is None and memory < page_bytes:
        return None
    return PrefixTiers(runner, page_bytes, memory, store, doubling_depth=doubling_depth(model.config))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
