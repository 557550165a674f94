"""A device that only has costs: the engine's own core and scheduler run on it with a clock of their own.

The next step is queued while one runs. Costs are those of gpt-oss-120b on an H200, every layer MXFP4, at a depth of
some 1,200 tokens (docs/log/2026-11-16.md): steps that decode as measured at 1 to 64 rows; others 20.4 ms and 15.3 us a
row of a prompt, and 4 us more for each beyond 2048, which gives the measured 31, 51 and 170 ms of 704, 2048 and 8192.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from halfbyte.engine.batch import Batch
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.runner import StepResult

DECODE_MS = {0: 0.0, 1: 1.2, 8: 4.7, 32: 11.8, 64: 16.9}  # by rows
MIXED_MS, ROW_MS, LATER_ROW_MS, LATER = 20.4, 15.3e-3, 4e-3, 2048
LAUNCH_MS = {True: 0.5, False: 8.0}  # of the host: whether a step only decodes
CLIENT_MS = 5.0  # from a client's last token to the engine's knowing of its next request


def step_ms(rows: int, decoding: int) -> float:
    if rows > decoding:
        prompt = rows - decoding
        return MIXED_MS + ROW_MS * prompt + LATER_ROW_MS * max(0, prompt - LATER)
    known = sorted(DECODE_MS)
    high = min(bisect_right(known, rows), len(known) - 1)
    a, b = known[high - 1], known[high]
    return DECODE_MS[a] + (DECODE_MS[b] - DECODE_MS[a]) * (rows - a) / (b - a)


@dataclass
class _Handle:
    device: TimedDevice
    end: float
    sampled: int

    def result(self) -> StepResult:
        self.device.now = max(self.device.now, self.end)
        return StepResult([7] * self.sampled)


@dataclass
class TimedDevice:
    now: float = 0.0  # the host's clock, in ms
    free: float = 0.0
    steps: list[tuple[int, int]] = field(default_factory=list)  # rows, and those that decode

    def launch(self, batch: Batch) -> _Handle:
        starts = batch.query_start.tolist()
        decoding = sum(b - a == 1 for a, b in itertools.pairwise(starts))
        self.free = max(self.free, self.now) + step_ms(batch.rows, decoding)
        self.now += LAUNCH_MS[batch.rows == decoding]
        self.steps.append((batch.rows, decoding))
        return _Handle(self, self.free, len(batch.samplers))

    def close(self) -> None: ...


@dataclass
class Stream:
    sent: float
    tokens: list[float] = field(default_factory=list)  # when each arrived

    @property
    def first(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.tokens)]


@dataclass(order=True)
class Ask:
    at: float
    id: str
    prompt: int = 1100
    tokens: int = 256


def play(
    asks: list[Ask], *, pages: int = 20_000, again: Callable[[str], str | None] = lambda id: None, **limits: int
) -> tuple[dict[str, Stream], TimedDevice]:
    """Serve the requests; `again` names the next one of a client that has its answer."""
    device = TimedDevice()
    config = EngineConfig(pages=pages, prefix_cache=False, **limits)  # type: ignore[arg-type]
    core = EngineCore(device, config, clock=lambda: device.now / 1e3)  # type: ignore[arg-type]
    queue = sorted(asks)
    streams: dict[str, Stream] = {}
    while core.has_work or queue:
        if not core.has_work:
            device.now = max(device.now, queue[0].at)
        while queue and queue[0].at <= device.now:
            ask = heapq.heappop(queue)
            streams[ask.id] = Stream(ask.at)
            params = SamplingParams(temperature=0.0, max_tokens=ask.tokens, ignore_eos=True)
            core.submit(Request([5] * ask.prompt, params, id=ask.id))
        for id, delta in core.step():
            assert delta.error is None, delta.error
            streams[id].tokens += [device.now] * len(delta.tokens)
            if delta.finish is not None and (name := again(id)) is not None:
                heapq.heappush(queue, Ask(device.now + CLIENT_MS, name))
    core.check()
    return streams, device
