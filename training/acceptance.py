"""How many tokens per verification the shipped draft model gives on held-out conversations, through halfbyte's network.

`python training/acceptance.py` reads models/tiny and models/tiny-draft. Conversations the target would not write itself
are left out: what is measured is the target's own greedy output, token for token. The EAGLE-3 head's figure comes from
stage eagle, which has the target's hidden states at hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from eagle import STEPS, acceptance, pack

from halfbyte.evals.suite import Suite
from halfbyte.evals.tasks import TASKS
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.model import checkpoint
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.solo import Solo
from halfbyte.model.tokenizer import Tokenizer


def guesses(model: GptOss, tokens: list[int]) -> list[int]:
    """The greedy next token after each."""
    return [int(t) for t in Solo(model, len(tokens)).feed(tokens, all_logits=True).argmax(-1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--per-task", type=int, default=8)
    parser.add_argument("--seed", type=int, default=2000)
    args = parser.parse_args()
    tok = Tokenizer.for_model(args.models / "tiny")
    target = GptOss(checkpoint.load(args.models / "tiny"))
    draft = GptOss(checkpoint.load(args.models / "tiny-draft"))
    conversations, hits = [], []
    suite = Suite("tiny", args.seed, args.per_task, [t for t in TASKS if t != "needle"])
    for problem in (p for ps in suite.problems.values() for p in ps):
        prompt = len(render_prompt(tok, problem.prompt()))
        whole, _ = render_training_example(tok, problem.worked())
        if guesses(target, whole[:-1])[prompt - 1 :] == whole[prompt:]:
            conversations.append((whole, prompt))
            hits.append([g == t for g, t in zip(guesses(draft, whole[:-1]), whole[1:], strict=True)] + [False])
    longest = max(len(whole) for whole, _ in conversations)
    batch = [pack([c], longest, "cpu") for c in conversations]
    rows = torch.tensor([row + [False] * (longest - len(row)) for row in hits])
    joined = type(batch[0])(**{f: torch.cat([getattr(b, f) for b in batch]) for f in batch[0].__dataclass_fields__})
    length, shares = acceptance([rows.roll(-1 - j, dims=1) for j in range(STEPS)], joined)
    print(
        json.dumps(
            {
                "drafted": STEPS,
                "conversations": len(conversations),
                "of": sum(map(len, suite.problems.values())),
                "tokens_per_verification": round(length, 3),
                "accepted_at_step": [round(s, 3) for s in shares],
            }
        )
    )


if __name__ == "__main__":
    main()
