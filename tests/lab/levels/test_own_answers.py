"""Level 2's checks that each request has an answer of its own, however it is asked; and that answers are drawn."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence

import pytest

from halfbyte.lab.levels.correctness import MOST, end_check, stream_problem
from halfbyte.lab.levels.own_answers import TEXTS, own_answer_checks, variants
from halfbyte.lab.levels.sampling import classes_of, walk_check
from halfbyte.lab.levels.scores import margin_of
from halfbyte.lab.peers.asker import Asker, Question, Reply, read_native_stream, read_streamed

NATURAL = [k % 50 for k in range(300)]
SHARES = (0.5, 0.2, 0.2, 0.1)  # of tokens 0 to 3
TOP = {str(k): math.log(p) for k, p in enumerate(SHARES)}


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


class Scripted(Asker):
    """Log probabilities and tokens are a function of the prompt; `fault` is what it takes for what."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.kept: dict[object, list[int]] = {}

    def ask(self, question: Question) -> Reply:
        prompt = question.prompt
        ids = encode(prompt) if isinstance(prompt, str) else list(prompt)
        count = len(ids)
        if self.fault == "keeps letters" and isinstance(prompt, str):
            ids = self.kept.setdefault("".join(prompt.lower().split()), ids)
        if self.fault == "keeps both ends" and len(ids) > 128:
            ids = self.kept.setdefault((*ids[:64], *ids[-64:]), ids)
        if self.fault == "changes texts" and isinstance(prompt, str):
            ids = [*ids, 7]
        if self.fault == "counts texts" and isinstance(prompt, str):
            count += 1
        seed = None if question.temperature == 0 else question.seed
        if self.fault == "streams ignore seeds" and question.stream:
            seed = -1
        draw = random.Random(hashlib.sha256(repr((ids, seed)).encode()).digest())
        tokens = tuple(draw.randrange(1000) for _ in range(question.tokens))
        values = tuple(-draw.random() for _ in tokens)
        top = tuple({"a": v, "b": v - 5} for v in values)
        return Reply("text", "length", count, len(tokens), tokens, ("a",) * len(tokens), values, top)

    def ask_all(self, questions: Sequence[Question], at_once: int) -> list[object]:  # type: ignore[override]
        return [self.ask(question) for question in questions]


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("", ""),
        ("keeps letters", "similar prompts have answers of their own"),
        ("keeps both ends", "similar prompts have answers of their own"),
        ("changes texts", "a prompt as text is its tokens"),
        ("counts texts", "a prompt as text is its tokens"),
        ("streams ignore seeds", "a seed gives the same tokens in a stream"),
    ],
)
def test_an_answer_belongs_to_its_prompt(fault: str, check: str) -> None:
    failed = [c.what for c in own_answer_checks(Scripted(fault), encode, NATURAL, 0.4) if not c.ok]
    assert failed == ([check] if check else [])


def test_variants_differ_hardly() -> None:
    for text in TEXTS:
        assert len(set(variants(text))) == len(variants(text))
        assert len({"".join(v.lower().split()).rstrip(".") for v in variants(text)}) == 1


def drawn(shares: Sequence[float], count: int, seed: int = 3) -> Reply:
    """An answer whose tokens are drawn by `shares`, while its log probabilities are those of SHARES."""
    tokens = random.Random(seed).choices(range(len(SHARES)), shares, k=count)
    values = tuple(TOP[str(t)] for t in tokens)
    return Reply("", "length", 1, count, tuple(tokens), tuple(map(str, tokens)), values, (TOP,) * count)


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        (SHARES, ""),
        ((1, 0, 0, 0), "the best token was drawn 600 times instead of 300"),
        ((0.5, 0.25, 0.25, 0), "a token outside of the likeliest 80% was drawn 0 times instead of 60"),
        ((0.25, 0.25, 0.25, 0.25), "a token outside of the likeliest 80% was drawn"),
    ],
    ids=["drawn", "greedy", "cut", "even"],
)
def test_sampled_answers_follow_their_probabilities(shares: Sequence[float], says: str) -> None:
    check = walk_check([drawn(shares, 300), drawn(shares, 300, 4)])
    assert check is not None
    assert check.ok == (not says), check
    assert says in check.note


