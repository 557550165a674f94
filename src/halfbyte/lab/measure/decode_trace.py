"""Clocks read inside the whole-step decode kernel, brought to one time: where a token's time goes without launches.

Every block notes a clock at four marks of six phases of each layer (`StepShape(trace=True)`). `digest` turns these into
microseconds after the last block had finished the layer before; `shares` cuts a step into categories along the last
block, which is the one everybody waits for. Tracing itself costs some percent, so a digest says how long its own step
took. Knows the kernel's format of traces; refuses a trace that is empty.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.cuda.decode.step import DecodeStep
from halfbyte.kernels.cuda.device.host import gpu
from halfbyte.lab.measure.device_timing import Cache, device_us, random_tokens
from halfbyte.model.gpt_oss import GptOss
from halfbyte.ops.rope import rope_table

PHASES = ("qkv", "attention", "o", "gate_up", "down", "head")
MARKS = ("start", "x", "sums", "done")


def trace(d: DecodeStep) -> dict[str, Any]:
    """One traced step of a kernel that is placed and warm."""
    assert d.trace is not None, "the shape was not compiled for tracing"
    for _ in range(3):
        d.run()
    torch.cuda.synchronize()
    d.trace.zero_()
    us = device_us(d.run, 1)
    return digest(d.trace, us)


def digest(trace: Tensor, us: float) -> dict[str, Any]:
    """Per kind of layer, phase and mark: first, mean and last block, in microseconds after the layer before.

    `trace` is int64 [blocks, layers + 1, 32]: clocks at 4 * phase + mark, the global timer at 31."""
    marks, timers = trace[:, :, :24].cpu(), trace[:, :-1, 31].cpu()
    assert bool((timers > 0).all()), "the trace is empty: was the kernel compiled for it?"
    started = int(marks[marks > 0].min())  # both are too large for a double's mantissa
    t = torch.where(marks > 0, marks - started, -1).double()
    clock, timer = t[:, :-1, 0], (timers - timers.min()).double()
    # clocks per nanosecond, of each block: multiprocessors need not run at one clock
    away = timer - timer.mean(1, keepdim=True)
    rates = (away * clock).sum(1) / away.square().sum(1)
    offset = (timer - clock / rates[:, None]).median(1).values
    rate = float(rates.median())
    at = t.view(*t.shape[:2], 6, 4)
    at = torch.where(at >= 0, (at / rates[:, None, None, None] + offset[:, None, None, None]) / 1000, torch.nan)
    ends = _over(at[:, :-1, 4, 3], max)  # of layers
    out: dict[str, Any] = {
        "us": us,
        "clock_ghz": rate,
        "clocks_ghz": [float(rates.min()), float(rates.max())],
        "layers": {},
    }
    for kind, first in (("sliding", 2), ("full", 3)):
        table: dict[str, Any] = {}
        for i, phase in enumerate(PHASES[:5]):
            for j, mark in enumerate(MARKS):
                rows = at[:, first:-1:2, i, j] - ends[first - 1 : -1 : 2][: at[:, first:-1:2].shape[1]]
                table[f"{phase} {mark}"] = [
                    round(float(torch.nanmean(_over(rows, f))), 2) for f in (min, statistics.mean, max)
                ]
        out["layers"][kind] = table
        out["layers"][kind]["layer"] = round(
            float((ends[first::2] - ends[first - 1 : -1 : 2][: len(ends[first::2])]).mean()), 2
        )
    out["head"] = {m: round(float(torch.nan_to_num(at[:, -1, 5, j] - ends[-1]).max()), 2) for j, m in enumerate(MARKS)}
    return out


def _over(rows: Tensor, f: Callable[[list[float]], float]) -> Tensor:
    """f over the blocks that have a value."""
    columns = []
    for column in rows.T:
        values = [float(v) for v in column if v == v]
        columns.append(f(values) if values else float("nan"))
    return torch.tensor(columns, dtype=torch.float64)


def lines(digested: dict[str, Any]) -> Iterator[str]:
    kinds = digested["layers"]
    clocks = f"{digested['clock_ghz']:.4f} GHz {digested['clocks_ghz']}"
    yield f"step {digested['us']:.1f} us at {clocks}; head {digested['head']}"
    yield "us after the last layer's end: first, mean and last block; sliding | full"
    for key in next(iter(kinds.values())):
        if key != "layer":
            yield f"  {key:18} " + " | ".join("{:7.2f} {:7.2f} {:7.2f}".format(*kinds[k][key]) for k in kinds)
    yield f"  layer { ({k: kinds[k]['layer'] for k in kinds}) }"


def shares(digested: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, float]:
    """Category -> microseconds of the traced step, cut at the moments when the last block is done.

    The router has no phase of its own: it is the wait between o's end and the moment experts know what to read. What
    the layers and the head leave over (embedding, the kernel's start and end) is "other"."""
    total: dict[str, float] = {}
    for kind in kinds:
        marks = digested["layers"][kind]

        def last(*names: str, marks: dict[str, Any] = marks) -> float:
            ends = [marks[n][2] for n in names if marks[n][2] == marks[n][2]]
            return float(max(ends))

        at, cuts = 0.0, {
            "qkv + rope/KV": last("qkv done"),
            "attention": last("attention sums", "attention done"),
            "o": last("o done"),
            "router": last("gate_up x"),
            "MoE": float(marks["layer"]),
        }  # fmt: skip
        for name, end in cuts.items():
            end = max(at, end)
            total[name] = total.get(name, 0.0) + end - at
            at = end
    total["lm_head"] = float(max(digested["head"].values()))
    total["other"] = max(0.0, float(digested["us"]) - sum(total.values()))
    return total


def traced_step(model: GptOss, cache: Cache, context: int) -> DecodeStep:
    """The model's own decode kernel, compiled for tracing, at the end of every sequence of the cache."""
    from halfbyte.kernels.cuda.decode.phase import shape_of, step_weights  # only where that kernel runs

    rows = int(cache.full.shape[0])
    shape = replace(shape_of(model.spec, model.arch, rows), trace=True)
    binding = model.binding(None)
    positions = cache.blocks * model.spec.page_size
    rope = torch.cat(rope_table(*binding.rope, torch.arange(positions)), -1).contiguous().to(model.device)
    d = DecodeStep(
        shape, step_weights(binding), gpu(), pool=binding.kv_pool(), tables=(cache.sliding, cache.full), rope=rope,
        norm_eps=model.spec.norm_eps, swiglu_limit=model.spec.swiglu_limit, swiglu_alpha=model.spec.swiglu_alpha,
    )  # fmt: skip
    d.tokens.copy_(random_tokens(model, rows, 1))
    d.positions.fill_(context)
    return d
