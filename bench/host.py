"""Host work of the engine per step, and how much of it the running step hides.

    python bench/host.py [--steps 2000]

First part: a runner that answers at once, so a step is nothing but the engine's own work: schedule, build the batch,
commit, and encode the message for the client's process. Second part: a runner whose steps take a fixed time on a
thread of their own, like a device; the gaps between its steps are what the host failed to hide, with steps launched
ahead and without. Times are of this machine, so this is no test. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import queue
import statistics
import threading
import time

from halfbyte.engine import messages
from halfbyte.engine.batch import Batch
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.runner import StepResult


class Instant:
    """Every row samples token 7."""

    def launch(self, batch: Batch) -> Instant:
        self.answer = StepResult([7] * len(batch.samplers))
        return self

    def result(self) -> StepResult:
        return self.answer

    def close(self) -> None: ...


class Timed:
    """A device: runs steps in order, each for `seconds`, and remembers when."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.spans: list[tuple[float, float]] = []
        self._work: queue.SimpleQueue = queue.SimpleQueue()
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


def make(runner, batch: int, tokens: int, run_ahead: bool = True) -> EngineCore:
    config = EngineConfig(pages=200_000, max_seqs=max(64, batch), vocab=201088, run_ahead=run_ahead)
    core = EngineCore(runner, config)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i in range(batch):
        core.submit(Request([5 + i] * 200, params))
    while len(core.scheduler.running) < batch or any(s.generated < 2 for s in core.scheduler.running):
        core.step()
    return core


def host_work(batch: int, steps: int) -> dict[str, float]:
    core = make(Instant(), batch, steps + 200)
    times = []
    gc.collect()
    for _ in range(steps):
        start = time.perf_counter_ns()
        outputs = core.step()
        messages.frame(messages.Stepped(outputs, core.stats()))
        times.append((time.perf_counter_ns() - start) / 1000)
    times.sort()
    return {
        "batch": batch,
        "p50_us": round(statistics.median(times), 1),
        "p99_us": round(times[int(len(times) * 0.99)], 1),
        "per_sequence_us": round(statistics.median(times) / batch, 2),
    }


def overlap(batch: int, seconds: float, steps: int, run_ahead: bool) -> dict[str, float]:
    device = Timed(seconds)
    core = make(device, batch, steps + 200, run_ahead)
    device.spans.clear()
    for _ in range(steps):
        messages.frame(messages.Stepped(core.step(), core.stats()))
    gaps = [(b[0] - a[1]) * 1e6 for a, b in zip(device.spans, device.spans[1:])]
    zero = device.spans[0][0]
    trace = [[round((begin - zero) * 1e6), round((end - zero) * 1e6)] for begin, end in device.spans[:4]]
    idle = round(statistics.median(gaps), 1)
    return {"batch": batch, "step_us": seconds * 1e6, "ahead": run_ahead, "idle_p50_us": idle, "trace_us": trace}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    gc.freeze()
    work = [host_work(b, steps) for b in (1, 8, 64)]
    print(f"{'batch':>6} {'p50 µs':>9} {'p99 µs':>9} {'µs / sequence':>14}")
    for row in work:
        print(f"{row['batch']:>6} {row['p50_us']:>9} {row['p99_us']:>9} {row['per_sequence_us']:>14}")
    hidden = [overlap(b, s, 200, ahead) for b, s in ((1, 0.001), (64, 0.008)) for ahead in (True, False)]
    print("\ndevice idle between steps:")
    for row in hidden:
        how = "launched ahead" if row["ahead"] else "one at a time"
        steps_of = f"batch {row['batch']:>2}, steps of {row['step_us'] / 1000:.0f} ms, {how}"
        spans = ", ".join(f"{begin}..{end}" for begin, end in row["trace_us"])
        print(f"  {steps_of:<42} {row['idle_p50_us']:>8} µs   first steps, µs: {spans}")
    met = work[0]["p50_us"] <= 150 and work[2]["p50_us"] <= 1000
    print(f"\ntarget: p50 <= 150 µs at batch 1 and <= 1000 µs at batch 64: {'met' if met else 'MISSED'}")
    print(json.dumps({"bench": "host", "work": work, "overlap": hidden, "met": met}))


if __name__ == "__main__":
    main()
