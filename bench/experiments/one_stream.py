"""Builds of the decode step that differ from today's in one thing each, beside today's, turn by turn.

    python -m bench run one-stream --out one-stream.json
    python -m bench run one-stream --set trials=nap,poller --set seconds=3

What is asked (docs/log/2026-11-19.md has the predictions): how long blocks nap between two looks into a mailbox, and
whether one warp looks for all; a shift by a product; four chains of products in o; parts of three pages; router sums
joined in a block; what an acquire a phase costs; whether what several blocks copy should stay in L2; two and four rows
with the ring and warps of one row; experts by products of a warpgroup (decode/digits.cuh). Then where a step's time
goes at the end of `steps` of them, with watts and MHz; and qkv and o of 32 and 64 rows by the products of a warpgroup
beside those of a batch.

Every build is compared with its oracle first, and one that is wrong is not timed. All of them read the same weights:
120b's shapes, every layer. Trials take turns in changing order, and each has the ratio to today's build in the same
round.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.checks.decode_case import DecodeCase, place_rows, random_weights, shape_of
from bench.checks.decode_check import DEPTH, at_depth, check_decode, same_as_timed
from bench.kernels import batch, timing
from bench.kernels.decode import short_case
from bench.kernels.prefill_products import dequantized
from bench.measurement import Run, measurement, option
from halfbyte.errors import UsageError
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.kernels.cuda.prefill.products import Dense
from halfbyte.lab import receipts
from halfbyte.lab.levels.verdict import Verdict
from halfbyte.lab.measure import decode_trace
from halfbyte.lab.measure.power import PowerMeter
from halfbyte.lab.predict import KERNEL
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.model.config import NAMED

CONTEXT, FURTHER = 2048, 2048  # tokens before the first step, and after it until it begins again
REPLAYS = 48  # of one trial in one round
WIDE_TILE = "m256n64"
DENSE_BOUND = 1e-4  # docs/numerics.md
STACK = 12  # matrices of a role, in turn
ONE_ROWS_RING: dict[str, Any] = {"workers": 12, "slot": 24_576, "probe": 0}


@dataclass(frozen=True)
class StepTrial:
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    defines: tuple[str, ...] = ()
    rows: int = 1
    sustained: bool = False  # also for seconds, with watts and MHz

    def shape(self, layers: int) -> StepShape:
        more = {"layers": layers} if layers else {}
        return replace(shape_of("120b", "mxfp4", self.rows, **self.changes, **more), defines=self.defines)


TODAY = "as it is"
TRIALS = (
    StepTrial(TODAY, sustained=True),
    StepTrial("nap 60", {"nap": 60}, sustained=True),
    StepTrial("nap 100", {"nap": 100}, sustained=True),
    StepTrial("nap 300", {"nap": 300}, sustained=True),
    StepTrial("one poller", defines=("HB_ONE_POLLER=1",), sustained=True),
    StepTrial("one poller, nap 100", {"nap": 100}, ("HB_ONE_POLLER=1",), sustained=True),
    StepTrial("shift as a product", defines=("HB_BY_PRODUCT=1",)),
    StepTrial("four chains in o", defines=("HB_O_CHAINS=4",)),
    StepTrial("parts of three pages", {"splits": 12}, ("HB_PART_PAGES=3",)),
    StepTrial("router sums joined", defines=("HB_ROUTER_JOINED=1",)),
    StepTrial(
        "these four", {"splits": 12},
        ("HB_BY_PRODUCT=1", "HB_O_CHAINS=4", "HB_PART_PAGES=3", "HB_ROUTER_JOINED=1"), sustained=True,
    ),
    StepTrial("an acquire a phase", {"acquire": True}),
    StepTrial("shared copies kept in L2", {"keep_shared": True}),
    StepTrial(f"2 rows, {TODAY}", rows=2, sustained=True),
    StepTrial("2 rows, ring of one row", ONE_ROWS_RING, rows=2, sustained=True),
    StepTrial("2 rows, ring of one row, probing", ONE_ROWS_RING | {"probe": 1}, rows=2),
    StepTrial(f"4 rows, {TODAY}", rows=4),
    StepTrial("4 rows, ring of one row", ONE_ROWS_RING, rows=4),
    StepTrial("experts by digits", {"digits": True}, sustained=True),  # 26,112 bytes; 39,168 leave four slots
    StepTrial("experts by digits, slots of 13,056", {"digits": True, "slot": 13_056}),
    StepTrial("experts by digits, four slots ahead", {"digits": True, "ahead": 4}),  # about as many bytes as today
    StepTrial("2 rows, experts by digits", {"digits": True}, rows=2),
    StepTrial("2 rows, experts by digits, slots of 13,056", {"digits": True, "slot": 13_056}, rows=2),
    StepTrial("4 rows, experts by digits", {"digits": True}, rows=4),
    StepTrial("4 rows, experts by digits, slots of 13,056", {"digits": True, "slot": 13_056}, rows=4),
    StepTrial(f"8 rows, {TODAY}", rows=8),
    StepTrial("8 rows, experts by digits", {"digits": True}, rows=8),
)  # fmt: skip


def today_of(trial: StepTrial) -> str:
    """The trial that another is compared with."""
    return TODAY if trial.rows == 1 else f"{trial.rows} rows, {TODAY}"


class TimedTrial:
    """A trial's step of all layers, captured."""

    def __init__(self, trial: StepTrial, case: DecodeCase, shape: StepShape) -> None:
        self.trial, self.step = trial, case.step(shape)
        self.graph = timing.captured(self.step.run)
        self.samples: list[float] = []

    def begin(self) -> None:
        """Rows back to where they start, with tokens of this trial's own, the same in every trial."""
        torch.manual_seed(17)
        place_rows(self.step, CONTEXT)

    def microseconds(self, steps: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(steps):
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / steps

    def round(self) -> None:
        self.begin()
        self.microseconds(4)
        self.samples.append(self.microseconds(REPLAYS))

    def sustained(self, seconds: float) -> dict[str, Any]:
        """Microseconds of a step, watts and MHz over so many seconds without a pause."""
        samples = []
        with PowerMeter() as meter:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                self.begin()
                samples.append(self.microseconds(FURTHER // 8))
        us = statistics.fmean(samples[len(samples) // 2 :])
        power = meter.summary()
        joules = {"joules_per_token": power["watts"] * us / 1e6 / self.trial.rows} if power else {}
        return {"us": us} | joules | power


def cell_of(trial: StepTrial, layers: int) -> Cell:
    model = f"120b, {layers} layers" if layers else "120b"
    shape = {"formats": "mxfp4", "rows": trial.rows, "context": CONTEXT, "trial": trial.name}
    return Cell("decode", model, path=KERNEL, shape=shape)


def checks_of(timed: TimedTrial, case: DecodeCase) -> tuple[Check, ...]:
    shape = timed.step.shape
    verdicts = [check_decode(shape, short_case(shape, case.weights, CONTEXT), CONTEXT)]
    verdicts.append(same_as_timed(timed.step, case, CONTEXT))
    return tuple(v.as_check() for v in verdicts)


def result_of(timed: TimedTrial, today: TimedTrial, checks: tuple[Check, ...], layers: int, seconds: float) -> Result:
    cell = cell_of(timed.trial, layers)
    ratios = [mine / other for mine, other in zip(timed.samples, today.samples)]
    figures = (figure("step", "us", timed.samples), figure("of today's", "ratio", ratios))
    detail = {"sustained": timed.sustained(seconds)} if timed.trial.sustained and seconds else {}
    return Result(cell, figures, checks, detail=detail)


def trace_at_the_end(case: DecodeCase, shape: StepShape, cell: Cell, steps: int) -> Result:
    """Where the time goes in the last of so many steps behind each other, and alone after a pause."""
    timed = TimedTrial(StepTrial("traced"), case, replace(shape, trace=True))
    assert timed.step.trace is not None
    timed.begin()
    timed.microseconds(3)
    time.sleep(0.5)
    alone = decode_trace.digest(timed.step.trace, timed.microseconds(1))
    with PowerMeter() as meter:
        for _ in range(max(1, round(0.8 / (steps * 1.2e-3)))):  # NVML averages: nearly a second of the same
            timed.begin()
            us = timed.microseconds(steps)
    late = decode_trace.digest(timed.step.trace, us)
    print(*decode_trace.lines(late), sep="\n", flush=True)
    kinds = tuple(late["layers"])
    shares = {name: decode_trace.shares(trace, kinds) for name, trace in (("alone", alone), ("late", late))}
    return Result(
        cell,
        (figure("traced step", "us", [us]),),
        detail={"alone": alone, "late": late, "shares": shares} | meter.summary(),
    )


# ---- qkv and o of many rows ----------------------------------------------------------------------------------------


class WideDense:
    """qkv or o of some rows by a warpgroup's products, weights widened once for all of them."""

    def __init__(self, role: str, rows: int, buffers: dict[str, Tensor]) -> None:
        c = NAMED["120b"]
        width, q_dim = (c.heads + 2 * c.kv_heads) * c.head_dim, c.heads * c.head_dim
        n, k = (width, c.hidden) if role == "qkv" else (c.hidden, q_dim)
        self.role, self.rows = role, rows
        self.weights = [timing.random_mxfp4(n, k) for _ in range(STACK)]
        self.x = torch.randn(rows, k, device="cuda").bfloat16()
        workspace = Workspace(gpu(), buffers, torch.device("cuda"))
        self.matrices = [Dense(workspace, w, None, role, WIDE_TILE) for w in self.weights]

    def check(self) -> Check:
        verdict = Verdict(f"{self.role} of {self.rows} rows, {WIDE_TILE}")
        expected = self.x.float() @ dequantized(self.weights[0]).T
        verdict.compare("product", self.matrices[0].run(self.x).float(), expected, DENSE_BOUND)
        return verdict.as_check()

    def run(self) -> None:
        for matrix in self.matrices:
            matrix.run(self.x)


def measure_wide(cell: Cell, wide: WideDense, repeats: int) -> Result:
    check = wide.check()
    if not check.ok:
        return Result(cell, checks=(check,))
    return Result(cell, (figure("time", "us", timing.graph_us(wide.run, repeats, STACK)),), (check,))


def measure_dense(run: Run, rows: tuple[int, ...], repeats: int) -> None:
    """Both ways, in turn; the batch's o has the router and the residual with it."""
    shared: dict[str, Tensor] = {}
    cases = [batch.RandomLayer("120b", shared) for _ in range(4)]
    for count in rows:
        products = batch.Timing(cases, count)
        for role, part in (("qkv", "qkv"), ("o", "o, router")):
            cell = Cell("kernel", "120b", path=f"batch: {part}", shape={"rows": count})
            work = partial(products.run, part)
            run.measure(
                cell, lambda c=cell, w=work: Result(c, (figure("time", "us", timing.graph_us(w, repeats, len(cases))),))
            )
            cell = Cell("kernel", "120b", path=f"grouped {role}", shape={"rows": count, "tile": WIDE_TILE})
            run.measure(cell, partial(measure_wide, cell, WideDense(role, count, {}), repeats))


# ---- the measurement ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    trials: tuple[str, ...] = option((), "words of the names of trials; today's builds always, empty: all")
    layers: int = option(0, "so many layers only; 0: all")
    rounds: int = option(5, "in which every trial has its turn")
    seconds: float = option(2.5, "of the same step for watts and MHz, where a trial is asked for them; 0: none")
    steps: int = option(300, "behind each other, the last of which is traced; 0: no trace")
    dense_rows: tuple[int, ...] = option((32, 64), "of qkv and o by a warpgroup's products")


def chosen(terms: tuple[str, ...]) -> list[StepTrial]:
    if unknown := [w for w in terms if not any(w in t.name for t in TRIALS)]:
        raise UsageError(f"one-stream has no trial with {unknown[0]!r} in its name.")
    mine = [t for t in TRIALS if not terms or any(w in t.name for w in terms)]
    today = {today_of(t) for t in mine}
    return [t for t in TRIALS if t in mine or t.name in today]


def compile_trials(trials: list[StepTrial], layers: int, traced: bool) -> None:
    shapes = [t.shape(layers) for t in trials]
    shapes += [at_depth(s, depth) for s in shapes for depth in range(1, DEPTH + 1)]
    if traced:
        shapes.append(replace(TRIALS[0].shape(layers), trace=True))
    timing.compile_all(s.program() for s in shapes)


@measurement("one-stream", needs=("gpu",), seconds=150, routine=False)
def one_stream(run: Run, options: Options) -> None:
    begun = time.perf_counter()

    def clock(stage: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {stage}", flush=True)

    timing.begin()
    trials = chosen(options.trials)
    compile_trials(trials, options.layers, bool(options.steps))
    clock("compiled")
    run.sources |= receipts.measured([KERNEL]) | receipts.hashes([Path(__file__)])
    base = trials[0].shape(options.layers)
    case = DecodeCase.make(base, random_weights(base), CONTEXT + FURTHER, max(t.rows for t in trials))
    clock("weights made")
    if options.steps:
        cell = Cell("decode", "120b", path=KERNEL, shape={"trace": f"the last of {options.steps} steps"})
        run.measure(cell, partial(trace_at_the_end, case, base, cell, options.steps))
        clock("traced")
    timed: dict[str, TimedTrial] = {}
    checks: dict[str, tuple[Check, ...]] = {}
    for trial in trials:
        mine = TimedTrial(trial, case, trial.shape(options.layers))
        checks[trial.name] = checks_of(mine, case)
        if all(c.ok for c in checks[trial.name]):
            timed[trial.name] = mine
        else:
            run.add(Result(cell_of(trial, options.layers), checks=checks[trial.name]))
    clock("compared")
    for number in range(options.rounds + 1):
        order = list(timed.values())
        shift = 5 * number % max(1, len(order))
        for mine in (order[shift:] + order[:shift])[:: 1 if number % 2 else -1]:
            mine.round()
    for mine in timed.values():
        del mine.samples[0]
    clock("timed")
    for name, mine in timed.items():
        today = timed.get(today_of(mine.trial), mine)
        run.measure(
            cell_of(mine.trial, options.layers),
            partial(result_of, mine, today, checks[name], options.layers, options.seconds),
        )
    clock("sustained")
    del timed, case
    torch.cuda.empty_cache()
    if options.dense_rows:
        measure_dense(run, options.dense_rows, timing.REPEATS)
    clock("end")
