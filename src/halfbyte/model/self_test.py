"""Checks the kernels that are about to serve against known answers on this machine; a wrong one is not served.

Machine code that has never run on such a GPU may be wrong in ways that no compiler shows: a lane that holds another
row, a code that is flushed to zero, a hand-over that comes too early. Before weights are loaded the plan's own binaries
run on small models in the model's shapes (`twin.py`): every code under many scales through each matrix alone, in every
regime; two random layers compared with the reference; and those again with late hand-overs. Any difference is named,
and the model is not served. A pass is remembered for this GPU, driver, plan and these kernels
(`cache_folder("self-test")`); GPUs that receipts were measured on need none. Needs a GPU; says nothing about speed.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.errors import EngineError, PlanError, UsageError
from halfbyte.gates import Gates, cache_folder
from halfbyte.model.checkpoint import place_experts
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.model.twin import Probe, enlarge, probes, random_twin
from halfbyte.model.weights import Weights
from halfbyte.plan import reference
from halfbyte.plan.phase import ARCHES, Arch, Spec
from halfbyte.plan.plan import Compilation
from halfbyte.plan.select import PlanChoice, select
from halfbyte.plan.step import Regime, Step

WAYS = ("auto", "always", "off")
KERNELS = "halfbyte.kernels.self_test"
# GPUs whose receipts are in bench/results: every kernel has been compared there (a test holds them to this list).
MEASURED = ("NVIDIA H200",)

REGIMES: tuple[Regime, ...] = ("decode", "batch", "prefill")  # long prompts run prefill's kernels
CONTEXT, VOCAB = 512, 4096
# Of the random twin: a prompt, a batch, decode, three drafts, a prompt over more pages than a kernel has in flight.
CHUNKS = (130, 20, 1, 3, 300)
# A code differs from its neighbours by a sixth or more. What is between may be rounded once or twice, as the
# activations are: relative, and in units of the group's scale (or of the row).
TOLERANCE = {"f32": 0.01, "bf16": 0.01, "int8": 0.03, "fp8": 0.09, "mxfp8": 0.09}
# int8 has one step for a group of elements, half of which each rounding may add to the small ones too; a value is
# rounded in front of the next matrix and in front of the head.
GROUP, ROUNDINGS = 32, 2
EXPERT_PROBES = ("gate", "up", "down")
# Of the logits of two layers; no more than `lab/plan_comparison.py` allows (docs/numerics.md).
TWIN = {"f32": 2e-4, "bf16": 2e-2, "int8": 4e-2, "fp8": 8e-2, "mxfp8": 8e-2, "mxfp4": 0.4}


@dataclass(frozen=True)
class Report:
    """`problems` is empty where everything is right."""

    checks: tuple[str, ...]
    problems: tuple[str, ...]
    seconds: float


# ---- when it runs, and its record -----------------------------------------------------------------------------------


def way_of(text: str) -> str:
    if text not in WAYS:
        raise UsageError(f"--self-test is {text!r}; use one of {', '.join(WAYS)}.")
    return text


def ensure(config: ModelConfig, choice: PlanChoice, arch: Arch, gates: Gates, device: torch.device, way: str) -> None:
    """Run the self-test where it is due; a PlanError names the differences. Its kernels are compiled first."""
    if not is_due(choice, device, way_of(way)):
        return
    kernels = importlib.import_module(KERNELS)
    Compilation(choice.spec, choice.chosen, arch, kernels.compilations(choice.spec, choice.chosen, arch)).wait()
    report = run(config, choice, gates, device)
    if report.problems:
        raise PlanError(refusal(arch, report))
    remember(choice, report)


def is_due(choice: PlanChoice, device: torch.device, way: str) -> bool:
    if device.type != "cuda" or way == "off":
        return False
    if way == "always":
        return True
    return not _is_measured(choice, torch.cuda.get_device_name(device)) and passed(choice) is None


def _is_measured(choice: PlanChoice, gpu: str) -> bool:
    """Whether this plan's kernels have been compared on such a GPU: its own, not those of an older architecture that
    HALFBYTE_GPU_INSTRUCTIONS restricts it to; and not with experts in host memory, of which no receipt compares all."""
    return gpu in MEASURED and ARCHES[choice.selection.arch].has_run and not choice.spec.host_layers


def refusal(arch: Arch, report: Report) -> str:
    problems = "; ".join(report.problems[:4])
    return (
        f"the self-test failed on this {arch.name} GPU, so nothing is served: {problems}. Please report it; "
        "--moe-kernel triton --linear-kernel triton --attention triton asks for other kernels, and --self-test off "
        "serves wrong answers."
    )


def _path(choice: PlanChoice) -> Any:
    spec, selection = choice.spec, choice.selection
    identity = importlib.import_module(KERNELS).identity()
    plan = [identity, selection.chosen, dict(selection.layouts), spec.matrices.texts(), spec.activation, spec.kv_dtype,
            spec.hidden, spec.intermediate, spec.experts, spec.heads, spec.layers, spec.vocab]  # fmt: skip
    if spec.host_layers:
        plan.append([spec.host_layers, spec.host_activation])
    key = hashlib.sha256(json.dumps(plan, sort_keys=True, default=list).encode()).hexdigest()[:24]
    return cache_folder("self-test") / f"{key}.json", identity


def passed(choice: PlanChoice) -> dict[str, Any] | None:
    """The record of an earlier pass of this plan on this GPU, with this driver and these kernels."""
    path, _ = _path(choice)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def remember(choice: PlanChoice, report: Report) -> None:
    """Record the pass; if the cache cannot be written, the next load tests again."""
    path, identity = _path(choice)
    summary = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "seconds": round(report.seconds, 2)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(identity | summary | {"checks": report.checks}), encoding="utf-8")
    except OSError:
        return


def describe(choice: PlanChoice, arch: Arch, here: bool) -> str:
    """One clause for `explain`; `here` means that the plan is for this machine."""
    if not arch.is_gpu:
        return "none: the tests run these very kernels"
    if not here:
        where = f"none on a {' or '.join(MEASURED)}, on others " if arch.name == "sm90" else ""
        return f"{where}at the first load there (--self-test auto)"
    if _is_measured(choice, name := torch.cuda.get_device_name()):
        return f"none needed: receipts were measured on a {name} (--self-test always runs it)"
    record = passed(choice)
    if record is None:
        return "at the next load: this GPU, driver, plan and these kernels have not passed it yet"
    return f"passed at {record['time']} in {record['seconds']} s, with driver {record['driver']}"


# ---- running it -----------------------------------------------------------------------------------------------------


def run(
    config: ModelConfig, choice: PlanChoice, gates: Gates, device: torch.device, *, regimes: Sequence[Regime] = REGIMES,
    columns: int = 64, late: bool = True,
) -> Report:  # fmt: skip
    """Run all checks on the plan's own kernels."""
    began = time.perf_counter()
    spec = choice.spec
    # One layer's experts in host memory are enough: the next layer's are then on the GPU, and both ways are tested.
    choice = replace(choice, spec=replace(spec, max_context=CONTEXT, host_layers=min(1, spec.host_layers)))
    checks: list[str] = []
    problems: list[list[str]] = []  # by probe: a wrong matrix also spoils the probes whose values pass through it
    with torch.inference_mode():
        for probe in probes(config, spec.matrices.in_layer(0), device, columns):
            if skipped(probe.name, spec):
                continue
            checks.append(probe.name)
            problems.append(ask(probe, config, choice, gates, regimes))
        if not any(problems):
            checks += ["two layers", *(["late hand-overs"] if late else [])]
            problems.append(compare_twin(config, choice, gates, device, regimes, late=late))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the weights come next
    first_of_each = [problem for regime in zip_longest(*problems) for problem in regime if problem is not None]
    return Report(tuple(checks), tuple(first_of_each), time.perf_counter() - began)


