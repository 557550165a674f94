"""Streams in a closed loop on a device that only has costs: what an order of steps can gain, without a GPU.

    python -m bench.experiments.simulated_streams [--beside 832,1024,2048] [--decode 16.9] [--mixed 20.4] [--row 15.3]

The engine's own core and scheduler serve `--streams` that ask again as soon as they have their answer. Nothing is
computed: a step of one row for each of N sequences takes what DECODE says (--decode for 64 rows), any other --mixed
milliseconds and --row microseconds for each row of a prompt, and the next is queued while it runs. The defaults are
gpt-oss-120b's on an H200 at a depth of 1,230 tokens (docs/LOG.md, what an order of steps can gain).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from bisect import bisect_right
from dataclasses import dataclass, field

from halfbyte.engine.batch import Batch
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.runner import StepResult
from halfbyte.lab.entry import numbers
from halfbyte.lab.statistics import quantile

DECODE = {0: 0.0, 1: 1.3, 8: 4.7, 32: 11.8, 64: 16.9}  # rows -> ms
LAUNCH_MS = {True: 0.5, False: 4.0}  # of the host, for a graph and for a mixed step
WAY_MS = 5.0  # from a client's last token to the engine's knowing of its next request


@dataclass(frozen=True)
class Costs:
    decode: dict[int, float]
    mixed: float  # ms
    row: float  # us

    def step(self, rows: int, singles: int) -> float:
        """Milliseconds."""
        if rows > singles:
            return self.mixed + (rows - singles) * self.row / 1e3
        known = sorted(self.decode)
        high = min(bisect_right(known, rows), len(known) - 1)
        a, b = known[high - 1], known[high]
        return self.decode[a] + (self.decode[b] - self.decode[a]) * (rows - a) / (b - a)


class Handle:
    def __init__(self, device: Device, end: float, sampled: int) -> None:
        self.device, self.end, self.sampled = device, end, sampled

    def result(self) -> StepResult:
        self.device.now = max(self.device.now, self.end)
        return StepResult([7] * self.sampled)


@dataclass
class Device:
    """Runs one step after the other; `now` is the host's clock in milliseconds."""

    costs: Costs
    now: float = 0.0
    free: float = 0.0
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # begun at, rows, rows that decode

    def launch(self, batch: Batch) -> Handle:
        starts = batch.query_start.tolist()
        singles = sum(b - a == 1 for a, b in itertools.pairwise(starts))
        begin = max(self.free, self.now)
        self.free = begin + self.costs.step(batch.rows, singles)
        self.now += LAUNCH_MS[batch.rows == singles]
        self.steps.append((begin, batch.rows, singles))
        return Handle(self, self.free, len(batch.samplers))

    def close(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """Of the steady state: from the first token of the last stream to the last request."""

    speed: float  # tokens/s
    gap_p99: float  # ms, as the next three
    gap_median: float
    first_median: float
    first_p99: float
    mixed: int  # steps
    rows: float  # of prompts, in each of them


def simulate(
    costs: Costs, beside: int, streams: int = 64, rounds: int = 6, prompt: int = 1100, tokens: int = 256
) -> Outcome:
    device = Device(costs)
    pages = streams * (-(-(prompt + tokens) // 64) + 2) * 4
    config = EngineConfig(pages=pages, max_seqs=streams, max_tokens=8192, beside_decode=beside, prefix_cache=False)
    core = EngineCore(device, config)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    asking = [(0.3 * i, i, 0) for i in range(streams)]  # when, who, for which time
    sent: dict[str, float] = {}
    arrived: dict[str, list[float]] = {}
    while core.has_work or asking:
        if not core.has_work:
            device.now = max(device.now, asking[0][0])
        while asking and asking[0][0] <= device.now:
            at, stream, turn = heapq.heappop(asking)
            id = f"{turn}.{stream}"
            sent[id], arrived[id] = at, []
            core.submit(Request([5] * prompt, params, id=id))
        for id, delta in core.step():
            assert delta.error is None, delta.error
            arrived[id] += [device.now] * len(delta.tokens)
            turn, stream = map(int, id.split("."))
            if delta.finish is not None and turn + 1 < rounds:
                heapq.heappush(asking, (device.now + WAY_MS, stream, turn + 1))
    begin, end = max(arrived[f"0.{i}"][0] for i in range(streams)), max(sent.values())
    steady = [at for times in arrived.values() for at in times if begin < at <= end]
    gaps = [b - a for times in arrived.values() for a, b in itertools.pairwise(times) if begin < b <= end]
    firsts = [times[0] - sent[id] for id, times in arrived.items() if not id.startswith("0.")]
    mixed = [rows - singles for at, rows, singles in device.steps if begin < at <= end and rows > singles]
    return Outcome(
        1e3 * len(steady) / (end - begin), quantile(gaps, 0.99), quantile(gaps, 0.5), quantile(firsts, 0.5),
        quantile(firsts, 0.99), len(mixed), sum(mixed) / len(mixed),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--beside", type=numbers, default=[614, 832, 896, 1024, 1163, 2048], help="rows of a mixed step"
    )
    parser.add_argument("--decode", type=float, default=DECODE[64], help="ms of a step of 64 rows")
    parser.add_argument("--mixed", type=float, default=20.4, help="ms of a mixed step without its rows")
    parser.add_argument("--row", type=float, default=15.3, help="us of each row of a prompt")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=1100)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    costs = Costs(DECODE | {64: args.decode}, args.mixed, args.row)
    shape = args.streams, args.rounds, args.prompt, args.tokens
    print("  rows  tokens/s  gap p99  median  first token   p99  mixed steps   rows")
    for beside in args.beside:
        o = simulate(costs, beside, *shape)
        print(
            f"{beside:6}{o.speed:10.0f}{o.gap_p99:9.1f}{o.gap_median:8.1f}{o.first_median:13.0f}{o.first_p99:6.0f}"
            f"{o.mixed:13}{o.rows:7.0f}", flush=True,
        )  # fmt: skip
    free = args.tokens * costs.step(args.streams, args.streams) + args.streams * args.prompt * args.row / 1e3
    print(f"if mixing cost nothing and nobody ever waited: {1e3 * args.streams * args.tokens / free:.0f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
