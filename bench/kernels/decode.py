"""The decode step (cuda.decode_step) on a GPU at true shapes: compared with its oracle, then timed.

    python -m bench run decode-kernel --set models=120b --set contexts=2048 --set rows=1
    python -m bench run decode-kernel --set models=120b --set "variants=nap=0;workers=15+ahead=9" --set layers=12

Weights are random bytes of the full size (61 GB of experts for 120b), so nothing sits in the L2 cache; routing is
spread. In front of every figure, in its format, for its rows and at its context, the same build with two layers is
compared with float32 torch on the same bytes: every value of each layer, the choice of experts, the KV cache, the
logits and the token (bench.checks.decode_check); then the build that is timed writes the same bits as the
compared one. What differs is not timed. Experts are counted in the last layer of timed steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.checks import decode_case
from bench.checks.decode_case import DecodeCase, place_rows, random_weights, with_dense_formats
from bench.checks.decode_check import DEPTH, at_depth, check_decode, experts_of_last_step, same_as_timed
from bench.kernels import timing
from bench.measurement import Row, Run, measurement, option
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.decode.step import DecodeStep, StepWeights
from halfbyte.lab import receipts
from halfbyte.lab.levels.verdict import Verdict
from halfbyte.lab.measure import decode_trace
from halfbyte.lab.predict import KERNEL, STEP, formats_of
from halfbyte.lab.result import Cell, FigureCeiling, Result, figure
from halfbyte.model.config import NAMED
from halfbyte.plan.stopped import stop_reason
from halfbyte.roofline import decode_ceiling

STEPS = 24  # graph replays in a sample, tokens fed back
VARIANT_CONTEXT, VERIFY_CONTEXT = 2048, 600
Changes = dict[str, Any]


def short_case(shape: StepShape, weights: StepWeights, context: int) -> DecodeCase:
    """Two of the model's layers with a cache of their own, for comparisons."""
    layers = list(weights.layers)[:DEPTH]
    two = at_depth(shape, len(layers))
    return DecodeCase.make(two, replace(weights, layers=layers), context, shape.rows)


def compare(shape: StepShape, case: DecodeCase, context: int) -> list[Verdict]:
    """Every comparison that a figure of `shape` at `context` rests on. `case` holds all layers of the model."""
    short = short_case(shape, case.weights, context)
    verdicts = [check_decode(shape, short, context)]
    if shape.rows > 1:  # rows of one sequence see each other, as when drafts are verified
        together = short_case(shape, case.weights, VERIFY_CONTEXT)
        verdicts.append(check_decode(shape, together, VERIFY_CONTEXT, [0] * shape.rows))
    return verdicts


def time_steps(step: DecodeStep, context: int, repeats: int, steps: int = STEPS) -> tuple[list[float], float]:
    """Microseconds a step, one sample for `steps` replays with tokens fed back; and the distinct experts of the last
    layer, mean over the last steps of the samples."""
    place_rows(step, context)
    graph = timing.captured(step.run)
    samples, experts = [], []
    for i in range(repeats + timing.WARM_UP):
        place_rows(step, context)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(steps):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= timing.WARM_UP:
            samples.append(start.elapsed_time(end) * 1e3 / steps)
            experts.append(experts_of_last_step(step))
    return samples, statistics.fmean(experts)


def speed(cell: Cell, step: DecodeStep, verdicts: Sequence[Verdict], context: int, repeats: int) -> Result:
    """The figures of one cell, or its refusal."""
    checks = tuple(v.as_check() for v in verdicts)
    if not all(c.ok for c in checks):
        return Result(cell, checks=checks)
    shape = step.shape
    try:
        samples, experts = time_steps(step, context, repeats)
    except Exception as error:
        raise RuntimeError(f"{error}; {stop_reason() or 'no wait was given up'}") from error
    model = NAMED[cell.model.partition(",")[0]]
    config = model.with_(layers=shape.layers, layer_kinds=model.layer_kinds[: shape.layers])
    gpu = timing.roof()
    formats = formats_of(str(cell.shape["formats"]))
    ceiling = decode_ceiling(gpu, config, formats, context, shape.rows, shape.kv, experts)
    source = f"{gpu.name}: read bandwidth in roofline.py"
    rates = [shape.rows * 1e6 / us for us in samples]
    figures = (
        figure("speed", "tok/s", rates, FigureCeiling(ceiling.tokens_per_second, source)),
        figure(STEP, "us", samples),
        figure("experts of a layer", "experts", experts),
    )
    return Result(cell, figures, checks)


def trace(cell: Cell, case: DecodeCase, shape: StepShape, context: int) -> Result:
    """Where a step's time goes, by clocks read inside the kernel (halfbyte.lab.measure.decode_trace)."""
    step = case.step(replace(shape, trace=True))
    place_rows(step, context)
    phases = decode_trace.trace(step)
    print("\n".join(decode_trace.lines(phases)), flush=True)
    return Result(cell, detail={"trace": phases})


