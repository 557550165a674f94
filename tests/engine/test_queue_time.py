"""Queue time: from arrival to first being scheduled, once per choice, and not for what never ran."""

from __future__ import annotations

from fake_core import GREEDY, collect, drain, make

from halfbyte.engine.request import QUEUE_BUCKETS, Request


def test_a_choice_that_waits_for_a_place() -> None:
    now = [0.0]
    core = make(clock=lambda: now[0], max_seqs=1)
    core.submit(Request([5, 6], GREEDY, id="first"))
    core.submit(Request([5, 7], GREEDY, id="second"))
    core.submit(Request([5, 8], GREEDY, id="never"))
    now[0] = 0.003
    out: dict = {}
    collect(core.step(), out)
    s = core.stats()
    assert sum(s.queue_counts) == 1
    assert s.queue_counts[1] == 1  # 1 to 5 ms
    core.check()
    assert core.cancel("never")
    core.check()
    now[0] = 3.0
    drain(core, out)
    s = core.stats()
    assert sum(s.queue_counts) == 2
    assert s.queue_counts[QUEUE_BUCKETS.index(10.0)] == 1  # 2 to 10 s
    assert abs(s.queue_seconds - 3.003) < 1e-9
    core.check()
