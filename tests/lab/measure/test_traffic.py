"""The instrument against a server of known speed, by the server's own time: at most 3 % off, whatever the chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from halfbyte.errors import UsageError
from halfbyte.gpu_sensor import Sample
from halfbyte.lab import served
from halfbyte.lab.measure.event_stream import StreamReading
from halfbyte.lab.measure.power import PowerMeter
from halfbyte.lab.measure.traffic import Limits, SentRequest, measure_traffic, stall
from halfbyte.lab.options import WorkloadOptions
from halfbyte.lab.result import Cell, Result
from halfbyte.lab.workloads.arrivals import Arrivals, ClosedLoop, Poisson, Staircase
from halfbyte.lab.workloads.recording import replay
from halfbyte.lab.workloads.workload import Workload, chat, synthetic
from halfbyte.model import load
from tests.lab.measure.virtual_server import KnownServer

WITHIN = 0.03
made: list[KnownServer] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


def play(server: KnownServer, workload: Workload, when: Arrivals | Staircase, limits: str = "", **more: Any) -> Result:
    made.append(server)
    return measure_traffic(server.client(), workload, when, Cell("serving"), Limits.parse(limits), server.run, **more)


def figures(result: Result) -> dict[str, float]:
    assert result.state == "measured", result.refused
    return {f.name: f.value for f in result.figures}


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (KnownServer(0.1, 0.01, ids=False, spells=0.34), "and their texts are"),
        (KnownServer(0.1, 0.01, spells=0.1), "every request was answered"),
        (KnownServer(0.1, 0.01, reads=32), "read 32 of a prompt's 64 tokens"),
    ],
    ids=["a third", "ids without text", "cut prompts"],
)
def test_liars_under_load_have_no_figures(server: KnownServer, says: str) -> None:
    made.append(server)
    client = server.client(load.tokenizer_of(load.resolve_model(None)))
    workload = synthetic(64, 65, 1000)
    result = measure_traffic(client, workload, ClosedLoop(4, 8), Cell("serving"), Limits(), server.run)
    assert result.invalid
    assert not result.figures
    assert says in result.refused + "".join(c.note for c in result.checks if not c.ok)


@pytest.mark.parametrize("together", [1, 3, 8])
@pytest.mark.parametrize(("ids", "running"), [(True, False), (False, True), (False, False)])
def test_every_figure_of_a_known_server(together: int, ids: bool, running: bool) -> None:
    """100 ms to the first token, 10 ms a token, eight streams that do not disturb each other."""
    server = KnownServer(0.1, 0.01, together, ids=ids, running=running)
    result = play(server, synthetic(64, 65, 1000), ClosedLoop(8, 32))
    found = figures(result)
    whole = 0.1 + 64 * 0.01
    counted = "ids" if ids else "running usage, unverified" if running else "spread, unverified"
    assert result.detail["counted_by"] == [counted]
    assert found["ttft_p50"] == pytest.approx(100, rel=WITHIN)
    assert found["e2e_p99"] == pytest.approx(1e3 * whole, rel=WITHIN)
    assert found["itl_p50"] == pytest.approx(10 * together, rel=WITHIN)
    if ids or running or together == 1:  # spread evenly, the first token of a chunk of many cannot be told
        assert found["tpot_p50"] == pytest.approx(10, rel=WITHIN)
        assert found["speed"] == pytest.approx(8 * 65 / whole, rel=WITHIN)
    assert result.detail["completion_tokens"] == 32 * 65
    assert all(len(body["prompt"]) == 64 for path, body in server.bodies[1:])


def test_the_longest_gap_and_when_it_was() -> None:
    server = KnownServer(0.1, 0.01, pauses=[(2.0, 0.3)])
    result = play(server, synthetic(64, 65, 1000), ClosedLoop(2, 8))
    assert figures(result)["gap_longest"] == pytest.approx(310, rel=WITHIN)
    assert result.detail["longest_gaps"][0] == {
        "ms": pytest.approx(310, rel=WITHIN),
        "at_s": pytest.approx(2.0, abs=0.15),
    }


def test_a_staircase_reaches_every_level_and_measures_from_the_first_request() -> None:
    """Levels of 1, 4 and 2 sessions, two seconds each; a stall of seconds is a figure here, not a cold server."""
    server = KnownServer(0.1, 0.01, pauses=[(1.0, 1.5)])
    result = play(server, synthetic(8, 21, 1000), Staircase((1, 4, 2), 6.0))
    found = figures(result)
    assert found["gap_longest"] == pytest.approx(1510, rel=WITHIN)
    assert server.sent[0] == 0.0  # no request came before
    assert result.detail["requests"] == len(server.bodies)
    each = 0.1 + 20 * 0.01
    under_way = [sum(s <= at < s + each for s in server.sent) for at in (0.5, 3.5, 5.5)]
    assert under_way == [1, 4, 2]
    with pytest.raises(UsageError, match="staircase"):
        Staircase((), 1.0)


def test_a_prompt_that_the_server_knows_makes_prompts_that_should_all_be_new_invalid() -> None:
    server = KnownServer(0.1, 0.01)
    assert play(server, synthetic(64, 9, 1000), ClosedLoop(2, 4)).state == "measured"
    again = play(server, synthetic(64, 9, 1000), ClosedLoop(2, 4))
    assert again.state == "INVALID"
    assert "256 tokens" in next(c.note for c in again.checks if not c.ok)


def test_no_cell_of_a_run_asks_what_another_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of streams, other lengths: the server's cache helps none of them."""
    server = KnownServer(0.1, 0.01)
    made.append(server)
    monkeypatch.setattr(served, "measure_traffic", partial(measure_traffic, run=server.run))
    works = [synthetic(prompt, tokens, 1000) for prompt in (32, 64) for tokens in (9, 17)]
    when = [ClosedLoop(1, 2), ClosedLoop(2, 4), ClosedLoop(4, 8)]
    results = served.measure_workloads(server.client(), WorkloadOptions("synthetic"), works, when, Cell("serving"), str)
    assert [r.state for r in results] == ["measured"] * 12, [r.refused for r in results]
    assert [r.detail["cached_tokens"] for r in results] == [0] * 12


