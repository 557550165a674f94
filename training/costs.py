"""What each format costs the shipped model: replies it still gets right and how far its next tokens move, in one table.

`python training/costs.py` loads models/tiny once per format and compares it with itself in the checkpoint's formats, on
held-out conversations. All is teacher-forced, one pass per conversation: a reply counts as right where every token of
the worked reply is the model's first choice (what `Suite.forced` counts, a little stricter than greedy accuracy), and
KL(shipped || format) is the mean over reply tokens, in nats. Everything runs through the reference plan, which rounds
where the gates say and nowhere else, but for the row of a CPU's own kernels. It times nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from second_edition import held_out_problems
from torch import Tensor

from halfbyte.evals.problem import Frame, Problem
from halfbyte.evals.reading import needle
from halfbyte.evals.suite import Suite
from halfbyte.evals.tasks import TASKS
from halfbyte.gates import AXES, Gates, Layers, PerRegime
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.lab import receipts
from halfbyte.lab.measure.accuracy import ALL
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.plan.step import Step

REFERENCE = PerRegime("reference", "reference", "reference")
EXACT = Gates(moe_kernel=REFERENCE, linear_kernel=REFERENCE, attention="reference", layers=Layers())
CPU_KERNELS = "a CPU's default: its kernels, KV cache in bf16, activations in int8"
DENSE = ("qkv", "o", "lm_head")
STEP = 4096  # tokens
NEEDLE = (60, 70)  # sentences: 600 tokens, past the window and yarn's original context, and quick


def formats() -> Iterator[tuple[str, Gates]]:
    """Each format on its own, as the gates name them, and some together."""
    yield "as shipped", EXACT
    for kind in ("q8", "mxfp4"):
        for group in DENSE:
            yield f"{group} in {kind}", replace(EXACT, layers=Layers()._replace(**{group: kind}))
        yield f"qkv, o and lm_head in {kind}", replace(EXACT, layers=Layers(**dict.fromkeys(DENSE, kind)))
    axes: tuple[tuple[str, str], ...] = (("kv_dtype", "KV cache"), ("activation", "activations"))
    for field, what in axes:
        for value in next(a for a in AXES if a.field == field).values:
            if value not in ("auto", "f32"):  # f32 is what EXACT is
                changed: dict[str, Any] = {field: value}
                yield f"{what} in {value}", replace(EXACT, **changed)
    yield CPU_KERNELS, Gates()
    dense = Layers(**dict.fromkeys(DENSE, "mxfp4"))
    yield "dense layers mxfp4, KV fp8, activations fp8", replace(EXACT, layers=dense, kv_dtype="fp8", activation="fp8")


@dataclass
class Cost:
    format: str
    changed: dict[str, str]
    right: int
    of: int
    kl: float
    same_top: float
    tokens: int

    def row(self) -> str:
        kl = f"{self.kl:.1e}" if self.kl else "0"
        share = 100 * self.right / self.of
        return f"| {self.format} | {self.right} / {self.of} ({share:.1f} %) | {kl} | {100 * self.same_top:.2f} % |"

    def result(self) -> Result:
        figures = (
            figure("kl", "nats", self.kl),
            figure("right", "%", 100 * self.right / self.of, ALL),
            figure("same_top", "%", 100 * self.same_top, ALL),
        )
        cell = Cell("cost of a format", "tiny", gates=self.changed, shape={"format": self.format})
        return Result(cell, figures, detail={"problems": self.of, "tokens": self.tokens})


def conversations(tok: Tokenizer, per_task: int, seed: int, turns: int = 0) -> list[tuple[list[int], int]]:
    """(conversation, length of its prompt) of `per_task` problems of every task of the first edition, and of `turns`
    turns of the second edition's conversations, in phrasings that training has, with names that it has not."""
    suite = Suite("tiny", seed, per_task, [t for t in TASKS if t != "needle"])
    problems: list[Problem] = [p for each in suite.problems.values() for p in each]
    problems += [needle(Random(f"costs/{seed}/{i}"), Frame(), NEEDLE) for i in range(per_task)]
    problems += held_out_problems("train", seed, turns)[:turns]  # a conversation has one turn at least
    out = []
    for p in problems:
        whole, _ = render_training_example(tok, p.worked())
        out.append((whole, len(render_prompt(tok, p.prompt()))))
    return out


