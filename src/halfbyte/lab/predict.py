"""Predicted decode speed on a GPU that is not here, from what the receipts measured on one that is.

    time of a token = bytes / (read bandwidth x streaming share) + layers x fixed cost per layer

The streaming share is what the decode kernel's longest stream (lm_head) reached of the read bandwidth where it was
measured; the fixed cost is what is left of the measured step, per layer: waits between blocks, first bytes, tails.
Both are read from receipts, never written here. Carried over to another GPU under stated assumptions:

    low      the share of the shorter streams (experts), the fixed cost as it was measured
    central  the share of the longest stream, the fixed cost by the ratio of clocks
    high     the same, and slower memory hides as much of the waits as it is slower, but not the router's, which alone
             says what to read next

A GPU that was rehearsed (bench/experiments/rehearsal.py: its blocks, its ring and its memory's pace on a GPU that is
here) needs no such assumption: its fixed cost is what the rehearsed step took beyond its bytes at that pace, found at
several of them. What stays assumed is the bandwidth. Where others' products are reported, central takes the middle of
what they read with, high all that a reading kernel gets there, and low is as far below central, in time, as high is
above; elsewhere central stands half way between the least and the most. (The share of lm_head where it was measured
says nothing here: on an H200 instructions set it.) Clock and latencies stay those of the GPU that rehearsed. The
formula's figures stand beside them.

A chip with fewer instructions per weight than the measured one is slowed down by that ratio in low and central. A paper
bandwidth is taken at the share that the H200 reaches of its own (low: GB10's). Where the very step was measured all
three are the measurement. Where the model does not fit, or the plan runs other kernels than the measured one, there is
no figure. Nothing else is modelled, batches and prompts least of all; everything that comes out is a prediction and
is labelled so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halfbyte.errors import PlanError, UsageError
from halfbyte.gates import Gates
from halfbyte.lab.measure.decode_trace import shares
from halfbyte.lab.receipts import Receipt
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import choose, formats_after
from halfbyte.plan.phase import ARCHES
from halfbyte.roofline import GPUS, Gpu, decode_traffic, gpu_named, step_work

KERNEL = "cuda.decode_step"
REHEARSAL = "rehearsal"  # kind of a cell
STEP = "step"  # name of the figure, in microseconds
# What a cell's shape calls a set of formats, by the format of qkv, o and lm_head.
LABELS = {"mxfp4": "mxfp4", "q8": "q8", "bf16": "checkpoint"}


@dataclass(frozen=True)
class Basis:
    """What was measured, where it stands, and what was made of it."""

    receipt: str
    trace_receipt: str
    state: str  # current or STALE
    gpu: str
    model: str
    formats: str
    context: int
    us: float  # of a step, measured
    bytes: float  # that the step must read
    streaming: float  # share of the read bandwidth, longest stream
    streaming_short: float  # experts
    fixed_us: float  # per layer, at the share of the longest stream
    fixed_short_us: float  # per layer, at the share of the experts' streams
    router_us: float  # of it, waiting for the router
    ghz: float  # measured in the traced step

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CrossCheck:
    """This share and fixed cost, applied to another measurement of the same receipt."""

    what: str
    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1


@dataclass(frozen=True)
class Scenario:
    name: str
    read: float
    streaming: float
    fixed_us: float
    tokens_per_second: float


@dataclass(frozen=True)
class Rehearsal:
    """Steps at another GPU's blocks, ring and memory, at several paces."""

    receipt: str
    state: str
    device: str
    blocks: int
    of: int  # multiprocessors of the GPU; fewer blocks are a slice of it
    slots: int
    times: tuple[tuple[float, float, float], ...]  # bytes/s of the GPU's memory, us of the step, of it fixed per layer

    def fixed(self, pace: float) -> float:
        """Between two paces on a line over their inverse; beyond them as at the nearest."""
        points = sorted((1 / p, fixed) for p, _, fixed in self.times)
        at = min(max(1 / pace, points[0][0]), points[-1][0])
        (x, low), (y, high) = next((a, b) for a, b in itertools.pairwise(points) if at <= b[0])
        return low + (high - low) * (at - x) / (y - x)


