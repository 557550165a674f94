"""Grammars inside vLLM's processes: masks follow what was generated, rows may move, and nothing ever raises."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.engine import vllm_grammar
from halfbyte.engine.request import Constraint, ReasoningLimit, Request
from halfbyte.engine.vllm_grammar import Followed, Grammars, constraint_record, request_record
from halfbyte.harmony.triggers import final_triggers, reasoning_closings
from halfbyte.model import load
from halfbyte.vllm_plugin.compat_engine import unpacked

TOKENIZER = load.tokenizer_of(load.resolve_model(None))
ENDS = TOKENIZER.eos_tokens
PROMPT = TOKENIZER.encode("Value:")


def followed(constraint: Constraint) -> Followed:
    return Grammars(str(load.EMBEDDED)).follow(constraint_record(constraint, ENDS), PROMPT)


def allowed(follower: Any, tokens: Sequence[int]) -> set[int] | None:
    bits = follower.allowed(tokens)
    return None if bits is None else set(np.flatnonzero(unpacked(bits, TOKENIZER.vocab_size).numpy()).tolist())


def test_masks_follow_what_was_generated() -> None:
    follower = followed(Constraint("regex", "yes|no"))
    start = allowed(follower, [])
    assert start is not None
    assert {TOKENIZER.token_bytes(t)[:1] for t in start} == {b"y", b"n"}
    text = TOKENIZER.encode("no")
    assert text[0] in start
    assert allowed(follower, text) == set(ENDS)
    assert allowed(follower, [*text, ENDS[0]]) is None  # complete: it sleeps


def test_a_constraint_sleeps_until_its_trigger() -> None:
    trigger = TOKENIZER.encode("go")
    follower = followed(Constraint("regex", "1", triggers=(tuple(trigger),)))
    other = TOKENIZER.encode("well")
    assert allowed(follower, other) is None
    assert allowed(follower, [*other, *trigger]) == set(TOKENIZER.encode("1"))
    again = followed(Constraint("regex", "1", triggers=(tuple(trigger),)))  # as after a preemption
    assert allowed(again, [*other, *trigger]) == set(TOKENIZER.encode("1"))


def test_a_grammar_that_fails_allows_an_end_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = followed(Constraint("regex", "("))
    assert allowed(broken, []) == set(ENDS)
    left = followed(Constraint("regex", "yes"))
    assert allowed(left, TOKENIZER.encode("no")) == set(ENDS)
    assert allowed(left, []) == set(ENDS)
    costly = followed(Constraint("regex", "yes"))
    monkeypatch.setattr("halfbyte.engine.grammar_work.BUDGET_S", -1.0)
    monkeypatch.setattr("halfbyte.engine.grammar_work.BUDGET_PER_TOKEN_S", 0.0)
    assert allowed(costly, []) == set(ENDS)


def test_reasoning_ends_at_its_limit_and_the_grammar_of_the_answer_follows() -> None:
    special = TOKENIZER.special
    limit = ReasoningLimit(2, reasoning_closings(TOKENIZER, tools=False))
    constraint = Constraint("regex", "yes|no", final_triggers(TOKENIZER), (special["<|return|>"],))
    prompt = TOKENIZER.encode("<|start|>assistant<|channel|>analysis<|message|>", allow_special=True)
    for grammar in (None, constraint):
        record = request_record(Request(prompt, constraint=grammar, reasoning=limit), ENDS)
        assert record is not None
        follower = Grammars(str(load.EMBEDDED)).follow(record, prompt)
        tokens = TOKENIZER.encode("on")[:1] * 2
        assert allowed(follower, tokens[:1]) is None
        for token in limit.closings[0]:
            assert allowed(follower, tokens) == {token}
            tokens.append(token)
        after = allowed(follower, tokens)
        assert after is None if grammar is None else {TOKENIZER.token_bytes(t)[:1] for t in after or ()} == {b"y", b"n"}


class Direction(Enum):
    UNIDIRECTIONAL = 1
    SWAP = 2


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As vLLM finds it by its name, with the interface of both model runners and nothing behind them."""
    for name, attributes in {
        "vllm": {},
        "vllm.v1.sample.logits_processor": {"LogitsProcessor": type("First", (), {}), "MoveDirectionality": Direction},
        "vllm.v1.worker.gpu.sample.logits_processor": {"LogitsProcessor": type("Second", (), {})},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm.v1", "vllm.v1.sample", "vllm.v1.worker", "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.sample"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module, _, attribute = vllm_grammar.PROCESSOR.partition(":")
    return getattr(sys.modules[module], attribute)


CONFIG = SimpleNamespace(model_config=SimpleNamespace(model=str(load.EMBEDDED)))


def params(pattern: str | None) -> Any:
    extra = None if pattern is None else {"halfbyte": constraint_record(Constraint("regex", pattern), ENDS)}
    return SimpleNamespace(extra_args=extra)


def open_rows(processor: Any, rows: int, context: Any = None) -> list[bool]:
    """Which rows were left as they were."""
    logits = torch.zeros((rows, TOKENIZER.vocab_size + 8))
    more = () if context is None else (context,)
    return (processor.apply(logits, *more) == 0).all(1).tolist()  # type: ignore[no-any-return]


def update(removed: Any = (), added: Any = (), moved: Any = ()) -> Any:
    return SimpleNamespace(removed=removed, added=added, moved=moved)


def test_rows_move_in_the_first_model_runner(processor: Any) -> None:
    held = processor(CONFIG, torch.device("cpu"), False)
    assert not held.is_argmax_invariant()
    generated: list[int] = []
    held.update_state(update(added=[(0, params("1"), PROMPT, generated), (1, params(None), PROMPT, [])]))
    assert open_rows(held, 2) == [False, True]
    held.update_state(update(moved=[(0, 1, Direction.SWAP)]))
    assert open_rows(held, 2) == [True, False]
    held.update_state(update(moved=[(1, 0, Direction.UNIDIRECTIONAL)]))
    assert open_rows(held, 2) == [False, True]
    generated += [*TOKENIZER.encode("1"), ENDS[0]]  # vLLM's own list grows
    held.update_state(None)
    assert open_rows(held, 2) == [True, True]
    held.update_state(update(added=[(0, params("2"), PROMPT, [])]))  # another in its place
    assert open_rows(held, 2) == [False, True]
    held.update_state(update(removed=[0]))
    assert open_rows(held, 2) == [True, True]


def test_slots_of_the_second_model_runner(processor: Any) -> None:
    one = TOKENIZER.encode("1")
    tokens = torch.zeros((4, 64), dtype=torch.int32)
    tokens[2, : len(PROMPT)] = torch.tensor(PROMPT)
    lengths = np.array([0, 0, len(PROMPT), 0])
    state = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=tokens), prompt_len=SimpleNamespace(np=lengths))
    held = processor(CONFIG, state)
    assert held.add_request(2, params("1"))
    assert not held.add_request(3, params(None))

    def context(length: int) -> Any:
        return SimpleNamespace(idx_mapping_np=np.array([3, 2]), seq_lens_upper_bound_np=np.array([1, length]))

    assert open_rows(held, 2, context(len(PROMPT) - 1)) == [True, True]  # in its prompt
    assert open_rows(held, 2, context(len(PROMPT))) == [True, False]
    after = [*one, ENDS[0]]
    tokens[2, len(PROMPT) : len(PROMPT) + len(after)] = torch.tensor(after)
    assert open_rows(held, 2, context(len(PROMPT) + len(after))) == [True, True]
    assert not held.add_request(2, params(None))  # the slot is somebody else's
    assert open_rows(held, 2, context(len(PROMPT))) == [True, True]
