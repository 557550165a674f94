"""Clients on one engine: what one of them may cost another, counted in steps on the fake core."""

from __future__ import annotations

import pytest
from fake_core import GREEDY, Got, collect, drain, make, tokens_of

from halfbyte.engine.clients import MOST_ABSENT, Clients
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import Request, SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def endless(n: int = 1, tokens: int = 400) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=tokens, n=n, ignore_eos=True)


def steps_until(core: EngineCore, id: str, out: Got, most: int) -> int:
    """Steps until the request has ended."""
    for step in range(1, most + 1):
        collect(core.step(), out)
        core.check()
        if (id, 0) in out and out[id, 0][-1].finish is not None:
            return step
    raise AssertionError(f"{id} has not ended after {most} steps")


def run(core: EngineCore, out: Got, steps: int) -> None:
    for _ in range(steps):
        collect(core.step(), out)
        core.check()


def cancel_all(core: EngineCore, out: Got) -> None:
    for id in list(core.groups):
        core.cancel(id)
    drain(core, out)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_many_sequences_of_one_client_do_not_keep_another_waiting(run_ahead: bool) -> None:
    core = make(pages=4000, run_ahead=run_ahead, max_rows_with_decode=8)
    for i in range(20):
        core.submit(Request([5, 6, 7 + i], endless(n=16), id=f"many {i}", client="a"))
    out: Got = {}
    run(core, out, 30)
    for i in range(3):
        core.submit(Request([9] * 12, ONE, id=f"short {i}", client="b"))
        # a commit and an exchange of one slot, then twelve rows of prompt, two a step at least
        assert steps_until(core, f"short {i}", out, 10) <= 10
        run(core, out, 5)
    assert len(core.scheduler.running) == 8, "the slot is given back to the client that waits for it"
    cancel_all(core, out)


def test_slots_are_shared_evenly_and_stay_so() -> None:
    core = make(pages=4000, max_seqs=8)
    for client in "ab":
        core.submit(Request([5, 6], endless(n=16), id=client, client=client))
    out: Got = {}
    run(core, out, 20)
    before = core.scheduler.preemptions
    run(core, out, 40)
    assert {c.id: len(c.running) for c in core.scheduler.clients.present.values()} == {"a": 4, "b": 4}
    assert core.scheduler.preemptions == before, "clients with equal shares take each other's slots"
    cancel_all(core, out)


def filled() -> tuple[EngineCore, Got]:
    """A client whose sequences have filled the pages, so that some of them were preempted and wait."""
    core = make(pages=120, max_context=200)
    core.submit(Request([5, 6, 7], endless(n=8, tokens=190), id="n", client="a"))
    out: Got = {}
    while not core.scheduler.preemptions:
        run(core, out, 1)
    assert core.scheduler.num_waiting
    return core, out


def test_preempted_siblings_do_not_hold_the_head_of_the_queue() -> None:
    core, out = filled()
    for i in range(5):
        core.submit(Request([9, 8, 7, 6 + i], GREEDY, id=f"short {i}", client="b"))
        assert steps_until(core, f"short {i}", out, 40) <= 34  # thirty tokens
        run(core, out, 2)
    assert not all(out["n", i][-1].finish for i in range(8)), "the other client has ended, so nothing was shared"
    tokens = {key: tokens_of(deltas) for key, deltas in drain(core, out).items()}
    assert all(len(tokens["n", i]) == 190 for i in range(8))


def test_siblings_are_preempted_before_the_only_sequence_of_another_client() -> None:
    core, out = filled()
    core.submit(Request([9, 8, 7], endless(tokens=150), id="only", client="b"))
    admitted = 0
    while ("only", 0) not in out or out["only", 0][-1].finish is None:
        run(core, out, 1)
        only = [s for s in core.scheduler.running if s.request.id == "only"]
        if only:
            admitted = admitted or only[0].admission
            assert only[0].admission == admitted, "the only sequence of a client was preempted"
    assert core.scheduler.preemptions >= 3
    drain(core, out)


