"""What Prometheus reads: the engine's queue times, and memory as the account of `halfbyte.memory` has it."""

from __future__ import annotations

from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from halfbyte.engine.request import QUEUE_BUCKETS, EngineStats, SourceInfo
from halfbyte.memory import GIB, MemoryState
from halfbyte.server.http import metrics
from halfbyte.server.http.metrics import EngineCollector


class Source:
    ready = True
    info = SourceInfo("m", 1, 1, (0,), {"device_id": "cuda:1"})

    def stats(self) -> EngineStats:
        return EngineStats(queue_seconds=12.5, queue_counts=(4, 2, 0, 0, 0, 0, 0, 0, 1))


def scrape(monkeypatch: pytest.MonkeyPatch, state: MemoryState, device: str = "cuda:1") -> str:
    monkeypatch.setattr(metrics, "read_memory", {device: state}.__getitem__)  # of the engine's device and no other
    registry = CollectorRegistry()
    registry.register(EngineCollector(cast(Any, Source())))
    return generate_latest(registry).decode()


def test_buckets_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    text = scrape(monkeypatch, MemoryState(total=GIB, available=GIB))
    assert 'halfbyte_queue_time_seconds_bucket{le="0.001"} 4.0' in text
    assert 'halfbyte_queue_time_seconds_bucket{le="0.005"} 6.0' in text
    assert f'halfbyte_queue_time_seconds_bucket{{le="{QUEUE_BUCKETS[-1]}"}} 6.0' in text
    assert 'halfbyte_queue_time_seconds_bucket{le="+Inf"} 7.0' in text
    assert "halfbyte_queue_time_seconds_count 7.0" in text
    assert "halfbyte_queue_time_seconds_sum 12.5" in text


def figure(text: str, name: str) -> float | None:
    return next((float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} ")), None)


@pytest.mark.parametrize(
    "state",
    [
        MemoryState(total=500 * GIB, available=9 * GIB, device_total=140 * GIB, device_free=139 * GIB),
        MemoryState(total=119 * GIB, available=110 * GIB, unified=True),
        MemoryState(total=256 * GIB, available=200 * GIB),
    ],
    ids=["discrete", "unified", "cpu"],
)
def test_memory_is_that_of_the_engines_device(state: MemoryState, monkeypatch: pytest.MonkeyPatch) -> None:
    text = scrape(monkeypatch, state)
    assert figure(text, "halfbyte_memory_available_bytes") == state.available
    assert figure(text, "halfbyte_memory_unified") == state.unified
    assert figure(text, "halfbyte_device_memory_free_bytes") == (None if state.shared else state.free)
    assert figure(text, "halfbyte_device_memory_total_bytes") == (None if state.shared else state.size)
