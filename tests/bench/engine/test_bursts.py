"""The measurement of a burst finds the gap and the first token that a server of known speed has."""

from __future__ import annotations

import pytest

from bench.engine.bursts import PAUSE_S, play
from tests.lab.measure.virtual_server import KnownServer

PROMPTS = [[i, i, i] for i in range(4)]


def test_a_gap_and_the_last_first_token_are_found() -> None:
    learning = 0.1 + 0.01
    arrival = learning + 0.1 + PAUSE_S
    server = KnownServer(0.1, 0.01, slots=3, pauses=[(arrival - 0.2, 0.15), (arrival + 0.02, 0.3)])
    burst = server.run(play(server.client(), PROMPTS, 1, 8, 300))
    assert burst.gap == burst.gap_of_speakers == pytest.approx(310, abs=1), "the pause before the burst does not count"
    assert burst.first_median == pytest.approx(100, abs=1)
    assert burst.first_last == pytest.approx(100 + 70 + 100, abs=1), "it waits for a slot"
    server.close()


def test_nobody_speaks_before() -> None:
    server = KnownServer(0.1, 0.01)
    burst = server.run(play(server.client(), PROMPTS, 0, 8, 300))
    assert (burst.gap, burst.gap_of_speakers) == (pytest.approx(10, abs=0.1), 0.0)
    server.close()


@pytest.mark.parametrize(("server", "longer"), [(KnownServer(0.1, 0.01, short_by=1), 300), (KnownServer(0.1, 0.01), 9)])
def test_answers_that_are_too_short_have_no_figure(server: KnownServer, longer: int) -> None:
    with pytest.raises(ValueError, match=r"were asked for|had ended before"):
        server.run(play(server.client(), PROMPTS, 1, 8, longer))
    server.close()
