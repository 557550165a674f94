"""The engine on a real gpt-oss (random weights, reference and CPU plans): tokens bitwise those of one at a time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.engine.build import core_for
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.python_api import Completion, Engine
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.sampling.host import sample_token
from halfbyte.engine.sampling.row import RowSampler
from halfbyte.errors import EngineDiedError, EngineError, RequestError, UsageError
from halfbyte.gates import Gates
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.load import load_model, resolve_model
from halfbyte.model.single_sequence import generate
from halfbyte.model.tokenizer import Tokenizer

pytestmark = pytest.mark.exact
VOCAB = 1024


def model_for(page_size: int = 64) -> GptOss:
    return load_model(resolve_model("random:small"), Gates(), page_size=page_size)


def expected(model: GptOss, request: Request) -> list[int]:
    p = request.sampling
    assert p.max_tokens is not None
    position = [len(request.prompt)]
    sampler = RowSampler(p, 0, position[0], p.seed or 0, frozenset(model.config.eos_tokens))

    def pick(logits: torch.Tensor) -> int:
        position[0] += 1
        if p.temperature == 0:
            return int(logits.argmax())
        return sample_token(logits.numpy(), p, sampler.uniform(position[0] - 1))

    return list(generate(model, request.prompt, p.max_tokens, pick=pick))


def requests(count: int) -> list[Request]:
    rng = random.Random(count)
    shared = [rng.randrange(2, VOCAB) for _ in range(90)]
    return [
        Request(
            shared[: rng.choice([0, 70, 90])] + [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 12))],
            SamplingParams(temperature=float(i % 2), seed=i, max_tokens=4 if count > 10 else 8, top_p=0.95),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(("batch", "page_size", "speculate"), [(1, 64, "off"), (7, 16, "ngram"), (64, 64, "off")])
def test_tokens_are_those_of_one_at_a_time(batch: int, page_size: int, speculate: str) -> None:
    alone = model_for()
    asked = requests(batch)
    checked = asked if batch < 10 else asked[::16]
    wanted = [expected(alone, r) for r in checked]
    options = EngineOptions(
        gates=Gates(speculate=speculate), max_context=512, max_rows_per_step=128, page_size=page_size, kv_gib=0.05,
        reserve_gib=0.0,
    )  # fmt: skip
    core, _, _ = core_for(model_for(page_size), Tokenizer.gpt_oss(), options)
    got: dict[str, list[int]] = {r.id: [] for r in asked}
    for r in asked:
        core.submit(r)
    while core.has_work:
        for id, delta in core.step():
            assert delta.finish != "error", delta.error
            got[id] += delta.tokens
        core.check()
    core.close()
    for r, tokens in zip(checked, wanted):
        assert got[r.id] == tokens
    assert core.pages.available == core.pages.capacity


@pytest.fixture(scope="module")
def engine():
    with Engine("random:small", max_context=512, kv_gib=0.05, reserve_gib=0.0) as engine:
        yield engine


def test_generate_takes_texts_and_ids(engine: Engine) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=5)
    ids = [5, 6, 7]
    answers = engine.generate([ids, ids], greedy)
    assert [type(a) for a in answers] == [Completion, Completion]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].usage.completion_tokens == len(answers[0].tokens)
    two = engine.generate([ids], SamplingParams(seed=1, max_tokens=3, n=2, logprobs=1))
    assert [c.index for c in two] == [0, 1]
    assert all(len(c.logprobs or []) == len(c.tokens) for c in two)
    assert engine.generate([], greedy) == []


def test_refusals_reach_the_caller(engine: Engine) -> None:
    with pytest.raises(RequestError, match="vocabulary"):
        engine.generate([[5000]])
    with pytest.raises(UsageError, match="Engine takes preset, model"):
        Engine("random:small", nonsense=1)


@pytest.mark.parametrize(
    "values", [{"temperature": "0.7"}, {"n": 0}, {"n": "2"}, {"stop": "abc"}, {"top_k": 1.5}, {"logit_bias": [1]}]
)
def test_a_mistyped_value_ends_that_request_only(engine: Engine, values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"cannot be served: sampling.{next(iter(values))}"):
        engine.generate([[5]], SamplingParams(**values))
    with pytest.raises(RequestError, match="text or a list of token ids"):
        engine.generate([["5"]])  # type: ignore[list-item]
    with pytest.raises(RequestError):
        list(engine.source.iterate(Request([5], timeout="soon")))  # type: ignore[arg-type]
    assert engine.generate([np.asarray([5, 6])], SamplingParams(max_tokens=2))[0].tokens  # type: ignore[list-item]


def test_whatever_submitting_raises_ends_that_request_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(request: Request) -> int:
        raise ZeroDivisionError("secret")

    core = engine.source._core
    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler, "max_length_of", bug)
        with pytest.raises(EngineError, match="could not take this request") as e:
            engine.generate([[5]])
    assert "secret" not in str(e.value)
    assert engine.generate([[5]], SamplingParams(max_tokens=2))[0].tokens
    core.check()


async def test_stream(engine: Engine) -> None:
    tokens: list[int] = []
    async for delta in engine.stream([5, 6, 7], SamplingParams(temperature=0, max_tokens=5)):
        tokens += delta.tokens
    assert tokens == engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5))[0].tokens
    stream = engine.stream([5, 6, 7], SamplingParams(temperature=0, max_tokens=400))
    async for _ in stream:
        break
    await stream.aclose()
    engine.generate([[9]], SamplingParams(max_tokens=2))
    assert engine.stats().running == 0


def test_a_closed_engine_says_so() -> None:
    engine = Engine("random:small", max_context=256, kv_gib=0.02, reserve_gib=0.0)
    engine.close()
    with pytest.raises(EngineDiedError, match="shut down"):
        engine.generate([[5]])
