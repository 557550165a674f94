"""Random seeded schedules that mix everything: tokens equal to one-request-at-a-time generation, no page leaked."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from engine_fakes import (
    EOS,
    GO,
    PIECES,
    VOCAB,
    ExpertCost,
    FakeRunner,
    FakeVocabulary,
    fake_logits,
    oracle,
    random_prompt,
    text_of,
)

from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import Constraint, Delta, Request, SamplingParams
from halfbyte.engine.sampling.logprobs import logprob_of
from halfbyte.engine.sequence import Sequence
from halfbyte.engine.speculative.controller import Controller, Pace
from halfbyte.engine.speculative.ngram import NgramProposer
from halfbyte.engine.speculative.proposer import Proposal, Proposer
from halfbyte.engine.speculative.suffix import SuffixProposer
from halfbyte.kv.pages import PagePool

REGEX = "(12|345|6)(ab|c)(d|\\{\\})"
LANGUAGE = [(a + b + c).encode() for a in ("12", "345", "6") for b in ("ab", "c") for c in ("d", "{}")]


def allowed_from(start: bytes) -> list[int]:
    """What the finite language allows after `start`, by looking at every word of it."""
    ids = [
        i for i, piece in enumerate(PIECES)
        if piece and i not in (EOS, GO) and any(w.startswith(start + piece) for w in LANGUAGE)
    ]  # fmt: skip
    return [*ids, EOS] if start in LANGUAGE else ids


def allowed_after(out: list[int], text: bytes | None, sleeper: bool) -> list[int] | None:
    for token in out:
        if text is not None:
            text = None if token == EOS and text in LANGUAGE else text + PIECES[token]
        elif sleeper and token == GO:
            text = b""
    return None if text is None else allowed_from(text)


def always(out: list[int]) -> list[int] | None:
    return allowed_after(out, b"", False)


def after_go(out: list[int]) -> list[int] | None:
    return allowed_after(out, None, True)


class RandomProposer:
    """Drafts that are partly right: the true continuation with some tokens replaced; drafts whenever it may."""

    def __init__(self, rng: random.Random, controller: Controller) -> None:
        self.rng, self.controller = rng, controller

    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        out = []
        for seq, most in wants:
            tokens = list(seq.tokens)
            for _ in range(self.rng.randint(0, most)):
                tokens.append((tokens[-1] * 5 + 3) % VOCAB if self.rng.random() < 0.8 else self.rng.randrange(VOCAB))
            out.append(Proposal(tokens[len(seq.tokens) :]))
        return out

    def observe(self, seq: Sequence, new: int) -> None: ...

    def forget(self, seq: Sequence) -> None: ...

    def pace(self, seq: Sequence) -> Pace:
        return self.controller.pace()


def make_proposer(name: str, rng: random.Random) -> Proposer | None:
    cost = ExpertCost(dense=3.0, expert=0.01, experts=32, top_k=4, layers=1, kv_token=0.0)
    controller = Controller(cost, longest=rng.randint(1, 6), allowance=rng.choice([0.02, 1.0]))
    makers: dict[str, Callable[[], Proposer | None]] = {
        "off": lambda: None,
        "ngram": lambda: NgramProposer(controller),
        "suffix": lambda: SuffixProposer(controller),
        "random": lambda: RandomProposer(rng, controller),
    }
    return makers[name]()


RequestMaker = Callable[[random.Random, int, list[list[int]]], tuple[Request, Callable | None]]


def random_request(rng: random.Random, number: int, shared: list[list[int]]) -> tuple[Request, Callable | None]:
    base = rng.choice(shared)
    prompt = base[: rng.choice([1, 5, rng.randint(1, len(base))])] + random_prompt(rng, 0, 12)
    params = {
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.3]),
        "seed": rng.randrange(1 << 60),
        "max_tokens": rng.choice([1, 5, 12, 40, 70]),
        "top_k": rng.choice([0, 0, 3]),
        "top_p": rng.choice([1.0, 0.8]),
        "min_p": rng.choice([0.0, 0.05]),
        "top_n_sigma": rng.choice([0.0, 0.0, 2.0]),
        "logprobs": rng.choice([None, None, 0, 2]),
        "n": rng.choice([1, 1, 1, 3]),
        "ignore_eos": rng.random() < 0.6,
    }
    if rng.random() < 0.2:
        params |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    if rng.random() < 0.2:
        params |= {"logit_bias": {rng.randrange(3, VOCAB): 4.0}, "stop_token_ids": (rng.randrange(3, VOCAB),)}
    if rng.random() < 0.3:
        params |= {"stop": tuple(rng.sample(["ab", "a", "é", "xyz", "0"], 2))}
    if rng.random() < 0.2:
        params |= {"min_tokens": rng.randint(0, params["max_tokens"])}
    constraint, allowed = None, None
    if rng.random() < 0.3 and not params.get("min_tokens"):
        params |= {"logit_bias": {GO: 3.0}}
        constraint = Constraint("regex", REGEX, triggers=rng.choice([(), ((GO,),)]))
        allowed = after_go if constraint.triggers else always
    scored = random.Random(sum(prompt) + number)
    if scored.random() < 0.3:
        params |= {"prompt_logprobs": scored.choice([0, 3]), "prompt_logprobs_from": scored.choice([1, 1, 7, 200])}
        if constraint is None and not params.get("min_tokens") and scored.random() < 0.3:
            params |= {"max_tokens": 0}
    timeout = rng.choice([None] * 9 + [rng.uniform(1, 60)])
    client = scored.choice(["", "", "a", "b"])
    return Request(prompt, SamplingParams(**params), constraint, timeout, id=f"r{number}", client=client), allowed


def run_schedule(
    seed: int, vocabulary: FakeVocabulary | None = None, make_request: RequestMaker = random_request
) -> dict[str, int]:
    rng = random.Random(seed)
    page_size, window = rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 3, 8, 20])
    longest = 170
    pages = 1 + PagePool(9, page_size, window).peak_pages(longest, 2) + rng.randint(0, 100) // page_size
    max_seqs = rng.choice([1, 3, 8])
    now = [0.0]
    method = rng.choice(["off", "ngram", "suffix", "random"])
    on_host = rng.random() < 0.3
    core = EngineCore(
        FakeRunner(pages, page_size, window, on_host=on_host),
        EngineConfig(
            pages=pages, page_size=page_size, window=window, vocab=VOCAB, max_context=longest, eos_tokens=(EOS,),
            max_seqs=max_seqs, max_rows_per_step=max(max_seqs, rng.choice([8, 16, 64])),
            run_ahead=not on_host and rng.random() < 0.7, prefix_cache=rng.random() < 0.8,
            max_rows_with_decode=rng.choice([4, 2048]), max_rows_in_burst=24 * (seed % 2), host_steps=on_host,
        ),
        vocabulary or FakeVocabulary(),
        make_proposer(method, rng),
        clock=lambda: now[0],
    )  # fmt: skip
    assert core.grammars is not None
    core.grammars.compiler.matcher(Constraint("regex", REGEX))  # known: no schedule depends on how long that takes
    shared = [random_prompt(rng, 10, 80) for _ in range(2)]
    hurry = rng.choice([0.1, 0.3, 0.9])
    todo = [make_request(rng, i, shared) for i in range(rng.randint(4, 14))]
    got: dict[tuple[str, int], list[Delta]] = {}
    sent: list[tuple[Request, Callable | None]] = []
    while todo or core.has_work:
        while todo and rng.random() < hurry:
            request, allowed = todo.pop()
            core.submit(request)
            sent.append((request, allowed))
        if sent and rng.random() < 0.02:
            core.cancel(rng.choice(sent)[0].id)
        for id, delta in core.step():
            got.setdefault((id, delta.index), []).append(delta)
        core.check()
        now[0] += 1.0
        assert now[0] < 20_000, "no progress"
    for id, delta in core.step():
        got.setdefault((id, delta.index), []).append(delta)
    core.check()
    assert core.pages.available == core.pages.capacity, "pages leaked"
    assert not core.groups

    for request, allowed in sent:
        for index in range(request.sampling.n):
            verify(request, index, got[request.id, index], window, allowed)
    stats = core.stats()
    return {
        "preemptions": stats.preemptions, "hits": stats.prefix_hit_tokens, "accepted": stats.accepted_tokens,
        "drafted": stats.drafted_tokens, "generated": stats.generated_tokens,
    }  # fmt: skip


def verify(request: Request, index: int, deltas: list[Delta], window: int, allowed: Callable | None) -> None:
    verify_scores(request, index, deltas, window)
    deltas = [d for d in deltas if d.prompt_logprobs is None]
    tokens = [t for d in deltas for t in d.tokens]
    last = deltas[-1]
    assert last.finish is not None
    assert all(d.finish is None for d in deltas[:-1])
    assert last.finish != "error", last.error
    params = request.sampling
    limit = len(request.prompt) + (params.max_tokens or 0)
    wanted, reason = oracle(request, index, limit, window, allowed) if params.max_tokens else ([], "length")
    if last.finish in ("cancelled", "timeout"):
        assert tokens == wanted[: len(tokens)]
    else:
        assert (tokens, last.finish) == (wanted, reason)
    assert last.usage is not None
    assert last.usage.completion_tokens == len(tokens)
    assert last.usage.cached_tokens < len(request.prompt)
    if params.logprobs is not None:
        logprobs = [lp for d in deltas for lp in d.logprobs or []]
        assert [lp.token for lp in logprobs] == tokens
        assert all(len(lp.top) == params.logprobs for lp in logprobs)
    if params.stop:
        shown = [d.visible_bytes for d in deltas]
        assert shown == sorted(shown)
        text = text_of(tokens)
        if last.stop_match is not None:
            assert text[last.visible_bytes :].startswith(last.stop_match.encode())
        else:
            assert last.visible_bytes == len(text)


def verify_scores(request: Request, index: int, deltas: list[Delta], window: int) -> None:
    """Of the prompt's tokens: each once, in order, as if the prompt had been read alone."""
    got = [lp for d in deltas for lp in d.prompt_logprobs or []]
    params, prompt = request.sampling, request.prompt
    if params.prompt_logprobs is None or index:
        assert not got
        return
    wanted = [
        logprob_of(fake_logits(prompt[:at], prompt[:at][-window:]), prompt[at], params.prompt_logprobs)
        for at in range(params.prompt_logprobs_from, len(prompt))
    ]
    assert got == wanted[: len(got)]
    if deltas[-1].finish not in ("cancelled", "timeout"):
        assert len(got) == len(wanted)


@pytest.mark.parametrize("seed", range(20))
def test_schedule(seed: int) -> None:
    run_schedule(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 200))
def test_schedule_long(seed: int) -> None:
    run_schedule(seed)


def test_the_schedules_do_exercise_what_they_claim() -> None:
    total: dict[str, int] = {}
    for seed in range(12):
        for key, value in run_schedule(seed).items():
            total[key] = total.get(key, 0) + value
    assert total["preemptions"] > 0
    assert total["hits"] > 0
    assert 0 < total["accepted"] < total["drafted"]