def test_a_client_that_holds_least_takes_pages_but_no_more_than_its_share() -> None:
    """Both ask for far more than there is: each ends with about half of the pages, and both end."""
    core, out = filled()
    core.submit(Request([9, 8, 7], endless(n=8, tokens=190), id="late", client="b"))
    run(core, out, 60)
    clients = core.scheduler.clients
    a, b = (clients.share(clients.present[id]) for id in "ab")
    assert a == pytest.approx(b, abs=0.35)
    drain(core, out)
    assert all(len(tokens_of(out[id, i])) == 190 for id in ("n", "late") for i in range(8))


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize(("count", "client"), [(1, "a"), (2, "a"), (1, "b"), (2, "b"), (5, "b")])
def test_a_short_prompt_waits_for_no_long_one(count: int, client: str, run_ahead: bool) -> None:
    core = make(
        pages=8000, max_context=4096, max_seqs=8, max_rows_per_step=64, max_rows_with_decode=16, run_ahead=run_ahead
    )
    for i in range(count):
        core.submit(Request([7 + i] * 3000, ONE, id=f"long {i}", client="a"))
    out: Got = {}
    run(core, out, 12)
    core.submit(Request([3, 4, 5], ONE, id="short", client=client))
    assert steps_until(core, "short", out, 4) <= 4
    assert not any(key[0].startswith("long") for key in out)
    cancel_all(core, out)


def test_a_step_is_not_large_for_a_long_prompt_if_a_short_one_of_another_client_waits_for_it() -> None:
    rows: list[int] = []
    core = make(
        pages=8000, max_context=4096, max_rows_per_step=256, max_rows_with_decode=16, run_ahead=False,
        fault=lambda batch: rows.append(batch.rows),
    )  # fmt: skip
    core.submit(Request([7] * 3000, ONE, id="long", client="a"))
    out: Got = {}
    run(core, out, 3)
    core.submit(Request([3, 4, 5], ONE, id="short", client="b"))
    steps_until(core, "short", out, 4)
    run(core, out, 2)
    assert rows[0] == rows[1] == 256
    assert min(rows) <= 16
    assert rows[-1] == 256, "with one client left the steps are large again"
    cancel_all(core, out)


def test_on_a_host_steps_are_short_while_several_clients_are_present() -> None:
    rows: list[int] = []
    core = make(
        pages=8000, max_context=4096, max_rows_per_step=256, max_rows_with_decode=16, run_ahead=False, host_steps=True,
        fault=lambda batch: rows.append(batch.rows),
    )  # fmt: skip
    out: Got = {}
    core.submit(Request([7] * 2000, ONE, id="a", client="a"))
    run(core, out, 3)
    assert set(rows) == {256}
    core.submit(Request([8] * 2000, ONE, id="b", client="b"))
    run(core, out, 4)
    rows.clear()
    run(core, out, 4)
    assert set(rows) == {16}
    cancel_all(core, out)


def test_a_long_prompt_is_read_at_its_rate_beside_endless_short_ones() -> None:
    core = make(pages=8000, max_context=4096, max_seqs=8, max_rows_per_step=64)
    core.submit(Request([7] * 1500, ONE, id="long", client="a"))
    out: Got = {}
    for step in range(80):
        for i in range(4):
            core.submit(Request([3 + step % 30, 4, 5] * 8, ONE, id=f"{step} {i}", client=f"b{i}"))
        run(core, out, 1)
        if ("long", 0) in out:
            break
    assert ("long", 0) in out, "half of every step in its turn would have been enough"
    assert step >= 24, "it had every step to itself"
    drain(core, out)


def test_prompts_of_two_clients_are_read_at_one_rate_whatever_they_send() -> None:
    core = make(pages=60000, max_context=4096, max_seqs=8, max_rows_per_step=64)
    for i in range(30):
        core.submit(Request([7 + i % 20] * (400 + i), ONE, id=f"a{i}", client="a"))
    out: Got = {}
    run(core, out, 10)
    for i in range(3):
        core.submit(Request([30 + i] * 3000, ONE, id=f"b{i}", client="b"))
    clients = core.scheduler.clients.present
    start = {id: clients[id].served for id in "ab"}
    run(core, out, 80)
    rows = {id: clients[id].served - start[id] for id in "ab"}
    assert sum(rows.values()) == 80 * 64
    assert abs(rows["a"] - rows["b"]) <= 2 * 64
    cancel_all(core, out)


