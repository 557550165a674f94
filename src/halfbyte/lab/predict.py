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
several of them. What stays assumed is the bandwidth. high takes all that a reading kernel gets there; low the least
that others' products are reported to read with; central stands half way, in time, between the best of those, which have
the ends of their launches in them, and a reading kernel. (The share of lm_head where it was measured says nothing here:
on an H200 instructions set it.) Clock and latencies stay those of the GPU that rehearsed. The formula's figures stand
beside them.

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
# What bench/kernels/decode.py calls a set of formats, by the format of qkv, o and lm_head.
LABELS = {"mxfp4": "mxfp4", "q8": "q8", "bf16": "checkpoint"}
LANES = 128  # instructions a multiprocessor issues per clock


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
class Check:
    """The same share and fixed cost, asked for another measurement of the same receipt."""

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
        known = sorted((1 / p, fixed) for p, _, fixed in self.times)
        at = min(max(1 / pace, known[0][0]), known[-1][0])
        (x, low), (y, high) = next((a, b) for a, b in itertools.pairwise(known) if at <= b[0])
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
    checks: tuple[Check, ...]
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
        said = {"label": "MEASURED" if self.measured else "PREDICTED"}
        return asdict(self) | said | {"tokens_per_second": None if self.void else self.central}


def basis(receipts: Sequence[Receipt], model: str, formats: str, context: int) -> Basis:
    """The newest measurement of the decode kernel in these formats, nearest in context; current before stale."""
    rows = [
        (r, row)
        for r in receipts
        for row in _rows(r)
        if row.get("rows") == 1 and "us" in row and row.get("formats") == formats and row.get("model") in NAMED
    ]
    traces = [(r, row) for r in receipts for row in _rows(r) if isinstance(row.get("phases"), Mapping)]
    if not rows or not traces:
        raise UsageError(
            f"no receipt of bench/kernels/decode.py measures {formats} with a trace, so nothing can be "
            "predicted from it; "
            "run it on a GPU first."
        )

    def order(r: Receipt, row: Mapping[str, Any]) -> tuple[Any, ...]:
        far = abs(math.log2((row["context"] + 128) / (context + 128)))
        return r.state == "current", row["model"] == model, -round(far, 3), r.date, r.name

    receipt, row = max(rows, key=lambda found: order(*found))

    def likeness(r: Receipt, t: Mapping[str, Any]) -> tuple[Any, ...]:
        same = r.raw.get("sources") == receipt.raw.get("sources")
        return same, t.get("model") == row["model"], t.get("formats") == formats, r.date, r.name

    where, traced = max(traces, key=lambda found: likeness(*found))
    gpu = gpu_named(receipt.gpu)
    config, held = NAMED[row["model"]], formats_of(formats)
    stream, short, router = streams(traced, gpu)
    total = decode_traffic(config, held, row["context"]).total
    fixed, fixed_short = ((row["us"] - total / (gpu.read * s) * 1e6) / config.layers for s in (stream, short))
    return Basis(
        receipt.name, where.name, receipt.state, gpu.name, row["model"], formats, int(row["context"]), float(row["us"]),
        total, stream, short, fixed, fixed_short, router, float(traced["phases"]["clock_ghz"]),
    )  # fmt: skip


def checks(receipts: Sequence[Receipt], b: Basis) -> tuple[Check, ...]:
    """What the basis gives for the other models and formats that its receipt measured at the same context."""
    gpu = gpu_named(b.gpu)
    found = []
    for row in (row for r in receipts if r.name == b.receipt for row in _rows(r)):
        other = (row.get("model"), row.get("formats")) != (b.model, b.formats)
        if row.get("rows") == 1 and row.get("context") == b.context and other and row.get("model") in NAMED:
            config = NAMED[row["model"]]
            total = decode_traffic(config, formats_of(row["formats"]), b.context).total
            us = total / (gpu.read * b.streaming) * 1e6 + config.layers * b.fixed_us
            found.append(Check(f"{row['model']} {row['formats']}", us, float(row["us"])))
    return tuple(found)


def rehearsal(receipts: Sequence[Receipt], gpu: Gpu, model: str, formats: str, context: int) -> Rehearsal | None:
    """The newest one of exactly this at two paces or more, current before stale; every result must have been right."""
    config = NAMED[model]
    bytes_ = decode_traffic(config, formats_of(formats), context).total
    found: dict[tuple[bool, str, str], Rehearsal] = {}
    for r in receipts:
        given = r.raw.get("rehearsed")
        rows = [
            row
            for row in (given if isinstance(given, list) else [])
            if (row.get("model"), row.get("formats"), row.get("context")) == (model, formats, context)
            and gpu_named(str(row["gpu"])) is gpu
            and (row["read"], row.get("of")) == (gpu.read, gpu.blocks)  # else the table means another GPU today
            and not row["variant"]
        ]
        paced = [row for row in rows if row["share"] and "us" in row]
        if not all(row.get("ok", True) for row in rows) or len({row["share"] for row in paced}) < 2:
            continue
        times = []
        for row in paced:
            pace, us = row["read"] * row["share"], float(row["us"])
            part = row["blocks"] / row["of"]
            times.append((pace, us, (us - bytes_ / (pace * part) * 1e6) / config.layers))
        found[(r.state == "current", r.date, r.name)] = Rehearsal(
            r.name, r.state, r.gpu, int(paced[0]["blocks"]), gpu.blocks, int(paced[0]["slots"]), tuple(times)
        )
    return found[max(found)] if found else None


