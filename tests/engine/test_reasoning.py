"""Limits on reasoning: which tokens follow at the limit, whatever else the engine does; loops of the embedded model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest
from engine_fakes import EOS, GO, VOCAB, FakeVocabulary
from fake_core import make
from test_schedules import run_schedule

from halfbyte import Engine, Gates, SamplingParams
from halfbyte.engine.reasoning import ReasoningState
from halfbyte.engine.request import Constraint, Delta, ReasoningLimit, Request
from halfbyte.errors import RequestError
from halfbyte.harmony.parse import Parser
from halfbyte.harmony.render import render_prompt
from halfbyte.harmony.triggers import reasoning_closings
from halfbyte.harmony.vocabulary import CONTROL_NAMES
from halfbyte.model.load import EMBEDDED
from halfbyte.model.tokenizer import Tokenizer

# Letters that stand for the words of harmony, so that random tokens are often headers and often broken ones.
WORDS = ("assistant", "analysis", "commentary", "final", " to")
START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL = CONTROLS = tuple(range(35, 42))
ASSISTANT, ANALYSIS, COMMENTARY, FINAL, TO = tuple(range(42, 47))
NAMES = dict(zip((*CONTROLS, ASSISTANT, ANALYSIS, COMMENTARY, FINAL, TO), (*CONTROL_NAMES, *WORDS), strict=True))
QUESTION = "What is 17 + 25?"


class HarmonyVocabulary(FakeVocabulary):
    special = {**FakeVocabulary.special, **dict(zip(CONTROL_NAMES, CONTROLS, strict=True))}

    def token_bytes(self, id: int) -> bytes:
        return NAMES[id].encode() if id in NAMES else super().token_bytes(id)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        ids = {word: id for id, word in NAMES.items()}
        return [ids[text]] if text in ids else super().encode(text)


VOCABULARY = HarmonyVocabulary()


def scan(limit: ReasoningLimit, start: list[int], out: list[int]) -> list[int] | None:
    """Which tokens may follow `out`, read from its beginning: the specification in the plainest words."""

    def reasoning() -> bool:
        return parser.in_text and parser.header is not None and parser.header.kind == "reasoning"

    parser, left = Parser(VOCABULARY, prefix=start), limit.tokens
    closing: tuple[int, ...] | None = () if reasoning() and left <= 0 else None
    for token in out:
        before = reasoning()
        parser.feed([token])
        if closing is not None:
            closing = None if (*closing, token) in limit.closings else (*closing, token)
        if closing is None and reasoning():
            left -= before or token not in VOCABULARY.special.values()
            closing = () if left <= 0 else None
    if closing is None:
        return None
    return sorted({c[len(closing)] for c in limit.closings if c[: len(closing)] == closing})


def random_request(
    rng: random.Random, number: int, shared: list[list[int]]
) -> tuple[Request, Callable[[list[int]], list[int] | None]]:
    start = rng.choice([[], [CHANNEL, ANALYSIS], [CHANNEL, ANALYSIS, MESSAGE], [CHANNEL, ANALYSIS, MESSAGE, 5, 6, 7]])
    prompt = [*rng.choice(shared)[: rng.randint(1, 60)], START, ASSISTANT, *start]
    bias = {token: rng.choice([0.0, 2.0]) for token in (CHANNEL, ANALYSIS, MESSAGE, START, ASSISTANT)}
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]), seed=rng.randrange(1 << 60), max_tokens=rng.choice([1, 5, 12, 40, 70]),
        n=rng.choice([1, 1, 3]), ignore_eos=rng.random() < 0.8, logit_bias=bias if rng.random() < 0.5 else {},
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]), logprobs=rng.choice([None, 1]),
    )  # fmt: skip
    limit = ReasoningLimit(rng.choice([0, 1, 2, 3, 9]), reasoning_closings(VOCABULARY, tools=rng.random() < 0.5))
    request = Request(prompt, params, id=f"r{number}", reasoning=limit)
    return request, lambda out: scan(limit, start, out)


@pytest.mark.parametrize("seed", range(16))
def test_the_limit_holds_in_random_schedules_with_drafts_preemption_and_prefix_hits(seed: int) -> None:
    run_schedule(seed, VOCABULARY, random_request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16, 200))
def test_the_limit_holds_in_more_schedules(seed: int) -> None:
    run_schedule(seed, VOCABULARY, random_request)


def test_steps_run_ahead_until_the_limit_is_near() -> None:
    limit = ReasoningLimit(40, reasoning_closings(VOCABULARY, tools=False))
    core = make()
    core.arrivals.vocabulary = VOCABULARY
    never = dict.fromkeys((EOS, GO, *CONTROLS), -100.0)  # it never stops reasoning, nor what follows
    params = SamplingParams(temperature=0, max_tokens=80, logit_bias=never, ignore_eos=True)
    core.submit(Request([5, START, ASSISTANT, CHANNEL, ANALYSIS, MESSAGE], params, reasoning=limit))
    tokens: list[int] = []
    waits: list[int] = []  # the tokens before which a step was not scheduled ahead of the last one
    while core.has_work:
        tokens += [t for _, delta in core.step() for t in delta.tokens]
        if core.launched is not None and not core.launched.step.ahead:
            waits.append(len(tokens))
    core.close()
    assert tokens[40:46] == list(limit.closings[0])
    assert tokens.count(END) == 1
    assert waits
    assert min(waits) >= 37
    assert max(waits) <= 46


def test_a_limit_that_cannot_be_kept_is_refused() -> None:
    core = make()
    closings = reasoning_closings(VOCABULARY, tools=True)
    cases = {"-1": (-1, closings), "begins another": (3, ((5,), (5, 6))), str(VOCAB): (3, ((VOCAB,),)), "runs": (3, ())}
    for vocabulary, word, limit in [
        (FakeVocabulary(), "harmony", (3, closings)),
        *((VOCABULARY, word, limit) for word, limit in cases.items()),
    ]:
        core.arrivals.vocabulary = vocabulary
        with pytest.raises(RequestError, match=word):
            core.submit(Request([5], SamplingParams(), reasoning=ReasoningLimit(*limit)))
    core.close()


def test_a_stop_token_that_a_minimum_forbids_delays_the_end_of_the_reasoning() -> None:
    core = make()
    core.arrivals.vocabulary = VOCABULARY
    params = SamplingParams(temperature=0, max_tokens=30, min_tokens=12, stop_token_ids=(END,), ignore_eos=True)
    limit = ReasoningLimit(4, reasoning_closings(VOCABULARY, tools=False))
    core.submit(Request([5, START, ASSISTANT, CHANNEL, ANALYSIS, MESSAGE], params, reasoning=limit))
    deltas = []
    while core.has_work:
        deltas += [delta for _, delta in core.step()]
    core.close()
    assert deltas[-1].finish != "error", deltas[-1].error


def test_the_state_reads_where_the_prompt_stands() -> None:
    tokenizer = Tokenizer.gpt_oss()
    limit = ReasoningLimit(2, reasoning_closings(tokenizer, tools=False))

    def state(text: str) -> ReasoningState:
        prompt = tokenizer.encode(f"<|start|>user<|message|>Hi<|end|><|start|>assistant{text}", allow_special=True)
        return ReasoningState(limit, tokenizer, prompt, tokenizer.vocab_size)

    def left(state: ReasoningState) -> int:
        for count in range(4):
            if state.mask() is not None:
                return count
            state.observe(tokenizer.encode("a")[0])
        return -1

    assert left(state("<|channel|>analysis<|message|>")) == 2
    assert left(state("<|channel|>analysis<|message|>some text")) == 2
    assert left(state("<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>analysis<|message|>")) == 2
    assert left(state("<|channel|>final<|message|>")) == -1
    assert left(state("<|channel|>commentary<|message|>")) == -1
    assert left(state("<|channel|>analysis to=functions.f<|message|>")) == -1  # a call, whatever its channel


# ---- the embedded model ---------------------------------------------------------------------------------------------

needs_model = pytest.mark.skipif(not (EMBEDDED / "config.json").exists(), reason="the embedded model is not here")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_seqs=8, kv_gib=0.2) as engine:
        yield engine


def loop(engine: Engine, **params: object) -> SamplingParams:
    """Sampling under which the model cannot end a message; some tokens later it begins another one all the same."""
    bias = dict.fromkeys((engine.tokenizer.special["<|end|>"], *engine.tokenizer.eos_tokens), -100.0)
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 100, "logit_bias": bias, **params})


def answers(engine: Engine, deltas: list[Delta]) -> list[tuple[str, str, int]]:
    """Channel, end and number of reasoning tokens of each message of an answer; nothing had to be repaired."""
    parser, out = Parser(engine.tokenizer), []
    for delta in deltas:
        parser.feed(delta.tokens)
    parser.finish()
    assert not parser.repairs
    for message in parser.messages:
        out.append((message.channel or "", message.text, parser.account.reasoning_tokens))
    return out


@needs_model
@pytest.mark.parametrize("limit", [0, 1, 7, 50])
def test_reasoning_that_does_not_end_ends_at_the_limit_and_the_answer_follows(engine: Engine, limit: int) -> None:
    endless = engine.chat(QUESTION, loop(engine, max_tokens=58), effort="high")
    assert endless.finish == "length"
    assert endless.text == ""
    assert not endless.reasoning_cut
    answer = engine.chat(QUESTION, loop(engine), effort="high", max_reasoning_tokens=limit)
    assert answer.reasoning_tokens == limit
    assert answer.reasoning_cut
    assert endless.reasoning.startswith(answer.reasoning)
    assert answer.text  # <|return|> is out of its reach as well, so it goes on to the limit of tokens
    assert len(answer.tokens) == 100
    assert "<|" not in answer.text


@needs_model
def test_a_limit_that_is_not_reached_changes_nothing(engine: Engine) -> None:
    free = engine.chat(QUESTION, effort="high")
    bound = engine.chat(QUESTION, effort="high", max_reasoning_tokens=free.reasoning_tokens + 1)
    assert (bound.tokens, bound.reasoning_cut) == (free.tokens, False)
    assert bound.text == "17 + 25 = 42."


@needs_model
@pytest.mark.parametrize("most", range(1, 14))
def test_forced_tokens_count_against_max_tokens(engine: Engine, most: int) -> None:
    answer = engine.chat(QUESTION, loop(engine, max_tokens=most), max_reasoning_tokens=3)
    assert (len(answer.tokens), answer.finish) == (most, "length")
    full = engine.chat(QUESTION, loop(engine), max_reasoning_tokens=3)
    assert answer.tokens == full.tokens[:most]


@needs_model
def test_several_reasoning_messages_share_one_limit_and_a_preamble_is_not_reasoning(engine: Engine) -> None:
    encode = engine.tokenizer.encode
    again = "<|start|>assistant<|channel|>analysis<|message|>"
    written = (
        "<|channel|>analysis<|message|>Ones.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
        f"<|end|>{again}Tens.<|end|>{again}"
    )
    reasoning = len(encode("Ones.")) + len(encode("Tens."))
    start, tokens = (encode(text, allow_special=True) for text in ("<|start|>assistant", written))
    for limit in (reasoning - 1, reasoning, reasoning + 1):
        state = ReasoningState(engine.reasoning_limit(limit), engine.tokenizer, start, engine.tokenizer.vocab_size)
        count = 0
        while count < len(tokens) and state.mask() is None:
            state.observe(tokens[count])
            count += 1
        assert state.cut == (limit <= reasoning)
        assert (
            limit > reasoning
            or tokens[count] == encode("<|end|>" if limit == reasoning else ".", allow_special=True)[0]
        )


@needs_model
def test_streams_and_async_reach_the_limit_as_well(engine: Engine) -> None:
    stream = engine.chat(QUESTION, loop(engine), stream=True, max_reasoning_tokens=9)
    kinds = [piece.kind for piece in stream]
    assert kinds == sorted(kinds, reverse=True)  # reasoning, then content
    assert stream.answer.reasoning_tokens == 9
    same = asyncio.run(engine.achat(QUESTION, loop(engine), max_reasoning_tokens=9))
    assert same.tokens == stream.answer.tokens


@needs_model
@pytest.mark.parametrize("speculate", ["ngram", "eagle3"])
def test_speculation_gives_the_same_tokens_at_every_limit(engine: Engine, speculate: str) -> None:
    with Engine(gates=Gates(speculate=speculate), max_seqs=4, kv_gib=0.1) as other:
        for limit in (0, 1, 2, 5, 17, 60):
            params = loop(engine, max_tokens=limit + 30)
            wanted = engine.chat(QUESTION, params, effort="high", max_reasoning_tokens=limit)
            answer = other.chat(QUESTION, params, effort="high", max_reasoning_tokens=limit)
            assert (answer.tokens, answer.reasoning_tokens) == (wanted.tokens, limit)


@needs_model
def test_a_grammar_wakes_after_a_forced_closing(engine: Engine) -> None:
    from halfbyte.harmony.messages import Message, opening
    from halfbyte.harmony.triggers import final_triggers

    tokenizer = engine.tokenizer
    prompt = render_prompt(tokenizer, [*opening("high"), Message.user(QUESTION)])
    constraint = Constraint("regex", "(yes|no)", final_triggers(tokenizer), (tokenizer.special["<|return|>"],))
    deltas = list(
        engine.iterate(
            prompt, SamplingParams(temperature=0), constraint=constraint, reasoning=engine.reasoning_limit(6)
        )
    )
    messages = answers(engine, deltas)
    assert [channel for channel, _, _ in messages] == ["analysis", "final"]
    assert messages[-1][1] in ("yes", "no")
    assert messages[-1][2] == 6
    assert [d.reasoning_cut for d in deltas] == sorted(d.reasoning_cut for d in deltas)
