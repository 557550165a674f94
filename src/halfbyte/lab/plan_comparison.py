"""A model's plan against the reference, regime by regime: what must hold before its figures mean anything.

Two layers of the model, one of each kind of attention, and its head: in 36 random layers one rounding that falls the
other way chooses other experts, and two right kernels differ by a third. The reference runs on the same device, on the
same weights, with the same quantisation points and with the experts that the plan chose; that those are a right choice
is a comparison of its own. Compared are all rows of every layer, what the cache holds, the logits and the token. Every
case must hold: there is no median over seeds and no second try. Bounds are in docs/numerics.md.

A phase that runs a whole step keeps its layers to itself. Then the reference is replayed with every near tie of the
experts, and one must fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halfbyte.lab.levels.verdict import Verdict, choice_gap, relative_error, rms, token_gap
from halfbyte.lab.measure.device_timing import Cache, decode_step, prefill_step, random_tokens
from halfbyte.lab.result import Check
from halfbyte.model.gpt_oss import GptOss
from halfbyte.ops.attention import gather_kv
from halfbyte.ops.products import matmul
from halfbyte.plan import reference
from halfbyte.plan.activations import Activations
from halfbyte.plan.record import NodeKernel
from halfbyte.plan.select import PlanChoice
from halfbyte.plan.step import REGIMES, Step

LAYERS = 2
PROMPTS = {161: 3, 2048: 1, 8192: 1}  # rows -> seeds; each row of a long prompt is a sample of its own
BATCHES = (8, 32, 64)
CONTEXTS = (512, 2048, 8192, 32768)
BATCH_CONTEXT = 128

# On what a layer adds to the residual, over all rows, by the format of activations. Weights are exact everywhere, so
# bf16 pays for a rounding of 2^-9 in front of each of four products and in the softmax weights. A narrower format pays
# for values on the edge between two codes that fall the other way: their number grows with what is above, and each
# costs a step. The second layer has the first one's error in its input as well.
# A test holds them against what rounding a layer's input to bf16 does to the reference itself.
BOUNDS = {"f32": 1e-4, "bf16": 1e-2, "int8": 2e-2, "fp8": 6e-2, "mxfp8": 6e-2, "mxfp4": 0.2}
# Of keys and values: an edge costs a step of the cache, and half of what a layer may be off comes with the activations.
CACHE_BOUNDS = {"f32": 1e-4, "bf16": 1e-2, "fp8": 4e-2}
WORST = 5  # times the bound: the largest of a million normal errors is 4.9 of their deviation
TIE = 2 * WORST  # two values that are compared may both be off
DECODE_STEP = "decode_step"


@dataclass
class StepTrace:
    """What a step left behind, layer by layer."""

    x: list[Tensor] = field(
        default_factory=list
    )  # [rows, hidden] after each layer; the reference: before the first, too
    experts: list[Tensor] = field(default_factory=list)  # [rows, top_k] of each layer
    router: list[Tensor] = field(default_factory=list)  # [rows, experts]: logits; of the reference alone
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def complete(self) -> bool:
        """One phase ran everything, and shows its logits only."""
        return not self.x


# ---- the two sides --------------------------------------------------------------------------------------------------


def first_layers(model: GptOss, layers: int = LAYERS) -> GptOss:
    """The model cut after so many layers, with the same kernels."""
    w, c = model.weights, model.config
    if c.layers <= layers:
        return model
    short = replace(w, config=c.with_(layers=layers, layer_kinds=c.layer_kinds[:layers]), layers=w.layers[:layers])
    return GptOss(short, model.gates, page_size=model.spec.page_size, limits=model.plan.limits)


def reference_of(model: GptOss) -> GptOss:
    """A reference plan with these weights and quantisation points, on the same device."""
    names = tuple(p.name for p in reference.PHASES)
    selection = replace(model.plan.selection, chosen=dict.fromkeys(REGIMES, names), refusals=(), notes=())
    chosen = {regime: list(reference.PHASES) for regime in REGIMES}
    choice, limits = PlanChoice(model.spec, chosen, selection), model.plan.limits
    return GptOss(model.weights, model.gates, page_size=model.spec.page_size, choice=choice, limits=limits)


def trace(model: GptOss, step: Step) -> StepTrace:
    """The plan's own step."""
    out, acts = StepTrace(), Activations()
    for bound in model.plan.walk(step, acts):
        if bound.phase.covers[-1] == "moe":
            out.x.append(acts.complete_x().float())
            out.experts.append(acts.topk_ids.long().clone())
    out.logits = acts.logits.float()
    return out