def test_a_client_saves_up_no_credit_and_cannot_lose_its_debt_by_leaving() -> None:
    clients = Clients(make().pages, 8)
    a = clients.arrive("a")
    a.waiting.append(object())  # type: ignore[arg-type]
    a.served = 1000
    b = clients.arrive("b")
    assert b.served == 1000, "its idle time would count for it"
    b.served += 50
    clients.leave(b)
    assert clients.arrive("b").served == 1050
    clients.leave(b)
    a.served = 3000
    assert clients.arrive("b").served == 3000
    for i in range(3 * MOST_ABSENT):
        c = clients.arrive(f"c{i}")
        c.served += 1
        clients.leave(c)
    assert len(clients._absent) == MOST_ABSENT


def test_a_sequence_that_waits_for_pages_is_overtaken_but_not_starved() -> None:
    core = make(pages=120, max_context=400, max_seqs=8, max_rows_per_step=64)
    big = 380  # about 100 pages of 119
    core.submit(Request([7] * (big - 60), endless(tokens=60), id="first", client="a"))
    out: Got = {}
    run(core, out, 8)
    core.submit(Request([8] * (big - 60), endless(tokens=60), id="second", client="b"))
    for step in range(400):
        core.submit(Request([9, 10 + step % 20], endless(tokens=8), id=f"s{step}", client=f"c{step}"))
        run(core, out, 1)
        if ("second", 0) in out:
            break
    ended = [key for key, deltas in out.items() if key[0].startswith("s") and deltas[-1].finish == "length"]
    assert len(ended) > 10, "no short request overtook the one that waits for pages"
    assert out["first", 0][-1].finish == "length"
    assert step < 100, "short requests took the pages that the long one waited for"
    drain(core, out)


def test_a_short_prompt_finds_a_slot_before_long_ones_of_many_clients() -> None:
    core = make(pages=30000, max_context=4096, max_seqs=8, max_rows_per_step=64)
    for i in range(60):
        core.submit(Request([7 + i % 20] * 1000, ONE, id=f"long {i}", client=f"c{i}"))
    out: Got = {}
    run(core, out, 30)
    core.submit(Request([3, 4, 5], ONE, id="short", client="short"))
    assert steps_until(core, "short", out, 4) <= 4
    assert len(out) == 1, "no long prompt had to end for it"
    cancel_all(core, out)


def test_a_long_prompt_finds_a_slot_beside_endless_short_ones_of_new_clients() -> None:
    core = make(pages=8000, max_context=4096, max_seqs=2, max_rows_per_step=64)
    out: Got = {}
    for step in range(200):
        for i in range(8):
            core.submit(Request([3 + i, 4 + step % 20, 5], ONE, id=f"{step} {i}", client=f"{step} {i}"))
        if step == 5:
            core.submit(Request([7] * 300, ONE, id="long", client="long"))
        run(core, out, 1)
        if ("long", 0) in out:
            break
        if step > 8:  # more come than are answered, but not without end
            for group in list(core.groups)[:-20]:
                if group != "long":
                    core.cancel(group)
    assert ("long", 0) in out
    cancel_all(core, out)


def test_one_client_is_served_first_come_first_served() -> None:
    core = make(pages=4000, max_seqs=2)
    for i in range(6):
        core.submit(Request([5, 6 + i], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), id=f"{i}"))
    ends = []
    while core.has_work:
        ends += [id for id, delta in core.step() if delta.finish is not None]
    assert ends == ["0", "1", "2", "3", "4", "5"]
    assert core.scheduler.preemptions == 0


def test_steps_that_only_decode_compare_no_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make(pages=4000, max_seqs=64, max_rows_per_step=128)
    for i in range(64):
        core.submit(Request([5, 6], endless(tokens=60), id=f"{i}", client=f"{i}"))
    out: Got = {}
    run(core, out, 10)
    calls: list[str] = []
    for name in ("share", "_share", "in_turn", "room_for", "youngest_to_yield"):
        monkeypatch.setattr(Clients, name, lambda *_, name=name, **__: calls.append(name))
    for _ in range(20):
        core.step()
    assert not calls
