"""Sampling a token on a GPU (cuda/sampling): compared with the sampler in torch token by token, then timed beside it.

    python -m bench run sampling --set rows=1,8,32,64

Logits of gpt-oss's vocabulary, steep (a trained model's: few tokens hold most of the mass) and flat (random weights': a
top-p of 0.9 keeps half of the vocabulary). Every sample is a replay of a graph of `launches` launches, over logits
that lie in L2, as they do behind the output layer. One token that is not torch's refuses the figure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.kernels import timing
from bench.measurement import Run, measurement, option
from halfbyte.engine.sampling.race import sample_rows
from halfbyte.kernels.cuda.sampling import sampler
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.ops.sampling_settings import SamplingSettings, is_filtered, row_of

VOCAB = 201_088
GREEDY = "greedy"
SETTINGS = {
    "temperature 1": SamplingSettings(), "top-p 0.9": SamplingSettings(top_p=0.9),
    "top-k 40": SamplingSettings(top_k=40), "min-p 0.05": SamplingSettings(min_p=0.05),
    "top-k 50, top-p 0.8": SamplingSettings(0.8, 50, 0.8),
}  # fmt: skip
DEVIATION = {"steep": 3.0, "flat": 0.5}  # of the logits
TORCH_LAUNCHES = 2


def argmax_in_torch(logits: Tensor, results: Tensor) -> None:
    value, token = logits.max(-1)
    results[:, 0].copy_(token)
    results.view(torch.float32)[:, 1].copy_(value)


class SamplingInputs:
    """Fresh logits and keys, and results that hold no token yet."""

    def __init__(self, rows: int, logits: str, setting: str) -> None:
        self.logits = torch.randn((rows, VOCAB), device="cuda") * DEVIATION[logits]
        self.keys = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
        self.results = torch.full((rows, 2), -1, dtype=torch.int32, device="cuda")
        values = SETTINGS.get(setting, SamplingSettings(temperature=0.0))
        self.filtered = is_filtered(values)
        self.settings = torch.tensor(row_of(values), device="cuda").expand(rows, -1).contiguous()

    def expected(self, setting: str) -> Tensor:
        if setting == GREEDY:
            return self.logits.argmax(-1)
        return sample_rows(self.logits, self.settings, self.keys, filtered=self.filtered)


def measure(cell: Cell, rows: int, logits: str, setting: str, launches: int, repeats: int) -> Result:
    on_device, inputs = sampler.make(rows, VOCAB, torch.device("cuda")), SamplingInputs(rows, logits, setting)
    if setting == GREEDY:
        work = partial(on_device.argmax, inputs.logits, inputs.results)
    else:
        on_device.argmax(inputs.logits, inputs.results)
        work = partial(
            on_device.sample, inputs.logits, inputs.settings, inputs.keys, inputs.results, filtered=inputs.filtered
        )
    work()
    wrong = int((inputs.results[:, 0] != inputs.expected(setting)).sum())
    check = Check("tokens are those of torch", wrong == 0, float(wrong), 0.0, f"{wrong} of {rows} tokens differ")
    if wrong:
        return Result(cell, checks=(check,))
    return Result(cell, (figure("time", "us", repeated_us(work, launches, repeats)),), (check,))


def measure_torch(cell: Cell, rows: int, setting: str, repeats: int) -> Result:
    """What the same takes in torch, for comparison."""
    inputs = SamplingInputs(rows, "steep", setting)
    work: Callable[[], object]
    if setting == GREEDY:
        work = partial(argmax_in_torch, inputs.logits, inputs.results)
    else:
        work = partial(sample_rows, inputs.logits, inputs.settings, inputs.keys, filtered=inputs.filtered)
    return Result(cell, (figure("time", "us", repeated_us(work, TORCH_LAUNCHES, repeats)),))


def repeated_us(work: Callable[[], object], launches: int, repeats: int) -> list[float]:
    def several() -> None:
        for _ in range(launches):
            work()

    return timing.graph_us(several, repeats, launches)


@dataclass(frozen=True)
class Options:
    rows: tuple[int, ...] = (1, 8, 32, 64)
    launches: int = option(20, "in one graph")
    repeats: int = timing.REPEATS


@measurement("sampling", needs=("gpu",), seconds=60)
def sampling(run: Run, options: Options) -> None:
    timing.begin()
    run.sources |= receipts.hashes(receipts.sources_of([Path(sampler.__file__)]))
    for rows in options.rows:
        for logits in DEVIATION:
            for setting in (GREEDY, *SETTINGS):
                cell = Cell("kernel", path="cuda sampler", shape={"rows": rows, "logits": logits, "setting": setting})
                run.measure(cell, partial(measure, cell, rows, logits, setting, options.launches, options.repeats))
    for rows in options.rows:  # last, so that nothing above is lost where torch cannot be captured
        for setting in (GREEDY, "temperature 1", "top-p 0.9"):
            cell = Cell("kernel", path="torch", shape={"rows": rows, "logits": "steep", "setting": setting})
            run.measure(cell, partial(measure_torch, cell, rows, setting, options.repeats))
