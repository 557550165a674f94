"""What a client of the engine sees: time to first token and total speed at a concurrency, prompts all different.

Runs the engine's own core in this process (scheduler, pages, graphs, device sampling), every request submitted at
once; no HTTP and no tokenizer in the way. Greedy, nothing stops early, the prefix cache has nothing to hit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.lab.machine import device_roof
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.roofline import decode_ceiling, prefill_ceiling


def percentile(values: Sequence[float], p: float) -> float:
    """The smallest value that at least p percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(p * 100) // 10000) - 1)]


@dataclass
class Served:
    """Seconds since submission, per request."""

    first: list[float]
    last: list[float]
    tokens: list[int]

    def figures(self) -> dict[str, float]:
        start, end = min(self.first), max(self.last)
        generated = sum(n - 1 for n in self.tokens)
        return {
            "tokens_per_s": generated / (end - start) if end > start else 0.0,
            "ttft_p50_ms": percentile(self.first, 50) * 1e3,
            "ttft_p99_ms": percentile(self.first, 99) * 1e3,
            "ttft_mean_ms": statistics.fmean(self.first) * 1e3,
        }


def drive(core: EngineCore, prompts: Sequence[Sequence[int]], tokens: int, clock: Callable[[], float]) -> Served:
    """All prompts at once, until each has its tokens."""
    places: dict[str, int] = {}
    start = clock()
    served = Served([0.0] * len(prompts), [0.0] * len(prompts), [0] * len(prompts))
    for i, prompt in enumerate(prompts):
        request = Request(list(prompt), SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        places[request.id] = i
        core.submit(request)
    while core.has_work:
        for id, delta in core.step():
            i = places[id]
            assert delta.finish in (None, "length"), (delta.finish, delta.error)
            if delta.tokens:
                now = clock() - start
                if not served.tokens[i]:
                    served.first[i] = now
                served.last[i] = now
                served.tokens[i] += len(delta.tokens)
    assert all(n == tokens for n in served.tokens), served.tokens
    return served


def serve(
    model: GptOss, tokenizer: Tokenizer, concurrency: int, prompt: int, tokens: int, rounds: int = 3
) -> dict[str, Any]:
    """`rounds` batches of requests after one that warms up; percentiles over all requests."""
    page = model.spec.page_size
    context = -(-(prompt + tokens + page) // page) * page
    pages = 1 + concurrency * 2 * (context // page + 2)
    options = EngineOptions(
        gates=model.gates, max_seqs=concurrency, max_context=context, max_tokens=max(2048, concurrency),
        kv_gib=(pages + 1) * model.page_bytes / (1 << 30), prefix_cache=False,
    )  # fmt: skip
    core, _, _ = core_for(model, tokenizer, options)
    rates: list[float] = []
    first: list[float] = []
    g = torch.Generator().manual_seed(concurrency)
    for i in range(rounds + 1):
        prompts = torch.randint(0, model.config.vocab, (concurrency, prompt), generator=g).tolist()
        served = drive(core, prompts, tokens, time.perf_counter)
        if i:
            rates.append(served.figures()["tokens_per_s"])
            first += served.first
    core.check()
    core.close()
    roof = device_roof(model.device)
    formats, kv = model.spec.formats, model.spec.kv_dtype
    ceiling = decode_ceiling(roof, model.config, formats, prompt + tokens // 2, concurrency, kv).tokens_per_second
    rate = statistics.median(rates)
    least = prompt / prefill_ceiling(roof, model.config, formats, prompt).tokens_per_second
    return {
        "test": f"engine tg{tokens}, prompts of {prompt}, c={concurrency}", "tokens_per_s": rate,
        "spread": max(rates) - min(rates), "ceiling": ceiling, "share": rate / ceiling, "valid": rate < ceiling,
        "ttft_floor_ms": least * 1e3, "ttft_p50_ms": percentile(first, 50) * 1e3,
        "ttft_p99_ms": percentile(first, 99) * 1e3, "requests": len(first),
    }  # fmt: skip
