"""Logprobs of a prompt's own tokens: chunks, the prefix cache, preemption, both ways of sampling, a real model."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from engine_fakes import EOS, VOCAB, FakeRunner, FakeVocabulary, fake_logits, random_prompt

from bench.padded_model import load_padded
from halfbyte import gates
from halfbyte.engine.batch import Batch
from halfbyte.engine.build import core_for
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.cpu_runner import CpuRunner
from halfbyte.engine.device_runner import DeviceRunner
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.python_api import Engine
from halfbyte.engine.request import Delta, Logprob, Request, SamplingParams
from halfbyte.engine.runner import StepHandle
from halfbyte.engine.sampling.device import TorchSampler
from halfbyte.engine.sampling.logprobs import logprob_of
from halfbyte.engine.scheduler import SCORED_ROWS
from halfbyte.errors import RequestError
from halfbyte.model.load import load_model, resolve_model, tokenizer_of
from halfbyte.model.single_sequence import SingleSequence
from tests.reference import REFERENCE

WINDOW = 8
ONLY = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2)


def make(pages: int = 400, fault=None, **kw) -> EngineCore:
    settings = {"max_seqs": 8, "max_rows_per_step": 200, "max_context": 1024, **kw}
    config = EngineConfig(pages=pages, page_size=4, window=WINDOW, vocab=VOCAB, eos_tokens=(EOS,), **settings)
    return EngineCore(FakeRunner(pages, 4, WINDOW, fault=fault), config, FakeVocabulary())


def run(core: EngineCore) -> dict[str, list[Delta]]:
    out: dict[str, list[Delta]] = {}
    while core.has_work:
        for id, delta in core.step():
            out.setdefault(id, []).append(delta)
        core.check()
    for id, delta in core.step():
        out.setdefault(id, []).append(delta)
    assert core.pages.available == core.pages.capacity
    return out


def scores(deltas: list[Delta]) -> list[Logprob]:
    return [lp for d in deltas for lp in d.prompt_logprobs or []]


def wanted(prompt: list[int], top: int, first: int = 1) -> list[Logprob]:
    return [
        logprob_of(fake_logits(prompt[:at], prompt[:at][-WINDOW:]), prompt[at], top) for at in range(first, len(prompt))
    ]


@pytest.mark.parametrize("run_ahead", [True, False])
def test_every_token_but_the_first(run_ahead: bool) -> None:
    prompt = random_prompt(random.Random(1), 300, 300)
    largest = 0

    def watch(batch: Batch) -> None:
        nonlocal largest
        largest = max(largest, len(batch.logit_rows))

    core = make(run_ahead=run_ahead, fault=watch)
    core.submit(Request(prompt, ONLY, id="a"))
    deltas = run(core)["a"]
    assert scores(deltas) == wanted(prompt, 2)
    assert largest == SCORED_ROWS  # in chunks: logits are large
    assert [d.finish for d in deltas if d.finish] == ["length"]
    assert [t for d in deltas for t in d.tokens] == []
    assert deltas[-1].usage is not None
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens) == (300, 0)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 65, 66])
def test_prompts_of_any_length_with_and_without_an_answer(length: int) -> None:
    prompt = random_prompt(random.Random(length), length, length)
    plain = make()
    plain.submit(Request(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), id="a"))
    tokens = [t for d in run(plain)["a"] for t in d.tokens]
    core = make()
    core.submit(Request(prompt, ONLY, id="only"))
    core.submit(
        Request(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=2), id="both")
    )
    out = run(core)
    assert scores(out["only"]) == scores(out["both"]) == wanted(prompt, 2)
    assert [t for d in out["both"] for t in d.tokens] == tokens


def test_what_is_cached_is_computed_again_only_as_far_as_it_is_asked_for() -> None:
    prompt = random_prompt(random.Random(3), 120, 120)
    core = make()
    core.submit(Request(prompt, SamplingParams(temperature=0, max_tokens=1), id="before"))
    run(core)
    core.submit(Request(prompt, ONLY, id="all"))
    late = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_from=118)
    core.submit(Request(prompt, late, id="late"))
    out = run(core)
    assert scores(out["all"]) == wanted(prompt, 2)
    assert scores(out["late"]) == wanted(prompt, 0, 118)
    usage = [d.usage for d in (out["all"][-1], out["late"][-1])]
    assert [u.cached_tokens for u in usage if u] == [0, 116]  # a window is kept where a prompt ended


def test_choices_share_one_account_of_the_prompt() -> None:
    prompt = random_prompt(random.Random(4), 30, 30)
    core = make()
    core.submit(Request(prompt, SamplingParams(seed=1, max_tokens=3, n=3, prompt_logprobs=1), id="a"))
    deltas = run(core)["a"]
    assert {d.index for d in deltas if d.prompt_logprobs} == {0}
    assert scores(deltas) == wanted(prompt, 1)
    assert {d.index for d in deltas if d.finish} == {0, 1, 2}


def test_many_at_once_none_starves() -> None:
    core = make(pages=2000, max_seqs=8, max_rows_per_step=64)
    rng = random.Random(5)
    prompts = {f"q{i}": random_prompt(rng, 60, 200) for i in range(12)}
    for id, prompt in prompts.items():
        core.submit(Request(prompt, ONLY, id=id))
    out = run(core)
    for id, prompt in prompts.items():
        assert scores(out[id]) == wanted(prompt, 2)


def test_too_few_pages_for_all_of_them() -> None:
    core = make(pages=90, max_seqs=4, max_rows_per_step=64)
    rng = random.Random(6)
    prompts = {f"q{i}": random_prompt(rng, 60, 90) for i in range(6)}
    more = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=2)
    for id, prompt in prompts.items():
        core.submit(Request(prompt, more, id=id))
    out = run(core)
    assert core.stats().preemptions > 0
    for id, prompt in prompts.items():
        assert scores(out[id]) == wanted(prompt, 2)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        (SamplingParams(max_tokens=0), "prompt_logprobs"),
        (SamplingParams(prompt_logprobs=-1), "prompt_logprobs is -1"),
        (SamplingParams(prompt_logprobs=0, prompt_logprobs_from=0), "the first token has none"),
    ],
)
def test_what_can_never_be_served(params: SamplingParams, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        make().submit(Request([5, 6], params))


# ---- a real model -----------------------------------------------------------------------------

LENGTHS = (70, 5)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(2, 1000) for _ in range(n)] for n in LENGTHS]


def alone(prompt: list[int], top: int) -> list[Logprob]:
    model = load_model(resolve_model("random:small"), REFERENCE, page_size=16)
    with torch.inference_mode():
        logits = SingleSequence(model, len(prompt)).feed(prompt, all_logits=True).float().numpy()
    return [logprob_of(logits[at - 1], prompt[at], top) for at in range(1, len(prompt))]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_real_model(on_device: bool) -> None:
    model = load_model(resolve_model("random:small"), REFERENCE, page_size=16)
    model.allocate_kv(64)
    config = EngineConfig(
        pages=64, page_size=16, window=model.config.window, vocab=model.config.vocab, max_context=256,
        eos_tokens=model.config.eos_tokens, max_seqs=4, max_rows_per_step=32,
        host_steps=not on_device, run_ahead=on_device,
    )  # fmt: skip
    runner = DeviceRunner(model, TorchSampler(), rows=64, sequences=4, blocks=16) if on_device else CpuRunner(model)
    core = EngineCore(runner, config)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=3, logprobs=1)
    for i, prompt in enumerate(prompts()):
        core.submit(Request(prompt, params, id=f"q{i}"))
    out = run(core)
    for i, prompt in enumerate(prompts()):
        got = scores(out[f"q{i}"])
        assert [lp.token for lp in got] == prompt[1:]
        for ours, right in zip(got, alone(prompt, 3), strict=True):
            assert ours.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert ours.top[0][1] >= ours.logprob


def test_from_python() -> None:
    prompt = prompts()[0]
    with Engine("random:small", gates=REFERENCE, max_context=512, kv_gib=0.05, reserve_gib=0.0) as engine:
        engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1))  # so that it is cached
        (only,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0))
    assert (only.tokens, only.finish) == ([], "length")
    assert only.prompt_logprobs is not None
    right = [lp.logprob for lp in alone(prompt, 0)]
    assert [lp.logprob for lp in only.prompt_logprobs] == pytest.approx(right, abs=1e-4)


# ---- a trained model, as a server has it --------------------------------------------------------

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
TEXT = [(7 * i * i + 11 * i) % 800 + 100 for i in range(300)]


@pytest.mark.parametrize(
    ("preset", "device"),
    [("exact", "cpu"), *(pytest.param(p, "cuda", marks=on_gpu) for p in ("exact", "balanced", "fast"))],
)
def test_beside_a_neighbour_that_decodes(preset: str, device: str) -> None:
    """Steps of a prompt's rows whose logits are wanted, with rows that decode and without, graphs and the sampler of
    the device: what the model says of the same prompt by itself. A step later the cache has the prompt."""
    g = gates.parse({}, env={}, preset=preset)
    model = load_padded(g, device)
    core, _, _ = core_for(
        model, tokenizer_of(resolve_model(None)),
        EngineOptions(gates=g, max_context=1024, kv_gib=0.25, reserve_gib=0.0),
    )  # fmt: skip
    steps: list[int] = []  # rows of each
    launch = core.runner.launch

    def counted(batch: Batch) -> StepHandle:
        steps.append(batch.rows)
        return launch(batch)

    core.runner.launch = counted  # type: ignore[method-assign]
    try:
        core.submit(Request(TEXT[:5], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), id="neighbour"))
        asked = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=3, logprobs=2)
        late = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=200)
        core.submit(Request(TEXT, asked, id="all"))
        out = {id: list(deltas) for id, deltas in run(core).items()}
        steps.clear()
        core.submit(Request(TEXT, late, id="late"))
        out |= run(core)
    finally:
        core.close()
    assert not [d.error for deltas in out.values() for d in deltas if d.finish == "error"]
    # Steps of other sizes run other kernels, and a tie of two experts then moves all that follows: the same steps here.
    for id, first, sizes in (("all", 1, [len(TEXT)]), ("late", 200, steps)):
        sizes = [n for n in (len(TEXT) - sum(sizes), *sizes) if n]  # what the cache had, first
        whole = SingleSequence(load_padded(g, device), len(TEXT))
        with torch.inference_mode():
            parts = [whole.feed(TEXT[end - n : end], all_logits=True) for n, end in zip(sizes, accumulate(sizes))]
        logits = torch.cat(parts).float().cpu()
        right = logits.log_softmax(-1)[torch.arange(len(TEXT) - 1), torch.tensor(TEXT[1:])]
        got = scores(out[id])
        assert [lp.token for lp in got] == TEXT[first:]
        off = (torch.tensor([lp.logprob for lp in got]) - right[first - 1 :]).abs()
        assert float(off.median()) < 0.05, (id, float(off.median()))
        assert float(off.mean()) < 0.1, (id, off.tolist())
    for lp in scores(out["all"]):
        assert len(lp.top) == 3
        assert lp.top[0][1] >= max(lp.logprob, lp.top[1][1], lp.top[2][1])
    assert len([t for d in out["all"] for t in d.tokens]) == 3
    assert len([t for d in out["neighbour"] for t in d.tokens]) == 40
