"""What a step that verifies drafts costs on a GPU, replayed as a graph and queued eagerly.

    python -m bench run verification --set batches=1,8 --set draft=3

Every sequence gets a draft of random tokens every time, all of them rejected (so that a step adds one token to each,
and both ways run the same steps); the tokens must be those of eager steps, or the first that is not is named, with the
rows of every step. Drafting costs nothing here: what is timed is schedule, verify and commit, whose result decides the
next step, so the host's time shows.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from bench.measurement import Run, engine_sources, measurement
from halfbyte import gates as gates_
from halfbyte.engine.batch import Batch
from halfbyte.engine.build import core_for
from halfbyte.engine.observer import StepObserver
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.scheduled_step import ScheduledStep
from halfbyte.engine.sequence import Sequence
from halfbyte.engine.speculative.controller import Controller, Pace
from halfbyte.engine.speculative.proposer import Proposal
from halfbyte.errors import StepError
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss


class Always(Pace):
    """A draft every time, whatever became of the last."""

    def length(self, batch: int, rows: int, context: int) -> int:
        return self._controller.longest

    def learned(self, drafted: int, accepted: int) -> None: ...


class Noise:
    """Drafts of random tokens, the same in every run."""

    def __init__(self, vocab: int, length: int) -> None:
        self._random, self._vocab = random.Random(1), vocab
        self.controller = Controller(lambda rows, context: 1.0, longest=length)

    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        return [Proposal([self._random.randrange(self._vocab) for _ in range(most)]) for _, most in wants]

    def observe(self, seq: Sequence, new: int) -> None: ...
    def forget(self, seq: Sequence) -> None: ...
    def pace(self, seq: Sequence) -> Pace:
        return Always(self.controller)


class StepSizes(StepObserver):
    def __init__(self) -> None:
        self.rows = Counter[int]()

    def launched(self, step: ScheduledStep, batch: Batch) -> None:
        self.rows[batch.rows] += 1


def run_engine(
    model: GptOss, gates: gates_.Gates, batch: int, options: Options
) -> tuple[list[float], dict[str, list[int]], dict[str, Any]]:
    """(microseconds of the steps in the middle, tokens, what was drafted)."""
    name = load.resolve_model(options.model)
    context = options.depth + options.count + 64
    engine = EngineOptions(gates=gates, max_seqs=batch, max_context=context, kv_gib=2.0, max_draft=options.draft)
    core, _, _ = core_for(model, load.tokenizer_of(name), engine)
    if options.draft:
        core.proposer = Noise(model.config.vocab, options.draft)
    g = torch.Generator().manual_seed(batch)
    params = SamplingParams(temperature=0.0, max_tokens=options.count, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(torch.randint(0, model.config.vocab, (batch, options.depth), generator=g).tolist()):
        core.submit(Request(prompt, params, id=f"q{i}"))
        tokens[f"q{i}"] = []
    times = []
    core.observer = sizes = StepSizes()
    while core.has_work:
        start = time.perf_counter()
        for id, delta in core.step():
            if delta.finish == "error":
                raise StepError(f"a request failed: {delta.error}")
            tokens[id] += delta.tokens
        times.append(time.perf_counter() - start)
    stats = core.stats()
    core.close()
    model.release_kv()
    torch.cuda.empty_cache()
    middle = [1e6 * s for s in times[len(times) // 3 : -4]]
    detail = {
        "drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens, "steps_of_rows": dict(sizes.rows),
        "p90_us": sorted(middle)[int(0.9 * len(middle))],
    }  # fmt: skip
    return middle, tokens, detail


def check_verification(model: GptOss, options: Options, batch: int) -> list[Result]:
    """Runs the drafts through graphs and eagerly: the tokens must be equal, and each way has its time of a step."""
    runs = {
        graphs: run_engine(model, gates_.parse({"graphs": graphs}, env={}, preset=options.preset), batch, options)
        for graphs in ("on", "off")
    }
    other = {
        id: next(i for i, (a, b) in enumerate(zip(tokens, runs["off"][1][id], strict=True)) if a != b)
        for id, tokens in runs["on"][1].items()
        if tokens != runs["off"][1][id]
    }
    check = Check(
        "tokens of graphs and of eager steps are equal", not other, note=f"first that differ: {other}" if other else ""
    )
    label = load.resolve_model(options.model).random or options.model
    shape = {"concurrency": batch, "drafted": options.draft, "depth": options.depth}
    results = []
    for graphs, (times, _, detail) in runs.items():
        cell = Cell("verification", label, options.preset, {"graphs": graphs}, "engine", shape)
        figures = () if other else (figure("step", "us", times),)
        results.append(Result(cell, figures, (check,), detail=detail))
    return results


@dataclass(frozen=True)
class Options:
    model: str = "random:20b"
    preset: str = "fast"
    batches: tuple[int, ...] = (1, 8)
    draft: int = 3
    depth: int = 1024
    count: int = 96


@measurement("verification", needs=("gpu",), seconds=120)
def verification(run: Run, options: Options) -> None:
    torch.set_grad_enabled(False)
    name = load.resolve_model(options.model)
    model = load.load_model(name, gates_.PRESETS[options.preset].gates, device="cuda")
    for batch in options.batches:
        run.add(*check_verification(model, options, batch))
    run.sources |= engine_sources(model.plan.record.phases())
