"""A row's bits depend neither on the threads, nor on the batch it is in, nor on how a prompt was cut."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import GptOss
from tests.kernels.cpu.native import Native, make_step, random_weights, reference_model
from tests.kernels.cpu.step_cases import QUANTISED, RAGGED, SMALL, prompts, steps, tables

DEEP = SMALL.with_(layers=3, layer_kinds=("sliding", "full", "sliding"))
LENGTH = 700  # several segments of keys


@pytest.fixture(scope="module", params=[("int8", "bf16"), ("auto", "auto")], ids=["int8", "f32"])
def model(request: pytest.FixtureRequest) -> GptOss:
    activation, kv_dtype = request.param
    return reference_model(random_weights(DEEP, QUANTISED, 4), activation=activation, kv_dtype=kv_dtype)


def int8(model: GptOss) -> bool:
    return model.spec.activation == "int8"


def test_threads(step_library: ctypes.CDLL, model: GptOss) -> None:
    made, pages = steps(DEEP, [(600, 3, 1), *RAGGED[1:]])
    pool = model.allocate_kv(pages)
    results = []
    for threads in (1, 2, 3, 5):
        with Native(step_library, model, threads=threads, most_rows=512, int8=int8(model)) as native:
            mine = pool.clone()
            results.append([torch.cat([native.run(s, mine).logits for s in made]), mine])
    for logits, cache in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert torch.equal(cache, results[0][1])


def alone(native: Native, config: ModelConfig, tokens: Sequence[int], chunks: Sequence[int], pool: Tensor) -> Tensor:
    """Logits of every token of one sequence, fed in such chunks."""
    pages, at, out = tables(1, -(-len(tokens) // 64)), 0, []
    for n in chunks:
        out.append(native.run(make_step([(tokens[at : at + n], at)], pages), pool).logits)
        at += n
    assert at == len(tokens)
    return torch.cat(out)


@pytest.mark.parametrize("most_rows", [7, 64, 512])
def test_chunks_of_a_prompt(step_library: ctypes.CDLL, model: GptOss, most_rows: int) -> None:
    tokens = prompts(DEEP, [LENGTH])[0]
    pool = model.allocate_kv(2 * (LENGTH // 64 + 2))
    with Native(step_library, model, threads=2, most_rows=512, int8=int8(model)) as native:
        want = alone(native, DEEP, tokens, [LENGTH], pool.clone())
    with Native(step_library, model, threads=2, most_rows=most_rows, int8=int8(model)) as native:
        assert torch.equal(alone(native, DEEP, tokens, [LENGTH], pool.clone()), want)
        uneven = [64, 1, 1, 130, 3, 301, 200]
        assert torch.equal(alone(native, DEEP, tokens, uneven, pool.clone()), want)


def test_company(step_library: ctypes.CDLL, model: GptOss) -> None:
    """Each sequence of a ragged batch as if it were alone."""
    lengths = [150, 3, 77, 1]
    tokens, pages = prompts(DEEP, lengths), tables(4, 3)
    pool = model.allocate_kv(40)
    with Native(step_library, model, threads=3, most_rows=100, int8=int8(model)) as native:
        cache = pool.clone()
        first = native.run(make_step([(t[:-1], 0) for t in tokens[:3]], {k: p[:3] for k, p in pages.items()}), cache)
        last = native.run(make_step([(t[-1:], len(t) - 1) for t in tokens], pages), cache)
        start = 0
        for i, t in enumerate(tokens):
            want = alone(native, DEEP, t, [len(t)], pool.clone())
            if i < 3:
                assert torch.equal(first.logits[start : start + len(t) - 1], want[:-1])
                start += len(t) - 1
            assert torch.equal(last.logits[i], want[-1])


def test_best_without_logits(step_library: ctypes.CDLL, model: GptOss) -> None:
    made, pages = steps(DEEP, [(9, 5)])
    pool = model.allocate_kv(pages)
    with Native(step_library, model, threads=2, int8=int8(model)) as native:
        full, brief = native.run(made[0], pool.clone()), native.run(made[0], pool.clone(), logits=False)
    assert brief.best == full.best == full.logits.argmax(-1).tolist()
    assert (brief.logits == 7.0).all(), "nothing was written"
