"""Train the embedded model: `python training/train.py --stage main --seed 0` on a CUDA machine (models/tiny/README.md).

Stages, each restartable from the files of the one before: `vocabulary` (any machine), `main` (the network, ending in
MXFP4-aware training of the experts), `more` (the same from saved weights), `second` (the second edition from saved
weights, for so many seconds), `eagle` and `draft` (for speculation). The log is one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoint
import data
import eagle
import evaluate
import torch
import vocabulary
from network import Ablation, GptOss, Packed, block_masks, dense_masks, losses
from optimizer import Optimizer
from torch import Tensor

from halfbyte.evals.tasks import MIXTURE
from halfbyte.lab import receipts
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.tokenizer import Tokenizer

TINY = ModelConfig(
    layers=8, hidden=256, intermediate=192, experts=16, top_k=4, heads=8, kv_heads=2, head_dim=64, vocab=2048,
    max_context=8192, yarn=Yarn(factor=16.0, original_context=512), eos_tokens=(2031, 2041, 2028), pad_token=2028,
    name="tiny",
)  # fmt: skip
# The second edition: the same network, four times the context. With weights of the first one the loss of a text of its
# tasks stays where it was.
SECOND = TINY.with_(max_context=32768, yarn=Yarn(factor=64.0, original_context=512))
DRAFT = TINY.with_(
    layers=2,
    hidden=128,
    intermediate=128,
    experts=8,
    heads=4,
    kv_heads=1,
    head_dim=64,
    name="tiny-draft",
    layer_kinds=(),
)
SECOND_DRAFT = DRAFT.with_(max_context=SECOND.max_context, yarn=SECOND.yarn)
MICRO = TINY.with_(
    layers=8, hidden=64, intermediate=32, experts=8, heads=4, kv_heads=2, head_dim=32, name="micro", layer_kinds=()
)

# What stage main leaves weakest (long haystacks, asking for the person, letters, sorting, words never seen) is what
# stage more shows most.
MORE = {"short": 0.38, "scene": 0.27, "haystack": 0.14, "extract": 0.08, "tools": 0.13}
MORE_SHORT = {
    "arithmetic": 4, "story": 2, "lists": 4, "sort": 6, "letters": 7, "repeat": 3, "echo": 3, "chat": 1,
    "remark": 0.5, "memory": 2.5,
}  # fmt: skip
LONG = {"short": 0.46, "scene": 0.13, "haystack": 0.10, "extract": 0.09, "tools": 0.22}


STAGES = ("vocabulary", "main", "more", "second", "eagle", "draft", "evaluate")


@dataclass(frozen=True)
class Plan:
    """How long and how. Shares are of all steps."""

    steps: int
    rows: int = 6
    length: int = 8192
    warmup: int = 60
    long_from: float = 0.45  # from here on, haystacks of up to 640 sentences
    quantize_from: float = 0.70  # from here on, experts are rounded to MXFP4
    decay_from: float = 0.55  # from here on, rates fall to a twentieth
    muon: float = 0.02
    adam: float = 2e-3
    decay: float = 0.03
    prompt_weight: float = 0.1
    balance_weight: float = 0.01
    floor: float = 0.05  # the last rates, of the full ones
    noise: float = (
        0.0  # share of the tokens of replies that the network sees wrong until rates are low; what it shall say stays
    )
    seconds: float = 0.0  # 0: all steps; otherwise shares are of this time, and training ends with it


class Log:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")

    def __call__(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self.file, flush=True)


def rate_at(plan: Plan, step: int, progress: float) -> float:
    """Of the full rates; `progress` is the share of the training that is over."""
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    left = (1.0 - progress) / (1.0 - plan.decay_from)
    return min(1.0, max(plan.floor, left))


def with_noise(batch: Packed, share: float) -> Tensor:
    """The tokens, some of those of replies replaced by the one before or by any of their row.

    A network that never saw a wrong token of its own goes on with it for ever, where one is drawn by chance.
    """
    token = batch.token
    reply = (batch.weight == 2) & (batch.weight.roll(1, -1) == 2)
    drawn = torch.rand(token.shape, device=token.device)
    order = torch.randint(token.shape[-1], token.shape, device=token.device)
    wrong = torch.where(drawn < share / 2, token.roll(1, -1), token.gather(-1, order))
    return torch.where(reply & (drawn < share), wrong, token)


def fit(model: GptOss, plan: Plan, recipes: list[tuple[float, data.Recipe]], log: Log, *, workers: int, device: str,
        save: Callable[[int], None] | None = None, save_every: int = 0, save_seconds: float = 0.0) -> None:  # fmt: skip
    """Train in place. `recipes`: (share of steps from which it holds, recipe). Saves every so many steps or seconds."""
    cuda = device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    optimizer = Optimizer(model, muon=plan.muon, adam=plan.adam, decay=plan.decay)
    score: Any = torch.compile(losses, dynamic=False) if cuda else losses
    if cuda:
        for layer in model.layers:
            layer.compile(dynamic=False)
    began, shown, saved, tokens_since = time.time(), time.time(), time.time(), 0
    bounds = [int(share * plan.steps) for share, _ in recipes] + [plan.steps]
    parts = [(r, bounds[i + 1] - bounds[i]) for i, (_, r) in enumerate(recipes)]
    on = {False: torch.zeros((), device=device), True: torch.ones((), device=device)}
    for step, batch in enumerate(data.batches(parts, plan.rows, workers, device), 1):
        progress = (time.time() - began) / plan.seconds if plan.seconds else (step - 1) / plan.steps
        quantized = progress >= plan.quantize_from
        prompt_weight = plan.prompt_weight * on[progress < plan.decay_from]
        full, sliding = (block_masks if cuda else dense_masks)(batch, model.c.window)
        token = with_noise(batch, plan.noise) if plan.noise and progress < 0.8 else batch.token
        h, balance, _ = model.hidden(token, batch.position, full, sliding, dtype=dtype, quantized=on[quantized])
        loss, reply = score(h, model.lm_head, batch, prompt_weight)
        loss = loss + plan.balance_weight * balance
        loss.backward()
        rate = rate_at(plan, step - 1, progress)
        optimizer.step(rate)
        optimizer.zero()
        tokens_since += batch.token.numel()
        last = step == plan.steps or (plan.seconds > 0 and time.time() - began >= plan.seconds)
        if step % 25 == 0 or last or step <= 3:
            value, now = float(reply.detach()), time.time()
            speed = tokens_since / (now - shown)
            log(step=step, reply_loss=round(value, 5), balance=round(float(balance.detach()), 3), rate=round(rate, 4),
                tokens_per_s=round(speed), quantized=quantized, seconds=round(now - began, 1))  # fmt: skip
            bar = "#" * int(30 * (progress if plan.seconds else step / plan.steps))
            left = (plan.steps - step) * (now - shown) / tokens_since * batch.token.numel()
            left = plan.seconds - (now - began) if plan.seconds else left
            steps = "" if plan.seconds else f"/{plan.steps}"
            shown_line = f"[{bar:30}] {step}{steps} loss {value:.4f} {speed / 1e3:.0f}k tok/s {now - began:.0f}s"
            end = "\r" if sys.stderr.isatty() else "\n"
            print(f"{shown_line}, {left:.0f}s left", end=end, file=sys.stderr, flush=True)
            shown, tokens_since = now, 0
        if last:
            return
        due = time.time() - saved >= save_seconds if save_seconds else save_every and step % save_every == 0
        if save and due:
            save(step)
            saved = time.time()


def recipes_for(plan: Plan, seed: int, tokenizer: Path, name: str, rows: int = 60) -> list[tuple[float, data.Recipe]]:
    short = data.Recipe(f"{name}/short", seed, tokenizer, plan.length, rows, dict(MIXTURE))
    top = 640 if plan.length >= 8192 else 60
    long = replace(short, name=f"{name}/long", mixture=LONG, sentences=(20, top))
    return [(0.0, short), (plan.long_from, long)]


def more_recipes(plan: Plan, seed: int, tokenizer: Path, rows: int = 60) -> list[tuple[float, data.Recipe]]:
    sentences = (60, 640) if plan.length >= 8192 else (20, 60)
    return [(0.0, data.Recipe("more", seed, tokenizer, plan.length, rows, MORE, MORE_SHORT, sentences, who=0.6))]


def second_recipes(plan: Plan, seed: int, tokenizer: Path, rows: int = 8) -> list[tuple[float, data.Recipe]]:
    """Four of five documents are conversations, the others tasks of the first edition; haystacks fill up to a row."""
    top = plan.length // 10
    mixture = {"short": 0.46, "scene": 0.20, "haystack": 0.04, "extract": 0.09, "tools": 0.22}
    recipe = data.Recipe(
        "second", seed, tokenizer, plan.length, rows, mixture, MORE_SHORT, (20, top), who=0.4, conversations=0.8
    )
    return [(0.0, recipe)]


def shipped_hashes(model: GptOss) -> dict[str, str]:
    """File -> hash that models/tiny has once this is released, so that an evaluation names the weights it is of."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.export(model, Path(folder))
        files = sorted(Path(folder).glob("*.safetensors"))
        return {f"../../models/{model.c.name}/{f.name}": receipts.file_hash(f) for f in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", required=True, choices=STAGES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument(
        "--seconds", type=float, default=0.0,
        help="stages second and draft: how long it trains; eagle: how long it takes in all; 0: --steps",
    )  # fmt: skip
    parser.add_argument(
        "--edition", type=int, choices=[1, 2], default=1,
        help="stages eagle, draft and evaluate: whose network and data; the second's draft model begins as --weights",
    )  # fmt: skip
    parser.add_argument("--conversations", type=int, default=400, help="held-out conversations of each kind, edition 2")
    parser.add_argument("--rates", type=float, default=1.0, help="of the full rates, for a short stage of edition 2")
    parser.add_argument("--out", type=Path, default=Path("out/training"), help="where weights and the log go")
    parser.add_argument("--weights", type=Path, help="folder with saved weights to start from (default: --out)")
    parser.add_argument("--tokenizer", type=Path, default=Path("models/tiny/tokenizer.json"))
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--per-task", type=int, default=100, help="held-out problems per task after training; 0: none")
    parser.add_argument("--held-out", type=int, default=1000, help="seed of the held-out problems")
    parser.add_argument(
        "--micro", action="store_true", help="a network small enough to train on a CPU, to try the code"
    )
    parser.add_argument("--ablations", action="store_true", help="also judge the bf16 parent and the broken variants")
    parser.add_argument(
        "--own", type=int, default=24576, help="how many of the target's own outputs the head learns from"
    )
    parser.add_argument("--head", type=Path, help="stage eagle: go on from this shipped head instead of from nothing")
    args = parser.parse_args()
    if args.stage == "vocabulary":
        vocabulary.save(vocabulary.train(TINY.vocab, args.seed), args.tokenizer.parent, TINY.max_context)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    log = Log(args.out / "log.jsonl")
    source = args.weights or args.out
    second = args.stage == "second" or args.edition == 2
    config = SECOND if second else TINY
    if args.stage == "draft":
        config = SECOND_DRAFT if second else DRAFT
    elif args.micro:
        config = MICRO
    model = GptOss(config).to(device)
    if args.stage == "eagle":
        checkpoint.load_weights(model, source)
        eagle.stage(args, log, device, model)
        return
    plan = Plan(args.steps)
    if args.micro:
        plan = replace(plan, rows=2, length=1024, warmup=20)
    if args.stage == "more":
        checkpoint.load_weights(model, source)
        plan = replace(plan, warmup=30, quantize_from=0.0, decay_from=0.4, prompt_weight=0.0)
    if args.stage in ("second", "draft") and second:
        checkpoint.load_weights(model, source)
        plan = replace(plan, seconds=args.seconds, quantize_from=0.0, decay_from=0.3, prompt_weight=0.05, floor=0.01)
        plan = replace(plan, noise=0.01, muon=plan.muon * args.rates, adam=plan.adam * args.rates)
        if not args.micro:
            plan = replace(plan, rows=2, length=SECOND.max_context)
    if args.stage == "evaluate":
        checkpoint.load_weights(model, source)
    else:
        log(
            stage=args.stage,
            seed=args.seed,
            steps=plan.steps,
            device=device,
            parameters=sum(p.numel() for p in model.parameters()),
        )
        rows = 16 if args.micro else 60
        recipes = recipes_for(plan, args.seed, args.tokenizer, args.stage, rows)
        if args.stage == "more":
            recipes = more_recipes(plan, args.seed, args.tokenizer, rows)
        if second:
            recipes = second_recipes(plan, args.seed, args.tokenizer, 16 if args.micro else 8)
        fit(model, plan, recipes, log,
            workers=args.workers, device=device,
            save=lambda step: checkpoint.save_weights(model, args.out), save_every=max(1, plan.steps // 4),
            save_seconds=60.0 if plan.seconds else 0.0)  # fmt: skip
        checkpoint.save_weights(model, args.out)
        checkpoint.load_weights(model, args.out)  # judge what was saved, rounded to bf16
    if second and args.stage != "draft" and args.conversations:
        tok = Tokenizer.from_file(args.tokenizer)
        model.round_experts()
        reports = evaluate.judge_second(
            lambda suite, most: evaluate.completions(model, tok, suite, Ablation(), most),
            tok, args.conversations, args.per_task, args.out / "second.json", seed=args.held_out, micro=args.micro,
        )  # fmt: skip
    elif args.per_task == 0:
        return
    else:
        reports = evaluate.judge(
            model, args.tokenizer, args.per_task, ablations=args.ablations, seed=args.held_out, micro=args.micro
        )
    dtype = "bfloat16" if device == "cuda" else "float32"
    results = evaluate.accuracy_results(reports, model.c.name, "training's network", dtype)
    file = receipts.result_file("training/train.py --stage evaluate", results, shipped_hashes(model))
    file.write(args.out / "evaluation.json")


if __name__ == "__main__":
    main()
