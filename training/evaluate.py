"""Score a network in training on the held-out suite: its bf16 parent, as shipped, and broken in four ways."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from network import Ablation, GptOss

from halfbyte.evals.suite import MAX_TOKENS, Suite
from halfbyte.model.tokenizer import Tokenizer

ABLATIONS = {
    "sinks off": Ablation(sinks=False),
    "yarn off": Ablation(yarn=False),
    "window dropped": Ablation(window=False),
    "experts 0 and 1 swapped": Ablation(swap_experts=(0, 1)),
}
BREAKS = ("arithmetic", "lists", "needle", "tool_call")  # the tasks that show it
BUDGET = 400_000  # tokens of prompt in one batch


def run(model: GptOss, tok: Tokenizer, suite: Suite, ablation: Ablation, max_tokens: int = MAX_TOKENS) -> Any:
    """The suite's report, prompts of all tasks decoded together in order of length."""
    prompts = sorted((item.prompt for item in suite.items(tok)), key=len)
    answers: dict[tuple[int, ...], list[int]] = {}
    while prompts:
        rows = max(1, BUDGET // max(len(prompts[min(len(prompts), 600) - 1]), 1))
        part, prompts = prompts[: min(rows, 600)], prompts[min(rows, 600) :]
        for p, c in zip(part, model.generate(part, max_tokens, quantized=False, ablation=ablation), strict=True):
            answers[tuple(p)] = c
    return suite.run(tok, lambda asked, _: [answers[tuple(p)] for p in asked])


def judge(model: GptOss, tokenizer: Path, per_task: int, *, ablations: bool, seed: int = 1000) -> dict[str, Any]:
    """Rounds the model's experts to MXFP4 in place on the way."""
    tok = Tokenizer.from_file(tokenizer)
    runs: dict[str, Ablation] = {"bf16 parent": Ablation()} if ablations else {}
    runs["mxfp4"] = Ablation()
    runs |= ABLATIONS if ablations else {}
    out: dict[str, Any] = {}
    for name, ablation in runs.items():
        began = time.time()
        if name == "mxfp4":
            model.round_experts()
        suite, limit = Suite("tiny", seed, per_task), MAX_TOKENS
        if name in ABLATIONS:
            suite, limit = Suite("tiny", seed, max(1, per_task // 4), BREAKS), 130
        report = run(model, tok, suite, ablation, limit)
        print(f"== {name} ({time.time() - began:.0f} s)\n{report.table()}", file=sys.stderr, flush=True)
        shown = report.to_json()
        shown["wrong"] = shown["wrong"][:60] if name == "mxfp4" else []
        out[name] = shown
    return out
