"""--deterministic on the kernels of SM90, in the emulator: mixed schedules equal to one request at a time, bit for bit.

The plan is the one that sm90 gets, at a shape of a few kilobytes: the batch layer for answers, the prompt layer for
prompts, both heads. Two small parts of it are Triton's, and torch computes them here row by row. The emulator adds in
the order of the source. What it cannot show is how a GPU's products round inside one instruction; no GPU has run this.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_schedules import RandomProposer

from bench.checks.schedules import ChoiceResult, answers_of, first_difference
from halfbyte import gates
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.cpu_runner import CpuRunner
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import Output, Request, SamplingParams
from halfbyte.engine.speculative.controller import Controller
from halfbyte.kernels.cuda.attention import prompt
from halfbyte.kernels.cuda.batch import fused_phase
from halfbyte.kernels.cuda.batch import phase as batch_phase
from halfbyte.kernels.cuda.embedding import phase as embedding_phase
from halfbyte.kernels.cuda.prefill import layer as prefill_layer
from halfbyte.kernels.cuda.prefill import phases as prefill_phases
from halfbyte.kv.pages import PagePool
from halfbyte.model import synthetic
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import GptOss, choose
from halfbyte.ops.norm import rms_norm
from halfbyte.ops.router import route
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, Binding, Launch
from halfbyte.plan.step import Step
from tests.kernels.cuda.emulator import Emulator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++"),
]
SM90 = ARCHES["sm90"]
SMALL = ModelConfig(
    layers=2, hidden=64, intermediate=64, experts=16, top_k=4, heads=8, kv_heads=1, head_dim=64, vocab=64, window=64,
    eos_tokens=(1,), pad_token=0, max_context=4096,
)  # fmt: skip
LONGEST = 150


def angles(half: int) -> Any:
    """The call of Triton's kernel that makes a step's cosines and sines."""

    def launch(grid: object, device: object, **v: Any) -> None:
        turns = v["positions"].float()[:, None] * v["inverse"][None]
        v["cos"].copy_(turns.double().cos() * v["temperature"])
        v["sin"].copy_(turns.double().sin() * v["temperature"])

    return SimpleNamespace(launch=launch)


class RouterByRow:
    """Norm and router of a prompt, one row at a time."""

    def bind(self, b: Binding) -> Launch:
        w, s = b.weights, b.spec

        def launch(step: Step, acts: Activations) -> None:
            rows = [rms_norm(x[None], w.mlp_norm, s.norm_eps) for x in acts.x]
            choices = [route(h, w.router, w.router_bias, s.top_k) for h in rows]
            acts.h = torch.cat(rows).bfloat16()
            acts.topk_ids = torch.cat([ids for ids, _ in choices]).int()
            acts.topk_weights = torch.cat([shares for _, shares in choices]).float()

        return launch


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, GptOss]]:
    """With --deterministic and without, over one set of weights."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (prompt, fused_phase, batch_phase, embedding_phase, prefill_phases):
            patch.setattr(module, "gpu", lambda: Emulator(3))
        patch.setattr(prefill_phases, "workspace_of", lambda b: prefill_phases.Workspace(
            Emulator(3), b.buffers, torch.device("cpu")))  # fmt: skip
        patch.setattr(batch_phase, "current_arch", lambda: SM90)
        patch.setattr(fused_phase, "angles_call", angles)
        patch.setattr(prefill_layer, "angles_call", angles)
        patch.setattr(prefill_layer.PrefillLayer, "bind_router", lambda self, b: RouterByRow().bind(b))
        yield {value: model_with(value) for value in ("on", "off")}


def model_with(deterministic: str) -> GptOss:
    g = gates.parse({"deterministic": deterministic}, env={}, preset="fast")
    choice = choose(SMALL, replace(g, moe_kernel="cuda", linear_kernel="cuda", attention="cuda"), SM90)
    fixed = choice.chosen["batch"] if deterministic == "off" else choice.chosen["decode"]
    choice = replace(choice, chosen=choice.chosen | {"decode": fixed})  # the decode step is too slow here
    assert [p.name for p in fixed] == ["cuda.embed", "cuda.batch_layer_fused", "cuda.batch_norm_lm_head"]
    assert [p.name for p in choice.chosen["prefill"]][1] == "cuda.prefill_layer"
    weights = synthetic.make(SMALL, 0, layer_formats=g.layer_formats, layouts=choice.selection.layouts)
    return GptOss(weights, g, choice=choice, limits=SM90.limits)


def config(pages: int, answer_rows: int, **changes: Any) -> EngineConfig:
    base = EngineConfig(
        pages=pages, page_size=64, window=SMALL.window, vocab=SMALL.vocab, max_context=LONGEST, eos_tokens=(1,),
        max_rows_per_step=256, run_ahead=False, answer_rows=answer_rows,
    )  # fmt: skip
    return replace(base, **changes)


def outputs_of(core: EngineCore, requests: list[Request], rng: random.Random) -> Iterator[Output]:
    todo = list(requests)
    while todo or core.has_work:
        while todo and rng.random() < 0.6:
            core.submit(todo.pop())
        yield from core.step()


def differences(model: GptOss, seed: int, answer_rows: int) -> tuple[list[str], EngineCore]:
    rng = random.Random(seed)
    shared = [rng.randrange(2, SMALL.vocab) for _ in range(100)]
    requests = [
        Request(
            shared[: rng.choice([3, 70, 100])] + [rng.randrange(2, SMALL.vocab) for _ in range(rng.randint(1, 20))],
            SamplingParams(
                temperature=rng.choice([0.0, 1.0]), seed=i, max_tokens=rng.randint(2, 12), logprobs=0, ignore_eos=True,
                n=rng.choice([1, 1, 2]),
            ),
            id=f"r{i}",
        )
        for i in range(rng.randint(2, 4))
    ]  # fmt: skip
    one = 1 + PagePool(9, 64, SMALL.window).peak_pages(LONGEST, 256)
    model.allocate_kv(2 * one)
    alone: dict[tuple[str, int], ChoiceResult] = {}
    for request in requests:
        core = EngineCore(CpuRunner(model), config(one, answer_rows, max_seqs=1, prefix_cache=False))
        alone |= answers_of(outputs_of(core, [request], random.Random(0)))
    few = config(one + rng.choice([0, 2, one - 1]), answer_rows, max_seqs=4, max_rows_per_step=rng.choice([70, 256]))
    proposer = RandomProposer(rng, Controller(lambda rows, context: 1.0, longest=3, allowance=1.0))
    core = EngineCore(CpuRunner(model), few, None, proposer if rng.random() < 0.5 else None)
    mixed = answers_of(outputs_of(core, requests, rng))
    pairs = ((choice, first_difference(alone[choice], result)) for choice, result in mixed.items())
    return [f"seed {seed}, {choice}: {text}" for choice, text in pairs if text], core


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule(models: dict[str, GptOss], seed: int) -> None:
    parted, _ = differences(models["on"], seed, SM90.limits.batch)
    assert not parted, parted[0]


def test_without_it_schedules_show(models: dict[str, GptOss]) -> None:
    assert any(differences(models["off"], seed, 0)[0] for seed in range(3))