def test_a_model_that_is_sure_shows_nothing() -> None:
    sure = {"a": math.log(0.9999), "b": math.log(0.00005)}
    assert walk_check([Reply("", "length", 1, 50, None, ("a",) * 50, (sure["a"],) * 50, (sure,) * 50)]) is None


def test_an_end_that_is_named_and_never_drawn_is_left_out() -> None:
    """As llama.cpp names it where nothing may end an answer."""
    ends = {"": math.log(0.9), "a": math.log(0.09), "b": math.log(0.01)}
    assert margin_of(ends) == pytest.approx(math.log(9))
    reply = Reply("", "length", 1, 50, None, ("b",) * 50, (ends["b"],) * 50, (ends,) * 50)
    assert walk_check([reply]) is None


def test_tokens_of_one_text_are_told_by_their_values() -> None:
    assert classes_of(TOP["0"], TOP) == [(True, 0.5), (False, pytest.approx(0.1))]
    assert classes_of(TOP["3"], TOP) == [(False, 0.5), (True, pytest.approx(0.1))]
    assert classes_of(math.log(0.3), {"x": math.log(0.4)}) == [(False, pytest.approx(0.4)), (False, 0.0)]


def reply(finish: str = "stop", tokens: int = 3, logprobs: Sequence[float] = (-1.0, -2.0, -3.0)) -> Reply:
    top = ({"a": -1.0, "b": -9.0},) * tokens
    return Reply("abc", finish, 1, tokens, tuple(range(tokens)), ("a",) * tokens, tuple(logprobs), top)


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (reply(), ""),
        (reply(logprobs=()), ""),  # it was not asked for any
        (reply("length"), "ended with 'length' instead of 'stop'"),
        (reply(logprobs=(-1.0, -2.0)), "3 tokens has 2 log probabilities"),
        (reply(logprobs=(-3.0, -2.0, -3.0)), "differ by 0.67 nats"),
    ],
    ids=["equal", "plain", "end", "missing", "scores"],
)
def test_a_stream_has_the_scores_and_the_end_of_its_answer(stream: Reply, says: str) -> None:
    problem = stream_problem(stream, reply(), 0.4)
    assert says in problem
    assert bool(problem) == bool(says)


def test_answers_say_why_they_ended() -> None:
    assert end_check([reply()] * 9 + [reply("length", MOST, ())]).ok
    assert end_check([reply()] * 9 + [reply("stop", MOST, ())]).ok  # the last token that was allowed ended it
    assert not end_check([reply()] * 9 + [reply("length")] * 2).ok


def test_log_probabilities_of_a_stream_are_read() -> None:
    tokens = (("a", 5, -0.5), ("b", 6, -1.5))
    events: list[object] = []
    for text, token, value in tokens:
        scores = {"tokens": [text], "token_logprobs": [value], "top_logprobs": [{text: value}]}
        finish = "stop" if text == "b" else None
        choice = {"index": 0, "text": text, "token_ids": [token], "logprobs": scores, "finish_reason": finish}
        events.append({"choices": [choice]})
    events.append({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}})
    read = read_streamed(stream_of(events) + b"data: [DONE]\n\n", 0.0)
    assert (read.pieces, read.logprobs, read.top) == (("a", "b"), (-0.5, -1.5), ({"a": -0.5}, {"b": -1.5}))
    events = []
    for text, token, value in tokens:
        best = {"token": text, "logprob": value}
        scores = {"completion_probabilities": [{**best, "top_logprobs": [best]}]}
        events.append({"content": text, "tokens": [token], "stop": False, **scores})
    events.append({"content": "", "stop": True, "stop_type": "limit", "tokens_evaluated": 4, "tokens_predicted": 2})
    read = read_native_stream(stream_of(events), 0.0)
    assert (read.text, read.logprobs, read.top) == ("ab", (-0.5, -1.5), ({"a": -0.5}, {"b": -1.5}))


def stream_of(events: Sequence[object]) -> bytes:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