@dataclass(frozen=True)
class Prediction:
    gpu: Gpu
    model: str
    formats: Mapping[str, str]
    context: int
    bytes: float
    ceiling: float  # at the table's bandwidth, nothing lost
    scenarios: tuple[Scenario, ...]  # low, central, high
    basis: Basis
    checks: tuple[CrossCheck, ...]
    warnings: tuple[str, ...]
    formula: tuple[Scenario, ...] = ()  # with a rehearsal: what it gives without
    rehearsal: Rehearsal | None = None
    void: str = ""  # why the figures mean nothing there

    @property
    def central(self) -> float:
        return self.scenarios[1].tokens_per_second

    @property
    def measured(self) -> bool:
        """This very step, on that very kind of GPU; the scenarios are the measurement."""
        b = self.basis
        return (self.gpu.name, self.model, self.context) == (b.gpu, b.model, b.context)

    def as_dict(self) -> dict[str, Any]:
        label = {"label": "MEASURED" if self.measured else "PREDICTED"}
        return asdict(self) | label | {"tokens_per_second": None if self.void else self.central}


def basis(receipts: Sequence[Receipt], model: str, formats: str, context: int) -> Basis:
    """The newest measurement of the decode kernel in these formats, nearest in context; current before stale."""
    steps = [(r, s) for r in receipts for s in _steps(r)]
    timed = [(r, s) for r, s in steps if s.us is not None and s.rows == 1 and s.formats == formats]
    traces = [(r, s, s.trace) for r, s in steps if s.trace is not None]
    if not timed or not traces:
        raise UsageError(
            f"no receipt of bench/kernels/decode.py measures {formats} with a trace, so nothing can be predicted; "
            "run it on a GPU first."
        )

    def order(r: Receipt, s: _Step) -> tuple[Any, ...]:
        far = abs(math.log2((s.context + 128) / (context + 128)))
        return r.state == "current", s.model == model, -round(far, 3), r.date, r.name

    receipt, step = max(timed, key=lambda pair: order(*pair))

    def likeness(r: Receipt, s: _Step) -> tuple[Any, ...]:
        same = r.file is not None and receipt.file is not None and r.file.measured == receipt.file.measured
        return same, s.model == step.model, s.formats == formats, r.date, r.name

    where, traced, trace = max(traces, key=lambda t: likeness(t[0], t[1]))
    gpu = gpu_named(receipt.gpu)
    config, us = NAMED[step.model], step.us or 0.0
    stream, short, router = streams(traced, trace, gpu)
    total = decode_traffic(config, formats_of(formats), step.context).total
    fixed, fixed_short = ((us - total / (gpu.read * s) * 1e6) / config.layers for s in (stream, short))
    return Basis(
        receipt.name, where.name, receipt.state, gpu.name, step.model, formats, step.context, us, total, stream, short,
        fixed, fixed_short, router, float(trace["clock_ghz"]),
    )  # fmt: skip


def checks(receipts: Sequence[Receipt], b: Basis) -> tuple[CrossCheck, ...]:
    """What the basis gives for the other models and formats that its receipt measured at the same context."""
    gpu = gpu_named(b.gpu)
    others = []
    for step in (s for r in receipts if r.name == b.receipt for s in _steps(r)):
        other = (step.model, step.formats) != (b.model, b.formats)
        if step.us is not None and step.rows == 1 and step.context == b.context and other:
            config = NAMED[step.model]
            total = decode_traffic(config, formats_of(step.formats), b.context).total
            us = total / (gpu.read * b.streaming) * 1e6 + config.layers * b.fixed_us
            others.append(CrossCheck(f"{step.model} {step.formats}", us, step.us))
    return tuple(others)


