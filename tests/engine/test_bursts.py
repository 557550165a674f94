"""Bursts of prompts on a device that only has costs: what a stream that speaks waits, and the last prompt."""

from __future__ import annotations

import itertools

import pytest
from timed_device import Ask, TimedDevice, play

from halfbyte.engine.bursts import NEWCOMERS, REMEMBERED_STEPS, UNREAD, Bursts
from halfbyte.engine.sizing import LARGE_GPU_ROWS_IN_BURST, LARGE_GPU_ROWS_WITH_DECODE
from halfbyte.lab.statistics import quantile

SHORT = {"max_rows_per_step": 8192, "max_rows_with_decode": LARGE_GPU_ROWS_WITH_DECODE}
LARGE_GPU = {**SHORT, "max_rows_in_burst": LARGE_GPU_ROWS_IN_BURST}


def mixed_rows(device: TimedDevice) -> list[int]:
    return [rows for rows, decoding in device.steps if rows > decoding > 0]


def burst(count: int, speaking: int, **limits: int) -> tuple[float, float, list[int]]:
    """The longest gap of any stream and the last first token, in ms, when `count` prompts come at once."""
    asks = [Ask(0.0, f"speaks {i}", tokens=600) for i in range(speaking)]
    asks += [Ask(300.0 + 0.3 * i, f"new {i}") for i in range(count)]
    streams, device = play(asks, max_seqs=count + speaking, **limits)
    gaps = [gap for stream in streams.values() for gap in stream.gaps]
    return max(gaps), max(s.first for id, s in streams.items() if id.startswith("new")), mixed_rows(device)


@pytest.mark.parametrize(("count", "speaking"), [(8, 1), (64, 0), (64, 1), (64, 8)])
def test_a_burst_is_read_at_once_and_no_stream_waits_long(count: int, speaking: int) -> None:
    gap, last, _ = burst(count, speaking, **LARGE_GPU)
    assert gap <= 80
    assert last <= min(1800, 45 * count)  # 25k tokens/s for the eight, 39k for all 64
    short_gap, short_last, _ = burst(count, speaking, **SHORT)
    assert short_gap < gap
    assert short_last > 1.3 * last


@pytest.mark.parametrize("speaking", [0, 1])
def test_a_second_burst_is_one_too(speaking: int) -> None:
    """Half a second after the last answer of the first one; without anybody who speaks the engine was idle."""
    asks = [Ask(0.0, f"speaks {i}", tokens=3000) for i in range(speaking)]
    asks += [Ask(at + 0.3 * i, f"{at:.0f} {i}") for at in (300.0, 7000.0) for i in range(64)]
    streams, _ = play(asks, max_seqs=64 + speaking, **LARGE_GPU)
    first, second = ([s for id, s in streams.items() if id.startswith(at)] for at in ("300 ", "7000 "))
    assert 300 < 7000 - max(s.tokens[-1] for s in first) < 2000
    assert max(s.first for s in second) <= 1800


def test_a_few_prompts_or_a_long_one_are_read_in_short_steps() -> None:
    assert max(burst(NEWCOMERS - 1, 1, **LARGE_GPU)[2]) <= LARGE_GPU_ROWS_WITH_DECODE
    streams, device = play([Ask(0.0, "speaks", tokens=900), Ask(300.0, "long", 40_000)], max_seqs=64, **LARGE_GPU)
    assert len(streams["long"].tokens) == 256
    assert max(mixed_rows(device)) == LARGE_GPU_ROWS_WITH_DECODE


def test_streams_that_ask_again_keep_their_short_gaps() -> None:
    """64 clients that begin at once: only the first round is a burst. Their prompts of the second one end within few
    steps, too, so that some large steps follow; fewer than one token in a hundred waits for one."""

    def again(id: str) -> str | None:
        turn, client = map(int, id.split("."))
        return f"{turn + 1}.{client}" if turn < 4 else None

    streams, _ = play([Ask(0.3 * i, f"0.{i}") for i in range(64)], max_seqs=64, again=again, **LARGE_GPU)
    begin = max(streams[f"0.{i}"].tokens[0] for i in range(64))
    end = max(stream.sent for stream in streams.values())
    pairs = [p for s in streams.values() for p in itertools.pairwise(s.tokens)]
    steady = [b - a for a, b in pairs if begin < b <= end]
    assert quantile(steady, 0.99) < 32
    assert max(steady) <= 80
    assert begin <= 1800
    later = [s.first for id, s in streams.items() if not id.startswith("0.")]
    assert quantile(later, 0.5) < 250
    assert max(later) < 2000


def test_a_full_engine_keeps_short_steps() -> None:
    """Requests that have no room, of slots or of pages, are no reason for larger steps."""
    asks = [Ask(0.0, f"first {i}", prompt=600, tokens=300) for i in range(16)]
    asks += [Ask(700.0 + i, f"queued {i}", prompt=1500, tokens=40 + i) for i in range(60)]
    _, device = play(asks, max_seqs=16, **LARGE_GPU)
    assert max(mixed_rows(device)[16:]) <= LARGE_GPU_ROWS_WITH_DECODE
    pages = 16 * 24
    _, device = play(asks, max_seqs=64, pages=pages, **LARGE_GPU)
    large = [rows for rows in mixed_rows(device) if rows > LARGE_GPU_ROWS_WITH_DECODE]
    assert len(large) < len(mixed_rows(device)) / 10


def test_what_counts_as_a_burst() -> None:
    bursts = Bursts()
    assert not bursts.now(NEWCOMERS - 1, NEWCOMERS - 1)
    assert bursts.now(NEWCOMERS, NEWCOMERS)
    bursts.step_launched(10)
    assert not bursts.now(10 + NEWCOMERS - 1, UNREAD - 1)
    assert bursts.now(10 + NEWCOMERS, NEWCOMERS)
    assert not bursts.now(10 + NEWCOMERS, NEWCOMERS - 1), "the others have their first token already"
    assert bursts.now(10, UNREAD)
    for _ in range(2 * REMEMBERED_STEPS):
        bursts.step_launched(2)
    assert bursts.now(2 + NEWCOMERS, NEWCOMERS), "ten streams were long ago"


def test_a_burst_never_has_fewer_rows() -> None:
    assert max(burst(64, 1, **SHORT)[2]) <= LARGE_GPU_ROWS_WITH_DECODE
    named = {**SHORT, "max_rows_with_decode": 1000, "max_rows_in_burst": 300}
    assert max(burst(16, 1, **named)[2]) == 1000
