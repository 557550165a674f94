"""What a GPU decoded in bfloat16 when the shipped model was judged, our engine decodes on a CPU in float32.

The receipt holds the hundred natural questions and 420 problems of a seed that no training saw: how many were right,
and every miss with its reply. Here are the first of each task again, and all the misses: a narrow decision can fall the
other way, a right one hardly.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfbyte.engine.python_api import Engine
from halfbyte.engine.request import SamplingParams
from halfbyte.evals.suite import MAX_TOKENS, Suite, read_reply
from halfbyte.harmony.render import render_prompt
from halfbyte.lab import receipts

RECEIPT = Path(__file__).parents[2] / "bench" / "results" / "eval-20261119-second-edition.json"
EACH = 3
RUNS = ("natural", "first edition's tasks")


@pytest.mark.slow
def test_the_cpu_answers_as_the_gpu_did() -> None:
    torch.set_num_threads(1)
    receipt = receipts.read(RECEIPT)
    assert receipt.state == "current", "judge the new weights: training/train.py --stage evaluate"
    first, missed = [], []
    for run in RUNS:
        (detail,) = [r.detail for r in receipt.results if r.cell.shape["run"] == run]
        misses = {(w["task"], w["question"], w["expected"]): w["raw"] for w in detail["wrong"]}
        assert len(misses) == sum(t["problems"] - t["right"] for t in detail["tasks"].values())
        suite, seen = Suite(detail["suite"], detail["seed"], detail["per_task"]), len(missed)
        for task, problems in suite.problems.items():
            for i, p in enumerate(problems):
                reply = misses.get((task, p.turns[-1].text[-200:], p.reply[-1].text))
                if reply is not None:
                    missed.append((p, reply))
                elif i < EACH:
                    first.append((p, None))
        assert len(missed) == seen + len(misses)
    with Engine(device="cpu") as engine:
        tok = engine.tokenizer
        prompts = [render_prompt(tok, p.prompt()) for p, _ in first + missed]
        completions = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    right = []
    for (p, _), c in zip(first + missed, completions, strict=True):
        reply = read_reply(tok, c.tokens)
        right.append(reply.fault is None and p.judge(reply.final, reply.call))
    same = sum(tok.decode(c.tokens) == reply for (_, reply), c in zip(missed, completions[len(first) :], strict=True))
    both, lost = sum(right[: len(first)]), len(missed) - sum(right[len(first) :])
    print(f"\nright on the GPU: {both} of {len(first)} right on the CPU")
    print(f"missed on the GPU: {lost} of {len(missed)} missed on the CPU, {same} of them token for token")
    assert both >= 0.98 * len(first)
    assert lost >= 0.5 * len(missed)
