"""What a step that verifies drafts costs on a GPU, replayed as a graph and queued eagerly.

    python -m halfbyte.lab.levels.verification --model random:20b --batches 1,8 --draft 3

Every sequence gets a draft of random tokens every time, all of them rejected (so that a step adds one token to each,
and both ways run the same steps); the tokens must be those of eager steps, or the first that is not is named, with the
rows of every step. Drafting costs nothing here: what is timed is schedule, verify and commit, whose result decides the
next step, so the host's time shows. The last line is the receipt.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from halfbyte import gates as gates_
from halfbyte.engine.batch import Batch
from halfbyte.engine.build import core_for
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.runner import StepHandle
from halfbyte.engine.sequence import Sequence
from halfbyte.engine.speculative.controller import Controller, Pace
from halfbyte.engine.speculative.proposer import Proposal
from halfbyte.errors import StepError
from halfbyte.lab import environment, receipts
from halfbyte.lab.entry import finish, line_of, numbers
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
        self._controller = Controller(lambda rows, context: 1.0, longest=length)

    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        return [Proposal([self._random.randrange(self._vocab) for _ in range(most)]) for _, most in wants]

    def observe(self, seq: Sequence, new: int) -> None: ...
    def forget(self, seq: Sequence) -> None: ...
    def pace(self, seq: Sequence) -> Pace:
        return Always(self._controller)


def run_engine(
    model: GptOss, gates: gates_.Gates, batch: int, args: argparse.Namespace
) -> tuple[list[float], dict[str, list[int]], dict[str, Any]]:
    """(microseconds of the steps in the middle, tokens, what was drafted)."""
    name = load.resolve_model(args.model)
    context = args.depth + args.count + 64
    options = EngineOptions(gates=gates, max_seqs=batch, max_context=context, kv_gib=2.0, max_draft=args.draft)
    core, _, _ = core_for(model, load.tokenizer_of(name), options)
    if args.draft:
        core.proposer = Noise(model.config.vocab, args.draft)
    g = torch.Generator().manual_seed(batch)
    params = SamplingParams(temperature=0.0, max_tokens=args.count, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(torch.randint(0, model.config.vocab, (batch, args.depth), generator=g).tolist()):
        core.submit(Request(prompt, params, id=f"q{i}"))
        tokens[f"q{i}"] = []
    times = []
    launch, sizes = core.runner.launch, Counter[int]()

    def counted(batch: Batch) -> StepHandle:
        sizes[batch.rows] += 1
        return launch(batch)

    core.runner.launch = counted  # type: ignore[method-assign]
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
        "drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens, "steps_of_rows": dict(sizes),
        "p90_us": sorted(middle)[int(0.9 * len(middle))],
    }  # fmt: skip
    return middle, tokens, detail


def check_verification(model: GptOss, args: argparse.Namespace, batch: int) -> list[Result]:
    """The same drafts through graphs and eagerly: equal tokens, and the time of a step each way."""
    runs = {
        graphs: run_engine(model, gates_.parse({"graphs": graphs}, env={}, preset=args.preset), batch, args)
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
    shape = {"concurrency": batch, "drafted": args.draft, "depth": args.depth}
    results = []
    for graphs, (times, _, detail) in runs.items():
        cell = Cell("verification", args.model, args.preset, {"graphs": graphs}, "engine", shape)
        figures = () if other else (figure("step", "us", times),)
        results.append(Result(cell, figures, (check,), detail=detail))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:20b")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--draft", type=int, default=3)
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    torch.set_grad_enabled(False)
    model = load.load_model(load.resolve_model(args.model), gates_.PRESETS[args.preset].gates, device=args.device)
    results: list[Result] = []
    for batch in args.batches:
        results += check_verification(model, args, batch)
        print(*map(line_of, results[-2:]), sep="\n", flush=True)
    engine = receipts.sources_of([receipts.PACKAGE / "engine" / "build.py"], ("kernels", "engine"))
    measured = receipts.hashes(engine) | receipts.measured(model.plan.record.phases())
    return finish("python -m halfbyte.lab.levels.verification", results, measured, args.out)


if __name__ == "__main__":
    sys.exit(main())
