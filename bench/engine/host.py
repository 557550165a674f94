"""Host work of the engine per step, and how much of it the running step hides.

    python -m bench run host --set steps=2000

First part: a runner that answers at once, so a step is nothing but the engine's own work: schedule, build the batch,
commit, and encode the message for the client's process. Second part: a runner whose steps take a fixed time on a
thread of their own, like a device; the gaps between its steps are what the host failed to hide, with steps launched
ahead and without. Times are of this machine, so this is no test.
"""

from __future__ import annotations

import gc
import itertools
import queue
import statistics
import threading
import time
from dataclasses import dataclass

from bench.measurement import Row, Run, measurement, option
from halfbyte.engine import messages
from halfbyte.engine.batch import Batch
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.runner import ModelRunner, StepResult
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Check, Result, figure

LIMITS_US = {1: 150.0, 64: 1000.0}  # what the engine's host work should stay within, by batch


class Instant:
    """Every row samples token 7."""

    def launch(self, batch: Batch) -> Instant:
        self.answer = StepResult([7] * len(batch.samplers))
        return self

    def result(self) -> StepResult:
        return self.answer

    def close(self) -> None: ...


class TimedDevice:
    """A device: runs steps in order, each for `seconds`, and remembers when."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.spans: list[tuple[float, float]] = []
        self._work: queue.SimpleQueue[tuple[int, threading.Event, list[StepResult]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            rows, done, out = self._work.get()
            start = time.perf_counter()
            time.sleep(self.seconds)
            self.spans.append((start, time.perf_counter()))
            out.append(StepResult([7] * rows))
            done.set()

    def launch(self, batch: Batch) -> _Pending:
        pending = _Pending()
        self._work.put((len(batch.samplers), pending.done, pending.out))
        return pending

    def close(self) -> None: ...


class _Pending:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.out: list[StepResult] = []

    def result(self) -> StepResult:
        self.done.wait()
        return self.out[0]


def make(runner: ModelRunner, batch: int, tokens: int, run_ahead: bool = True) -> EngineCore:
    config = EngineConfig(pages=200_000, max_seqs=max(64, batch), vocab=201088, run_ahead=run_ahead)
    core = EngineCore(runner, config)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i in range(batch):
        core.submit(Request([5 + i] * 200, params))
    while len(core.scheduler.running) < batch or any(s.num_generated_tokens < 2 for s in core.scheduler.running):
        core.step()
    return core


def host_work(batch: int, steps: int) -> list[float]:
    """Microseconds of every step."""
    core = make(Instant(), batch, steps + 200)
    times = []
    gc.collect()
    for _ in range(steps):
        start = time.perf_counter_ns()
        outputs = core.step()
        messages.frame(messages.Stepped(outputs, core.stats()))
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


def overlap(batch: int, seconds: float, steps: int, run_ahead: bool) -> tuple[list[float], list[list[int]]]:
    """(microseconds between the device's steps, begin and end of the first ones)."""
    device = TimedDevice(seconds)
    core = make(device, batch, steps + 200, run_ahead)
    device.spans.clear()
    for _ in range(steps):
        messages.frame(messages.Stepped(core.step(), core.stats()))
    gaps = [max(0.0, (b[0] - a[1]) * 1e6) for a, b in itertools.pairwise(device.spans)]
    zero = device.spans[0][0]
    return gaps, [[round((begin - zero) * 1e6), round((end - zero) * 1e6)] for begin, end in device.spans[:4]]


def measure_host(steps: int) -> list[Result]:
    gc.freeze()
    results = []
    for batch in (1, 8, 64):
        times = host_work(batch, steps)
        targets: tuple[Check, ...] = ()
        if batch in LIMITS_US:
            median = statistics.median(times)
            targets = (Check(f"at most {LIMITS_US[batch]:g} us", median <= LIMITS_US[batch], median, LIMITS_US[batch]),)
        cell = Cell("host work", path="engine", shape={"concurrency": batch})
        p99 = sorted(times)[int(len(times) * 0.99)]
        results.append(Result(cell, (figure("step", "us", times), figure("p99", "us", p99)), targets=targets))
    for batch, seconds in ((1, 0.001), (64, 0.008)):
        for ahead in (True, False):
            gaps, spans = overlap(batch, seconds, 200, ahead)
            shape = {"concurrency": batch, "step_us": seconds * 1e6, "launched": "ahead" if ahead else "one at a time"}
            cell = Cell("idle between steps", path="engine", shape=shape)
            results.append(Result(cell, (figure("idle", "us", gaps),), detail={"first_steps_us": spans}))
    return results


@dataclass(frozen=True)
class Options:
    steps: int = option(2000, "timed steps")


@measurement(
    "host", seconds=120,
    rows=(Row("host work per step at 1 / 64 streams", "host work", "step", path="engine", over="concurrency",
              values=(1, 64)),),
)  # fmt: skip
def host(run: Run, options: Options) -> None:
    run.sources |= receipts.hashes(receipts.sources_of([receipts.PACKAGE / "engine" / "engine.py"], ("engine", "kv")))
    run.add(*measure_host(options.steps))