def _rows(receipt: Receipt) -> list[dict[str, Any]]:
    found = receipt.raw.get("rows")
    return [r for r in found if isinstance(r, dict)] if isinstance(found, list) else []


def streams(traced: Mapping[str, Any], gpu: Gpu) -> tuple[float, float, float]:
    """(share of lm_head's stream, share of the experts' streams, microseconds of a layer waiting for the router)."""
    config, held = NAMED[traced["model"]], formats_of(traced["formats"])
    work = step_work(config, held, 1, traced["context"])
    phases = traced["phases"]
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
    config, held = NAMED[model], formats_after(gates)
    dense = {held[role] for role in ("qkv", "o", "lm_head")}
    if len(dense) != 1 or not dense <= set(LABELS):
        raise UsageError("receipts measure qkv, o and lm_head in one format; use --preset exact, balanced or fast.")
    kv = "bf16" if gates.kv_dtype == "auto" else gates.kv_dtype
    label = LABELS[dense.pop()]
    found = basis(receipts, model, label, context)
    there = gpu_named(found.gpu)
    total = decode_traffic(config, held, context, kv_dtype=kv).total
    h200, gb10 = GPUS["h200"], GPUS["gb10"]
    usual, least = (1.0, 1.0) if gpu.measured else (h200.read / h200.paper, gb10.read / gb10.paper)
    clocks = there.ghz / gpu.ghz
    issue = min(1.0, (gpu.blocks * gpu.ghz / gpu.read) / (there.blocks * there.ghz / there.read))

    def scenario(label: str, read: float, streaming: float, fixed: float) -> Scenario:
        seconds = total / (read * streaming) + config.layers * fixed * 1e-6
        return Scenario(label, read, streaming, fixed, 1 / seconds)

    slower = min(1.0, gpu.read / there.read)
    made: tuple[Scenario, ...] = (
        scenario("low", gpu.read * least, found.streaming_short * issue, found.fixed_short_us * max(1.0, clocks)),
        scenario("central", gpu.read * usual, found.streaming * issue, found.fixed_us * clocks),
        scenario("high", gpu.read * usual, found.streaming, _hidden(found, slower) * clocks),
    )
    if gpu is there and (found.model, found.context) == (model, context):
        made = tuple(scenario(s, gpu.read, found.streaming, found.fixed_us) for s in ("low", "central", "high"))
    rehearsed = rehearsal(receipts, gpu, model, label, context) if kv == "bf16" else None
    formula: tuple[Scenario, ...] = ()
    if rehearsed:
        formula = made
        worst, best = gpu.products if gpu.products[0] else (gpu.read * least, gpu.read * least)
        all_of_it = gpu.read * usual
        reads = {"low": worst, "central": 2 / (1 / best + 1 / all_of_it), "high": all_of_it}
        made = tuple(scenario(name, read, 1.0, rehearsed.fixed(read)) for name, read in reads.items())
    return Prediction(
        gpu, model, held, context, total, gpu.read / total, made, found, checks(receipts, found),
        tuple(_warnings(model, found, rehearsed)), formula, rehearsed, _void(gpu, model, gates),
    )  # fmt: skip


def _hidden(found: Basis, slower: float) -> float:
    """What a memory of this part of the measured one's speed leaves of the fixed cost."""
    return max(min(found.fixed_us, found.router_us), found.fixed_us * slower)


def _warnings(model: str, found: Basis, rehearsed: Rehearsal | None) -> list[str]:
    said = []
    if rehearsed and rehearsed.state != "current":
        said.append(f"the rehearsal {rehearsed.receipt} is {rehearsed.state}: its kernel has changed since")
    if found.state != "current":
        said.append(f"the receipt {found.receipt} is {found.state}: its kernel has changed since")
    if found.model != model:
        said.append(f"measured on {found.model}, carried over to {model} by layers and bytes")
    return said


def _void(gpu: Gpu, model: str, gates: Gates) -> str:
    """Why no figure holds there."""
    need = _weights(model, gates)
    if gpu.memory < need:
        smaller = next((m for m in NAMED if _weights(m, gates) < gpu.memory), "")
        return f"{model} needs {need / 1e9:.0f} GB and does not fit in {gpu.memory / 1e9:.0f} GB" + (
            f"; --model {smaller} does" if smaller else ""
        )
    try:
        _, _, selection = choose(NAMED[model], gates, ARCHES[gpu.arch])
    except PlanError as e:
        return f"today's plan on {gpu.arch} refuses these gates: {str(e).splitlines()[0]}"
    chosen = selection.chosen["decode"]
    if KERNEL in chosen:
        return ""
    why = next((r.reason for r in selection.refusals if r.phase == KERNEL and r.regime == "decode"), "")
    kinds = " and ".join(sorted({name.partition(".")[0] for name in chosen}))
    return f"{gpu.arch} decodes with {kinds} kernels, which nobody has measured: {KERNEL} {why}"


def _weights(model: str, gates: Gates) -> float:
    from halfbyte.model.load import resolve_model, weight_bytes

    return weight_bytes(resolve_model(f"random:{model}"), gates)
