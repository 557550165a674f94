"""`python -m bench print format-costs`: the error of every format and scale rule on Gaussian numbers (numerics.md).

Measures what quantising costs, nothing else: no operation, no model. The same seed gives the same table.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from halfbyte.formats import FORMATS, dequantize, quantize

ROWS, K, SEED = 1024, 2880, 0


class FormatCost(NamedTuple):
    format: str
    rule: str
    bits: float
    relative: float  # ‖x − x'‖ / ‖x‖
    worst: float  # largest |x − x'| as a share of its group's largest |x|

    @property
    def decibels(self) -> float:
        return -20 * math.log10(self.relative)


def measure() -> list[FormatCost]:
    x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(SEED))
    rows = []
    for spec in FORMATS.values():
        amax = x.view(-1, spec.group).abs().amax(-1, keepdim=True)
        for rule in spec.rules:
            error = dequantize(quantize(x, spec.name, rule)) - x
            relative = float(error.norm() / x.norm())
            worst = float((error.view(-1, spec.group).abs() / amax).max())
            rows.append(FormatCost(spec.name, rule, spec.bits_per_weight, relative, worst))
    return rows


def table(rows: list[FormatCost]) -> list[str]:
    lines = [
        "| format | rule | bits per weight | ‖error‖ / ‖x‖ | SNR, dB | worst element / group amax |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.format} | {r.rule} | {r.bits} | {r.relative:.4f} | {r.decibels:.1f} | {r.worst:.4f} |" for r in rows
    ]
    return lines
