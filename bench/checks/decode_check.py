"""The decode step against its oracle, layer by layer: what must hold before a step is timed.

The kernel keeps the values of its last layer only, so it is built once for every depth: the build of one layer shows
the first layer, the build of two the second, with all other options those of the build that is timed. Every depth runs
twice over poisoned mailboxes (equal bits prove that nothing depends on timing) and is compared with the oracle,
replayed with the experts that the kernel itself chose. That those are a right choice is a comparison of its own. Bounds
are in docs/numerics.md. A step that differs is not excused by a near tie, and no second try is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.checks import decode_oracle as oracle
from bench.checks.decode_case import DecodeCase, place_rows
from halfbyte.kernels.cuda.decode.shape import PAGE, StepShape
from halfbyte.kernels.cuda.decode.step import DecodeStep
from halfbyte.kernels.cuda.device.host import KernelMachine
from halfbyte.lab.levels.verdict import Verdict, choice_gap, rms, token_gap

SIGNIFICANT_BITS = {torch.bfloat16: 8, torch.float8_e4m3fn: 4, torch.float32: 24}  # the leading one included
LEAST_EXPONENT = {torch.bfloat16: -126, torch.float8_e4m3fn: -6, torch.float32: -126}  # of a normal number
CONTEXTS = (512, 2048, 8192, 32768)
DEPTH = 2  # layers: one of each kind of attention
BOUND = 2e-3  # on every value of a layer, on the logits, and on what the cache holds beyond its rounding
# Of single values, where many share the error of their norm: the largest of 200,000 normal errors is 4.6 of their
# deviation, so twice that is no accident. Two values that are compared may both be off.
WORST = 9 * BOUND
TIE = 2 * WORST
SUMS = ("x", "mid", "logits", "best", "broken")  # mailboxes that are added to or raised: clean from the step before


def error_beyond_rounding(stored: Tensor, exact: Tensor) -> float:
    """How far `stored` is from `exact`, relative, once each element is forgiven half a step of its format.

    A value next to the edge between two codes may fall either way; that costs a whole step against the other code, and
    nothing here. Values beyond the largest code saturate.
    """
    bits, least = SIGNIFICANT_BITS[stored.dtype], LEAST_EXPONENT[stored.dtype]
    largest = torch.finfo(stored.dtype).max
    clamped = exact.double().clamp(-largest, largest)
    exponent = torch.where(clamped == 0, float(least), torch.frexp(clamped).exponent.double() - 1)
    half_step = torch.exp2(exponent.clamp(min=least) - bits)
    excess = ((stored.float().double() - clamped).abs() - half_step).clamp(min=0.0)
    if not bool(torch.isfinite(excess).all()):
        return float("inf")
    return float(excess.norm() / clamped.norm())


def at_depth(shape: StepShape, layers: int) -> StepShape:
    """The build with fewer layers. Their table would leave room for more slots of the ring, so that number is fixed."""
    return replace(shape, layers=layers, ring=shape.slots)


@dataclass
class Observation:
    """What one build left behind after a step."""

    shape: StepShape
    layer: dict[str, Tensor]  # its last layer, by the names in oracle.COMPARED
    logits: Tensor
    tokens: Tensor
    pool: Tensor
    repeats: bool  # a second run gave the same bits


@dataclass
class Inputs:
    """The inputs of one step: its rows, and the cache before it."""

    tokens: Tensor
    positions: Tensor
    row_seq: Tensor
    pool: Tensor


def check_decode(
    timed: StepShape,
    case: DecodeCase,
    context: int,
    row_sequences: Sequence[int] | None = None,
    machine: KernelMachine | None = None,
) -> Verdict:
    """The build `timed`, at this context, against the oracle: every one of the first `DEPTH` layers of the case."""
    observations: list[Observation] = []
    inputs: Inputs | None = None
    before = case.pool.clone()
    for depth in range(1, min(DEPTH, timed.layers) + 1):
        shape = at_depth(timed, depth)
        cut = case.first_layers(depth)
        step = cut.step(shape, machine)
        if inputs is None:
            place_rows(step, context, row_sequences)
            inputs = Inputs(step.tokens.clone(), step.positions.clone(), step.row_seq.clone(), before)
        observations.append(observe(step, case.pool, inputs))
    assert inputs is not None
    case.pool.copy_(before)
    rows = "" if timed.rows == 1 else f", {timed.rows} rows" + (" of one sequence" if row_sequences else "")
    return judge(f"{timed.qkv}, cache in {timed.kv}, at {context}{rows}", observations, case, inputs)


def observe(step: DecodeStep, pool: Tensor, inputs: Inputs) -> Observation:
    """Two runs over the same cache, with poison in everything that a run must write itself."""
    runs = []
    for _ in range(2):
        pool.copy_(inputs.pool)
        step.tokens.copy_(inputs.tokens)
        step.positions.copy_(inputs.positions)
        step.row_seq.copy_(inputs.row_seq)
        for name, box in step.boxes.items():
            if name not in SUMS:
                box.fill_(-1)
        step.logits.fill_(float("nan"))
        step.next_tokens.fill_(-1)
        step.run()
        runs.append((step.logits.clone(), step.next_tokens.clone(), pool.clone()))  # waits for the step
    same = all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(*runs))
    logits, tokens, written = runs[-1]
    return Observation(step.shape, oracle.last_layer(step), logits, tokens, written, same)


def judge(name: str, observations: Sequence[Observation], case: DecodeCase, inputs: Inputs) -> Verdict:
    """Observations of depth 1, 2, ... of the same inputs against the oracle. Needs no kernel: tests make their own."""
    verdict = Verdict(name)
    chosen: list[Tensor] = []
    for depth, seen in enumerate(observations, start=1):
        chosen.append(oracle.top_experts(seen.layer["router"]))
        pool = inputs.pool.clone()
        expected = oracle.step(
            seen.shape, case.first_layers(depth).weights, pool, case.tables, case.rope,
            inputs.tokens, inputs.positions, inputs.row_seq, experts=chosen,
        )  # fmt: skip
        layer = expected.layers[-1]
        verdict.require(f"layer {depth} repeats to the last bit", seen.repeats)
        for value in oracle.COMPARED:
            verdict.compare(f"layer {depth} {value}", seen.layer[value], getattr(layer, value), BOUND)
        gap, deviation = choice_gap(layer.router, chosen[-1]), float(layer.router.std())
        verdict.add(f"layer {depth} choice of experts, beyond a tie", max(gap, 0.0), TIE * deviation)
        _judge_cache(verdict, depth, seen, expected, case, inputs)
        _judge_logits(verdict, depth, seen, expected.logits)
    verdict.facts |= {"experts_per_layer": sum(torch.unique(c).numel() for c in chosen) / len(chosen)}
    return verdict


def _judge_logits(verdict: Verdict, depth: int, seen: Observation, expected: Tensor) -> None:
    size = rms(expected)
    verdict.compare(f"depth {depth} logits", seen.logits, expected, BOUND)
    verdict.add(f"depth {depth} worst logit", float((seen.logits - expected).abs().max()) / size, WORST)
    within = bool(((seen.tokens >= 0) & (seen.tokens < expected.shape[1])).all())
    verdict.require(
        f"depth {depth} token is the argmax of its logits", within and token_gap(seen.logits, seen.tokens) == 0
    )
    gap = token_gap(expected, seen.tokens) if within else float("inf")
    verdict.add(f"depth {depth} token below the oracle's highest, beyond a tie", gap / size, TIE)


def _judge_cache(
    verdict: Verdict, depth: int, seen: Observation, expected: oracle.StepValues, case: DecodeCase, inputs: Inputs
) -> None:
    """Cells of this step's rows against the oracle's keys and values; every other cell is as it was."""
    untouched = as_bytes(seen.pool).clone()
    for index, layer in enumerate(expected.layers):
        cells = cells_of(case.tables[index % 2], inputs)
        for name, part, exact in (("keys", 0, layer.key), ("values", 1, layer.value)):
            codes = [as_bytes(seen.pool)[page, index // 2, part, :, slot] for page, slot in cells]
            stored = torch.stack(codes).view(seen.pool.dtype)
            name = f"depth {depth} cached {name} of layer {index + 1}"
            verdict.add(name, error_beyond_rounding(stored, exact), BOUND)
            for page, slot in cells:
                untouched[page, index // 2, part, :, slot] = as_bytes(inputs.pool)[page, index // 2, part, :, slot]
    verdict.require(f"depth {depth} leaves the rest of the cache", torch.equal(untouched, as_bytes(inputs.pool)))


def cells_of(table: Tensor, inputs: Inputs) -> list[tuple[int, int]]:
    """(page, slot) of every row."""
    rows = zip(inputs.positions.tolist(), inputs.row_seq.tolist())
    return [(int(table[sequence, position // PAGE]), position % PAGE) for position, sequence in rows]


def same_as_timed(timed: DecodeStep, case: DecodeCase, context: int, machine: KernelMachine | None = None) -> Verdict:
    """The build that is timed, with all its layers, against the compared one of `DEPTH` layers, in what both write into
    the cache: the keys of a layer hold everything before them. It repeats, and its token is the argmax."""
    verdict = Verdict(f"{timed.shape.qkv}, all {timed.shape.layers} layers at {context}")
    place_rows(timed, context)
    inputs = Inputs(timed.tokens.clone(), timed.positions.clone(), timed.row_seq.clone(), case.pool)
    shape = at_depth(timed.shape, min(DEPTH, timed.shape.layers))
    short = case.first_layers(shape.layers).step(shape, machine)
    cells = [(i, page, slot) for i in range(shape.layers) for page, slot in cells_of(case.tables[i % 2], inputs)]
    written, logits = [], []
    for step in (timed, timed, short):
        step.tokens.copy_(inputs.tokens)
        step.positions.copy_(inputs.positions)
        step.row_seq.copy_(inputs.row_seq)
        for i, page, slot in cells:
            as_bytes(case.pool)[page, i // 2, :, :, slot] = 0
        step.run()
        written.append(torch.stack([as_bytes(case.pool)[page, i // 2, :, :, slot] for i, page, slot in cells]).clone())
        logits.append(step.logits.clone())
    verdict.require(
        "repeats to the last bit", torch.equal(logits[0], logits[1]) and torch.equal(written[0], written[1])
    )
    verdict.require("writes what the compared build writes", torch.equal(written[0], written[2]))
    verdict.require("logits are numbers", bool(torch.isfinite(logits[0]).all()))
    verdict.require("token is the argmax of its logits", token_gap(logits[1], timed.next_tokens) == 0)
    return verdict


def experts_of_last_step(step: DecodeStep) -> int:
    """Distinct experts that the rows of the step that ran last chose in its last layer."""
    return int(torch.unique(oracle.top_experts(oracle.last_layer(step)["router"])).numel())


def as_bytes(x: Tensor) -> Tensor:
    """For equality: torch compares no FP8, and two NaN are not equal."""
    return x.view(torch.uint8) if x.dtype in (torch.float8_e4m3fn, torch.bfloat16) else x