def test_first_usable_token_of_a_chat_is_no_role_and_the_answer_no_reasoning() -> None:
    server = KnownServer(0.2, 0.02, thinks=10)
    found = figures(play(server, chat(turns=1, tokens=30), ClosedLoop(1, 8)))
    assert found["ttft_p50"] == pytest.approx(200, rel=WITHIN)
    assert found["first_answer_p50"] == pytest.approx(200 + 10 * 20, rel=WITHIN)


def test_turns_wait_for_answers_and_for_thinking_and_carry_the_conversation() -> None:
    server = KnownServer(0.1, 0.01)
    workload = chat(turns=3, tokens=11, think_s=2.0, seed=5)
    play(server, workload, ClosedLoop(1, 1))
    turns = workload.session(0).turns
    begun = server.sent[1:]  # after the one that asks what the server can do
    for before, after, turn in zip(begun, begun[1:], turns[1:]):
        assert after - before == pytest.approx(0.2 + turn.think_s, rel=1e-6)
    lengths = [len(body["messages"]) for _, body in server.bodies[1:]]
    assert lengths == [2, 4, 6]
    assert server.bodies[2][1]["messages"][:2] == server.bodies[1][1]["messages"]


def test_a_recorded_session_is_replayed_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    server = KnownServer(0.05, 0.001)
    workload = replay(speed=4.0)
    result = play(server, workload, ClosedLoop(2, 2))
    assert result.state == "measured", result.refused
    asked = [body for _, body in server.bodies[1:]]
    assert len(asked) == 2 * workload.shape["turns"]
    assert all(body["tools"] for body in asked)
    first = [body["messages"] for body in asked if not body["messages"][0]["content"].startswith("[")]
    assert [len(m) for m in first] == sorted(len(m) for m in first)
    assert all(b[: len(a)] == a for a, b in itertools.pairwise(first))
    assert result.detail["completion_tokens"] == 2 * workload.shape["tg"]
    assert "Composed" in result.detail["note"]