def rehearsal(receipts: Sequence[Receipt], gpu: Gpu, model: str, formats: str, context: int) -> Rehearsal | None:
    """The newest one of exactly this at two paces or more, current before stale; every result must have been right."""
    config = NAMED[model]
    bytes_ = decode_traffic(config, formats_of(formats), context).total
    rehearsals: dict[tuple[bool, str, str], Rehearsal] = {}
    for r in receipts:
        mine = [
            result
            for result in r.results
            if result.cell.kind == REHEARSAL and result.cell.model == model
            and (result.cell.shape["formats"], result.cell.shape["context"]) == (formats, context)
            and gpu_named(str(result.cell.shape["gpu"])) is gpu
            # else the table means another GPU today
            and (result.cell.shape["read"], result.cell.shape["blocks_of"]) == (gpu.read, gpu.multiprocessors)
            and not result.cell.shape["variant"]
        ]  # fmt: skip
        paced = [result for result in mine if result.cell.shape["share"] and result.figures]  # a trace has none
        wrong = any(result.refused for result in mine)
        if wrong or len({result.cell.shape["share"] for result in paced}) < 2:
            continue
        times = []
        for result in paced:
            shape, us = result.cell.shape, result.figure(STEP).value
            pace, part = shape["read"] * shape["share"], shape["blocks"] / shape["blocks_of"]
            times.append((pace, us, (us - bytes_ / (pace * part) * 1e6) / config.layers))
        shape = paced[0].cell.shape
        rehearsals[(r.state == "current", r.date, r.name)] = Rehearsal(
            r.name, r.state, r.gpu, int(shape["blocks"]), gpu.multiprocessors, int(shape["slots"]), tuple(times)
        )
    return rehearsals[max(rehearsals)] if rehearsals else None


@dataclass(frozen=True)
class _Step:
    """A result of the decode kernel: cells of path cuda.decode_step, whose shape says formats, rows and context."""

    model: str
    formats: str
    rows: int
    context: int
    us: float | None
    trace: Mapping[str, Any] | None


def _steps(receipt: Receipt) -> list[_Step]:
    steps = []
    for result in receipt.results:
        cell, shape = result.cell, result.cell.shape
        if (cell.kind, cell.path) == ("decode", KERNEL) and cell.model in NAMED and "formats" in shape:
            us = next((f.value for f in result.figures if f.name == STEP), None)
            trace = result.detail.get("trace")
            steps.append(_Step(cell.model, shape["formats"], shape["rows"], shape["context"], us, trace))
    return steps


def streams(traced: _Step, phases: Mapping[str, Any], gpu: Gpu) -> tuple[float, float, float]:
    """(share of lm_head's stream, share of the experts' streams, microseconds of a layer waiting for the router)."""
    config = NAMED[traced.model]
    work = step_work(config, formats_of(traced.formats), 1, traced.context)
    head = phases["head"]
    # from the start of the phase, not from its input's arrival: the ring has been filling while blocks waited
    long = work["lm_head"].bytes / (head["sums"] - head["start"]) * 1e6
    spent = 0.0
    for marks in phases["layers"].values():
        spent += sum(marks[f"{p} sums"][1] - marks[f"{p} x"][1] for p in ("gate_up", "down")) / len(phases["layers"])
    short = work["moe"].bytes / config.layers / spent * 1e6
    router = shares(dict(phases), config.layer_kinds)["router"] / config.layers
    return min(1.0, long / gpu.read), min(1.0, short / gpu.read), router


def formats_of(label: str) -> dict[str, str]:
    kind = {v: k for k, v in LABELS.items()}[label]
    return {"qkv": kind, "o": kind, "lm_head": kind, "gate_up": "mxfp4", "down": "mxfp4", "embed": "bf16"}


