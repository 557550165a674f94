"""Grammars: JSON against the standard library's parser, drafts inside grammars, the cache, triggers."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from engine_fakes import EOS, GO, PIECES, VOCAB, FakeVocabulary, text_of

from halfbyte.engine.digit_runs import MOST_DIGITS
from halfbyte.engine.grammar import LEAST_BYTES, Bits, GrammarCompiler, GrammarState
from halfbyte.engine.request import Constraint
from halfbyte.errors import RequestError, StepError

SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}'
)


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FakeVocabulary(), (EOS,), cache_bytes=2 * LEAST_BYTES)


def allowed(state: GrammarState) -> list[int]:
    return tokens_of(state.mask())


def tokens_of(mask: Bits | None) -> list[int]:
    assert mask is not None
    return np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB])[0].tolist()


def walk(state: GrammarState, rng: random.Random, most: int = 60) -> list[int]:
    out: list[int] = []
    while len(out) < most:
        ids = allowed(state)
        assert ids, "the grammar is stuck"
        token = EOS if EOS in ids else rng.choice([i for i in ids if PIECES[i] not in (b" ", b"\n")] or ids)
        out.append(token)
        state.observe(out)
        if token == EOS:
            return out
    return out


def test_whatever_is_chosen_the_schema_holds(compiler: GrammarCompiler) -> None:
    for seed in range(20):
        out = walk(compiler.compile(Constraint("json_schema", SCHEMA), [5]), random.Random(seed))
        if out[-1] == EOS:
            value = json.loads(text_of(out[:-1]))
            assert list(value) == ["a"]
            assert isinstance(value["a"], bool)


def test_json_object_gives_objects(compiler: GrammarCompiler) -> None:
    ends = 0
    for seed in range(10):
        out = walk(compiler.compile(Constraint("json_object", ""), [5]), random.Random(seed), 200)
        if out[-1] == EOS:
            ends += 1
            assert isinstance(json.loads(text_of(out[:-1]).decode()), dict)
    assert ends


def test_whitespace_between_the_parts_of_a_value_is_bounded(compiler: GrammarCompiler) -> None:
    space, brace = PIECES.index(b" "), PIECES.index(b"{")
    for constraint in (Constraint("json_schema", SCHEMA), Constraint("json_object", "")):
        state = compiler.compile(constraint, [5])
        state.observe([brace])
        count = 0
        while space in allowed(state):
            state.observe([space])
            count += 1
        assert count == 64
        assert allowed(state), "the value can go on"


def test_digits_in_a_row_are_bounded_but_not_within_texts(compiler: GrammarCompiler) -> None:
    digit, quote = PIECES.index(b"1"), PIECES.index(b'"')
    integer = Constraint("json_schema", '{"type": "integer"}')
    number = compiler.compile(integer, [5])
    for _ in range(MOST_DIGITS):
        assert digit in allowed(number)
        number.observe([digit])
    assert allowed(number) == [EOS]

    drafted = compiler.compile(integer, [5])
    masks = drafted.masks(drafted.trim([], [digit] * MOST_DIGITS))
    assert [digit in tokens_of(mask) for mask in masks] == [True] * MOST_DIGITS + [False]
    assert digit in allowed(drafted), "masks do not move the grammar"

    text = compiler.compile(Constraint("json_schema", '{"type": "string"}'), [5])
    for token in [quote] + [digit] * (2 * MOST_DIGITS):
        assert token in allowed(text)
        text.observe([token])


def test_a_number_that_must_be_longer_than_the_bound_is_written(compiler: GrammarCompiler) -> None:
    value = 10 ** (2 * MOST_DIGITS)
    state = compiler.compile(Constraint("regex", str(value)), [5])
    assert len(walk(state, random.Random(0), 3 * MOST_DIGITS)) == 2 * MOST_DIGITS + 2
    state = compiler.compile(Constraint("json_schema", json.dumps({"enum": [value]})), [5])
    assert json.loads(text_of(walk(state, random.Random(0), 3 * MOST_DIGITS)[:-1])) == value


def test_gbnf_and_lark_are_both_read_as_ebnf(compiler: GrammarCompiler) -> None:
    for source in ('root ::= "ab" ("1" | "2")', 'start: "ab" ("1" | "2")'):
        out = walk(compiler.compile(Constraint("ebnf", source), [5]), random.Random(1))
        assert text_of(out[:-1]) in (b"ab1", b"ab2")


def test_drafts_are_cut_where_they_leave_the_grammar_and_masks_do_not_move_it(compiler: GrammarCompiler) -> None:
    vocabulary = FakeVocabulary()
    state = compiler.compile(Constraint("regex", "12(ab|3)4"), [5])
    good = vocabulary.encode("1234")
    assert state.trim([], [*good[:3], 40]) == good[:3]
    assert state.trim([], [40, *good]) == []
    before = allowed(state)
    masks = state.masks(good)
    assert len(masks) == len(good) + 1
    assert allowed(state) == before
    for i, token in enumerate(good):
        other = compiler.compile(Constraint("regex", "12(ab|3)4"), [5])
        for j in range(i):
            other.observe(good[: j + 1])
        assert (masks[i] == other.mask()).all()
        assert masks[i] is not None
        assert masks[i][token // 32] >> (token % 32) & 1


def test_a_trigger_is_never_drafted_over(compiler: GrammarCompiler) -> None:
    state = compiler.compile(Constraint("regex", "1", triggers=((7, GO),)), [5])
    assert not state.awake
    assert state.trim([5, 6], [7, GO, 8]) == [7]
    assert state.trim([5, 7], [GO, 8]) == []
    assert state.masks([9, 9]) == [None, None, None]
    state.observe([5, 7, GO])
    assert state.awake


def test_a_trigger_at_the_end_of_the_prompt_wakes_at_once(compiler: GrammarCompiler) -> None:
    assert compiler.compile(Constraint("regex", "1", triggers=((GO,),)), [5, GO]).awake


def test_choices_do_not_share_their_place(compiler: GrammarCompiler) -> None:
    state = compiler.compile(Constraint("regex", "12"), [5])
    copy = state.copy()
    state.observe(FakeVocabulary().encode("1"))
    assert allowed(state) != allowed(copy)


def test_a_token_outside_the_grammar_is_an_error_not_a_crash(compiler: GrammarCompiler) -> None:
    state = compiler.compile(Constraint("regex", "12"), [5])
    with pytest.raises(StepError, match="token 40"):
        state.observe([40])


def test_the_cache_is_used_and_bounded(compiler: GrammarCompiler) -> None:
    for source in ("1", "2", "1", "3", "1", "2"):
        compiler.compile(Constraint("regex", source), [5])
    assert (compiler.hits, compiler.misses) == (2, 4)


def test_unknown_kinds_are_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="not known"):
        compiler.compile(Constraint("xml", "1"), [5])  # type: ignore[arg-type]
