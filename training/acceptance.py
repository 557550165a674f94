"""Tokens per verification of an EAGLE-3 head and a draft model, on their target's own held-out replies.

`python training/acceptance.py` reads models/tiny, tiny-eagle3 and tiny-draft, on any machine; folders that training's
stages wrote do as well. Each problem is answered greedily by the target; then every reply is walked as an engine walks
it, three tokens drafted at a time. The problems are turns of conversations, or with --edition 1 that edition's tasks
without its haystacks, which are long. The last line is JSON, with the hashes of the weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import checkpoint
import torch
from eagle import STEPS, draft_acceptance, head_acceptance, held_out, held_out_conversations, load_head
from network import GptOss
from train import DRAFT, MICRO, SECOND, SECOND_DRAFT, TINY

from halfbyte.evals.tasks import TASKS
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, FigureCeiling, Result, figure


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder with all three")
    parser.add_argument("--target", type=Path, help="the target's folder, if it is not MODELS/tiny")
    parser.add_argument("--head", type=Path, help="the head's folder, if it is not MODELS/tiny-eagle3")
    parser.add_argument("--draft", type=Path, help="the draft model's folder, if it is not MODELS/tiny-draft")
    parser.add_argument("--edition", type=int, choices=[1, 2], default=2)
    parser.add_argument("--trained-for", type=int, choices=[1, 2], help="edition of the networks, if it is another")
    parser.add_argument("--conversations", type=int, default=20, help="of each wording, seen and new")
    parser.add_argument("--per-task", type=int, default=12, help="of the first edition's tasks")
    parser.add_argument("--seed", type=int, default=2000)
    parser.add_argument("--micro", action="store_true", help="the target is the network that a CPU trains")
    parser.add_argument("--out", type=Path, help="also write the last line here")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a network this small is slower on more
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    second = (args.trained_for or args.edition) == 2
    folders = args.target or args.models / "tiny", args.head or args.models / "tiny-eagle3"
    folders = *folders, args.draft or args.models / "tiny-draft"
    target = GptOss(MICRO if args.micro else SECOND if second else TINY).to(device)
    draft = GptOss(SECOND_DRAFT if second else DRAFT).to(device)
    checkpoint.load_weights(target, folders[0])
    checkpoint.load_weights(draft, folders[2])
    target.round_experts()
    draft.round_experts()
    head, draft_ids = load_head(folders[1], target.c)
    head, draft_ids = head.to(device), draft_ids.to(device)
    tokenizer = str(args.models / "tiny" / "tokenizer.json")
    if args.edition == 2:
        shape = {"drafted": STEPS, "edition": 2, "conversations": 2 * args.conversations, "seed": args.seed}
        batch = held_out_conversations(target, tokenizer, args.conversations, device, args.seed)
    else:
        shape = {"drafted": STEPS, "conversations": args.per_task * (len(TASKS) - 1), "seed": args.seed}
        batch = held_out(target, tokenizer, args.per_task, device, args.seed)
    every = FigureCeiling(1.0 + STEPS, "every draft accepted")
    results = []
    for name, (length, shares) in (
        ("eagle3", head_acceptance(head, target, batch, draft_ids, dtype)),
        ("draft", draft_acceptance(draft, batch, dtype)),
    ):
        tokens = figure("tokens_per_verification", "tokens", round(length, 3), every)
        detail = {"accepted_at_step": [round(s, 3) for s in shares], "reply_tokens": int((batch.weight == 2).sum())}
        results.append(Result(Cell("acceptance", "tiny", path=name, shape=shape), (tokens,), detail=detail))
    weights = receipts.weights(*folders)
    shown = json.dumps(receipts.result_file("training/acceptance.py", results, weights).as_json())
    print(shown)
    if args.out:
        args.out.write_text(shown + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
