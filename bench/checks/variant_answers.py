"""Variants of the embedded model through this machine's plan: the plain model's tokens and logits.

    python -m bench run variants
    python -m bench run variants --set presets=fast --set names="experts spread by 12"
    python -m bench run variants --set device=cpu --set presets=exact --set names="residual x 2^20"

A variant of `bench/variants.py` that computes the same function is loaded as any model is, and compared with the plain
model through the same plan: logits of one text in every regime (a prompt, a batch of rows, one row at a time), and
answers of the engine one, four and sixteen at a time. It is also asked padded (`bench/padded_model.py`), which is the
shape that the CUDA decode kernel wants. A variant that computes another function is compared with the reference in
float32: the plan's logits must be as near to it as those of a reference that rounds where the plan rounds. That the
plain model's answers are a CPU's is `embedded`. Times nothing.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.checks.embedded import complete
from bench.measurement import Run, engine_sources, measurement, option, run_cases, write_records
from bench.padded_model import load_padded
from bench.variants import CHANGED, NO_ROUNDING, SAME, logit_bound, write_variant
from halfbyte import gates as gates_
from halfbyte.engine.build import core_for
from halfbyte.engine.options import EngineOptions
from halfbyte.errors import UsageError
from halfbyte.evals.suite import Suite
from halfbyte.gates import Gates
from halfbyte.lab import receipts
from halfbyte.lab.measure.accuracy import ALL
from halfbyte.lab.plan_comparison import reference_of
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence

PRESETS = ("exact", "balanced", "mixed", "fast")
KINDS = {"same": SAME, "changed": CHANGED}
ROWS = {"prompt": [136], "batch": [40], "one row": [1] * 24}  # chunks of one text, in this order
SHORT_ROWS = {"prompt": [72], "batch": [24], "one row": [1] * 24}  # where the reference computes them, too
AT_ONCE = {1: 3, 4: 8, 16: 16}  # answers at a time -> problems
MAX_TOKENS = 64
WORST = (
    10  # times the bound of the median row: for the worst row of all where nothing rounds, else for nine of ten rows
)
FAR_ROWS = 0.1  # a near tie of experts that falls the other way moves a whole row
# A median of 24 rows or more may be so many times another's of the same rounding. The plain model and a variant that
# rounds in other places are two errors; a plan also rounds attention's probabilities, which the reference does not.
ROUNDING = 3.0
FLOOR = 2.0**-8  # rows in front of bf16 matrices are rounded too, which the reference does not: 2^-9 for each product
# A row has a clear choice if it is within CLOSE times the bound and its two highest logits are further apart than CLEAR
# times the bound and the logits' root mean square, four deviations of their difference.
CLOSE, CLEAR = 3, 16
MARGINS = 4  # differing answers of a variant whose margin is computed


def load_variant(folder: Path, gates: Gates, device: torch.device, padded: bool) -> GptOss:
    if padded:
        return load_padded(gates, device, folder)
    return load.load_model(load.resolve_model(str(folder)), gates, device=device)


def text_and_prompts() -> tuple[list[int], list[list[int]]]:
    """A text of the model's own kind, as long as all chunks, and the problems that are asked."""
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    prompts = [item.prompt for item in Suite("tiny", 0, 4).items(tokenizer) if len(item.prompt) < 500]
    step = len(prompts) // max(AT_ONCE.values())
    return [t for p in prompts for t in p][: sum(map(sum, ROWS.values()))], prompts[::step][: max(AT_ONCE.values())]


