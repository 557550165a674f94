"""The engine's queue times as a Prometheus histogram."""

from __future__ import annotations

from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest

from halfbyte.engine.request import QUEUE_BUCKETS, EngineStats
from halfbyte.server.http.metrics import EngineCollector


class Source:
    ready = True

    def stats(self) -> EngineStats:
        return EngineStats(queue_seconds=12.5, queue_counts=(4, 2, 0, 0, 0, 0, 0, 0, 1))


def test_buckets_add_up() -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(cast(Any, Source())))
    text = generate_latest(registry).decode()
    assert 'halfbyte_queue_time_seconds_bucket{le="0.001"} 4.0' in text
    assert 'halfbyte_queue_time_seconds_bucket{le="0.005"} 6.0' in text
    assert f'halfbyte_queue_time_seconds_bucket{{le="{QUEUE_BUCKETS[-1]}"}} 6.0' in text
    assert 'halfbyte_queue_time_seconds_bucket{le="+Inf"} 7.0' in text
    assert "halfbyte_queue_time_seconds_count 7.0" in text
    assert "halfbyte_queue_time_seconds_sum 12.5" in text