def predict(name: str, model: str, gates: Gates, context: int, receipts: Sequence[Receipt]) -> Prediction:
    if model not in NAMED:
        raise UsageError(f"there is no shape {model!r}; use {' or '.join(NAMED)}.")
    gpu = gpu_named(name)
    config = NAMED[model]
    formats = formats_after(config, gates, arch=ARCHES[gpu.arch])
    dense = {form for role in ("qkv", "o", "lm_head") for form in formats.kinds(role)}
    if len(dense) != 1 or not dense <= set(LABELS):
        raise UsageError("receipts measure qkv, o and lm_head in one format; use --preset exact, balanced or fast.")
    kv = "bf16" if gates.kv_dtype == "auto" else gates.kv_dtype
    label = LABELS[dense.pop()]
    base = basis(receipts, model, label, context)
    there = gpu_named(base.gpu)
    total = decode_traffic(config, formats, context, kv_dtype=kv).total
    h200, gb10 = GPUS["h200"], GPUS["gb10"]
    usual, least = (1.0, 1.0) if gpu.measured else (h200.read / h200.paper_read, gb10.read / gb10.paper_read)
    clocks = there.ghz / gpu.ghz
    issue = min(1.0, (gpu.multiprocessors * gpu.ghz / gpu.read) / (there.multiprocessors * there.ghz / there.read))

    def scenario(label: str, read: float, streaming: float, fixed: float) -> Scenario:
        seconds = total / (read * streaming) + config.layers * fixed * 1e-6
        return Scenario(label, read, streaming, fixed, 1 / seconds)

    slower = min(1.0, gpu.read / there.read)
    scenarios: tuple[Scenario, ...] = (
        scenario("low", gpu.read * least, base.streaming_short * issue, base.fixed_short_us * max(1.0, clocks)),
        scenario("central", gpu.read * usual, base.streaming * issue, base.fixed_us * clocks),
        scenario("high", gpu.read * usual, base.streaming, _hidden(base, slower) * clocks),
    )
    if gpu is there and (base.model, base.context) == (model, context):
        scenarios = tuple(scenario(s, gpu.read, base.streaming, base.fixed_us) for s in ("low", "central", "high"))
    rehearsed = rehearsal(receipts, gpu, model, label, context) if kv == "bf16" else None
    formula: tuple[Scenario, ...] = ()
    if rehearsed:
        formula = scenarios
        all_of_it = gpu.read * usual
        if gpu.product_reads[0]:  # what products get is the middle, and what only reads the top
            worst, best = gpu.product_reads
            middle = 2 / (1 / worst + 1 / best)
            reads = {"low": 1 / (2 / middle - 1 / all_of_it), "central": middle, "high": all_of_it}
        else:
            worst = gpu.read * least
            reads = {"low": worst, "central": 2 / (1 / worst + 1 / all_of_it), "high": all_of_it}
        scenarios = tuple(scenario(name, read, 1.0, rehearsed.fixed(read)) for name, read in reads.items())
    return Prediction(
        gpu, model, formats, context, total, gpu.read / total, scenarios, base, checks(receipts, base),
        tuple(_warnings(gpu, model, base, rehearsed)), formula, rehearsed, _void(gpu, model, gates),
    )  # fmt: skip


def _hidden(base: Basis, slower: float) -> float:
    """What a memory of this part of the measured one's speed leaves of the fixed cost."""
    return max(min(base.fixed_us, base.router_us), base.fixed_us * slower)


def _warnings(gpu: Gpu, model: str, base: Basis, rehearsed: Rehearsal | None) -> list[str]:
    warnings = []
    if "bulk_copies" not in ARCHES[gpu.arch].features:
        warnings.append(
            f"{gpu.arch} has no copy engine: there threads feed the step, which no receipt has measured yet"
        )
    if rehearsed and rehearsed.state != "current":
        warnings.append(f"the rehearsal {rehearsed.receipt} is {rehearsed.state}: its kernel has changed since")
    if base.state != "current":
        warnings.append(f"the receipt {base.receipt} is {base.state}: its kernel has changed since")
    if base.model != model:
        warnings.append(f"measured on {base.model}, carried over to {model} by layers and bytes")
    return warnings


def _void(gpu: Gpu, model: str, gates: Gates) -> str:
    """Why no figure holds there."""
    need = _weights(model, gates, gpu)
    if gpu.memory < need:
        smaller = next((m for m in NAMED if _weights(m, gates, gpu) < gpu.memory), "")
        return f"{model} needs {need / 1e9:.0f} GB and does not fit in {gpu.memory_text}" + (
            f"; --model {smaller} does" if smaller else ""
        )
    try:
        selection = choose(NAMED[model], gates, ARCHES[gpu.arch]).selection
    except PlanError as e:
        return f"today's plan on {gpu.arch} refuses these gates: {str(e).splitlines()[0]}"
    chosen = selection.chosen["decode"]
    if KERNEL in chosen:
        return ""
    why = next((r.reason for r in selection.refusals if r.phase == KERNEL and r.regime == "decode"), "")
    kinds = " and ".join(sorted({name.partition(".")[0] for name in chosen}))
    return f"{gpu.arch} decodes with {kinds} kernels, which have not been measured: {KERNEL} {why}"


def _weights(model: str, gates: Gates, gpu: Gpu) -> float:
    from halfbyte.model.load import resolve_model, weight_bytes

    return weight_bytes(resolve_model(f"random:{model}"), gates, ARCHES[gpu.arch])