def distributions(gates: Gates, model: str | None, samples: list[tuple[list[int], int]]) -> list[Tensor]:
    """Log-probabilities before every reply token, one tensor [reply, vocabulary] per conversation."""
    network = load.load_model(load.resolve_model(model), gates)
    out: list[Tensor] = []
    while len(out) < len(samples):  # as many whole conversations at once as STEP tokens hold
        part = samples[len(out) :]
        fits = next((i for i in range(1, len(part)) if sum(len(t) for t, _ in part[: i + 1]) > STEP), len(part))
        out += [logits.float().log_softmax(-1) for logits in together(network, part[:fits])]
    return out


def together(network: GptOss, samples: list[tuple[list[int], int]]) -> list[Tensor]:
    """Logits of the rows that predict a reply token, conversations side by side in one step."""
    sizes = [len(tokens) - 1 for tokens, _ in samples]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    blocks = [-(-n // network.spec.page_size) for n in sizes]
    network.allocate_kv(1 + 2 * sum(blocks))

    def tables(first: int) -> Tensor:
        table = torch.zeros(len(samples), max(blocks), dtype=torch.int32)
        for row, n in enumerate(blocks):
            table[row, :n] = torch.arange(first, first + n)
            first += n
        return table

    def ints(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    rows = [range(start + prompt - 1, start + n) for start, n, (_, prompt) in zip(starts, sizes, samples)]
    step = Step(
        tokens=ints(t for tokens, _ in samples for t in tokens[:-1]),
        positions=torch.cat([torch.arange(n, dtype=torch.int32) for n in sizes]),
        query_start=ints(starts),
        kv_lens=ints(sizes),
        row_sequence=ints(i for i, n in enumerate(sizes) for _ in range(n)),
        block_tables={"sliding": tables(1), "full": tables(1 + sum(blocks))},
        logit_rows=ints(row for r in rows for row in r),
        max_kv_len=max(sizes),
    )
    return list(network.forward(step).split([len(r) for r in rows]))


def cost(name: str, gates: Gates, samples: list[tuple[list[int], int]], base: list[Tensor], got: list[Tensor]) -> Cost:
    kl = same = 0.0
    right = count = 0
    for (tokens, prompt), ours, theirs in zip(samples, base, got, strict=True):
        kl += float((ours.exp() * (ours - theirs)).sum())
        top = theirs.argmax(-1)
        same += int((ours.argmax(-1) == top).sum())
        right += top.tolist() == tokens[prompt:]
        count += len(ours)
    return Cost(name, gates.changes(EXACT), right, len(samples), max(0.0, kl / count), same / count, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model folder (default: the embedded model)")
    parser.add_argument("--per-task", type=int, default=6)
    parser.add_argument("--turns", type=int, default=84, help="turns of the second edition's conversations")
    parser.add_argument("--seed", type=int, default=3000)
    parser.add_argument("--only", default="", help="formats whose name holds this text (the shipped form always runs)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a network this small is slower on more
    name = load.resolve_model(args.model)
    weights = receipts.weights(name.path) if name.path else {}
    samples = conversations(load.tokenizer_of(name), args.per_task, args.seed, args.turns)
    base: list[Tensor] = []
    done: list[Cost] = []
    print("| format | replies right | KL, nats a token | same first choice |\n|---|---|---|---|")
    for name, gates in formats():
        if base and args.only not in name:
            continue
        got = distributions(gates, args.model, samples)
        base = base or got
        done.append(cost(name, gates, samples, base, got))
        print(done[-1].row(), flush=True)
        if args.json:
            receipts.result_file("training/costs.py", [d.result() for d in done], weights).write(args.json)
    print(f"{len(samples)} conversations, {done[0].tokens} reply tokens, seed {args.seed}", file=sys.stderr)


if __name__ == "__main__":
    main()