def chunk_logits(model: GptOss, tokens: Sequence[int], rows: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The logits of every token, by the regime that read it."""
    sequence, at = SingleSequence(model, len(tokens)), 0
    out: dict[str, Tensor] = {}
    for regime, chunks in rows.items():
        parts = []
        for count in chunks:
            parts.append(sequence.feed(tokens[at : at + count], all_logits=True).float().cpu())
            at += count
        out[regime] = torch.cat(parts)
    model.release_kv()
    return out


def engine_answers(model: GptOss, gates: Gates, prompts: Sequence[Sequence[int]]) -> dict[int, list[list[int]]]:
    """Answers at a time -> answers of MAX_TOKENS tokens, whatever is in them: stop tokens have other numbers where the
    vocabulary is permuted."""
    most = max(map(len, prompts)) + MAX_TOKENS
    options = EngineOptions(gates=gates, max_context=most, max_seqs=max(AT_ONCE), kv_gib=0.25, reserve_gib=0.0,
                            prefix_cache=False)  # fmt: skip
    core = core_for(model, load.tokenizer_of(load.resolve_model(None)), options)[0]
    try:
        return {
            together: [
                answer
                for first in range(0, count, together)
                for answer in complete(core, [list(p) for p in prompts[first : first + together]], MAX_TOKENS, True)
            ]
            for together, count in AT_ONCE.items()
        }
    finally:
        core.close()
        model.release_kv()


def until_stop(answer: Sequence[int], stops: Sequence[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(answer) if token in stops), len(answer))
    return list(answer[:end])


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    return (got - want).norm(dim=1) / want.norm(dim=1)


# ---- the same function ----------------------------------------------------------------------------------------------


@dataclass
class PlainModel:
    """What the plain model gave through the same plan."""

    model: GptOss
    logits: dict[str, Tensor]
    rounding: dict[str, float]  # regime -> the median row's error against the function without rounding
    answers: dict[int, list[list[int]]]
    text: list[int]
    prompts: list[list[int]]

    @classmethod
    def ask_plain_model(cls, gates: Gates, device: torch.device, padded: bool) -> PlainModel:
        text, prompts = text_and_prompts()
        exact = reference_logits(load.EMBEDDED, gates, "f32", "f32", text, ROWS)
        model = load_variant(load.EMBEDDED, gates, device, padded)
        stops = model.config.eos_tokens
        answers = {
            together: [until_stop(a, stops) for a in several]
            for together, several in engine_answers(model, gates, prompts).items()
        }
        logits = chunk_logits(model, text, ROWS)
        rounding = {regime: float(row_errors(got, exact[regime]).median()) for regime, got in logits.items()}
        return cls(model, logits, rounding, answers, text, prompts)

    def margin(self, prompt: Sequence[int], mine: Sequence[int], other: Sequence[int]) -> dict[str, Any]:
        """How far apart this model's logits are where two answers part."""
        at = next(i for i, (a, b) in enumerate(zip([*mine, -1], [*other, -1], strict=False)) if a != b)
        prefix = [*prompt, *mine[:at]]
        logits = SingleSequence(self.model, len(prefix) + 1).feed(prefix)[0].float()
        self.model.release_kv()
        pair = (mine[at], other[at]) if at < min(len(mine), len(other)) else None
        margin = float(logits[pair[0]] - logits[pair[1]]) if pair else None
        return {"token": at, "margin": margin, "spread": float(logits.std())}


def compare_same(name: str, preset: str, plain: PlainModel, gates: Gates, padded: bool, folder: Path) -> dict[str, Any]:
    """One variant that must have the plain model's answers."""
    variant = write_variant(name, load.EMBEDDED, folder)
    to_variant = torch.arange(variant.config["vocab_size"])  # the plain model's token -> this one's
    if variant.tokens is not None:
        to_variant = torch.argsort(variant.tokens)
    to_plain = torch.argsort(to_variant).tolist()

    def named(tokens: Sequence[int]) -> list[int]:
        return to_variant[torch.tensor(tokens)].tolist()

    model = load_variant(folder, gates, plain.model.device, padded)
    logits = chunk_logits(model, named(plain.text), ROWS)
    answers = engine_answers(model, gates, [named(p) for p in plain.prompts])
    checks: list[Check] = []
    figures: dict[str, Any] = {"regimes": {}, "differ": []}
    for regime, want in plain.logits.items():
        got = logits[regime][:, to_variant]
        errors, same = row_errors(got, want), got.argmax(-1) == want.argmax(-1)
        bound, rounds = bound_of(name, preset, regime, plain.rounding[regime], model)
        near = errors <= WORST * bound
        two = want.topk(2).values
        clear = (errors <= CLOSE * bound) & (two[:, 0] - two[:, 1] > CLEAR * bound * want.square().mean(1).sqrt())
        median, worst, far = float(errors.median()), float(errors.max()), float((~near).float().mean())
        share = float(same[clear].float().mean()) if bool(clear.any()) else math.nan
        figures["regimes"][regime] = {
            "median": median, "worst": worst, "far_rows": far, "rounding": plain.rounding[regime],
            "clear_rows": int(clear.sum()), "same_tokens": float(same.float().mean()),
        }  # fmt: skip
        checks += [
            Check(f"{regime}: logits, median row", median <= bound, median, bound),
            Check(f"{regime}: rows beyond {WORST} times that", far <= FAR_ROWS * rounds, far, FAR_ROWS * rounds),
            Check(f"{regime}: rows with a clear choice have the plain model's token", share == 1.0, share, 1.0),
        ]
    equal = total = 0
    for together, several in answers.items():
        for prompt, want_answer, answer in zip(plain.prompts, plain.answers[together], several, strict=False):
            mine = until_stop([to_plain[t] for t in answer], plain.model.config.eos_tokens)
            total, equal = total + 1, equal + (mine == want_answer)
            if mine != want_answer and len(figures["differ"]) < MARGINS:
                figures["differ"].append({"at_once": together} | plain.margin(prompt, want_answer, mine))
    share = equal / total
    checks.append(Check("answers are the plain model's", share == 1.0, share, 1.0))
    return record_of(name, model, checks, figures | {"equal": equal, "answers": total})


def bound_of(name: str, preset: str, regime: str, rounding: float, model: GptOss) -> tuple[float, bool]:
    """How far the median row of a variant may be from the plain model's, and whether the two round differently."""
    bound = logit_bound(name, preset)
    fixed_point = any("decode_step" in phase for phase in model.plan.record.phases("decode")) and regime == "one row"
    if bound == NO_ROUNDING and not (fixed_point and name.startswith("residual")):
        return bound, False
    return max(bound, ROUNDING * rounding), True


# ---- another function -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """One variant's logits without rounding, and how far from them a reference is that rounds where the plan does."""

    exact: dict[str, Tensor]
    rounded: dict[str, Tensor]


def reference_logits(
    folder: Path, gates: Gates, activation: str, kv_dtype: str, text: Sequence[int], rows: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    same_weights = replace(gates, activation=activation, kv_dtype=kv_dtype)
    model = load.load_model(load.resolve_model(str(folder)), gates_.as_stored(same_weights))
    return chunk_logits(reference_of(model), text, rows)


def compare_changed(
    name: str, gates: Gates, device: torch.device, padded: bool, folder: Path, text: list[int]
) -> dict[str, Any]:
    """One variant that has no plain model to stand beside."""
    model = load_variant(folder, gates, device, padded)
    logits = chunk_logits(model, text, SHORT_ROWS)
    expected = Expected(
        reference_logits(folder, gates, "f32", "f32", text, SHORT_ROWS),
        reference_logits(folder, gates, model.spec.activation, model.spec.kv_dtype, text, SHORT_ROWS),
    )
    checks: list[Check] = []
    figures: dict[str, Any] = {"regimes": {}}
    for regime, got in logits.items():
        errors = row_errors(got, expected.exact[regime])
        rounding = row_errors(expected.rounded[regime], expected.exact[regime])
        bound = ROUNDING * float(rounding.median()) + FLOOR
        figures["regimes"][regime] = {
            "median": float(errors.median()), "worst": float(errors.max()), "rounding": float(rounding.median()),
            "rounding_worst": float(rounding.max()),
        }  # fmt: skip
        checks += [
            Check(f"{regime}: every logit is a number", bool(got.isfinite().all())),
            Check(f"{regime}: logits, median row", float(errors.median()) <= bound, float(errors.median()), bound),
        ]
    return record_of(name, model, checks, figures)


# ---- processes and results ------------------------------------------------------------------------------------------


def record_of(name: str, model: GptOss, checks: Sequence[Check], figures: dict[str, Any]) -> dict[str, Any]:
    phases = {regime: sorted(model.plan.record.phases(regime)) for regime in model.plan.selection.chosen}
    plain_checks = [[c.what, c.ok, c.value, c.bound] for c in checks]
    return figures | {"name": name, "phases": phases, "checks": plain_checks, "record": model.plan.record.as_dict()}


def run_case(preset: str, padded: bool, kind: str, out: str, device_name: str, names: list[str]) -> None:
    """One process's part: a preset, a shape, and the variants of one kind."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    device, gates = torch.device(device_name), gates_.parse({}, env={}, preset=preset)
    chosen = [name for name in KINDS[kind] if name in names]
    plain = PlainModel.ask_plain_model(gates, device, padded) if kind == "same" else None
    text = text_and_prompts()[0][: sum(map(sum, SHORT_ROWS.values()))]
    records: list[dict[str, Any]] = []
    for name in chosen:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            if plain is not None:
                record = compare_same(name, preset, plain, gates, padded, Path(folder))
            else:
                write_variant(name, load.EMBEDDED, Path(folder))
                record = compare_changed(name, gates, device, padded, Path(folder), text)
        seconds = time.perf_counter() - start
        if records:
            del record["record"]  # of the same kernels; the receipt has it once
        records.append(record | {"preset": preset, "padded": padded, "kind": kind, "seconds": seconds})
        write_records(out, records)


def result_of(record: dict[str, Any]) -> Result:
    shape = {"padded": record["padded"], "variant": record["name"]}
    cell = Cell("variant", "tiny", record["preset"], {}, "engine" if record["kind"] == "same" else "plan", shape)
    checks = tuple(Check(*check) for check in record["checks"])
    regimes = record["regimes"].values()
    figures = [figure("logit_error", "relative", statistics.median(r["median"] for r in regimes)),
               figure("worst_row", "relative", max(r["worst"] for r in regimes))]  # fmt: skip
    if "equal" in record:
        figures.append(figure("equal_answers", "%", 100 * record["equal"] / record["answers"], ALL))
    detail = {k: record[k] for k in ("regimes", "differ", "phases", "seconds") if k in record}
    holds = all(c.ok for c in checks)
    return Result(cell, tuple(figures) if holds else (), checks, record=record.get("record"), detail=detail)


def summary(record: dict[str, Any]) -> str:
    failed = [f"{check}: {value}" for check, ok, value, _ in record["checks"] if not ok]
    errors = ", ".join(f"{regime} {r['median']:.1e}" for regime, r in record["regimes"].items())
    answers = f", answers {record['equal']}/{record['answers']}" if "equal" in record else ""
    margins = "; margins " + ", ".join(str(d["margin"]) for d in record["differ"]) if record.get("differ") else ""
    return (
        f"{record['preset']:8} {'padded' if record['padded'] else 'plain ':6} {record['name']:24} {errors}{answers}, "
        f"{record['seconds']:.1f} s: {'holds' if not failed else '; '.join(failed)}{margins}"
    )


@dataclass(frozen=True)
class Options:
    presets: tuple[str, ...] = PRESETS
    shapes: tuple[str, ...] = option(("plain", "padded"), "plain, padded (with idle heads and experts)")
    kinds: tuple[str, ...] = option(("same", "changed"), "same (as the plain model), changed (another function)")
    names: tuple[str, ...] = option((), "variants; empty: all")
    device: str = "cuda"
    jobs: int = option(16, "processes at a time")
    seconds: float = option(1e9, "stop what has not ended by then, keep the rest")


@measurement("variants", needs=("gpu",), seconds=300)
def variants(run: Run, options: Options) -> None:
    """Every variant of the embedded model through this machine's plan."""
    every_name = [*SAME, *CHANGED]
    if wrong := [name for name in options.names if name not in every_name]:
        raise UsageError(f"there is no variant {wrong[0]!r}; use {', '.join(every_name)}.")
    names = options.names or tuple(every_name)
    cases = [
        (preset, shape == "padded", kind)
        for kind in options.kinds
        for shape in options.shapes
        for preset in options.presets
        if any(name in KINDS[kind] for name in names)
    ]
    phases: set[str] = set()
    run.sources |= receipts.weights(load.EMBEDDED)
    for outcome in run_cases(run_case, cases, options.device, names, jobs=options.jobs, seconds=options.seconds):
        for record in outcome.records:
            print(summary(record), flush=True)
            phases |= {name for of_regime in record["phases"].values() for name in of_regime}
        run.sources |= engine_sources(phases)
        run.add(*map(result_of, outcome.records))
        if outcome.failed:
            preset, padded, kind = outcome.case
            cell = Cell("variant", "tiny", preset, {}, "engine", {"padded": padded, "kind": kind})
            run.add(Result(cell, refused=outcome.failed))