def skipped(probe: str, spec: Spec) -> bool:
    """Four-bit activations round a layer's output to a quarter of itself, so that only the head can be tested."""
    narrow = any(spec.at(r).activation not in TOLERANCE for r in REGIMES)
    return narrow and probe != "lm_head"


def activations(spec: Spec, regime: Regime, probe: str = "") -> tuple[str, ...]:
    """The formats of rows in front of the weights that a probe sees, or all weights see: the GPU's, and in front of
    experts in host memory the CPU's."""
    own = spec.at(regime).activation
    on_host = spec.host_layers and (not probe or probe in EXPERT_PROBES)
    return (own, spec.host_activation) if on_host else (own,)


def step_of(tokens: Tensor, device: torch.device) -> Step:
    """One token to a sequence, each at its beginning."""
    rows = len(tokens)
    at = torch.arange(rows, dtype=torch.int32, device=device)
    return Step(
        tokens=tokens.int().to(device), positions=torch.zeros_like(at), row_sequence=at, logit_rows=at, max_kv_len=1,
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=device), kv_lens=torch.ones_like(at),
        block_tables={"sliding": at[:, None] + 1, "full": at[:, None] + 1 + rows},
    )  # fmt: skip


def batches(count: int, model: GptOss, regimes: Sequence[Regime]) -> Iterator[tuple[Regime, list[int]]]:
    """Which tokens run together so that each regime sees all of them, and each number of rows that it has."""
    limits = model.plan.limits
    everything = list(range(count))
    for regime in regimes:
        size = {"decode": limits.decode, "batch": limits.batch, "prefill": limits.batch + 1}[regime]
        fewest = {"decode": 1, "batch": limits.decode + 1, "prefill": limits.batch + 1}[regime]
        if regime == "decode":
            yield regime, everything[:1]
        for first in range(0, count, size):
            rows = everything[first : first + size]
            yield regime, (rows * -(-fewest // len(rows)))[: max(fewest, len(rows))]


def ask(probe: Probe, config: ModelConfig, choice: PlanChoice, gates: Gates, regimes: Sequence[Regime]) -> list[str]:
    """The differences from the probe's expected logits, one per regime at most."""
    model = GptOss(
        enlarged(probe.small, config, choice),
        gates,
        page_size=choice.spec.page_size,
        choice=choice,
    )
    most = max(model.plan.limits.batch + 1, len(probe.tokens))
    model.allocate_kv(1 + 2 * most)
    problems: dict[Regime, str] = {}
    for regime, rows in batches(len(probe.tokens), model, regimes):
        if regime in problems:
            continue
        got = model.forward(step_of(probe.tokens[rows], model.device)).double()
        problem = judge(probe, rows, got[:, : probe.want.shape[1]], activations(choice.spec, regime, probe.name))
        if problem is not None:
            names = ", ".join(choice.selection.chosen[regime])
            problems[regime] = f"{regime} ({names}), step of {len(rows)}: {problem}"
    model.plan.bound.clear()  # launches refer to their model: without them its memory is free for the next probe
    return list(problems.values())


def enlarged(small: Weights, config: ModelConfig, choice: PlanChoice) -> Weights:
    """A small model in the shapes of a large one, laid out and placed as a plan has it."""
    weights = enlarge(small, config, choice.selection.layouts, choice.spec.matrices)
    return place_experts(weights, choice.spec.host_layers)


def allowed_error(want: Tensor, unit: Tensor, formats: Sequence[str]) -> Tensor:
    """How far each element may be off where rows have these formats in front of weights."""
    allowed = max(TOLERANCE.get(a, 0.09) for a in formats) * (want.abs() + unit / 4)
    if "int8" not in formats:
        return allowed
    groups = nn.functional.pad(want.abs(), (0, -want.shape[1] % GROUP)).reshape(want.shape[0], -1, GROUP)
    largest = groups.amax(2).repeat_interleave(GROUP, 1)[:, : want.shape[1]]
    return allowed + ROUNDINGS * largest / 254


def judge(probe: Probe, rows: Sequence[int], got: Tensor, formats: Sequence[str]) -> str | None:
    """The wrong elements, described as precisely as possible, or None."""
    want, unit = probe.want[rows], probe.unit[rows]
    wrong = ~((got - want).abs() <= allowed_error(want, unit, formats))  # NaN is wrong as well
    if not bool(wrong.any()):
        return None
    places = wrong.nonzero()
    worst = int(((got - want).abs() / unit)[wrong].nan_to_num(torch.inf).argmax())
    at, out = places[worst].tolist()
    row, column = probe.element(int(probe.tokens[rows[at]]), out)
    problem = (
        f"{probe.name} row {row}, column {column}, {probe.drawn.say(row, column)}, gave {float(got[at, out]):.5g} "
    )
    problem += f"instead of {float(want[at, out]):.5g}; {len(places)} of {wrong.numel()} differ"
    some = places[torch.linspace(0, len(places) - 1, min(64, len(places))).long()].tolist()
    codes = {probe.drawn.say(*probe.element(int(probe.tokens[rows[a]]), o)).partition(" x ")[0] for a, o in some}
    return f"{problem}, all of {' or '.join(sorted(codes))}" if len(codes) <= 2 < len(some) else problem


def compare_twin(
    config: ModelConfig,
    choice: PlanChoice,
    gates: Gates,
    device: torch.device,
    regimes: Sequence[Regime],
    *,
    late: bool,
) -> list[str]:
    """Compare two random layers with the reference, and with themselves (bit by bit) where hand-overs are late."""
    spec, selection = choice.spec, choice.selection
    small = random_twin(config, spec.matrices, device, VOCAB)
    model = GptOss(enlarged(small, config, choice), gates, page_size=spec.page_size, choice=choice)
    few = replace(
        spec, layers=small.config.layers, experts=small.config.experts, vocab=small.config.vocab, host_layers=0
    )
    plain = select(few, ARCHES["cpu"], Gates(), reference.PHASES)
    choice = PlanChoice(few, *plain)
    other = GptOss(small, gates, page_size=spec.page_size, choice=choice, limits=model.plan.limits)
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, small.config.vocab, (sum(CHUNKS),), generator=random).tolist()
    expected = feed(other, tokens)
    actual = feed(model, tokens)
    problems: dict[Regime, str] = {}
    for rows, got, want in zip(CHUNKS, actual, expected):
        regime = model.plan.limits.regime(rows)
        bound = max(TWIN[a] for a in activations(spec, regime))
        off = (got[:, : want.shape[1]] - want).norm(dim=1) / want.norm(dim=1)
        near = float((off <= 4 * bound).float().mean())  # NaN is not near; a tie may choose another expert
        if regime in regimes and not (float(off.median()) <= bound and near >= 0.75):
            problems[regime] = (
                f"{regime} ({', '.join(selection.chosen[regime])}), two layers, step of {rows}: logits are "
                f"{float(off.median()):.2g} from the reference's in the median row, where {bound:.2g} is allowed"
            )
    if problems or not late:
        return list(problems.values())
    with _late(device):
        again = feed(model, tokens)
    for rows, got, want in zip(CHUNKS, again, actual):
        regime = model.plan.limits.regime(rows)
        if regime in regimes and not torch.equal(got, want):
            names = ", ".join(selection.chosen[regime])
            problems[regime] = f"{regime} ({names}), step of {rows}: other logits where hand-overs are late"
    return list(problems.values())


def _late(device: torch.device) -> AbstractContextManager[None]:
    if device.type != "cuda":
        return nullcontext()
    context: AbstractContextManager[None] = importlib.import_module(KERNELS).late_hand_overs()
    return context


def feed(model: GptOss, tokens: Sequence[int]) -> list[Tensor]:
    sequence, out, at = SingleSequence(model, sum(CHUNKS)), [], 0
    for rows in CHUNKS:
        try:
            out.append(sequence.feed(tokens[at : at + rows], all_logits=True).float().clone())
        except RuntimeError as e:  # a kernel that stopped itself takes the context with it
            raise EngineError(f"a kernel failed in the self-test, in a step of {rows} rows: {e}") from None
        at += rows
    model.release_kv()
    return out
