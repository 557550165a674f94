"""Tokens per verification of the embedded model's EAGLE-3 head through the engine, on held-out prompts.

    python -m bench run eagle-acceptance --set presets=fast,exact
    python -m bench run eagle-acceptance --set device=cpu --set presets=exact --set per_task=2

Three tokens are always drafted, so that the figure is the head's and not the controller's. The model is padded to
gpt-oss' proportions, so that on a GPU its prompts run through the kernels of gpt-oss; only prompts of more than a
batch's rows are taken, because those are what a prompt's kernels see. Times nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from bench.measurement import Run, measurement
from bench.padded_model import load_padded
from halfbyte import gates
from halfbyte.engine.build import core_for
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.evals.suite import Suite
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Result, figure
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
    controller.ledger = None
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


@dataclass(frozen=True)
class Options:
    device: str = "cuda"
    presets: tuple[str, ...] = ("fast", "exact")
    graphs: tuple[str, ...] = ("on", "off")
    per_task: int = 6
    seed: int = 2000


@measurement("eagle-acceptance", needs=("gpu",), seconds=300, routine=False)
def eagle_acceptance(run: Run, options: Options) -> None:
    torch.set_grad_enabled(False)
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    items = Suite("tiny", options.seed, options.per_task).items(tokenizer)
    least = arch_of(options.device).limits.batch
    prompts = [item.prompt for item in items if least < len(item.prompt) < 600]
    sources = receipts.sources_of([receipts.PACKAGE / "engine" / "build.py"], ("engine",))
    run.sources |= receipts.hashes(sources) | receipts.weights(load.EMBEDDED, load.EMBEDDED.parent / "tiny-eagle3")
    for preset in options.presets:
        for graphs in options.graphs:
            counts = acceptance(options.device, preset, graphs, prompts)
            cell = Cell("acceptance", "tiny", preset, {"graphs": graphs}, "eagle3", {"conversations": len(prompts)})
            per = figure("tokens_per_verification", "tokens", counts["tokens_per_verification"])
            run.add(Result(cell, (per,), detail=counts))
