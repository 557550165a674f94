"""Sampling that never leaves the device: the right distribution, exact filters, independent of batch and timing."""

from __future__ import annotations

import random
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from halfbyte.engine.build import core_for
from halfbyte.engine.device_runner import DeviceRunner
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Constraint, Request, SamplingParams
from halfbyte.engine.sampling import device as device_
from halfbyte.engine.sampling.device import TorchSampler, choose_device_sampler
from halfbyte.engine.sampling.race import edges, log_exponentials, random_keys, row_settings, sample_rows
from halfbyte.engine.sampling.row import RowSampler
from halfbyte.model.load import load_model, resolve_model
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.ops.sampling import distribution

V = 60
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


def samplers(count: int, **kw) -> list[RowSampler]:
    return [RowSampler(SamplingParams(**kw), 0, 0, seed, frozenset()) for seed in range(count)]


def noise(seed: int = 0) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"top_n_sigma": 1.2},
        {"min_p": 0.2, "top_p": 0.9, "temperature": 1.7},
    ],
)
def test_the_race_draws_from_the_distribution(params: dict, device: str) -> None:
    count = 40_000
    logits = noise(3)
    some = samplers(count, **params)
    p = some[0].params
    settings = torch.from_numpy(row_settings(some)).to(device)
    keys = torch.from_numpy(random_keys(some, list(range(count))).copy()).to(device)
    rows = logits.to(device).expand(count, V)
    filtered = some[0].filtered
    assert filtered == bool(set(params) - {"temperature"})
    drawn = sample_rows(rows, settings, keys, filtered=filtered).cpu().numpy()
    seen = np.bincount(drawn, minlength=V)
    want = np.zeros(V)
    q, ids = distribution(logits, p)
    want[ids.numpy()] = q.numpy() * count
    assert seen[want == 0].sum() == 0, "a token was drawn that the filters exclude"
    possible = want >= 5
    chi2 = float(((seen - want) ** 2 / np.where(want > 0, want, 1))[possible].sum())
    freedom = int(possible.sum()) - 1
    assert chi2 < freedom + 4.5 * (2 * freedom) ** 0.5, f"chi2 {chi2:.1f} with {freedom} degrees of freedom"


def test_edges_keep_what_the_specification_keeps() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        logits = torch.from_numpy(rng.standard_normal(V).astype(np.float32) * 3)
        params = SamplingParams(
            top_k=int(rng.choice([0, 1, 7])), top_p=float(rng.choice([1.0, 0.9, 0.3])),
            min_p=float(rng.choice([0.0, 0.1])), top_n_sigma=float(rng.choice([0.0, 0.5, 2.0])),
        )  # fmt: skip
        sampler = RowSampler(params, 0, 0, 0, frozenset())
        edge = float(edges(logits[None], torch.from_numpy(row_settings([sampler])))[0, 0])
        _, ids = distribution(logits, params)
        assert set((logits >= edge).nonzero().flatten().tolist()) == set(ids.tolist())


def test_greedy_rows_among_sampled_ones_take_the_highest() -> None:
    rows = torch.stack([noise(i) for i in range(6)])
    some = [RowSampler(SamplingParams(temperature=float(i % 2)), 0, 0, i, frozenset()) for i in range(6)]
    settings = torch.from_numpy(row_settings(some))
    keys = torch.from_numpy(random_keys(some, [3] * 6).copy())
    drawn = sample_rows(rows, settings, keys, filtered=False)
    assert drawn[::2].tolist() == rows[::2].argmax(-1).tolist()
    alone = [
        int(sample_rows(rows[i : i + 1], settings[i : i + 1], keys[i : i + 1], filtered=True)[0]) for i in range(6)
    ]
    assert alone == drawn.tolist(), "a row's token depends on its neighbours"


def test_the_variates_are_exponential_and_independent() -> None:
    keys = torch.from_numpy(random_keys(samplers(200), list(range(200))).copy())
    e = log_exponentials(keys, 500).exp().double().numpy()
    assert abs(e.mean() - 1.0) < 0.01
    assert abs(e.var() - 1.0) < 0.03
    assert abs(np.corrcoef(e[:-1].ravel(), e[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(e[:, :-1].ravel(), e[:, 1:].ravel())[0, 1]) < 0.01


def engine_tokens(run_ahead: bool, together: bool) -> dict[str, list[int]]:
    """Through the engine with the device runner (on whatever device there is)."""
    model = load_model(resolve_model("random:small"), page_size=16)
    options = EngineOptions(
        max_context=256, max_rows_per_step=64, page_size=16, kv_gib=0.05, reserve_gib=0.0, run_ahead=run_ahead
    )
    core, _, _ = core_for(model, Tokenizer.gpt_oss(), options)
    core.runner.close()
    core.runner = DeviceRunner(model, TorchSampler())
    rng = random.Random(5)
    kinds = [
        {"temperature": 0.0}, {}, {"top_p": 0.9}, {"repetition_penalty": 1.3}, {"logprobs": 2},
        {"logit_bias": {9: 4.0}},
    ]  # fmt: skip
    asked = [
        Request([rng.randrange(2, 1024) for _ in range(rng.randint(1, 30))],
                SamplingParams(seed=i, max_tokens=8, ignore_eos=True, **kinds[i]), id=f"d{i}")
        for i in range(6)
    ]  # fmt: skip
    got: dict[str, list[int]] = {r.id: [] for r in asked}
    for batch in [asked] if together else [[r] for r in asked]:
        for r in batch:
            core.submit(r)
        while core.has_work:
            for id, delta in core.step():
                assert delta.finish != "error", delta.error
                got[id] += delta.tokens
                if id == "d4":
                    assert [lp.token for lp in delta.logprobs or []] == delta.tokens
            core.check()
    return got


def test_tokens_do_not_depend_on_batch_or_timing() -> None:
    first = engine_tokens(run_ahead=True, together=True)
    assert all(len(t) == 8 for t in first.values())
    assert engine_tokens(run_ahead=False, together=True) == first
    assert engine_tokens(run_ahead=True, together=False) == first


def test_grammar_on_the_device_runner() -> None:
    model = load_model(resolve_model("random:small"), page_size=16)
    options = EngineOptions(max_context=256, max_rows_per_step=64, page_size=16, kv_gib=0.05, reserve_gib=0.0)
    tokenizer = Tokenizer.gpt_oss()
    core, _, _ = core_for(model, tokenizer, options)
    core.runner.close()
    core.runner = DeviceRunner(model, TorchSampler())
    digits = Constraint("regex", "[0-9]{12}")
    core.submit(Request([5, 6], SamplingParams(seed=1, max_tokens=3, ignore_eos=True), digits))
    out: list[int] = []
    while core.has_work:
        for _, delta in core.step():
            assert delta.finish != "error", delta.error
            out += delta.tokens
    assert tokenizer.decode_bytes(out).isdigit()


def test_where_torch_samples_on_a_gpu_its_name_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = ModuleType("a_sampler_for_tests")
    provider.refuse = lambda vocab: "no compiler" if vocab == V else None  # type: ignore[attr-defined]
    provider.make = lambda rows, vocab, device: (rows, vocab, device)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, provider.__name__, provider)
    monkeypatch.setattr(device_, "PROVIDER", provider.__name__)
    gpu = torch.device("cuda")
    assert choose_device_sampler(torch.device("cpu"), 4, V).name == "torch"
    assert choose_device_sampler(gpu, 4, V).name == "torch (no compiler)"
    assert choose_device_sampler(gpu, 4, V + 1) == (4, V + 1, gpu)
