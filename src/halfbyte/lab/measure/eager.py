"""llama-bench style figures of the model itself: ppN and tgN at depth D, each beside its physical ceiling.

`ppN`: prompt tokens per second over N tokens. `tgN`: generated tokens per second over N, the first excluded.
`@ dD`: with D tokens already in the cache, untimed. Every run uses other random tokens. A figure above its own
ceiling is marked invalid and has no number.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from halfbyte import roofline
from halfbyte.lab.machine import device_roof, limit_threads, synchronize
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.ops.sampling import greedy


@dataclass(frozen=True)
class Figure:
    test: str
    tokens_per_second: float | None  # None: invalid
    spread: float
    runs: int
    ceiling: float | None
    ceiling_from: str
    experts_per_layer: float | None = None
    valid: bool = True
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(
    model: GptOss,
    prompts: Sequence[int],
    generated: Sequence[int],
    depths: Sequence[int],
    runs: int,
    *,
    chunk: int = 512,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Figure]:
    gpu = device_roof(model.device)
    limit_threads(model.device, model.weights.nbytes)
    figures = []
    for depth in depths:
        for n in prompts:
            progress(f"pp{n}" + (f" @ d{depth}" if depth else ""))
            rates = [_prefill(model, n, depth, chunk, seed) for seed in range(runs + 1)][1:]
            ceiling = roofline.prefill_ceiling(gpu, model.config, model.spec.formats, n, depth).tokens_per_second
            figures.append(_figure(f"pp{n}", depth, rates, ceiling, gpu, None))
        for n in generated:
            progress(f"tg{n}" + (f" @ d{depth}" if depth else ""))
            measured = [_decode(model, n, depth, chunk, seed) for seed in range(runs + 1)][1:]
            ceiling = roofline.decode_ceiling(
                gpu, model.config, model.spec.formats, depth + n // 2, 1, model.spec.kv_dtype
            ).tokens_per_second
            experts = statistics.fmean(e for _, e in measured)
            figures.append(_figure(f"tg{n}", depth, [r for r, _ in measured], ceiling, gpu, experts))
    return figures


def _tokens(model: GptOss, n: int, seed: int) -> list[int]:
    return torch.randint(0, model.config.vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def _fill(solo: SingleSequence, tokens: Sequence[int], chunk: int) -> torch.Tensor:
    logits = torch.empty(0)
    for i in range(0, len(tokens), chunk):
        logits = solo.feed(tokens[i : i + chunk])
    return logits


def _prefill(model: GptOss, n: int, depth: int, chunk: int, seed: int) -> float:
    solo = SingleSequence(model, depth + n)
    _fill(solo, _tokens(model, depth, seed), chunk)
    tokens = _tokens(model, n, seed + 1000)
    synchronize(model.device)
    start = time.perf_counter()
    int(greedy(_fill(solo, tokens, chunk)[0]))
    return n / (time.perf_counter() - start)


def _decode(model: GptOss, n: int, depth: int, chunk: int, seed: int) -> tuple[float, float]:
    """(tokens/s over n - 1 intervals, mean distinct experts per layer and step)."""
    solo = SingleSequence(model, depth + n + 1)
    logits = _fill(solo, _tokens(model, max(depth, 1), seed), chunk)
    token = int(greedy(logits[0]))
    start = time.perf_counter()
    for _ in range(n - 1):
        token = int(greedy(solo.feed([token])[0]))
    seconds = time.perf_counter() - start
    return (n - 1) / seconds, float(model.config.top_k)  # one row always touches top_k experts


def _figure(
    name: str, depth: int, rates: list[float], ceiling: float, gpu: roofline.Gpu, experts: float | None
) -> Figure:
    mean = statistics.fmean(rates)
    spread = statistics.stdev(rates) if len(rates) > 1 else 0.0
    label = name + (f" @ d{depth}" if depth else "")
    if mean > ceiling:
        reason = f"{mean:.1f} t/s is above the ceiling of {ceiling:.1f}: something was not really read or computed"
        return Figure(label, None, 0.0, len(rates), ceiling, gpu.note, experts, False, reason)
    return Figure(label, mean, spread, len(rates), ceiling, f"{gpu.name}: {gpu.note}", experts)


def table(figures: Sequence[Figure]) -> list[Mapping[str, str]]:
    rows: list[Mapping[str, str]] = []
    for f in figures:
        share = f"{100 * f.tokens_per_second / f.ceiling:.1f} %" if f.tokens_per_second and f.ceiling else ""
        rows.append(
            {
                "test": f.test,
                "t/s": "INVALID" if f.tokens_per_second is None else f"{f.tokens_per_second:.2f} ± {f.spread:.2f}",
                "ceiling t/s": f"{f.ceiling:.1f}" if f.ceiling else "",
                "share": share,
            }
        )
    return rows