def parse_changes(text: str) -> list[Changes]:
    """'nap=0;workers=15+ahead=9;define=X=1': fields of StepShape, or definitions for the compiler."""
    variants: list[Changes] = []
    for part in filter(None, text.split(";")):
        pairs = dict(p.split("=", 1) for p in part.split("+"))
        define = pairs.get("define")
        variants.append({"defines": (define,)} if define else {k: int(v) for k, v in pairs.items()})
    return variants


def measure_formats(
    run: Run,
    options: Options,
    model: str,
    formats: str,
    base: Changes,
    variants: Sequence[Changes],
    weights: StepWeights,
) -> None:
    """Every cell of one model in one set of formats."""
    contexts_of = {
        rows: options.contexts if rows == 1 else options.row_contexts or options.contexts for rows in options.rows
    }
    longest = max(VARIANT_CONTEXT, *(c for contexts in contexts_of.values() for c in contexts))
    case = DecodeCase.make(decode_case.shape_of(model, formats, **base), weights, longest, max(options.rows))
    name = f"{model}, {options.layers} layers" if options.layers else model  # a model cut short is not that model

    def measure(changes: Changes, rows: int, context: int, **more: str) -> None:
        kv = {} if options.kv == "bf16" else {"kv": options.kv}
        cell = Cell(
            "decode", name, path=KERNEL, shape={"formats": formats, "rows": rows, "context": context} | kv | more
        )
        step = case.step(decode_case.shape_of(model, formats, rows, **base | changes))
        verdicts = [*compare(step.shape, case, context), same_as_timed(step, case, context)]
        run.measure(cell, partial(speed, cell, step, verdicts, context, options.repeats))

    for rows, contexts in contexts_of.items():
        for context in contexts:
            measure({}, rows, context)
    if 1 not in options.rows:
        return
    for changes in variants:
        measure(changes, 1, VARIANT_CONTEXT, variant=str(changes))
    if options.trace:
        cell = Cell("decode", name, path=KERNEL, shape={"formats": formats, "rows": 1, "context": VARIANT_CONTEXT})
        shape = decode_case.shape_of(model, formats, **base)
        run.measure(cell, partial(trace, cell, case, shape, VARIANT_CONTEXT))


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(("120b", "20b"), "shapes")
    formats: tuple[str, ...] = option(("mxfp4", "q8", "checkpoint"), "of qkv, o and lm_head")
    contexts: tuple[int, ...] = (512, 2048, 8192, 32768)
    rows: tuple[int, ...] = (1, 2, 4)
    row_contexts: tuple[int, ...] = option((2048,), "contexts of more than one row; empty: contexts")
    kv: str = option("bf16", "format of the cache: bf16 or fp8")
    layers: int = option(0, "so many layers only, for experiments; 0: all")
    variants: str = option("", "experiments at one row: 'nap=0;workers=15+ahead=9;define=X=1'")
    trace: bool = option(True, "also where a step's time goes")
    repeats: int = timing.REPEATS


STEP_ALONE: dict[str, Any] = {
    "kind": "decode", "figure": "speed", "path": KERNEL, "over": "formats", "values": ("mxfp4", "q8", "checkpoint"),
}  # fmt: skip


@measurement(
    "decode-kernel", needs=("gpu",), seconds=200,
    rows=(
        Row("decode step alone @ 2k, 120b: MXFP4 / q8 / checkpoint", model="120b",
            shape={"rows": 1, "context": 2048}, **STEP_ALONE),
        Row("decode step alone @ 32k, 120b", model="120b", shape={"rows": 1, "context": 32768}, **STEP_ALONE),
        Row("decode step alone @ 2k, 20b", model="20b", shape={"rows": 1, "context": 2048}, **STEP_ALONE),
    ),
)  # fmt: skip
def decode_kernel(run: Run, options: Options) -> None:
    timing.begin()
    base: Changes = {"kv": options.kv} | ({"layers": options.layers} if options.layers else {})
    variants = parse_changes(options.variants)
    shapes = [
        decode_case.shape_of(m, f, r, **base) for m in options.models for f in options.formats for r in options.rows
    ]
    extra = [replace(s, **v) for s in shapes if s.rows == 1 for v in variants]
    timed = shapes + extra + [replace(s, trace=True) for s in shapes if s.rows == 1 and options.trace]
    compared = [at_depth(s, d) for s in shapes + extra for d in range(1, DEPTH + 1)]
    timing.compile_all(s.program() for s in timed + compared)
    run.sources |= receipts.measured([KERNEL])
    for model in options.models:
        weights: StepWeights | None = None
        for formats in options.formats:
            shape = decode_case.shape_of(model, formats, **base)
            weights = random_weights(shape) if weights is None else with_dense_formats(weights, shape)
            measure_formats(run, options, model, formats, base, variants, weights)
        del weights
        torch.cuda.empty_cache()
