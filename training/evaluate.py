"""Score a network in training on the held-out suite: its bf16 parent, as shipped, and broken on purpose.

`judge` decodes greedily and wants a GPU. `python training/evaluate.py --weights FOLDER` prints the same table on any
machine, teacher-forced: a reply counts as right where every token of the worked one is the network's first choice. With
`--answers FILE` the engine answers the second edition's problems on any machine instead, shipped weights alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import checkpoint
import torch
from network import Ablation, GptOss
from phrasings import Split
from second_edition import held_out_problems

from halfbyte import Engine
from halfbyte.engine.request import SamplingParams
from halfbyte.evals.problem import Frame
from halfbyte.evals.reading import needle
from halfbyte.evals.suite import MAX_TOKENS, Suite, SuiteReport, read_reply
from halfbyte.evals.tasks import TASKS
from halfbyte.lab import receipts
from halfbyte.lab.measure.accuracy import accuracy_result
from halfbyte.lab.result import Cell, Result
from halfbyte.model.tokenizer import Tokenizer

ABLATIONS = {
    "sinks off": Ablation(sinks=False),
    "yarn off": Ablation(yarn=False),
    "window dropped": Ablation(window=False),
    "experts 0 and 1 swapped": Ablation(swap_experts=(0, 1)),
    "gate and up swapped": Ablation(swap_gate_up=True),
    "rope base 10 % off": Ablation(rope_base=1.1),
    "rope base 1 % off": Ablation(rope_base=1.01),
}
BREAKS = ("arithmetic", "lists", "repeat", "reading", "needle", "extract", "tool_call")  # tasks that show it
NEEDLE = (60, 70)  # sentences of a haystack when teacher-forced: 600 tokens, past window and original context
BUDGET = 400_000  # tokens of prompt in one batch


Answers = Callable[[Suite, int], dict[tuple[int, ...], list[int]]]  # prompt -> completion of so many tokens at most


def completions(
    model: GptOss, tok: Tokenizer, suite: Suite, ablation: Ablation, max_tokens: int = MAX_TOKENS
) -> dict[tuple[int, ...], list[int]]:
    """Prompt -> completion, prompts of all tasks decoded together in order of length."""
    prompts = sorted((item.prompt for item in suite.items(tok)), key=len)
    answers: dict[tuple[int, ...], list[int]] = {}
    while prompts:
        rows = max(1, BUDGET // max(len(prompts[min(len(prompts), 600) - 1]), 1))
        part, prompts = prompts[: min(rows, 600)], prompts[min(rows, 600) :]
        for p, c in zip(part, model.generate(part, max_tokens, quantized=False, ablation=ablation), strict=True):
            answers[tuple(p)] = c
    return answers


def run(model: GptOss, tok: Tokenizer, suite: Suite, ablation: Ablation, max_tokens: int = MAX_TOKENS) -> SuiteReport:
    answers = completions(model, tok, suite, ablation, max_tokens)
    return suite.run(tok, lambda asked, _: [answers[tuple(p)] for p in asked])


def strange_calls(tok: Tokenizer, suite: Suite, answers: dict[tuple[int, ...], list[int]]) -> int:
    """How many completions call a function that was not offered to them."""
    count = 0
    for item in suite.items(tok):
        called = read_reply(tok, answers[tuple(item.prompt)]).call
        count += called is not None and called[0] not in {tool.name for tool in item.problem.frame.tools}
    return count


def judge_second(
    answers_of: Answers,
    tok: Tokenizer,
    conversations: int,
    per_task: int,
    file: Path,
    *,
    seed: int,
    micro: bool = False,
) -> dict[str, Any]:
    """The second edition's problems with names that training never has, phrasings seen or not; the hundred natural
    questions; the first edition's tasks. `file` is written after each of these, so that what is done survives an end in
    the middle."""
    suites = {"natural": Suite("natural")}
    wordings: tuple[Split, ...] = ("train", "held-out")
    for wording in wordings:
        suite = Suite("quick", seed, 1, ["chat"])
        suite.name = f"conversations, {'seen' if wording == 'train' else 'new'} phrasings, new names"
        suite.problems = {}
        for p in held_out_problems(wording, seed, conversations):
            suite.problems.setdefault(p.task, []).append(p)
        suites[suite.name] = suite
    if per_task:
        suites["first edition's tasks"] = Suite("quick" if micro else "tiny", seed, per_task)
    out: dict[str, Any] = {}
    for name, suite in suites.items():
        began = time.time()
        answers = answers_of(suite, 4 if micro else MAX_TOKENS)
        report = suite.run(tok, lambda asked, _, known=answers: [known[tuple(p)] for p in asked])
        print(f"== {name} ({time.time() - began:.0f} s)\n{report.table()}", flush=True)
        shown = report.to_json()
        shown["strange_calls"] = strange_calls(tok, suite, answers)
        print(f"calls of functions that were not offered: {shown['strange_calls']}", flush=True)
        shown["wrong"] = shown["wrong"][:400]
        out[name] = shown
        file.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return out


def accuracy_results(reports: dict[str, Any], name: str, path: str, dtype: str) -> list[Result]:
    """A result for each run of a judge."""
    return [
        accuracy_result(
            report,
            Cell(
                "accuracy", name, path=path,
                shape={"run": run, "dtype": dtype, "suite": report["suite"], "seed": report["seed"]},
            ),
        )
        for run, report in reports.items()
    ]  # fmt: skip


def answers_of_engine(engine: Engine, suite: Suite, max_tokens: int) -> dict[tuple[int, ...], list[int]]:
    """Prompt -> completion, by the engine."""
    answers: dict[tuple[int, ...], list[int]] = {}
    prompts = sorted({tuple(item.prompt) for item in suite.items(engine.tokenizer)}, key=len)
    for i in range(0, len(prompts), 64):
        part = prompts[i : i + 64]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        answers |= zip(part, (c.tokens for c in engine.generate([list(p) for p in part], sampling)))
    return answers


def judge(
    model: GptOss, tokenizer: Path, per_task: int, *, ablations: bool, seed: int = 1000, micro: bool = False
) -> dict[str, Any]:
    """Rounds the model's experts to MXFP4 in place on the way. `micro`: short prompts, and replies cut after a few
    tokens, which are wrong."""
    tok = Tokenizer.from_file(tokenizer)
    runs: dict[str, Ablation] = {"bf16 parent": Ablation()} if ablations else {}
    runs["mxfp4"] = Ablation()
    runs |= ABLATIONS if ablations else {}
    out: dict[str, Any] = {}
    for name, ablation in runs.items():
        began = time.time()
        if name == "mxfp4":
            model.round_experts()
        suite, limit = Suite("quick" if micro else "tiny", seed, per_task), MAX_TOKENS
        if name in ABLATIONS:
            suite, limit = Suite(suite.name, seed, max(1, per_task // 4), BREAKS), 130
        report = run(model, tok, suite, ablation, 4 if micro else limit)
        print(f"== {name} ({time.time() - began:.0f} s)\n{report.table()}", file=sys.stderr, flush=True)
        shown = report.to_json()
        shown["wrong"] = shown["wrong"][:60] if name == "mxfp4" else []
        out[name] = shown
    return out


@torch.no_grad()
def forced(model: GptOss, tok: Tokenizer, suite: Suite, ablation: Ablation) -> dict[str, float]:
    """Per task, the share of worked replies that the network would write token for token."""

    def predict(tokens: list[int]) -> Sequence[int]:
        ids, position = torch.tensor([tokens]), torch.arange(len(tokens))[None]
        cache = model.new_cache(1, len(tokens), torch.float32)
        x, _ = model.step(ids, position, cache, dtype=torch.float32, quantized=False, ablation=ablation)
        return [int(t) for t in model.logits(x)[0].argmax(-1)]

    return suite.forced(tok, predict)


def short_suite(seed: int, per_task: int, tasks: Sequence[str]) -> Suite:
    """Problems of the first edition, with short haystacks, and turns of the second edition's conversations."""
    suite = Suite("tiny", seed, per_task, [t for t in tasks if t != "needle"])
    if "needle" in tasks:
        suite.problems["needle"] = [needle(Random(f"forced/{seed}/{i}"), Frame(), NEEDLE) for i in range(per_task)]
    turns = held_out_problems("train", seed, per_task)  # one conversation has one turn at least
    suite.problems["turns"] = [turns[i * len(turns) // per_task] for i in range(per_task)]
    return suite


def main() -> None:
    from train import SECOND, TINY

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--weights", type=Path, default=Path("models/tiny"), help="of a stage (with parent), or shipped"
    )
    parser.add_argument("--tokenizer", type=Path, default=Path("models/tiny/tokenizer.json"))
    parser.add_argument("--edition", type=int, choices=[1, 2], default=2, help="whose weights these are")
    parser.add_argument("--per-task", type=int, default=40)
    parser.add_argument("--seed", type=int, default=5000)
    parser.add_argument("--only", help="bf16 parent, mxfp4, or the name of an ablation")
    parser.add_argument("--answers", type=Path, help="write here what the engine answers; instead of all else")
    parser.add_argument("--conversations", type=int, default=300, help="of each kind, with --answers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.answers:
        with Engine(str(args.weights), preset="exact", max_seqs=16) as engine:
            answer = functools.partial(answers_of_engine, engine)
            reports = judge_second(
                answer, engine.tokenizer, args.conversations, args.per_task, args.answers, seed=args.seed
            )
        results = accuracy_results(reports, "tiny", "engine, exact", "float32")
        receipts.result_file("training/evaluate.py --answers", results, receipts.weights(args.weights)).write(
            args.answers
        )
        return
    tok, model = Tokenizer.from_file(args.tokenizer), GptOss(SECOND if args.edition == 2 else TINY)
    checkpoint.load_weights(model, args.weights)
    for name, ablation in ({"bf16 parent": Ablation(), "mxfp4": Ablation()} | ABLATIONS).items():
        if name != "bf16 parent":
            model.round_experts()
        if args.only and args.only != name:
            continue
        broken = name in ABLATIONS
        suite = short_suite(
            args.seed, max(1, args.per_task // 3) if broken else args.per_task, BREAKS if broken else list(TASKS)
        )
        shares = forced(model, tok, suite, ablation)
        mean = sum(shares.values()) / len(shares)
        shown = {task: round(100 * share, 1) for task, share in shares.items()}
        print(
            json.dumps({"run": name, "per_task": len(suite.problems["needle"]), "mean": round(100 * mean, 1)} | shown),
            flush=True,
        )


if __name__ == "__main__":
    main()