def trace_reference(model: GptOss, step: Step, experts: Sequence[Tensor | None]) -> StepTrace:
    """The reference's step, with these experts in each layer; None: those of its own router."""
    out, acts = StepTrace(), Activations()
    for bound in model.plan.walk(step, acts):
        operation = bound.phase.covers[-1]
        if operation in ("embed", "moe"):
            out.x.append(acts.x)
        elif operation == "router":
            layer = len(out.router)
            w = model.weights.layers[layer]
            logits = matmul(acts.h, w.router) + w.router_bias.float()
            chosen = experts[layer] if layer < len(experts) else None
            if chosen is not None:
                acts.topk_ids = chosen
                acts.topk_weights = torch.softmax(logits.gather(1, chosen), -1)
            out.router.append(logits)
            out.experts.append(acts.topk_ids.long())
    out.logits = acts.logits
    return out


@dataclass(frozen=True)
class PlanComparison:
    """The outcome of every case, and the kernels that ran in them."""

    checks: tuple[Check, ...]
    kernels: frozenset[NodeKernel]

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(c.ok for c in self.checks)

    def covers(self, timed: Mapping[str, Any]) -> Check:
        """Whether every build of a result's record is one that was compared. Triton's kernels are left out because they
        are built anew for other sizes, and the decode step because its builds differ in their number of layers: it is
        compared with two of them."""
        runs = [p for ways in timed["regimes"].values() for way in ways for p in way["phases"]]
        kernels = {NodeKernel(k["name"], k["module"]) for p in runs for k in p["kernels"]}
        ran = {k for k in kernels if not k.name.endswith("_kernel") and k.name not in (DECODE_STEP, "")}
        others = sorted(f"{k.name} {k.module[:12]}" for k in ran - self.kernels)
        note = f"timed and never compared: {', '.join(others)}" if others else f"{len(ran)} kernels"
        return Check("every kernel that was timed was compared", not others, note=note)


def compare(
    model: GptOss,
    prompts: Sequence[int] = tuple(PROMPTS),
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    batch_context: int = BATCH_CONTEXT,
) -> PlanComparison:
    """Every case of this model. Replaces its KV pool and leaves none."""
    model.release_kv()
    short = first_layers(model)
    seeds = {rows: PROMPTS.get(rows, 1) for rows in prompts}
    cases = compare_regimes(short, prompts=seeds, batches=batches, contexts=contexts, batch_context=batch_context)
    return PlanComparison(tuple(v.as_check() for v in cases), frozenset(short.plan.record.launches()))


# ---- cases ----------------------------------------------------------------------------------------------------------


def compare_regimes(
    model: GptOss,
    *,
    prompts: dict[int, int] | None = None,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    batch_context: int = BATCH_CONTEXT,
) -> Iterator[Verdict]:
    """Prompts of so many rows (with so many seeds each), batches of so many sequences, and one row at each context."""
    short = first_layers(model)
    other = reference_of(short)
    for rows, seeds in (PROMPTS if prompts is None else prompts).items():
        for seed in range(seeds):
            cache = random_caches((short, other), 1, rows)
            step = prefill_step(short, cache, random_tokens(short, rows, seed), 0)
            yield compare_or_fail(f"prompt of {rows} rows, seed {seed}", short, other, step)
    for sequences, context in (*((b, batch_context) for b in batches), *((1, c) for c in contexts)):
        cache = random_caches((short, other), sequences, context + 1)
        step = decode_step(short, cache, context, seed=sequences)
        name = f"batch of {sequences}" if sequences > 1 else "decode"
        yield compare_or_fail(f"{name} at {context}", short, other, step)
    short.release_kv()
    other.release_kv()


