"""What each format costs the shipped model: accuracy, and the divergence of its next tokens, one table for all of them.

`python training/costs.py` loads models/tiny once per format and compares it with itself in the checkpoint's formats, on
held-out conversations that neither training nor the format saw. Accuracy is greedy and judged as `halfbyte eval` does.
KL(shipped || format), in nats a token, and the share of equal top tokens are taken over the replies with the shipped
model's own conversation given (teacher-forced), so that one early difference is not counted again after it. Everything
runs through the reference plan, which rounds where the gates say and nowhere else. It refuses a format the gates do not
have; it times nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.engine.api import Engine
from halfbyte.engine.request import SamplingParams
from halfbyte.evals.suite import Suite
from halfbyte.gates import AXES, Gates, Layers, PerRegime
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.model import ready
from halfbyte.model.solo import Solo
from halfbyte.model.tokenizer import Tokenizer

REFERENCE = PerRegime("reference", "reference", "reference")
EXACT = Gates(moe_kernel=REFERENCE, linear_kernel=REFERENCE, attention="reference")
DENSE = ("qkv", "o", "lm_head")


def formats() -> Iterator[tuple[str, Gates]]:
    """Each format on its own, as the gates name them, then those that people would run together."""
    yield "as shipped", EXACT
    for kind in ("q8", "mxfp4"):
        for group in DENSE:
            yield f"{group} in {kind}", replace(EXACT, layers=Layers()._replace(**{group: kind}))
        together = replace(EXACT, layers=Layers(**dict.fromkeys(DENSE, kind)))
        yield f"qkv, o and lm_head in {kind}", together
    for axis, what in (("kv_dtype", "KV cache"), ("activation", "activations")):
        for value in next(a for a in AXES if a.field == axis).values:
            if value != "auto":
                yield f"{what} in {value}", replace(EXACT, **{axis: value})  # type: ignore[arg-type]
    fast = replace(EXACT, layers=Layers(**dict.fromkeys(DENSE, "mxfp4")), kv_dtype="fp8", activation="mxfp8")
    yield "all dense layers mxfp4, KV fp8, activations mxfp8", fast


@dataclass
class Cost:
    format: str
    gates: dict[str, str]
    right: int = 0
    problems: int = 0
    worst: str = ""  # the task it is worst at
    worst_accuracy: float = 1.0
    well_formed: float = 1.0
    kl: float = 0.0
    same_top: float = 1.0
    tokens: int = 0

    @property
    def row(self) -> str:
        share = f"{100 * self.right / self.problems:.1f}" if self.problems else "-"
        worst = f"{self.worst} {100 * self.worst_accuracy:.0f}" if self.worst else "-"
        return f"| {self.format} | {share} | {worst} | {self.kl:.2g} | {100 * self.same_top:.2f} |"


def replies(tok: Tokenizer, suite: Suite) -> list[tuple[list[int], int]]:
    """(conversation, length of its prompt) of every problem."""
    out = []
    for p in (p for problems in suite.problems.values() for p in problems):
        whole, _ = render_training_example(tok, p.worked())
        out.append((whole, len(render_prompt(tok, p.prompt()))))
    return out


def distributions(gates: Gates, model: str | None, conversations: list[tuple[list[int], int]]) -> list[Tensor]:
    """Log-probabilities before every reply token, one tensor [reply, vocabulary] per conversation."""
    network = ready.load(ready.resolve(model), gates)
    out = []
    for tokens, prompt in conversations:
        solo = Solo(network, len(tokens))
        logits = [solo.feed(tokens[i : i + 512], all_logits=True) for i in range(0, len(tokens) - 1, 512)]
        out.append(torch.cat(logits)[prompt - 1 : len(tokens) - 1].float().log_softmax(-1))
    return out


def cost(name: str, gates: Gates, args: argparse.Namespace, tok: Tokenizer, base: list[Tensor] | None,
         conversations: list[tuple[list[int], int]]) -> tuple[Cost, list[Tensor]]:  # fmt: skip
    out = Cost(name, gates.changes(EXACT))
    got = distributions(gates, args.model, conversations)
    total = same = 0.0
    for ours, theirs in zip(base or got, got, strict=True):
        total += float((ours.exp() * (ours - theirs)).sum())
        same += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        out.tokens += len(ours)
    out.kl, out.same_top = total / out.tokens, same / out.tokens
    if args.per_task:
        with Engine(args.model, gates=gates, device="cpu") as engine:
            report = Suite("tiny", args.seed, args.per_task).run(
                tok,
                lambda prompts, most: [
                    c.tokens for c in engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=most))
                ],
            )
        out.right, out.problems = (
            sum(t.right for t in report.tasks.values()),
            sum(t.problems for t in report.tasks.values()),
        )
        out.worst, score = min(report.tasks.items(), key=lambda item: item[1].accuracy)
        out.worst_accuracy, out.well_formed = score.accuracy, report.well_formed
    return out, got


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model folder (default: the embedded model)")
    parser.add_argument("--per-task", type=int, default=10, help="problems per task for accuracy; 0: divergence alone")
    parser.add_argument("--kl-per-task", type=int, default=8, help="conversations per task for the divergence")
    parser.add_argument("--seed", type=int, default=3000)
    parser.add_argument("--only", help="formats whose name holds this text (the shipped form always runs)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a network this small is slower on more
    tok = ready.tokenizer_of(ready.resolve(args.model))
    conversations = replies(tok, Suite("tiny", args.seed, args.kl_per_task))
    base: list[Tensor] | None = None
    done = []
    print("| format | accuracy, % | worst task | KL, nats a token | same top token, % |\n|---|---|---|---|---|")
    for name, gates in formats():
        if base is not None and args.only and args.only not in name:
            continue
        result, got = cost(name, gates, args, tok, base, conversations)
        base = base or got
        done.append(result)
        print(result.row, flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(d) for d in done], indent=1) + "\n", encoding="utf-8")
    sizes = f"{done[0].problems} problems, {len(conversations)} conversations with {done[0].tokens} reply tokens"
    print(f"{sizes}, seed {args.seed}", file=sys.stderr)


if __name__ == "__main__":
    main()
