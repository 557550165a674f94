"""The sampler in CUDA against the one in torch: the same edges and tokens, whatever the row and its neighbours."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from halfbyte.architectures import GPU_ARCHES
from halfbyte.engine.sampling.race import sample_rows
from halfbyte.errors import PlanError
from halfbyte.kernels.cuda.device.host import gpu
from halfbyte.kernels.cuda.sampling.sampler import BUILDS, SHARED, THREADS, VOCAB_MAX, CudaSampler, SampleArgs
from halfbyte.kernels.launch import build_program, nvrtc_available
from halfbyte.ops.sampling import distribution, greedy
from halfbyte.ops.sampling_settings import SamplingSettings, is_filtered, row_of
from halfbyte.plan.broken import broken_place
from tests.kernels.cuda.emulator import Emulator, sizes

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


def sampler_on(device: str, rows: int, vocab: int) -> CudaSampler:
    return CudaSampler(Emulator(1) if device == "cpu" else gpu(), rows, vocab, torch.device(device))


def noted(logits: torch.Tensor) -> torch.Tensor:
    """What the runner has put down before rows are drawn."""
    value, token = logits.max(-1)
    return torch.stack((token.int(), value.view(torch.int32)), 1).contiguous()


def keys_for(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(seed))


def logits_like(kind: str, rows: int, vocab: int, rng: np.random.Generator) -> torch.Tensor:
    x = rng.standard_normal((rows, vocab)).astype(np.float32)
    if kind == "peaked":
        x = x * 2 - 20
        x[np.arange(rows), rng.integers(0, vocab, rows)] += 24
    elif kind == "flat":
        x *= 1e-3
    elif kind == "equal":
        x = np.round(x)  # ties everywhere
    elif kind == "one":
        x[:] = 3.25
    elif kind == "cut":
        x = np.where(x < 0, -np.inf, x * 4)
    else:
        x *= 3
    return torch.from_numpy(x.astype(np.float32))


FILTERS = [
    SamplingSettings(top_k=k, top_p=p, min_p=m, top_n_sigma=n)
    for k, p, m, n in (
        (0, 1.0, 0.0, 0.0), (1, 1.0, 0.0, 0.0), (7, 1.0, 0.0, 0.0), (0, 0.9, 0.0, 0.0), (0, 0.3, 0.0, 0.0),
        (0, 1.0, 0.1, 0.0), (50, 0.8, 0.02, 0.0), (0, 1.0, 0.0, 1.5), (0, 0.5, 0.0, 2.0), (9, 1.0, 0.0, 2.5),
        (50, 0.9, 0.001, 1.0),
    )
]  # fmt: skip


def rows_of(*settings: SamplingSettings) -> torch.Tensor:
    return torch.tensor([row_of(s) for s in settings], dtype=torch.float32)


def allowed(logits: torch.Tensor, s: SamplingSettings, slack: float) -> tuple[set[int], set[int]]:
    """(tokens that must be kept, tokens that may be): the specification with limits a little lower and higher. Ties at
    an edge are kept, all of them."""
    found = []
    for sign in (-1, 1):
        top_p = min(1.0, s.top_p * (1 + sign * slack)) if s.top_p < 1 else 1.0
        others = {"min_p": min(1.0, s.min_p * (1 - sign * slack)), "top_n_sigma": s.top_n_sigma * (1 + sign * slack)}
        _, ids = distribution(logits, replace(s, top_p=top_p, **others))
        found.append(set((logits >= logits[ids].min()).nonzero().flatten().tolist()))
    return found[0], found[1]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["normal", "peaked", "flat", "equal", "one", "cut"])
def test_edges_are_the_specifications(kind: str, device: str, shared: bool) -> None:
    """`shared`: several blocks to a row."""
    rng = np.random.default_rng(len(kind))
    vocab = 700 if device == "cpu" else 201_088
    rows = len(FILTERS)
    logits = logits_like(kind, rows, vocab, rng)
    temperature = rng.uniform(0.5, 1.5, rows).astype(np.float32)
    filters = [replace(f, temperature=t) for t, f in zip(temperature.tolist(), FILTERS)]
    settings = rows_of(*filters)
    sampler = sampler_on(device, rows, vocab)
    sampler.cutoff_least = 100 if shared else vocab
    args = [t.to(device) for t in (logits, settings, keys_for(rows), noted(logits))]
    sampler.sample(*args, filtered=True)
    edges = sampler._cutoffs.cpu()
    for r, s in enumerate(filters):
        if not is_filtered(s):
            assert edges[r] == -torch.inf
            continue
        kept = set((logits[r] / temperature[r] >= edges[r]).nonzero().flatten().tolist())
        must, may = allowed(logits[r], s, 2e-6)
        assert must <= kept <= may, f"{FILTERS[r]}: {len(must)}, {len(kept)}, {len(may)}"
        assert int(args[3][r, 0]) in kept
    assert not sampler._bins.any()
    assert not sampler._tickets.any()


@pytest.mark.parametrize("device", DEVICES)
def test_more_equals_than_shared_memory_holds(device: str) -> None:
    vocab = 17_000
    logits = torch.zeros(2, vocab)
    logits[:, :50] = 0.25
    settings = rows_of(SamplingSettings(top_k=30), SamplingSettings(top_k=60, top_p=0.5))
    sampler = sampler_on(device, 2, vocab)
    sampler.sample(*(t.to(device) for t in (logits, settings, keys_for(2), noted(logits))), filtered=True)
    assert sampler._cutoffs.tolist() == [0.25, 0.25]
    settings = rows_of(SamplingSettings(top_k=51), SamplingSettings(top_k=51, top_p=0.999))
    sampler.sample(*(t.to(device) for t in (logits, settings, keys_for(2), noted(logits))), filtered=True)
    assert sampler._cutoffs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filtered", [False, True])
def test_tokens_are_those_of_the_sampler_in_torch(filtered: bool, device: str) -> None:
    rng = np.random.default_rng(5)
    vocab, rows = (3001, 9) if device == "cpu" else (201_088, 64)
    sampler = sampler_on(device, rows, vocab)
    for turn in range(2 if device == "cpu" else 20):
        logits = logits_like("normal", rows, vocab, rng).to(device)
        some = [SamplingSettings(temperature=t) for t in rng.choice([0.0, 0.7, 1.0, 1.3], rows).tolist()]
        if filtered:
            some = [
                replace(
                    s, top_k=int(rng.choice([0, 1, 40])), top_p=float(rng.choice([1.0, 0.95, 0.5])),
                    min_p=float(rng.choice([0.0, 0.05])), top_n_sigma=float(rng.choice([0.0, 1.5])),
                )
                for s in some
            ]  # fmt: skip
        given, keys = rows_of(*some).to(device), keys_for(rows, turn).to(device)
        results = noted(logits)
        before = results.clone()
        sampler.sample(logits, given, keys, results, filtered=filtered)
        expected = sample_rows(logits, given, keys, filtered=filtered)
        assert results[:, 0].tolist() == expected.tolist()
        assert torch.equal(results[:, 1], before[:, 1])
        alone = sampler_on(device, 1, vocab)  # in another number of blocks, without neighbours
        for r in range(0, rows, 4):
            one = before[r : r + 1].clone()
            alone.sample(logits[r : r + 1], given[r : r + 1], keys[r : r + 1], one, filtered=filtered)
            assert int(one[0, 0]) == int(expected[r])
    assert not sampler._best.any()
    assert not sampler._tickets.any()


@pytest.mark.parametrize("device", DEVICES)
def test_the_token_at_the_edge_is_drawn_too(device: str) -> None:
    rows, vocab = 40, 64
    logits = torch.zeros(rows, vocab)
    logits[:, 9], logits[:, 30] = 2.0, 1.5
    settings = rows_of(*[SamplingSettings(top_k=2)] * rows)
    given = [t.to(device) for t in (logits, settings, keys_for(rows), noted(logits))]
    sampler_on(device, rows, vocab).sample(*given, filtered=True)
    seen = given[3][:, 0].tolist()
    assert set(seen) == {9, 30}
    assert seen == sample_rows(*given[:3], filtered=True).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_the_highest_logit_is_noted(device: str) -> None:
    vocab, rows = (1500, 11) if device == "cpu" else (201_088, 64)
    sampler = sampler_on(device, rows, vocab)
    logits = logits_like("equal", rows, vocab, np.random.default_rng(1))
    logits[1] = logits[1] * 0 - 7.5  # all equal
    logits[2] = -torch.inf
    logits[3, 77] = torch.nan
    logits[4, 900] = -torch.tensor(torch.nan)
    logits[5, 1400:1403] = torch.inf
    logits[6] -= 1000
    logits[7, 11] = -torch.inf
    places = torch.tensor([0x7FC00000 | 0xFFF0], dtype=torch.int32).view(torch.float32)
    logits[8] = places  # every logit of a row that broke on its way says where
    logits[9, 5] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    results = torch.full((rows, 2), -1, dtype=torch.int32, device=device)
    sampler.argmax(logits.to(device), results)
    tokens, values = results[:, 0].cpu(), results[:, 1].cpu().view(torch.float32)
    broken = {2: 0, 3: 77, 4: 900, 5: 1400, 7: 11, 8: 0, 9: 5}
    assert [int(tokens[r]) for r in broken] == list(broken.values())
    assert values[list(broken)].isnan().all(), "infinity is no number either"
    said = [broken_place(int(bits)) for bits in results[list(broken), 1]]
    assert said == [broken_place(0x7FC0FFF0) if r == 8 else None for r in broken]
    fine = torch.tensor([r for r in range(rows) if r not in broken])
    assert tokens[fine].tolist() == greedy(logits[fine]).tolist()
    assert torch.equal(values[fine], logits[fine].amax(-1))
    assert not sampler._best.any()
    assert not sampler._tickets.any()
    sampler.argmax(logits.to(device), results, barred=True)
    tokens, values = results[:, 0].cpu(), results[:, 1].cpu().view(torch.float32)
    assert values[2] == -torch.inf, "none may be chosen"
    assert (int(tokens[7]), float(values[7])) == (int(greedy(logits[7])), float(logits[7].max()))
    assert values[3:6].isnan().all()


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.gpu
def test_the_distribution_on_a_gpu(device: str) -> None:
    """Chi squared over 40,000 draws, with every filter."""
    count, vocab = 40_000, 60
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    for s in (replace(f, temperature=1.3) for f in FILTERS):
        rows = logits.to(device).expand(count, vocab).contiguous()
        settings = rows_of(s).to(device).expand(count, -1).contiguous()
        results = noted(rows)
        sampler_on(device, count, vocab).sample(rows, settings, keys_for(count).to(device), results, filtered=True)
        seen = np.bincount(results[:, 0].cpu().numpy(), minlength=vocab)
        want = np.zeros(vocab)
        q, ids = distribution(logits, s)
        want[ids.numpy()] = q.numpy() * count
        assert seen[want == 0].sum() == 0, "a token was drawn that the filters exclude"
        possible = want >= 5
        chi2 = float(((seen - want) ** 2 / np.where(want > 0, want, 1))[possible].sum())
        freedom = int(possible.sum()) - 1
        assert chi2 < freedom + 4.5 * (2 * freedom) ** 0.5 + 1e-9, f"chi2 {chi2:.1f} with {freedom} degrees of freedom"


@pytest.mark.skipif(nvrtc_available() is not None, reason="no NVRTC")
@pytest.mark.parametrize("arch", [arch.target for arch in GPU_ARCHES.values()])
def test_compiles_without_spills(arch: str) -> None:
    _, log = build_program(BUILDS["sample_race"].program, arch, "--ptxas-options=-v")
    spills = [line for line in log.splitlines() if "spill stores" in line]
    assert len(spills) == len(THREADS)
    assert all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
    assert max(SHARED.values()) <= min(arch.shared_memory for arch in GPU_ARCHES.values())


def test_what_python_says_of_the_kernel_is_so() -> None:
    assert sizes(BUILDS["sample_race"].program, 2) == [ctypes.sizeof(SampleArgs), SHARED["sample_cutoffs"]]
    assert set(THREADS) == set(SHARED)


def test_a_vocabulary_that_is_too_large_is_refused() -> None:
    with pytest.raises(PlanError, match="at most 262143 tokens"):
        CudaSampler(Emulator(1), 1, VOCAB_MAX + 1, torch.device("cpu"))
