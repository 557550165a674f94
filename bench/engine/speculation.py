"""What speculation wins or loses, by counting bytes instead of time.

    python -m bench run speculation --set problems=24

Every step costs the bytes it reads by the roofline: dense weights once, the experts its rows touch, the keys and
values; drafting adds what the draft model or head reads. The count depends on the tokens alone, so it is the same on
every machine. Two workloads of the embedded model: one that suits guessing from text (repeat, extract, tool calls)
and one that does not (arithmetic, letters). Each method runs under the controller and, to show what the controller
does, with a fixed draft of four. `shape=120b` charges the bytes of gpt-oss-120b for the embedded model's tokens.

A method under the controller must never cost more than 3 % over no speculation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.measurement import Run, measurement, option
from halfbyte.engine.batch import Batch
from halfbyte.engine.build import core_for
from halfbyte.engine.observer import StepObserver
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.scheduled_step import ScheduledStep
from halfbyte.engine.sequence import Sequence
from halfbyte.engine.speculative.controller import Pace, StepCost
from halfbyte.engine.speculative.methods import BytesRead
from halfbyte.engine.speculative.proposer import Proposal
from halfbyte.errors import StepError, UsageError
from halfbyte.evals.tasks import problem
from halfbyte.gates import Gates
from halfbyte.harmony import render_prompt
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, GptOss
from halfbyte.model.load import EMBEDDED, load_model, resolve_model, tokenizer_of
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.roofline import decode_traffic

WORKLOADS = {"suits": ("repeat", "extract", "tool_call"), "does not suit": ("arithmetic", "letters")}
METHODS = ("ngram", "suffix", "draft", "eagle3")
LIMIT = 1.03


class ShapeCost:
    """Bytes a step of a named shape reads, in OpenAI's formats."""

    def __init__(self, shape: str) -> None:
        self._config = NAMED[shape]
        self._costs: dict[int, float] = {}
        self._token = 2 * self._config.kv_dim * 2 * self._config.kind_count("full")

    def __call__(self, rows: int, context: int) -> float:
        if rows not in self._costs:
            self._costs[rows] = decode_traffic(self._config, CHECKPOINT_FORMATS, 0, rows).total
        return self._costs[rows] + context * self._token


class FixedDraft(Pace):
    """No controller: four tokens, every time."""

    def length(self, batch: int, rows: int, context: int) -> int:
        self._load = (batch, rows, context)
        return 4

    def learned(self, drafted: int, accepted: int) -> None:
        c = self._controller
        c.net += accepted
        c.tokens += 1 + accepted

    def nothing(self) -> None: ...


class Meter(StepObserver):
    """Adds up what decoding costs, step by step. Prompts cost every method the same and are left out."""

    def __init__(self, cost: StepCost) -> None:
        self.bytes = 0.0
        self.steps = 0
        self._cost = cost

    def launched(self, step: ScheduledStep, batch: Batch) -> None:
        rows = len(batch.samplers)
        if rows:
            self.bytes += self._cost(rows, int(batch.kv_lens.sum()))
            self.steps += 1


def prompts(tokenizer: Tokenizer, tasks: tuple[str, ...], count: int, vocab: int) -> list[list[int]]:
    rendered = [render_prompt(tokenizer, problem(tasks[i % len(tasks)], 0, i).prompt()) for i in range(count)]
    return [[t % vocab for t in ids] for ids in rendered]  # random weights of a small shape have a smaller vocabulary