def random_caches(models: Sequence[GptOss], sequences: int, tokens: int) -> Cache:
    """Random pages that all models share, and tables that name them out of order."""
    first = models[0]
    blocks = -(-tokens // first.spec.page_size)
    count = 2 * sequences * blocks
    g = torch.Generator(device=first.device).manual_seed(0)
    filled: Tensor | None = None
    for model in models:
        pool = model.allocate_kv(1 + count)
        if filled is None:
            filled = pool
            for part in torch.split(pool, 64):
                part.copy_((torch.randn(part.shape, generator=g, device=first.device) * 0.5).to(part.dtype))
        else:
            pool.copy_(filled)
    pages = (torch.randperm(count, generator=g, device=first.device).int() + 1).view(2, sequences, blocks)
    return Cache(pages[0].contiguous(), pages[1].contiguous())


# ---- comparing ------------------------------------------------------------------------------------------------------


def compare_or_fail(name: str, model: GptOss, other: GptOss, step: Step) -> Verdict:
    """`compare_step`; a case that raises has failed with that reason, and the others go on."""
    try:
        return compare_step(name, model, other, step)
    except Exception as e:
        verdict = Verdict(name)
        verdict.require(f"{type(e).__name__}: {e}"[:300], False)
        return verdict


def compare_step(name: str, model: GptOss, other: GptOss, step: Step) -> Verdict:
    """One step of both, over caches that are alike before it."""
    regime = model.plan.regime(step)
    verdict = Verdict(f"{name} ({regime})")
    bound = BOUNDS[model.spec.at(regime).activation]
    actual = trace(model, step)
    if actual.complete:
        expected = closest_replay(model, other, step, actual.logits)
    else:
        expected = trace_reference(other, step, actual.experts)
        judge_layers(verdict, actual, expected, bound)
    judge_cache(verdict, model, other, step, max(CACHE_BOUNDS[model.spec.kv_dtype], bound / 2))
    judge_logits(verdict, actual.logits, expected.logits, bound * model.config.layers)
    touched = [torch.unique(e).numel() for e in expected.experts]
    verdict.facts |= {"experts_per_layer": sum(touched) / len(touched), "rows": step.rows}
    return verdict


def judge_layers(verdict: Verdict, actual: StepTrace, expected: StepTrace, bound: float) -> None:
    """All rows of every layer, in what the layer adds to the residual; and the choice of experts."""
    for i, (x, ids, router) in enumerate(zip(actual.x, actual.experts, expected.router)):
        layer, allowed = i + 1, bound * (i + 1)
        added, off = expected.x[i + 1] - expected.x[i], x - expected.x[i + 1]
        verdict.add(f"layer {layer}, all rows", float(off.double().norm() / added.double().norm()), allowed)
        rows = off.double().norm(dim=-1) / added.double().norm(dim=-1)
        verdict.add(f"layer {layer}, worst row", float(rows.max()), WORST * allowed)
        gap = max(choice_gap(router, ids), 0.0)
        verdict.add(f"layer {layer}, choice of experts beyond a tie", gap / float(router.std()), TIE * allowed)
    verdict.require("every layer was seen", len(actual.x) == len(expected.router) == len(expected.x) - 1)


def judge_logits(verdict: Verdict, actual: Tensor, expected: Tensor, bound: float) -> None:
    verdict.compare("logits", actual, expected, bound)
    gap = token_gap(expected, actual.argmax(-1)) / rms(expected)
    verdict.add("token below the reference's highest, beyond a tie", gap, TIE * bound)


def judge_cache(verdict: Verdict, model: GptOss, other: GptOss, step: Step, bound: float) -> None:
    """Keys and values of this step's rows; every other cell is as it was, which is as the other one has it."""
    pools = [m.kv_pool().view(torch.uint8).clone() for m in (model, other)]
    for layer, kind in enumerate(model.config.layer_kinds):
        index = model.config.kind_index(layer)
        for part, name in ((0, "keys"), (1, "values")):
            mine, other_rows = (rows_of(m.kv_pool(), index, part, kind, step) for m in (model, other))
            verdict.compare(f"cached {name} of layer {layer + 1}", mine, other_rows, bound * (layer + 1))
        page, slot = cells_of(model, kind, step)
        for pool in pools:
            pool[page, index, :, :, slot] = 0
    pools = [p[1:] for p in pools]  # page 0 is scratch
    verdict.require("the rest of the cache is as it was", torch.equal(*pools))


def cells_of(model: GptOss, kind: str, step: Step) -> tuple[Tensor, Tensor]:
    """(page, slot) of every row."""
    size = model.spec.page_size
    table = step.block_tables[kind][step.row_sequence.long()]
    page = table.gather(1, (step.positions // size).long()[:, None])[:, 0]
    return page.long(), (step.positions % size).long()


def rows_of(pool: Tensor, index: int, part: int, kind: str, step: Step) -> Tensor:
    """Float32 [rows, kv_heads, head_dim] as the cache holds them."""
    out = []
    starts = step.query_start.tolist()
    for s, length in enumerate(step.kv_lens.tolist()):
        both = gather_kv(pool, index, step.block_tables[kind][s], length)[part]  # [kv_heads, length, head_dim]
        out.append(both[:, length - (starts[s + 1] - starts[s]) :].transpose(0, 1))
    return torch.cat(out)


# ---- phases that keep their choices to themselves -------------------------------------------------------------------


def admissible(logits: Tensor, top_k: int, tolerance: float) -> list[list[int]]:
    """Every choice of experts of one row that is a top-k of logits which are each off by half the tolerance."""
    values, order = logits.sort(descending=True, stable=True)
    certain = int((values > values[top_k] + tolerance).sum())
    near = [int(e) for e, v in zip(order.tolist(), values.tolist()) if v >= float(values[top_k - 1]) - tolerance]
    choices = [
        order[:certain].tolist() + list(more) for more in itertools.combinations(near[certain:], top_k - certain)
    ]
    row = logits[None]
    return [c for c in choices if choice_gap(row, torch.tensor([c], device=logits.device)) <= tolerance]


def closest_replay(model: GptOss, other: GptOss, step: Step, logits: Tensor) -> StepTrace:
    """The reference with that near tie of one row's experts which fits best, layer by layer: what follows a layer shows
    in the next one's keys, behind the last one in the logits. Leaves the other's cache as this replay wrote it."""
    if step.rows != 1:
        raise AssertionError("a whole step is compared one row at a time")
    config = model.config
    tolerance = TIE * BOUNDS[other.spec.at(other.plan.regime(step)).activation]
    experts: list[Tensor | None] = []
    replay = trace_reference(other, step, experts)
    for layer in range(config.layers):
        router = replay.router[layer][0]
        best = float("inf")
        for choice in admissible(router, config.top_k, tolerance * (layer + 1) * float(router.std())):
            ids = torch.tensor([choice], device=router.device)
            candidate = trace_reference(other, step, [*experts, ids])
            if layer + 1 < config.layers:
                kind, index = config.layer_kinds[layer + 1], config.kind_index(layer + 1)
                error = relative_error(*(rows_of(m.kv_pool(), index, 0, kind, step) for m in (model, other)))
            else:
                error = relative_error(logits, candidate.logits)
            if error < best:
                best, closest = error, ids
        experts.append(closest)
        replay = trace_reference(other, step, experts)
    return replay
