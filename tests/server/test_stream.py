"""The parts of streaming on their own: stop strings, the pump, the pace."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.engine.request import Delta
from halfbyte.engine.stops import PartialMatches, TextStopMatcher
from halfbyte.server.answer.pump import Pacer, Pump
from halfbyte.server.http import sse
from halfbyte.server.http.connection import with_first

LETTERS = st.text("abc", max_size=30)


@given(LETTERS, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 30), max_size=6))
def test_stop_matcher_equals_a_plain_search(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = TextStopMatcher(tuple(stops))
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    shown = ""
    for a, b in itertools.pairwise(edges):
        shown += matcher.feed(text[a:b])
        if not any(s in text[:b] for s in stops):
            # Never more held back than could still become a match.
            assert len(shown) >= b - max((len(s) - 1 for s in stops), default=0)
    shown += matcher.flush()
    ends = [text.find(s) for s in stops if s in text]
    # The first match to be *complete* wins, wherever the text is cut; with whole text that is the first to begin,
    # unless a longer one that began earlier completes later.
    if not ends:
        assert shown == text
        assert matcher.matched is None
    else:
        assert matcher.matched in stops
        assert text.startswith(shown + matcher.matched)
        assert not any(s in shown for s in stops)


def test_what_is_held_back_costs_the_same_however_long_a_stop_string_is() -> None:
    """Counted in characters that are compared, not in seconds."""
    compared = 0

    class Counted(str):
        def __getitem__(self, at: Any) -> str:
            nonlocal compared
            compared += 1
            return super().__getitem__(at)

    for size in (10, 1000, 100_000):
        partial = PartialMatches([Counted("ab" * size + "c"), Counted("b" * size)])
        compared = 0
        for _ in range(2000):
            partial.feed("ab")
        assert compared < 4 * 2 * 2 * 2000
        assert partial.feed("a") == min(4001, 2 * size - 1)


async def deltas(count: int, pause: float = 0) -> AsyncIterator[Delta]:
    for i in range(count):
        await asyncio.sleep(pause)
        yield Delta([i])


async def test_pump_coalesces_what_piled_up() -> None:
    pump = Pump(deltas(100))
    first = await pump.take()
    assert first is not None
    for _ in range(500):  # turns of the loop, however long they take
        await asyncio.sleep(0)
    rest = await pump.take()
    assert rest is not None
    assert [d.tokens[0] for d in first + rest] == list(range(100))
    assert len(rest) > 1
    assert await pump.take() is None
    await pump.close()


async def test_closing_the_pump_closes_the_source() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[Delta]:
        try:
            while True:
                yield Delta([1])
                await asyncio.sleep(0.01)
        finally:
            closed.set()

    pump = Pump(endless())
    await pump.take()
    await pump.close()
    assert closed.is_set()


async def test_pump_passes_errors_on_after_what_came_before() -> None:
    async def breaks() -> AsyncIterator[Delta]:
        yield Delta([1])
        raise RuntimeError("x")

    pump = Pump(breaks())
    assert await pump.take() == [Delta([1])]
    with pytest.raises(RuntimeError):
        await pump.take()
    await pump.close()


async def test_with_first_raises_early_errors_and_passes_late_ones_through() -> None:
    now = asyncio.Event()

    async def fails() -> AsyncIterator[bytes]:
        await now.wait()
        raise ValueError("no")
        yield b""

    late = await with_first(fails(), 0.01)
    now.set()
    with pytest.raises(ValueError):
        await with_first(fails(), 60)
    with pytest.raises(ValueError):
        await anext(late)


async def test_pace_is_free_for_a_few_and_bounded_for_many() -> None:
    pacer = Pacer()
    async with pacer.stream():
        assert pacer.interval == 0
        pacer.active = 64
        assert 0.01 <= pacer.interval < 0.015  # 64 streams of 120b on an H200 have a step in 15.2 ms
        pacer.active = 5000
        assert pacer.interval == Pacer.LONGEST
        pacer.active = 1
    assert pacer.active == 0


def test_lone_surrogates_can_be_written() -> None:
    assert sse.quote("a\ud800b") == b'"a?b"'
