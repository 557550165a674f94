"""Sampling a token on a GPU (cuda/sampling): compared with the sampler in torch token by token, then timed beside it.

    python -m bench.kernels.sampling --rows 1,8,32,64

Logits of gpt-oss's vocabulary, steep (a trained model's: few tokens hold most of the mass) and flat (random weights': a
top-p of 0.9 keeps half of the vocabulary). Every sample is a replay of a graph of `--launches` launches, over logits
that lie in L2, as they do behind the output layer. One token that is not torch's refuses the figure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.kernels import runner
from halfbyte.engine.sampling.race import sample_rows
from halfbyte.kernels.cuda.sampling import sampler
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Check, Result, figure

VOCAB = 201_088
GREEDY = "greedy"
SETTINGS = {  # temperature, top-k, top-p, min-p
    "temperature 1": (1.0, 0, 1.0, 0.0), "top-p 0.9": (1.0, 0, 0.9, 0.0), "top-k 40": (1.0, 40, 1.0, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05), "top-k 50, top-p 0.8": (0.8, 50, 0.8, 0.0),
}  # fmt: skip
DEVIATION = {"steep": 3.0, "flat": 0.5}  # of the logits
TORCH_LAUNCHES = 2


def argmax_in_torch(logits: Tensor, results: Tensor) -> None:
    value, token = logits.max(-1)
    results[:, 0].copy_(token)
    results.view(torch.float32)[:, 1].copy_(value)


class Inputs:
    """Fresh logits and keys, and results that hold no token yet."""

    def __init__(self, rows: int, logits: str, setting: str) -> None:
        self.logits = torch.randn((rows, VOCAB), device="cuda") * DEVIATION[logits]
        self.keys = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
        self.results = torch.full((rows, 2), -1, dtype=torch.int32, device="cuda")
        values = SETTINGS.get(setting, (0.0, 0, 1.0, 0.0))
        self.filtered = values[1:] != (0, 1.0, 0.0)
        self.settings = torch.tensor(values, device="cuda").expand(rows, 4).contiguous()

    def expected(self, setting: str) -> Tensor:
        if setting == GREEDY:
            return self.logits.argmax(-1)
        return sample_rows(self.logits, self.settings, self.keys, filtered=self.filtered)


def measure(cell: Cell, rows: int, logits: str, setting: str, launches: int, repeats: int) -> Result:
    on_device, inputs = sampler.make(rows, VOCAB, torch.device("cuda")), Inputs(rows, logits, setting)
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
    inputs = Inputs(rows, "steep", setting)
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

    return runner.graph_us(several, repeats, launches)


def main() -> int:
    parser = runner.arguments(__doc__)
    parser.add_argument("--rows", type=runner.numbers, default=[1, 8, 32, 64])
    parser.add_argument("--launches", type=int, default=20, help="in one graph")
    args = runner.begin(parser)
    sources = receipts.hashes(receipts.sources_of([Path(sampler.__file__)]))
    receipt = runner.Receipt("bench/kernels/sampling.py", args.out, sources)
    for rows in args.rows:
        for logits in DEVIATION:
            for setting in (GREEDY, *SETTINGS):
                cell = Cell("kernel", path="cuda sampler", shape={"rows": rows, "logits": logits, "setting": setting})
                receipt.measure(cell, partial(measure, cell, rows, logits, setting, args.launches, args.repeats))
    for rows in args.rows:  # last, so that nothing above is lost where torch cannot be captured
        for setting in (GREEDY, "temperature 1", "top-p 0.9"):
            cell = Cell("kernel", path="torch", shape={"rows": rows, "logits": "steep", "setting": setting})
            receipt.measure(cell, partial(measure_torch, cell, rows, setting, args.repeats))
    return receipt.end()


if __name__ == "__main__":
    sys.exit(main())
