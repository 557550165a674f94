"""Tokens per verification of the embedded model's EAGLE-3 head through the engine, on held-out prompts.

    python -m bench.experiments.eagle_acceptance --device cuda --presets fast,exact
    python -m bench.experiments.eagle_acceptance --device cpu --presets exact --per-task 2

Three tokens are always drafted, so that the figure is the head's and not the controller's. The model is padded to
gpt-oss' proportions, so that on a GPU its prompts run through the kernels of gpt-oss; only prompts of more than a
batch's rows are taken, because those are what a prompt's kernels see. The last line is JSON. Times nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from typing import Any

import torch

from halfbyte import gates
from halfbyte.engine.build import core_for
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.evals.suite import Suite
from halfbyte.lab import environment
from halfbyte.lab.padded_model import load_padded
from halfbyte.model import load
from halfbyte.model.gpt_oss import arch_of

DRAFTED = 3


def acceptance(device: str, preset: str, graphs: str, prompts: list[list[int]]) -> dict[str, Any]:
    g = gates.parse({"graphs": graphs, "speculate": "eagle3"}, env={}, preset=preset)
    model = load_padded(g, device)
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    options = EngineOptions(gates=g, max_context=1024, max_seqs=8, kv_gib=0.25, reserve_gib=0.0, max_draft=DRAFTED)
    core, _, _ = core_for(model, tokenizer, options)
    proposer: Any = core.proposer
    controller = proposer.controller
    controller.tokens, controller.draft_cost, controller.cost = 10**9, 0.0, lambda rows, context: 1.0
    propose, verified = proposer.propose, []

    def counted(wants: Any) -> Any:
        proposals = propose(wants)
        verified.extend(len(p.tokens) for p in proposals if p.tokens)
        return proposals

    proposer.propose = counted
    answers: dict[str, list[int]] = {}
    for prompt in prompts:
        request = Request(prompt, SamplingParams(temperature=0.0, max_tokens=96))
        answers[request.id] = []
        core.submit(request)
    while core.has_work:
        for id, delta in core.step():
            assert delta.finish != "error", delta.error
            answers[id] += delta.tokens
    stats = core.stats()
    core.close()
    return {
        "device": device, "preset": preset, "graphs": graphs, "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)), "generated": stats.generated_tokens, "verifications": len(verified),
        "drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens,
        "tokens_per_verification": 1 + stats.accepted_tokens / max(1, len(verified)),
        "answers": hashlib.sha256(json.dumps(list(answers.values())).encode()).hexdigest()[:12],
        "prompt_phases": sorted(model.plan.record.phases("prefill")),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--presets", default="fast,exact")
    parser.add_argument("--graphs", default="on,off")
    parser.add_argument("--per-task", type=int, default=6)
    parser.add_argument("--seed", type=int, default=2000)
    args = parser.parse_args()
    if args.device != "cpu":
        environment.need_gpu()
    torch.set_grad_enabled(False)
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    items = Suite("tiny", args.seed, args.per_task).items(tokenizer)
    least = arch_of(args.device).limits.batch
    prompts = [item.prompt for item in items if least < len(item.prompt) < 600]
    results = []
    for preset in args.presets.split(","):
        for graphs in args.graphs.split(","):
            results.append(acceptance(args.device, preset, graphs, prompts))
            print(results[-1], flush=True)
    print(json.dumps({"bench": "eagle_acceptance", "results": results}))


if __name__ == "__main__":
    main()
