"""Tokens per verification of the shipped EAGLE-3 head and draft model, on the shipped model's own held-out replies.

`python training/acceptance.py` reads models/tiny, tiny-eagle3 and tiny-draft, on any machine. Each problem is answered
greedily by the target; then every reply is walked as an engine walks it, three tokens drafted at a time.
Haystacks are left out, for their length alone. The last line is JSON, with the hashes of the weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import checkpoint
import torch
from eagle import STEPS, draft_acceptance, head_acceptance, held_out, load_head
from network import GptOss
from train import DRAFT, TINY

from halfbyte.evals.tasks import TASKS
from halfbyte.lab import receipts
from halfbyte.lab.result import Ceiling, Cell, Result, figure


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--per-task", type=int, default=12)
    parser.add_argument("--seed", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a network this small is slower on more
    target, draft = GptOss(TINY), GptOss(DRAFT)
    checkpoint.load_weights(target, args.models / "tiny")
    checkpoint.load_weights(draft, args.models / "tiny-draft")
    head, draft_ids = load_head(args.models / "tiny-eagle3", TINY)
    batch = held_out(target, str(args.models / "tiny" / "tokenizer.json"), args.per_task, "cpu", args.seed)
    shape = {"drafted": STEPS, "conversations": args.per_task * (len(TASKS) - 1), "seed": args.seed}
    every = Ceiling(1.0 + STEPS, "every draft accepted")
    results = []
    for name, (length, shares) in (
        ("eagle3", head_acceptance(head, target, batch, draft_ids, torch.float32)),
        ("draft", draft_acceptance(draft, batch, torch.float32)),
    ):
        tokens = figure("tokens_per_verification", "tokens", round(length, 3), every)
        detail = {"accepted_at_step": [round(s, 3) for s in shares], "reply_tokens": int((batch.weight == 2).sum())}
        results.append(Result(Cell("acceptance", "tiny", path=name, shape=shape), (tokens,), detail=detail))
    weights = receipts.weights(*(args.models / name for name in ("tiny", "tiny-eagle3", "tiny-draft")))
    print(json.dumps(receipts.result_file("training/acceptance.py", results, weights).as_json()))


if __name__ == "__main__":
    main()
