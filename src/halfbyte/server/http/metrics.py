"""What Prometheus reads: latencies from the client's side of the engine, the engine's own counters, memory, repairs.

Gauges of the engine, of memory and of the card are read when scraped, never per token. The host's available memory is
always published, a GPU's only where the engine runs on one that has memory of its own, its power where the driver
says it. Every count that can be foreseen is there from the start, as a zero: a rate over a series that appears with its
first event misses that event.
"""

from __future__ import annotations

import bisect
import itertools
import platform
import time
from collections.abc import Iterable

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.registry import Collector

from halfbyte import __version__, log_lines
from halfbyte.engine.request import QUEUE_BUCKETS, EngineStats, TokenSource
from halfbyte.gpu_sensor import Sample, Sensor, nvml_sensor
from halfbyte.memory import MemoryState, read_memory

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text"
REASONS = ("cancelled", "error", "length", "mixed", "stop", "tool_calls")
REFUSALS = ("client", "draining", "memory", "not_ready", "queue")
# Of an answer to a body; the others have their first sample when they happen.
USUAL_STATUS = (200, 400, 429, 500, 503)
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


class EngineCollector(Collector):
    """The engine's counters and the host's memory at the moment of the scrape."""

    def __init__(self, source: TokenSource) -> None:
        self.source = source
        self.device: str = source.info.details.get("device_id", "cpu")
        device = torch.device(self.device)
        sensor = nvml_sensor(device.index) if device.type == "cuda" else None
        self.sensor: Sensor | None = None if sensor is None else sensor[0]
        self.power_limit: float | None = None if sensor is None else sensor[1]

    def collect(self) -> Iterable[Metric]:
        stats = self.source.stats()
        yield GaugeMetricFamily("halfbyte_ready", "1 while new requests are served.", float(self.source.ready))
        info = self.source.info
        build = {"version": __version__, "python": platform.python_version()}
        yield InfoMetricFamily("halfbyte_build", "What runs here.", value=build)
        model = {
            "model": info.model,
            "max_context": str(info.max_context),
            "device": str(info.details.get("device", "unknown")),
        }
        yield InfoMetricFamily("halfbyte_model", "What is served.", value=model)
        yield from self._engine(stats)
        yield from self._memory(read_memory(self.device))
        if self.sensor is not None and (sample := self.sensor()) is not None:
            yield from self._card(sample)

    def _engine(self, s: EngineStats) -> Iterable[Metric]:
        gauges = (
            ("halfbyte_requests_running", "Requests in the batch.", s.running),
            ("halfbyte_requests_waiting", "Requests in the engine's queue.", s.waiting),
            ("halfbyte_kv_pages", "Pages of the KV cache.", s.kv_pages_total),
            ("halfbyte_kv_pages_used", "Pages held by running requests.", s.kv_pages_used),
            ("halfbyte_kv_pages_cached", "Pages kept for prefix hits only.", s.kv_pages_cached),
            ("halfbyte_kv_use_ratio", "Share of the KV cache in use.", s.kv_pages_used / max(1, s.kv_pages_total)),
            (
                "halfbyte_prefix_hit_ratio",
                "Prompt tokens taken from the prefix cache over those looked up.",
                s.prefix_hit_tokens / max(1, s.prefix_query_tokens),
            ),
            (
                "halfbyte_speculation_acceptance_ratio",
                "Accepted over drafted tokens.",
                s.accepted_tokens / max(1, s.drafted_tokens),
            ),
            ("halfbyte_prefix_memory_bytes", "Prefixes held in host memory.", s.prefix_memory_bytes),
            ("halfbyte_prefix_disk_bytes", "Prefixes held in the prefix folder.", s.prefix_disk_bytes),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, float(value))
        counters = (
            ("halfbyte_prefix_hit_tokens", "Prompt tokens taken from the prefix cache.", s.prefix_hit_tokens),
            ("halfbyte_prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", s.prefix_query_tokens),
            ("halfbyte_prefix_skipped_pages", "Pages that were not stored, for want of time.", s.prefix_skipped_pages),
            ("halfbyte_prefix_damaged", "Pages and files of the prefix folder found damaged.", s.prefix_damaged),
            ("halfbyte_kv_checked_values", "Keys and values of an fp8 cache in filled pages.", s.kv_checked_values),
            ("halfbyte_kv_saturated_values", "Those of them at the end of fp8's range, 448.", s.kv_saturated_values),
            ("halfbyte_preemptions", "Requests put back for want of pages.", s.preemptions),
            ("halfbyte_engine_steps", "Steps of the engine.", s.steps),
            ("halfbyte_engine_generated_tokens", "Tokens the engine generated.", s.generated_tokens),
            ("halfbyte_engine_prompt_tokens", "Prompt tokens the engine took in.", s.prompt_tokens),
            ("halfbyte_drafted_tokens", "Speculative tokens proposed.", s.drafted_tokens),
            ("halfbyte_accepted_tokens", "Speculative tokens accepted.", s.accepted_tokens),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(name, text, float(value))
        restored = CounterMetricFamily(
            "halfbyte_prefix_restored_tokens", "Tokens brought up into KV pages, by tier.", labels=["tier"]
        )
        restored.add_metric(["memory"], float(s.prefix_memory_tokens))
        restored.add_metric(["disk"], float(s.prefix_disk_tokens))
        yield restored
        sums = [sum(s.queue_counts[: i + 1]) for i in range(len(s.queue_counts))]
        yield HistogramMetricFamily(
            "halfbyte_queue_time_seconds", "From a choice's arrival in the engine to its first being scheduled.",
            buckets=[(str(end), float(n)) for end, n in zip((*QUEUE_BUCKETS, "+Inf"), sums)], sum_value=s.queue_seconds,
        )  # fmt: skip

    def _memory(self, m: MemoryState) -> Iterable[Metric]:
        yield GaugeMetricFamily("halfbyte_memory_total_bytes", "Host memory (unified: the GPU's too).", float(m.total))
        yield GaugeMetricFamily(
            "halfbyte_memory_available_bytes", "MemAvailable, or a cgroup's rest.", float(m.available)
        )
        yield GaugeMetricFamily("halfbyte_swap_used_bytes", "Swap in use.", float(m.swap_used))
        yield GaugeMetricFamily("halfbyte_process_resident_bytes", "Resident set of this process.", float(m.resident))
        yield GaugeMetricFamily("halfbyte_memory_unified", "1 where GPU and host share one memory.", float(m.unified))
        if m.pressure is not None:
            yield GaugeMetricFamily("halfbyte_memory_pressure_ratio", "PSI memory, some, 10 s average.", m.pressure)
        if m.device_total is not None and m.device_free is not None:
            yield GaugeMetricFamily("halfbyte_device_memory_total_bytes", "GPU memory.", float(m.device_total))
            yield GaugeMetricFamily("halfbyte_device_memory_free_bytes", "Free GPU memory.", float(m.device_free))

    def _card(self, s: Sample) -> Iterable[Metric]:
        yield GaugeMetricFamily("halfbyte_device_power_watts", "What the GPU draws.", s.watts)
        if self.power_limit is not None:
            yield GaugeMetricFamily("halfbyte_device_power_limit_watts", "The most it may draw.", self.power_limit)
        yield GaugeMetricFamily("halfbyte_device_clock_hertz", "Clock of its multiprocessors.", s.mhz * 1e6)
        yield GaugeMetricFamily("halfbyte_device_temperature_celsius", "Of the GPU.", float(s.celsius))


class TokenGaps(Collector):
    """The time between two tokens of one choice, of every token that is not its choice's first.

    Tokens that came together share the time since those before. It is counted by hand: this is the one thing here that
    happens for every token.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.counts = [0] * (len(_ITL) + 1)

    def add(self, gap: float, tokens: int) -> None:
        self.seconds += gap
        self.counts[bisect.bisect_left(_ITL, gap / tokens)] += tokens

    def collect(self) -> Iterable[Metric]:
        sums = itertools.accumulate(self.counts)
        yield HistogramMetricFamily(
            "halfbyte_inter_token_seconds", "From a token to the next of the same choice, for every token.",
            buckets=[(str(end), float(n)) for end, n in zip((*_ITL, "+Inf"), sums)], sum_value=self.seconds,
        )  # fmt: skip


class Metrics:
    """One registry per application, so that tests and several servers in one process do not share counters."""

    def __init__(self, source: TokenSource, repairs: Iterable[str] = ()) -> None:
        """`repairs`: the kinds there are."""
        r = self.registry = CollectorRegistry()
        r.register(EngineCollector(source))
        self._http = Counter("halfbyte_http_requests", "HTTP answers.", ["method", "route", "status"], registry=r)
        self._finished = Counter("halfbyte_requests_finished", "Ended requests.", ["api", "reason"], registry=r)
        self._refused = Counter("halfbyte_requests_refused", "Refused before they ran.", ["reason"], registry=r)
        self._repairs = Counter("halfbyte_harmony_repairs", "Malformed harmony, repaired.", ["kind"], registry=r)
        self._prompt = Counter("halfbyte_prompt_tokens", "Prompt tokens served.", registry=r)
        self._cached = Counter("halfbyte_cached_prompt_tokens", "Of these, from the prefix cache.", registry=r)
        self._completion = Counter("halfbyte_completion_tokens", "Tokens generated for clients.", registry=r)
        self._reasoning = Counter("halfbyte_reasoning_tokens", "Of these, reasoning.", registry=r)
        self._reasoning_cuts = Counter(
            "halfbyte_reasoning_cuts", "Requests whose reasoning was ended by its limit.", registry=r
        )
        self.ttft = Histogram("halfbyte_time_to_first_token_seconds", "TTFT.", buckets=_LATENCY, registry=r)
        self.gaps = TokenGaps()
        r.register(self.gaps)
        self.e2e = Histogram("halfbyte_request_seconds", "Whole requests.", buckets=_LATENCY, registry=r)
        self.size = Histogram("halfbyte_request_completion_tokens", "Length.", buckets=_TOKENS, registry=r)
        self.active = Gauge("halfbyte_requests_active", "Requests the server has admitted.", registry=r)
        self.started = time.time()
        started = Gauge("halfbyte_start_time_seconds", "When the server started.", registry=r)
        started.set(self.started)
        for reason in REFUSALS:
            self._refused.labels(reason)
        for kind in repairs:
            self._repairs.labels(kind)

    def expect(self, method: str, route: str) -> None:
        """An endpoint that will be asked."""
        for status in USUAL_STATUS if method == "POST" else USUAL_STATUS[:1]:
            self._http.labels(method, route, str(status))

    def expect_api(self, api: str) -> None:
        """An API that will generate answers."""
        for reason in REASONS:
            self._finished.labels(api, reason)

    def http(self, method: str, route: str, status: int) -> None:
        self._http.labels(method, route, str(status or 499)).inc()

    def refused(self, reason: str) -> None:
        log_lines.note(refused=reason)
        self._refused.labels(reason).inc()

    def repairs(self, kinds: dict[str, int]) -> None:
        for kind, count in kinds.items():
            self._repairs.labels(kind).inc(count)

    def finished(
        self, api: str, reason: str, *, prompt: int, cached: int, completion: int, reasoning: int,
        reasoning_cut: bool = False,
    ) -> None:  # fmt: skip
        self._finished.labels(api, reason).inc()
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._completion.inc(completion)
        self._reasoning.inc(reasoning)
        self._reasoning_cuts.inc(reasoning_cut)
        self.size.observe(completion)
        log_lines.note(
            api=api, finish=reason, prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion,
            reasoning_tokens=reasoning,
        )  # fmt: skip
        if reasoning_cut:
            log_lines.note(reasoning_cut=True)

    def latency(self, first: float | None, total: float) -> None:
        self.e2e.observe(total)
        if first is not None:
            log_lines.note(first_token_ms=round(1000 * first, 1))
            self.ttft.observe(first)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics for those who ask for it."""
        if any(part.partition(";")[0].strip() == OPEN_METRICS for part in accept.split(",")):
            page = openmetrics_exposition.generate_latest(self.registry)  # type: ignore[no-untyped-call]
            return page, openmetrics_exposition.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE
