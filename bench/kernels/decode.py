"""The decode step (cuda.decode_step) on a GPU at true shapes: compared with its oracle, then timed.

    python -m bench.kernels.decode --models 120b,20b --formats mxfp4,q8,checkpoint --contexts 512,2048,8192,32768
    python -m bench.kernels.decode --models 120b --variants "nap=0;workers=15+ahead=9" --layers 12

Weights are random bytes of the full size (61 GB of experts for 120b), so nothing sits in the L2 cache; routing is
spread. In front of every figure, in its format, for its rows and at its context, the same build with two layers is
compared with float32 torch on the same bytes: every value of each layer, the choice of experts, the KV cache, the
logits and the token (halfbyte.lab.levels.decode_check); then the build that is timed writes the same bits as the
compared one. What differs is not timed. Experts are counted in the last layer of timed steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.kernels import runner
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.decode.step import DecodeStep, StepWeights
from halfbyte.lab import receipts
from halfbyte.lab.levels import decode_case
from halfbyte.lab.levels.decode_case import DecodeCase, place, random_weights, with_dense_formats
from halfbyte.lab.levels.decode_check import DEPTH, at_depth, check_decode, experts_of_last_step, same_as_timed
from halfbyte.lab.levels.verdict import Verdict
from halfbyte.lab.measure import decode_trace
from halfbyte.lab.predict import KERNEL, STEP, formats_of
from halfbyte.lab.result import Ceiling, Cell, Result, figure
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
    place(step, context)
    graph = runner.captured(step.run)
    samples, experts = [], []
    for i in range(repeats + runner.WARM_UP):
        place(step, context)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(steps):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= runner.WARM_UP:
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
    gpu = runner.roof()
    formats = formats_of(str(cell.shape["formats"]))
    ceiling = decode_ceiling(gpu, config, formats, context, shape.rows, shape.kv, experts)
    source = f"{gpu.name}: read bandwidth in roofline.py"
    rates = [shape.rows * 1e6 / us for us in samples]
    figures = (
        figure("speed", "tok/s", rates, Ceiling(ceiling.tokens_per_second, source)),
        figure(STEP, "us", samples),
        figure("experts of a layer", "experts", experts),
    )
    return Result(cell, figures, checks)


def trace(cell: Cell, case: DecodeCase, shape: StepShape, context: int) -> Result:
    """Where a step's time goes, by clocks read inside the kernel (halfbyte.lab.measure.decode_trace)."""
    step = case.step(replace(shape, trace=True))
    place(step, context)
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


def main() -> int:
    parser = runner.arguments(__doc__, models="120b", formats="mxfp4")
    parser.add_argument("--contexts", type=runner.numbers, default=[512, 2048, 8192, 32768])
    parser.add_argument("--rows", type=runner.numbers, default=[1])
    parser.add_argument("--row-contexts", type=runner.numbers, help="contexts of more than one row, if not --contexts")
    parser.add_argument("--kv", default="bf16", choices=("bf16", "fp8"), help="format of the cache")
    parser.add_argument("--layers", type=int, default=0, help="so many layers only, for experiments")
    parser.add_argument("--variants", default="", help="experiments at one row: 'nap=0;workers=15+ahead=9;define=X=1'")
    parser.add_argument("--no-trace", action="store_true", help="leave out where a step's time goes")
    args = runner.begin(parser)
    base: Changes = {"kv": args.kv} | ({"layers": args.layers} if args.layers else {})
    variants = parse_changes(args.variants)
    shapes = [decode_case.shape_of(m, f, r, **base) for m in args.models for f in args.formats for r in args.rows]
    extra = [replace(s, **v) for s in shapes if s.rows == 1 for v in variants]
    timed = shapes + extra + [replace(s, trace=True) for s in shapes if s.rows == 1 and not args.no_trace]
    compared = [at_depth(s, d) for s in shapes + extra for d in range(1, DEPTH + 1)]
    runner.compile_all(s.program() for s in timed + compared)
    receipt = runner.Receipt("bench/kernels/decode.py", args.out, receipts.measured([KERNEL]))
    for model in args.models:
        weights: StepWeights | None = None
        for formats in args.formats:
            shape = decode_case.shape_of(model, formats, **base)
            weights = random_weights(shape) if weights is None else with_dense_formats(weights, shape)
            measure_formats(receipt, args, model, formats, base, variants, weights)
        del weights
        torch.cuda.empty_cache()
    return receipt.end()


def measure_formats(
    receipt: runner.Receipt,
    args: argparse.Namespace,
    model: str,
    formats: str,
    base: Changes,
    variants: Sequence[Changes],
    weights: StepWeights,
) -> None:
    """Every cell of one model in one set of formats."""
    contexts_of = {rows: args.contexts if rows == 1 else args.row_contexts or args.contexts for rows in args.rows}
    longest = max(VARIANT_CONTEXT, *(c for contexts in contexts_of.values() for c in contexts))
    case = DecodeCase.make(decode_case.shape_of(model, formats, **base), weights, longest, max(args.rows))
    name = f"{model}, {args.layers} layers" if args.layers else model  # a model cut short is not that model

    def measure(changes: Changes, rows: int, context: int, **more: str) -> None:
        kv = {} if args.kv == "bf16" else {"kv": args.kv}
        cell = Cell(
            "decode", name, path=KERNEL, shape={"formats": formats, "rows": rows, "context": context} | kv | more
        )
        step = case.step(decode_case.shape_of(model, formats, rows, **base | changes))
        verdicts = [*compare(step.shape, case, context), same_as_timed(step, case, context)]
        receipt.measure(cell, partial(speed, cell, step, verdicts, context, args.repeats))

    for rows, contexts in contexts_of.items():
        for context in contexts:
            measure({}, rows, context)
    if 1 not in args.rows:
        return
    for changes in variants:
        measure(changes, 1, VARIANT_CONTEXT, variant=str(changes))
    if not args.no_trace:
        cell = Cell("decode", name, path=KERNEL, shape={"formats": formats, "rows": 1, "context": VARIANT_CONTEXT})
        shape = decode_case.shape_of(model, formats, **base)
        receipt.measure(cell, partial(trace, cell, case, shape, VARIANT_CONTEXT))


if __name__ == "__main__":
    sys.exit(main())
