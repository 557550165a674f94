"""What speculation wins or loses, by counting bytes instead of time.

    python -m halfbyte.lab.measure.speculation [--model MODEL] [--as 120b] [--batch 1] [--problems 24]

Every step costs the bytes it reads by the roofline: dense weights once, the experts its rows touch, the keys and
values; drafting adds what the draft model or head reads. The count depends on the tokens alone, so it is the same on
every machine. Two workloads of the embedded model: one that suits guessing from text (repeat, extract, tool calls)
and one that does not (arithmetic, letters). Each method runs under the controller and, to show what the controller
does, with a fixed draft of four. `--as 120b` charges the bytes of gpt-oss-120b for the embedded model's tokens.

A method under the controller must never cost more than 3 % over no speculation. The last line is the receipt.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halfbyte.engine.batch import Batch
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.runner import StepHandle
from halfbyte.engine.sequence import Sequence
from halfbyte.engine.speculative.controller import Controller, Pace, StepCost
from halfbyte.engine.speculative.methods import BytesRead
from halfbyte.engine.speculative.proposer import Proposal
from halfbyte.errors import StepError
from halfbyte.evals.tasks import problem
from halfbyte.gates import Gates
from halfbyte.harmony import render_prompt
from halfbyte.lab import receipts
from halfbyte.lab.entry import finish, line_of
from halfbyte.lab.result import Cell, Check, Result, figure, measure_cell
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
        self._known: dict[int, float] = {}
        self._token = 2 * self._config.kv_dim * 2 * self._config.kind_count("full")

    def __call__(self, rows: int, context: int) -> float:
        if rows not in self._known:
            self._known[rows] = decode_traffic(self._config, CHECKPOINT_FORMATS, 0, rows).total
        return self._known[rows] + context * self._token


class Always(Pace):
    """No controller: four tokens, every time."""

    def length(self, batch: int, rows: int, context: int) -> int:
        self._asked = (batch, rows, context)
        return 4

    def learned(self, drafted: int, accepted: int) -> None:
        c = self._controller
        c.net += accepted
        c.tokens += 1 + accepted

    def nothing(self) -> None: ...


class Meter:
    """Adds up what decoding costs, step by step. Prompts cost every method the same and are left out."""

    def __init__(self, core: EngineCore, cost: StepCost) -> None:
        self.bytes = 0.0
        self.steps = 0
        launch = core.runner.launch

        def counted(batch: Batch) -> StepHandle:
            rows = len(batch.samplers)
            if rows:
                self.bytes += cost(rows, int(batch.kv_lens.sum()))
                self.steps += 1
            return launch(batch)

        core.runner.launch = counted  # type: ignore[method-assign]


def prompts(tokenizer: Tokenizer, tasks: tuple[str, ...], count: int, vocab: int) -> list[list[int]]:
    rendered = [render_prompt(tokenizer, problem(tasks[i % len(tasks)], 0, i).prompt()) for i in range(count)]
    return [[t % vocab for t in ids] for ids in rendered]  # random weights of a small shape have a smaller vocabulary


def run(
    model: GptOss,
    tokenizer: Tokenizer,
    method: str,
    asked: list[list[int]],
    args: argparse.Namespace,
    cost: StepCost,
    controlled: bool,
) -> dict[str, Any]:
    options = EngineOptions(
        gates=Gates(speculate=method), max_seqs=args.batch, draft=args.draft.get(method), max_draft=8, run_ahead=False,
        kv_gib=args.kv_gib, reserve_gib=0.0, max_context=args.context,
    )  # fmt: skip
    core, _, _ = core_for(model, tokenizer, options)
    drafting = [0.0]
    if core.proposer is not None:
        controller: Controller = core.proposer.controller  # type: ignore[attr-defined]
        controller.cost = cost
        if not controlled:
            core.proposer.pace = lambda seq: Always(controller)  # type: ignore[method-assign]
        propose = core.proposer.propose

        def charged(wants: list[tuple[Sequence, int]]) -> list[Proposal]:
            out = propose(wants)
            drafting[0] += sum(p.cost for p in out)
            return out

        core.proposer.propose = charged  # type: ignore[method-assign]
    meter = Meter(core, cost)
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(asked):
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="default: the embedded model")
    parser.add_argument("--as", dest="shape", default=None, choices=sorted(NAMED), help="whose bytes to charge")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--kv-gib", type=float, default=0.5)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--draft-model", default=None)
    parser.add_argument("--eagle-head", default=None)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.draft = {"draft": args.draft_model, "eagle3": args.eagle_head}
    torch.set_num_threads(min(2, torch.get_num_threads()))
    name = resolve_model(args.model)
    model, tokenizer = load_model(name), tokenizer_of(name)
    cost = ShapeCost(args.shape) if args.shape else BytesRead(model)
    four = cost(4, 0) / cost(1, 0)
    print(
        f"{name.label}, batch {args.batch}, bytes of {args.shape or 'itself'}; 4 rows read {four:.2f}x the bytes of 1"
    )
    results: list[Result] = []
    for workload, tasks in WORKLOADS.items():
        asked = prompts(tokenizer, tasks, args.problems, model.config.vocab)
        base = run(model, tokenizer, "off", asked, args, cost, True)
        for method in args.methods.split(","):
            shape = {"workload": workload, "bytes_of": args.shape or "itself", "concurrency": args.batch}
            cell = Cell("speculation", name.label, path=method, shape=shape)
            results.append(measure_cell(cell, partial(compare, model, tokenizer, cell, asked, base, args, cost)))
            print(line_of(results[-1]), flush=True)
    sources = [receipts.PACKAGE / "roofline.py", *(receipts.PACKAGE / "engine" / "speculative").glob("*.py")]
    own = EMBEDDED.parent
    models = [name.path, args.draft_model or own / "tiny-draft", args.eagle_head or own / "tiny-eagle3"]
    measured = receipts.hashes(sources) | receipts.weights(*(Path(m) for m in models if m))
    return finish("python -m halfbyte.lab.measure.speculation", results, measured, args.out)


def compare(
    model: GptOss,
    tokenizer: Tokenizer,
    cell: Cell,
    asked: list[list[int]],
    base: dict[str, Any],
    args: argparse.Namespace,
    cost: StepCost,
) -> Result:
    """A method under the controller and with a fixed draft, beside no speculation."""
    controlled = run(model, tokenizer, cell.path, asked, args, cost, True)
    fixed = run(model, tokenizer, cell.path, asked, args, cost, False)
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


if __name__ == "__main__":
    sys.exit(main())
