"""What Prometheus reads: the engine's queue times, and memory as the account of `halfbyte.memory` has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from halfbyte import __version__
from halfbyte.engine.request import QUEUE_BUCKETS, EngineStats, SourceInfo
from halfbyte.gpu_sensor import Sample
from halfbyte.harmony.repairs import REPAIRS
from halfbyte.memory import GIB, MemoryState
from halfbyte.server.http import metrics
from halfbyte.server.http.metrics import EngineCollector, Metrics, TokenGaps


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


# ---- names are an interface: dashboards, rules and `halfbyte top` are built on them ---------------------------------

NAMES = Path(__file__).parent / "data" / "metrics.json"


class Everything(Source):
    """A source of which every metric can be made."""

    info = SourceInfo("m", 1, 1, (0,), {"device_id": "cuda:0"})

    def stats(self) -> EngineStats:
        return EngineStats(queue_seconds=1.0, queue_counts=(1,) * (len(QUEUE_BUCKETS) + 1))


def test_names_types_and_labels_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new metric is added to the committed list; one that is gone or renamed breaks what others have built."""
    monkeypatch.setattr(metrics, "nvml_sensor", lambda index: (lambda: Sample(0.0, 300.0, 1500, 60), 700.0))
    state = MemoryState(GIB, GIB, device_total=GIB, device_free=GIB, pressure=0.0)
    monkeypatch.setattr(metrics, "read_memory", lambda device: state)
    counts = Metrics(cast(Any, Everything()))
    counts.http("GET", "/", 200)
    counts.refused("queue")
    counts.repairs({"missing_end": 1})
    counts.finished("chat", "stop", prompt=1, cached=0, completion=1, reasoning=0)
    counts.latency(0.1, 0.2)
    counts.gaps.add(0.1, 1)
    found = {
        family.name: {
            "type": family.type,
            "labels": sorted({label for s in family.samples for label in s.labels} - {"le"}),
        }
        for family in text_string_to_metric_families(counts.render()[0].decode())
        if not family.name.endswith("_created")
    }
    assert found == json.loads(NAMES.read_text())


def test_a_card_whose_driver_says_its_power(monkeypatch: pytest.MonkeyPatch) -> None:
    sample: Sample | None = Sample(0.0, 312.5, 1980, 61)
    asked: list[int | None] = []

    def sensor(index: int | None) -> tuple[Any, float]:
        asked.append(index)
        return (lambda: sample), 700.0

    monkeypatch.setattr(metrics, "nvml_sensor", sensor)
    monkeypatch.setattr(metrics, "read_memory", lambda device: MemoryState(GIB, GIB))
    registry = CollectorRegistry()
    registry.register(EngineCollector(cast(Any, Source())))
    text = generate_latest(registry).decode()
    assert asked == [1]  # the engine's card and no other
    assert figure(text, "halfbyte_device_power_watts") == 312.5
    assert figure(text, "halfbyte_device_power_limit_watts") == 700.0
    assert figure(text, "halfbyte_device_clock_hertz") == 1.98e9
    sample = None  # the driver lost it
    assert figure(generate_latest(registry).decode(), "halfbyte_device_power_watts") is None


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    monkeypatch.setattr(metrics, "read_memory", lambda device: MemoryState(total=GIB, available=GIB))
    return Metrics(cast(Any, Source()), REPAIRS)


def test_every_token_counts(counts: Metrics) -> None:
    gaps = TokenGaps()
    gaps.add(0.004, 1)
    gaps.add(0.004, 4)  # four that came together
    gaps.add(5.0, 1)
    registry = CollectorRegistry()
    registry.register(gaps)
    text = generate_latest(registry).decode()
    assert 'halfbyte_inter_token_seconds_bucket{le="0.001"} 4.0' in text
    assert 'halfbyte_inter_token_seconds_bucket{le="0.005"} 5.0' in text
    assert 'halfbyte_inter_token_seconds_bucket{le="1"} 5.0' in text
    assert "halfbyte_inter_token_seconds_count 6.0" in text
    assert figure(text, "halfbyte_inter_token_seconds_sum") == pytest.approx(5.008)


def test_what_can_be_foreseen_is_there_as_zero(counts: Metrics) -> None:
    counts.expect("POST", "/v1/chat/completions")
    counts.expect_api("ollama")
    text = counts.render()[0].decode()
    for line in (
        'halfbyte_requests_finished_total{api="ollama",reason="error"} 0.0',
        'halfbyte_requests_refused_total{reason="queue"} 0.0',
        'halfbyte_http_requests_total{method="POST",route="/v1/chat/completions",status="503"} 0.0',
        "halfbyte_inter_token_seconds_count 0.0",
    ):
        assert line in text
    assert all(f'halfbyte_harmony_repairs_total{{kind="{kind}"}} 0.0' in text for kind in REPAIRS)


def test_what_runs_here(counts: Metrics) -> None:
    text = counts.render()[0].decode()
    assert f'version="{__version__}"}} 1.0' in text
    assert 'halfbyte_model_info{device="unknown",max_context="1",model="m"} 1.0' in text


@pytest.mark.parametrize(
    "accept",
    ["application/openmetrics-text; version=1.0.0,text/plain;q=0.5", "a, application/openmetrics-text;version=x"],
)
def test_openmetrics_for_those_who_ask(counts: Metrics, accept: str) -> None:
    page, content_type = counts.render(accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = {f.name: f for f in open_metrics_families(page.decode())}
    assert families["halfbyte_model"].type == "info"
    assert families["halfbyte_requests_finished"].type == "counter"
    assert families["halfbyte_inter_token_seconds"].type == "histogram"
    plain, content_type = counts.render("text/plain, */*")
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert not plain.decode().endswith("# EOF\n")
