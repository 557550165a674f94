"""Prefixes of a real model through every tier: on a CPU and on a GPU, with the kernels of a large model.

With --deterministic the tokens and log probabilities of an answer have the same bits, wherever its prefix comes from.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from bench.checks.schedules import ChoiceResult, ScheduleBench, answers_of, gates_of, run_schedule
from bench.padded_model import load_padded
from halfbyte import gates
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams, Usage
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GIB, MIB = 1 << 30, 1 << 20
PROMPT, PROMPTS, PAGES = 450, 6, 40  # tokens, of which the pages hold two prompts
ANSWER = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)

Answers = dict[tuple[str, int], ChoiceResult]


@pytest.fixture(
    scope="module",
    params=[("cpu", "int8"), *(pytest.param(("cuda", p), marks=needs_gpu) for p in ("exact", "balanced", "fast"))],
    ids=lambda param: " ".join(param),
)
def model(request: pytest.FixtureRequest) -> GptOss:
    device, preset = request.param
    return load_padded(gates.parse({"deterministic": "on"}, env={}, preset=preset), device)


def core_of(model: GptOss, folder: Path | None, memory: int, *, prefix_cache: bool = True) -> EngineCore:
    options = EngineOptions(
        gates=model.gates, max_context=PROMPT + 100, kv_gib=(PAGES + 0.5) * model.page_bytes / GIB, max_seqs=4,
        reserve_gib=0.0, device=model.device.type, max_rows_per_step=128, prefix_cache=prefix_cache,
        prefix_memory=memory, prefix_folder=None if folder is None else str(folder),
    )  # fmt: skip
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    core = core_for(model, tokenizer, options, path=load.EMBEDDED)[0]
    if core.tiers is not None:  # nothing depends on what is faster here
        core.tiers.computed = lambda rows, depth, seconds: None  # type: ignore[method-assign]
    return core


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(10, 2000) for _ in range(PROMPT)] for _ in range(PROMPTS)]


def serve(core: EngineCore, name: str) -> tuple[Answers, list[Usage]]:
    """All prompts at once, on pages for two of them; every step leaves the pages in order."""
    for i, prompt in enumerate(prompts()):
        core.submit(Request(prompt, ANSWER, id=f"{i}"))
    outputs = []
    while core.has_work:
        outputs += core.step()
        core.check()
    assert all(delta.finish != "error" for _, delta in outputs), name
    assert core.tiers is None or core.tiers.settle(30)
    return answers_of(outputs), [delta.usage for _, delta in outputs if delta.finish and delta.usage]


def test_answers_have_the_same_bits_from_every_tier(model: GptOss, tmp_path: Path) -> None:
    core = core_of(model, None, 0, prefix_cache=False)
    cold, usages = serve(core, "cold")
    assert not any(usage.cached_tokens for usage in usages)
    core.close()
    for name, folder, memory in (
        ("memory", None, 256 * MIB),
        ("disk", tmp_path / "p", 0),
        ("both", tmp_path / "p", 4 * MIB),
    ):
        core = core_of(model, folder, memory)
        for turn in range(2):
            answers, usages = serve(core, f"{name}, turn {turn}")
            assert answers == cold, f"{name}, turn {turn}"
        from_memory, from_disk = sum(u.memory_tokens for u in usages), sum(u.disk_tokens for u in usages)
        wanted = {"memory": from_memory, "disk": from_disk, "both": from_memory + from_disk}[name]
        assert wanted > PROMPT, (name, from_memory, from_disk)
        core.close()
    core = core_of(model, tmp_path / "p", 0)
    answers, usages = serve(core, "after a restart")
    assert answers == cold
    assert sum(u.disk_tokens for u in usages) > (PROMPTS - 1) * (PROMPT - 64), "what the last engine wrote"
    assert core.stats().prefix_damaged == 0
    core.close()


METHODS = {
    "no model drafts": ("off", "ngram", "suffix", "partly right"), "a head drafts": ("eagle3",),
    "a model drafts": ("draft",),
}  # fmt: skip
SEEDS = (7, 24, 26, 42, 46, 62)  # with preemption, hits in every tier, accepted drafts and engines that are built anew


@pytest.mark.parametrize(
    ("preset", "drafts", "seeds"),
    [
        *(pytest.param(preset, "no model drafts", SEEDS, marks=needs_gpu) for preset in ("exact", "balanced", "fast")),
        *(pytest.param("fast", drafts, (0, 1), marks=needs_gpu) for drafts in ("a head drafts", "a model drafts")),
    ],
)
def test_no_schedule_changes_an_answer_on_a_gpu(preset: str, drafts: str, seeds: tuple[int, ...]) -> None:
    machine = ScheduleBench(gates_of(preset, 1), device="cuda", methods=METHODS[drafts])
    try:
        for seed in seeds:
            schedule = run_schedule(machine, seed, requests=4)
            assert not schedule.differences, schedule.differences[0]
    finally:
        machine.close()
