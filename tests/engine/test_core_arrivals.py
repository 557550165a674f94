"""The engine's core on the fake runner: what it refuses at once, and how requests end before they are done."""

from __future__ import annotations

import pytest
from engine_fakes import EOS, VOCAB, oracle
from fake_core import GREEDY, Got, collect, drain, make, tokens_of

from halfbyte.engine.request import Request, SamplingParams
from halfbyte.errors import ContextError, QueueFullError, RequestError


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    core = make(pages=40, max_context=512)
    with pytest.raises(ContextError, match=r"\b500\b.*\b30\b.*\b530\b.*\b512\b"):
        core.submit(Request([5] * 500, GREEDY))
    with pytest.raises(ContextError, match=r"\b430\b.*\b39\b"):
        core.submit(Request([5] * 400, GREEDY))
    longest = core.scheduler.longest
    request = Request([5] * (longest - 30), GREEDY, id="fits")
    core.submit(request)
    assert tokens_of(drain(core)["fits", 0]) == oracle(request, 0, longest, 8)[0]


def test_without_max_tokens_a_request_ends_where_the_cache_does() -> None:
    core = make(pages=40, max_context=512)
    core.submit(Request([5, 6], SamplingParams(temperature=0, ignore_eos=True), id="a"))
    out = drain(core)
    assert len(tokens_of(out["a", 0])) == core.scheduler.longest - 2
    assert out["a", 0][-1].finish == "length"


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (Request([]), "empty"),
        (Request([VOCAB]), "vocabulary"),
        (Request([5], SamplingParams(temperature=-1)), "temperature"),
        (Request([5], SamplingParams(top_p=0)), "top_p"),
        (Request([5], SamplingParams(max_tokens=0)), "max_tokens"),
        (Request([5], SamplingParams(n=0)), "n is 0"),
        (Request([5], SamplingParams(logit_bias={999: 1.0})), "token 999"),
        (Request([5], SamplingParams(stop=("",))), "empty"),
    ],
)
def test_a_bad_request_is_refused_before_it_is_queued(request_: Request, match: str) -> None:
    core = make()
    with pytest.raises(RequestError, match=match):
        core.submit(request_)
    assert not core.has_work


def test_the_queue_is_bounded() -> None:
    core = make(max_waiting=3)
    for i in range(3):
        core.submit(Request([5], GREEDY, id=f"{i}"))
    with pytest.raises(QueueFullError, match="3 requests wait already"):
        core.submit(Request([5], GREEDY))
    drain(core)


def test_an_id_that_is_running_is_refused() -> None:
    core = make()
    core.submit(Request([5], GREEDY, id="x"))
    with pytest.raises(RequestError, match="ids must differ"):
        core.submit(Request([5], GREEDY, id="x"))
    drain(core)


def test_cancel_and_timeout_give_everything_back() -> None:
    now = [0.0]
    core = make(clock=lambda: now[0])
    core.submit(Request([5, 6, 7], GREEDY, id="cancelled"))
    core.submit(Request([5, 9, 7], GREEDY, timeout=5.0, id="late"))
    core.submit(Request([5, 9, 7] * 9, GREEDY, timeout=50.0, id="kept"))
    out: Got = {}
    for _ in range(4):
        collect(core.step(), out)
    assert core.cancel("cancelled")
    assert not core.cancel("cancelled")
    now[0] = 6.0
    drain(core, out)
    assert out["cancelled", 0][-1].finish == "cancelled"
    assert out["late", 0][-1].finish == "timeout"
    assert out["kept", 0][-1].finish == "length"


def test_a_waiting_request_can_be_cancelled() -> None:
    core = make(max_seqs=1)
    core.submit(Request([5], GREEDY, id="a"))
    core.submit(Request([6], GREEDY, id="b"))
    core.step()
    core.cancel("b")
    out = drain(core)
    assert out["b", 0][-1].finish == "cancelled"
    assert len(tokens_of(out["a", 0])) == 30


def test_min_tokens_keeps_the_end_token_away() -> None:
    core = make()
    bias = {EOS: 50.0}
    core.submit(Request([5], SamplingParams(temperature=0, max_tokens=20, min_tokens=7, logit_bias=bias), id="a"))
    tokens = tokens_of(drain(core)["a", 0])
    assert len(tokens) == 8
    assert tokens[-1] == EOS
    assert EOS not in tokens[:-1]