def test_goodput_counts_what_kept_its_limits() -> None:
    """One slot and two streams: every second request waits for a whole other one."""
    alone = figures(play(KnownServer(0.1, 0.01), synthetic(8, 11, 100), ClosedLoop(2, 16), "ttft=150"))
    queue = figures(play(KnownServer(0.1, 0.01, slots=1), synthetic(8, 11, 100), ClosedLoop(2, 16), "ttft=150,tpot=50"))
    assert alone["in_time"] == 100
    assert alone["goodput"] == pytest.approx(alone["requests"])
    assert queue["in_time"] < 10
    assert queue["requests"] == pytest.approx(1 / 0.2, rel=0.1)


def test_arrivals_that_are_too_fast_are_noticed_and_others_are_not() -> None:
    """A request takes 0.2 s and two run at once: 10 a second is the most."""
    results = {
        rate: play(KnownServer(0.1, 0.01, slots=2), synthetic(8, 11, 100), Poisson(rate, 60, seed=1))
        for rate in (4.0, 20.0)
    }
    slow, fast = results[4.0], results[20.0]
    assert [t.ok for t in slow.targets] == [True]
    assert [t.ok for t in fast.targets] == [False]
    assert "over-saturated" in fast.targets[0].note
    assert figures(slow)["requests"] == pytest.approx(4.0, rel=0.25)
    assert figures(fast)["ttft_p99"] > 5 * figures(slow)["ttft_p50"]


def test_arrivals_are_random_and_the_same_for_the_same_seed() -> None:
    times = Poisson(5.0, 400, seed=3).times()
    assert times == Poisson(5.0, 400, seed=3).times() != Poisson(5.0, 400, seed=4).times()
    assert 400 / times[-1] == pytest.approx(5.0, rel=0.15)


def test_an_answer_of_another_length_is_invalid() -> None:
    result = play(KnownServer(0.1, 0.01, short_by=1), synthetic(8, 11, 100), ClosedLoop(2, 4))
    assert result.state == "INVALID"
    assert "length" in result.refused
    assert "10 tokens instead of 11" in result.checks[1].note


def test_a_throttled_card_makes_it_invalid_and_its_own_power_limit_does_not() -> None:
    def meter(reasons: int) -> Any:
        samples = iter([Sample(0.1 * i, 600.0, 1500, 60, reasons) for i in range(50)])
        return lambda: PowerMeter(lambda: next(samples, None), 700.0, every_s=0.001)

    result = play(KnownServer(0.1, 0.01), synthetic(8, 11, 100), ClosedLoop(2, 8), meter=meter(0x40))
    assert result.state == "INVALID"
    assert "heat (hardware) 100%" in result.refused
    assert {f["name"] for f in result.detail["not_believed"]} >= {"speed", "ttft_p99"}
    limited = play(KnownServer(0.1, 0.01), synthetic(8, 11, 100), ClosedLoop(2, 8), meter=meter(0x4))
    found = figures(limited)
    assert limited.detail["power"]["throttled"] == {"power limit": 1.0}
    assert found["energy_per_token"] == pytest.approx(600 / found["speed"])


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=-1", "ttft=nan", "speed=3", "ttft=inf"])
def test_a_limit_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="a limit looks like"):
        Limits.parse(text)


def asked_at(*arrivals: list[float]) -> list[SentRequest]:
    made = []
    for times in arrivals:
        asked = SentRequest(synthetic(8, 2, 100).session(0).turns[0], 0, 0, 0.0)
        asked.reading = StreamReading(arrivals=[(at, 1.0) for at in times])
        made.append(asked)
    return made


def test_a_server_that_stands_still_now_and_then_was_not_warm() -> None:
    steady = [0.01 * i for i in range(100)]
    once = [t if t < 0.5 else t + 3.0 for t in steady]
    assert stall(asked_at(*[steady] * 8)) == ""
    assert "1 times nothing came for 3.01 s in all, where 10 ms are usual" in stall(asked_at(*[once] * 8))
    apart = [[t + 10 * k for t in once] for k in range(8)]  # with every request: so it is with this server
    assert stall(asked_at(*apart)) == ""
    slow = [0.5 * i for i in range(8)]
    assert stall(asked_at(*[[*slow, slow[-1] + 3.0]] * 8)) == ""  # six times the usual
