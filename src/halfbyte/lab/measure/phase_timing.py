"""Each phase of a plan on its own, at any number of rows: time, achieved bandwidth or FLOP/s, share of the ceiling.

A step runs once to leave every phase its real inputs; then all layers of one phase are captured in a graph and
replayed, so a phase meets other weights in every layer, as in a step, and its launches follow each other without the
host. What cannot be captured is timed eagerly and says so. Results are not compared here: check the model before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.lab.machine import device_roof
from halfbyte.lab.measure.device_timing import (
    decode_step,
    device_us,
    experts_touched,
    fill,
    prefill_step,
    random_tokens,
)
from halfbyte.lab.result import Cell, FigureCeiling, Result, figure, measure_cell
from halfbyte.model.gpt_oss import GptOss
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import uncounted
from halfbyte.plan.plan import Bound
from halfbyte.plan.step import Step
from halfbyte.roofline import Gpu, Work, step_work

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 320, 512, 1024, 2048, 4096)
LEAST_US = 20e3  # of replays in one sample
SAMPLES = 5
WEIGHTS = {"qkv", "o", "moe", "lm_head"}  # operations that read more weights than a cache holds


def step_of(model: GptOss, rows: int, context: int) -> tuple[Step, int, int, int]:
    """(step, sequences, new rows of each, length with them): streams that decode at `context`, or one prompt."""
    if rows <= model.plan.limits.batch:
        return decode_step(model, fill(model, rows, context + 64), context, rows), rows, 1, context + 1
    return prefill_step(model, fill(model, 1, rows), random_tokens(model, rows, rows), 0), 1, rows, rows


def time_phases(model: GptOss, cell: Cell, rows: int, context: int) -> list[Result]:
    """One result per phase of the regime that serves so many rows, and one of all together."""
    step, sequences, new, length = step_of(model, rows, context)
    gpu = device_roof(model.device)
    touched = experts_touched(model, step)
    experts = None if touched is None else touched[0]
    work = step_work(
        model.config, model.spec.formats, sequences, length, new=new, kv_dtype=model.spec.kv_dtype,
        experts_touched=experts,
    )  # fmt: skip
    inputs: list[Activations] = []
    acts = Activations()
    regime = model.plan.regime(step)
    bound = model.plan.bound[regime]
    with uncounted():
        for b in bound:
            inputs.append(acts.copy())
            b.launch(step, acts)
    torch.cuda.synchronize()
    shape = {"rows": rows, "context": length, "regime": regime}
    step_cell = replace(cell, kind="phase", path="all phases", shape=shape)
    if not bool(torch.isfinite(acts.logits).all()):
        return [Result(step_cell, refused="the logits are not numbers")]
    results, total = [], 0.0
    for name in dict.fromkeys(b.phase.name for b in bound):
        mine = [(b, i) for b, i in zip(bound, inputs) if b.phase.name == name]
        us, how = _time(step, mine)
        covers = mine[0][0].phase.covers
        floor = sum((work[op] for op in covers), Work())
        detail = {"launches": len(mine), "timed": how, "experts_per_layer": experts, **rates(floor, us * 1e-6, gpu)}
        # What only moves activations may find them in a cache, and has no ceiling alone.
        ceiling = FigureCeiling(floor.seconds(gpu) * 1e6, f"{gpu.name}: {gpu.note}") if WEIGHTS & set(covers) else None
        phase_cell = replace(step_cell, path=name)
        results.append(measure_cell(phase_cell, partial(timed, phase_cell, us, ceiling, detail)))
        total += us
    everything = sum(work.values(), Work())
    ceiling = FigureCeiling(everything.seconds(gpu) * 1e6, f"{gpu.name}: {gpu.note}")
    detail = {"launches": len(bound), "experts_per_layer": experts, **rates(everything, total * 1e-6, gpu)}
    results.append(measure_cell(step_cell, partial(timed, step_cell, total, ceiling, detail)))
    return results


def timed(cell: Cell, us: float, ceiling: FigureCeiling | None, detail: dict[str, Any]) -> Result:
    return Result(cell, (figure("time", "us", us, ceiling),), detail=detail)


def rates(work: Work, seconds: float, gpu: Gpu) -> dict[str, Any]:
    """What was achieved of what must be moved and computed."""
    return {
        "tb_per_s": work.bytes / seconds / 1e12,
        "tflop_per_s": work.flops / seconds / 1e12,
        "bound": work.bound(gpu),
    }


def _time(step: Step, launches: Sequence[tuple[Bound, Activations]]) -> tuple[float, str]:
    """Microseconds of all launches, and how they were timed."""

    def work() -> None:
        with uncounted():
            for b, inputs in launches:
                b.launch(step, inputs.copy())

    work()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    except (RuntimeError, HalfbyteError) as e:
        torch.cuda.synchronize()
        return _sample(work), f"eagerly: {str(e).splitlines()[0][:120]}"
    return _sample(graph.replay), "in a graph"


def _sample(work: Callable[[], object]) -> float:
    work()
    count = max(1, int(LEAST_US / max(device_us(work, 1), 1.0)))
    return statistics.median(device_us(work, count) for _ in range(SAMPLES))


def not_native(model: GptOss) -> list[str]:
    """Why the plan is not the native path: a reference, or machine code without the instruction a phase promises.

    CUDA phases are compiled for this architecture by name and have no other body; Triton's are compiled again here and
    their machine code is read."""
    from halfbyte.kernels import prove

    reasons = []
    provable = set(prove.provable())
    for phase in {b.phase.name: b.phase for bound in model.plan.bound.values() for b in bound}.values():
        if phase.reference:
            reasons.append(f"{phase.name} is the reference")
        elif phase.name in provable:
            for e in prove.prove(phase.name, model.arch.name, model.spec, model.gates):
                reasons += [f"{phase.name} {e.kernel}: {problem}" for problem in e.problems]
    return reasons
