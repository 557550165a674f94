"""Each phase of a plan on its own, at any number of rows: time, achieved bandwidth or FLOP/s, share of the ceiling.

A step runs once to leave every phase its real inputs; then all layers of one phase are captured in a graph and
replayed, so a phase meets other weights in every layer, as in a step, and its launches follow each other without the
host. What cannot be captured is timed eagerly and says so. Results are not compared here: check the model before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
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
from halfbyte.model.gpt_oss import GptOss
from halfbyte.plan.activations import Activations
from halfbyte.plan.plan import Bound
from halfbyte.plan.step import Step
from halfbyte.roofline import Gpu, Work, step_work

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 320, 512, 1024, 2048, 4096)
LEAST_US = 20e3  # of replays in one sample
SAMPLES = 5


def step_of(model: GptOss, rows: int, context: int) -> tuple[Step, int, int, int]:
    """(step, sequences, new rows of each, length with them): streams that decode at `context`, or one prompt."""
    if rows <= model.plan.limits.batch:
        return decode_step(model, fill(model, rows, context + 64), context, rows), rows, 1, context + 1
    return prefill_step(model, fill(model, 1, rows), random_tokens(model, rows, rows), 0), 1, rows, rows


def phases(model: GptOss, rows: int, context: int) -> list[dict[str, Any]]:
    """One entry per phase of the regime that serves so many rows."""
    step, sequences, new, length = step_of(model, rows, context)
    gpu = device_roof(model.device)
    touched = experts_touched(model, step)
    work = step_work(
        model.config, model.spec.formats, sequences, length, new=new, kv_dtype=model.spec.kv_dtype,
        experts_touched=None if touched is None else touched[0],
    )  # fmt: skip
    inputs: list[Activations] = []
    acts = Activations()
    regime = model.plan.regime(step)
    bound = model.plan.bound[regime]
    for b in bound:
        inputs.append(acts.copy())
        b.launch(step, acts)
    torch.cuda.synchronize()
    assert bool(torch.isfinite(acts.logits).all()), "the logits are not numbers"
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys(b.phase.name for b in bound):
        mine = [(b, i) for b, i in zip(bound, inputs) if b.phase.name == name]
        us, how = _time(step, mine)
        floor = sum((work[op] for op in mine[0][0].phase.covers), Work())
        found.append(
            {"phase": name, "rows": rows, "regime": regime, "launches": len(mine), "us": us, "timed": how}
            | rate(floor, us * 1e-6, gpu)
        )
    whole = sum(work.values(), Work())
    total: float = sum(row["us"] for row in found)
    entry = {"phase": "sum", "rows": rows, "regime": regime, "launches": len(bound), "us": total, "timed": ""}
    found.append(entry | rate(whole, total * 1e-6, gpu))
    for row in found:
        row["experts_per_layer"] = None if touched is None else touched[0]
    return found


def rate(work: Work, seconds: float, gpu: Gpu) -> dict[str, Any]:
    """Achieved figures and share of what the bound allows. Above it there is no figure: phases that run again and again
    may find in the caches what a step reads from memory."""
    bound, share = work.bound(gpu), work.seconds(gpu) / seconds
    if share > 1:
        reason = f"{share:.0%} of the {bound} bound of {gpu.name}: not all of it was really read or computed"
        return {"tb_per_s": None, "tflop_per_s": None, "bound": bound, "share": None, "refused": reason}
    return {
        "tb_per_s": work.bytes / seconds / 1e12,
        "tflop_per_s": work.flops / seconds / 1e12,
        "bound": bound,
        "share": share,
    }


def _time(step: Step, launches: Sequence[tuple[Bound, Activations]]) -> tuple[float, str]:
    """Microseconds of all launches, and how they were timed."""

    def work() -> None:
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
