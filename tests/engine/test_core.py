"""The engine's core on the fake runner: first that it works at all, then each promise on its own."""

from __future__ import annotations

import pytest
from engine_fakes import EOS, VOCAB, FakeRunner, FakeVocabulary, oracle, random_prompt

from halfbyte.engine.engine import EngineConfig, EngineCore, Output
from halfbyte.engine.request import Delta, Request, SamplingParams


def make(pages: int = 200, page_size: int = 4, window: int = 8, **kw: object) -> EngineCore:
    config = EngineConfig(
        pages=pages, page_size=page_size, window=window, vocab=VOCAB, max_context=512, eos_tokens=(EOS,),
        **{"max_seqs": 8, "max_tokens": 32, **kw},
    )  # fmt: skip
    return EngineCore(FakeRunner(pages, page_size, window), config, FakeVocabulary())


def drain(core: EngineCore) -> dict[tuple[str, int], list[Delta]]:
    out: dict[tuple[str, int], list[Delta]] = {}
    steps = 0
    while core.has_work:
        collect(core.step(), out)
        core.check()
        steps += 1
        assert steps < 5000
    collect(core.step(), out)
    assert core.pages.available == core.pages.capacity, "pages leaked"
    return out


def collect(outputs: list[Output], into: dict[tuple[str, int], list[Delta]]) -> None:
    for id, delta in outputs:
        into.setdefault((id, delta.index), []).append(delta)


def tokens_of(deltas: list[Delta]) -> list[int]:
    assert [d.finish is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
    return [t for d in deltas for t in d.tokens]


@pytest.mark.parametrize("run_ahead", [True, False])
def test_one_request(run_ahead: bool) -> None:
    core = make(run_ahead=run_ahead)
    request = Request([5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=30), id="a")
    core.submit(request)
    out = drain(core)
    assert tokens_of(out["a", 0]) == oracle(request, 0, 35, 8)[0]
    assert out["a", 0][-1].usage is not None


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_a_request_gives_the_same_tokens_in_any_batch(batch: int, run_ahead: bool) -> None:
    import random

    rng = random.Random(batch)
    core = make(pages=3000, max_seqs=64, max_tokens=100, run_ahead=run_ahead)
    requests = [
        Request(
            random_prompt(rng, 1, 60), SamplingParams(seed=i, max_tokens=20, top_p=0.9 if i % 2 else 1.0), id=f"q{i}"
        )
        for i in range(batch)
    ]
    for r in requests:
        core.submit(r)
    out = drain(core)
    for r in requests:
        assert tokens_of(out[r.id, 0]) == oracle(r, 0, len(r.prompt) + 20, 8)[0]
