"""Score a network in training on the held-out suite: as shipped, as its bf16 parent, and broken in four ways."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from halfbyte.evals.suite import Suite
from halfbyte.model.tokenizer import Tokenizer
from network import Ablation, GptOss

ABLATIONS = {
    "sinks off": Ablation(sinks=False),
    "yarn off": Ablation(yarn=False),
    "window dropped": Ablation(window=False),
    "experts 0 and 1 swapped": Ablation(swap_experts=(0, 1)),
}


def judge(model: GptOss, tokenizer: Path, per_task: int, *, ablations: bool, seed: int = 1000) -> dict[str, Any]:
    tok = Tokenizer.from_file(tokenizer)
    runs: dict[str, tuple[bool, Ablation, int]] = {"mxfp4": (True, Ablation(), per_task)}
    if ablations:
        runs["bf16 parent"] = (False, Ablation(), per_task)
        runs |= {name: (True, a, max(1, per_task // 4)) for name, a in ABLATIONS.items()}
    out: dict[str, Any] = {}
    for name, (quantized, ablation, count) in runs.items():
        began = time.time()

        def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
            done: list[list[int]] = []
            rows = max(1, min(len(prompts), 400_000 // max(map(len, prompts))))
            limit = min(max_tokens, 320 if not ablations or name in ("mxfp4", "bf16 parent") else 160)
            for i in range(0, len(prompts), rows):
                done += model.generate(prompts[i : i + rows], limit, quantized=quantized, ablation=ablation)
            return done

        report = Suite("tiny", seed, count).run(tok, generate)
        print(f"== {name} ({time.time() - began:.0f} s)\n{report.table()}", file=sys.stderr, flush=True)
        shown = report.to_json()
        shown["wrong"] = shown["wrong"][:60] if name == "mxfp4" else []
        out[name] = shown
    return out