def serve(
    model: GptOss,
    tokenizer: Tokenizer,
    method: str,
    questions: list[list[int]],
    options: Options,
    cost: StepCost,
    controlled: bool,
) -> dict[str, Any]:
    draft = {"draft": options.draft_model, "eagle3": options.eagle_head}.get(method)
    engine = EngineOptions(
        gates=Gates(speculate=method), max_seqs=options.batch, draft=draft, max_draft=8, run_ahead=False,
        kv_gib=options.kv_gib, reserve_gib=0.0, max_context=options.context,
    )  # fmt: skip
    core, _, _ = core_for(model, tokenizer, engine)
    drafting = [0.0]
    if core.proposer is not None:
        controller = core.proposer.controller
        controller.cost, controller.ledger = cost, None  # another model's cost is counted; this one's time says nothing
        if not controlled:
            core.proposer.pace = lambda seq: FixedDraft(controller)  # type: ignore[method-assign]
        propose = core.proposer.propose

        def charged(wants: list[tuple[Sequence, int]]) -> list[Proposal]:
            out = propose(wants)
            drafting[0] += sum(p.cost for p in out)
            return out

        core.proposer.propose = charged  # type: ignore[method-assign]
    core.observer = meter = Meter(cost)
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(questions):
        core.submit(Request(prompt, params, id=f"q{i}"))
    while core.has_work:
        for id, delta in core.step():
            if delta.finish == "error":
                raise StepError(delta.error or "a request failed")
            tokens.setdefault(id, []).extend(delta.tokens)
    stats = core.stats()
    core.close()
    return {
        "tokens": tokens, "bytes": meter.bytes + drafting[0] * cost(1, 0), "steps": meter.steps,
        "generated": stats.generated_tokens, "drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens,
    }  # fmt: skip


def compare(
    model: GptOss,
    tokenizer: Tokenizer,
    cell: Cell,
    questions: list[list[int]],
    base: dict[str, Any],
    options: Options,
    cost: StepCost,
) -> Result:
    """A method under the controller and with a fixed draft, beside no speculation."""
    controlled = serve(model, tokenizer, cell.path, questions, options, cost, True)
    fixed = serve(model, tokenizer, cell.path, questions, options, cost, False)
    check = Check("the tokens of no speculation", controlled["tokens"] == base["tokens"] == fixed["tokens"])
    if not check.ok:
        return Result(cell, checks=(check,))
    ratio = controlled["bytes"] / base["bytes"]
    per_step = controlled["generated"] / controlled["steps"] * base["steps"] / base["generated"]
    figures = (
        figure("cost_vs_off", "ratio", ratio),
        figure("cost_vs_off_fixed_4", "ratio", fixed["bytes"] / base["bytes"]),
        figure("tokens_per_step", "tokens", per_step),
    )
    target = Check("at most 3 % over no speculation", ratio <= LIMIT, ratio, LIMIT)
    detail = {
        "accepted": controlled["accepted"], "drafted": controlled["drafted"],
        "acceptance_fixed_4": fixed["accepted"] / max(1, fixed["drafted"]),
    }  # fmt: skip
    return Result(cell, figures, (check,), (target,), detail=detail)


@dataclass(frozen=True)
class Options:
    model: str | None = option(None, "empty: the embedded model")
    shape: str | None = option("120b", "whose bytes to charge for the model's tokens; empty: its own")
    batch: int = 1
    problems: int = 6
    tokens: int = 60
    context: int = 2048
    kv_gib: float = 0.5
    methods: tuple[str, ...] = METHODS
    draft_model: str | None = None
    eagle_head: str | None = None


@measurement("speculation", seconds=900)
def speculation(run: Run, options: Options) -> None:
    if options.shape is not None and options.shape not in NAMED:
        raise UsageError(f"there is no shape {options.shape!r}; use {' or '.join(NAMED)}.")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    name = resolve_model(options.model)
    model, tokenizer = load_model(name), tokenizer_of(name)
    cost = ShapeCost(options.shape) if options.shape else BytesRead(model)
    charged = options.shape or "itself"
    four = cost(4, 0) / cost(1, 0)
    print(f"{name.label}, batch {options.batch}, bytes of {charged}; 4 rows read {four:.2f}x the bytes of 1")
    sources = [receipts.PACKAGE / "roofline.py", *(receipts.PACKAGE / "engine" / "speculative").glob("*.py")]
    own = EMBEDDED.parent
    models = [name.path, options.draft_model or own / "tiny-draft", options.eagle_head or own / "tiny-eagle3"]
    run.sources |= receipts.hashes(sources) | receipts.weights(*(Path(m) for m in models if m))
    for workload, tasks in WORKLOADS.items():
        questions = prompts(tokenizer, tasks, options.problems, model.config.vocab)
        base = serve(model, tokenizer, "off", questions, options, cost, True)
        for method in options.methods:
            shape = {"workload": workload, "bytes_of": charged, "concurrency": options.batch}
            cell = Cell("speculation", name.label, path=method, shape=shape)
            run.measure(cell, partial(compare, model, tokenizer, cell, questions, base, options, cost))
