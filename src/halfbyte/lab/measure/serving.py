"""A server under traffic, by a client's clock: streams that ask again as soon as they have their answer, and the first
minute after a cold start.

    python -m halfbyte.lab.measure.serving random:120b --preset fast --streams 1,8,32,64 [--out receipt.json]
    python -m halfbyte.lab.measure.serving random:120b --preset fast --first-minute 60
    python -m halfbyte.lab.measure.serving random:120b --streams 64 --flags="--max-tokens-beside-decode 2048"
    python -m halfbyte.lab.measure.serving --device cpu --streams 1,8 --vocab 1900

Starts `halfbyte serve` as a user does (or takes `--url`). Prompts are random and all different, so nothing is found in
a cache. Steady state leaves out the first wave, in which all streams begin at once. Gaps are those between two arrivals
of tokens on one stream after its first. The first minute mixes prompt lengths, ways of sampling and numbers of streams;
it begins when the server says ready. The last line is the receipt.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte import gates as gates_
from halfbyte.errors import EngineError, HalfbyteError, UsageError
from halfbyte.lab import environment, receipts
from halfbyte.lab.ceilings import Ceilings, ceilings_here, under
from halfbyte.lab.entry import finish, line_of, numbers
from halfbyte.lab.measure.event_stream import exchange, read_blocks
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.result import Cell, Check, Figure, Result, figure
from halfbyte.lab.statistics import quantile
from halfbyte.model import load

VOCAB = 190_000  # of random prompts: no special token of gpt-oss
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 1.0}, {"top_p": 0.9}, {"top_k": 40}, {"temperature": 0, "logprobs": 3},
    {"frequency_penalty": 0.2}, {"min_p": 0.05},
)  # fmt: skip
LENGTHS = (20, 200, 1100, 1100, 4000, 12000)
PREPARED = 20  # requests for each second of the first minute; what is asked beyond them is made on the way
LEVELS = (1, 2, 4, 8, 3, 16, 6, 32, 12, 64, 5, 24)  # streams at once, in turn


@dataclass
class Stream:
    """What one request's client saw; seconds since the beginning of the measurement."""

    sent: float
    tokens: int  # asked for
    blocks: list[tuple[float, bytes]] = field(default_factory=list)
    arrivals: list[tuple[float, float]] = field(default_factory=list)  # when, how many tokens
    error: str = ""

    def read(self) -> None:
        """After the measurement, which parsing would disturb."""
        if self.error:
            return
        try:
            reading = read_blocks(self.blocks)
        except EngineError as e:
            self.error = str(e)[:400]
            return
        self.arrivals = reading.arrivals
        if reading.completion_tokens != self.tokens:
            self.error = f"{reading.completion_tokens} of {self.tokens} tokens arrived"

    @property
    def first(self) -> float:
        return self.arrivals[0][0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b[0] - a[0] for a, b in itertools.pairwise(self.arrivals)]


# ---- what is asked; made before the server starts, because a client that makes prompts sees no token arrive ---------


def body_of(draw: random.Random, vocab: int, prompt: int, tokens: int, way: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": draw.choices(range(vocab), k=prompt), "max_tokens": tokens, "ignore_eos": True, **way}


def loops_of(vocab: int, streams: int, rounds: int, prompt: int, tokens: int) -> list[list[dict[str, Any]]]:
    """For each stream what it asks, one after the other."""
    draw = random.Random(streams)
    return [[body_of(draw, vocab, prompt, tokens, {"temperature": 0}) for _ in range(rounds)] for _ in range(streams)]


def mixture(vocab: int) -> Iterator[dict[str, Any]]:
    """Without an end: prompt lengths and ways of sampling by turns."""
    draw = random.Random(0)
    for way in itertools.cycle(WAYS):
        yield body_of(draw, vocab, draw.choice(LENGTHS), draw.choice((16, 64, 160)), way)


# ---- asking ---------------------------------------------------------------------------------------------------------


class Traffic:
    def __init__(self, url: str) -> None:
        self.client = HttpClient(url)
        self.begin = time.perf_counter()
        self.streams: list[Stream] = []

    def now(self) -> float:
        return time.perf_counter() - self.begin

    async def ask(self, body: dict[str, Any]) -> None:
        request = self.client.request("/v1/completions", body)
        link = await self.client.connect()
        stream = Stream(self.now(), body["max_tokens"])
        self.streams.append(stream)
        try:
            stream.blocks = await exchange(link, request, self.now)
        except EngineError as e:
            stream.error = str(e)[:400]

    async def closed_loop(self, loops: list[list[dict[str, Any]]]) -> None:
        async def one(bodies: list[dict[str, Any]]) -> None:
            for body in bodies:
                await self.ask(body)

        await asyncio.gather(*map(one, loops))

    async def mixed(self, seconds: float, bodies: Iterator[dict[str, Any]]) -> None:
        """Streams come and go so that every level of LEVELS is reached in turn."""
        tasks: set[asyncio.Task[None]] = set()
        each = seconds / len(LEVELS)
        while self.now() < seconds:
            while len(tasks) < LEVELS[min(int(self.now() / each), len(LEVELS) - 1)]:
                tasks.add(asyncio.create_task(self.ask(next(bodies))))
            done, tasks = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await asyncio.gather(*tasks)


def _summary(name: str, unit: str, value: float, values: list[float]) -> Figure:
    return Figure(name, unit, value, min(*values, value), max(*values, value), len(values))


def _errors(traffic: Traffic) -> Check:
    for stream in traffic.streams:
        stream.read()
    errors = [s.error for s in traffic.streams if s.error]
    return Check("every request had all of its tokens", not errors, len(errors), 0, note=errors[0] if errors else "")


def steady(cell: Cell, traffic: Traffic, streams: int, rounds: int, tokens: int) -> Result:
    """Between the end of the first wave and the time when the first stream has nothing more to ask."""
    errors = _errors(traffic)
    if not errors.ok:
        return Result(cell, checks=(errors,))
    all_streams = sorted(traffic.streams, key=lambda s: s.sent)
    waves = all_streams[streams:]  # without the first
    begin = max(s.arrivals[0][0] for s in all_streams[:streams]) if rounds > 1 else all_streams[0].sent
    end = max(s.sent for s in all_streams) if rounds > 1 else max(s.arrivals[-1][0] for s in all_streams)
    counted = sum(n for s in all_streams for at, n in s.arrivals if begin < at <= end)
    gaps = [g * 1000 for s in all_streams for (a, _), g in zip(s.arrivals[1:], s.gaps) if begin < a <= end]
    firsts = [s.first * 1000 for s in waves or all_streams]
    figures = (
        figure("speed", "tok/s", counted / (end - begin)),
        _summary("gap_p99", "ms", quantile(gaps, 0.99), gaps),
        _summary("gap_median", "ms", quantile(gaps, 0.5), gaps),
        _summary("first_token_p99", "ms", quantile(firsts, 0.99), firsts),
        _summary("first_token_median", "ms", quantile(firsts, 0.5), firsts),
    )
    return Result(cell, figures, (errors,), detail={"rounds": rounds, "seconds": end - begin, "tokens": tokens})


def first_minute(cell: Cell, traffic: Traffic, ready: float | None) -> Result:
    errors = _errors(traffic)
    if not errors.ok:
        return Result(cell, checks=(errors,))
    gaps = sorted(((g * 1000, a) for s in traffic.streams for (a, _), g in zip(s.arrivals[1:], s.gaps)), reverse=True)
    values, firsts = [g for g, _ in gaps], [s.first * 1000 for s in traffic.streams]
    figures = [
        _summary("gap_longest", "ms", values[0], values), _summary("gap_p99", "ms", quantile(values, 0.99), values),
        _summary("first_token_p99", "ms", quantile(firsts, 0.99), firsts),
    ]  # fmt: skip
    if ready is not None:
        figures.append(figure("ready", "s", ready))
    worst = [{"ms": round(g, 1), "at": round(a, 2)} for g, a in gaps[:20]]
    detail = {"requests": len(traffic.streams), "worst": worst, "slow_firsts": sorted(firsts)[-10:]}
    target = Check("no gap above 200 ms", values[0] <= 200, values[0], 200)
    return Result(cell, tuple(figures), (errors,), targets=(target,), detail=detail)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?")
    p.add_argument("--preset", default="exact")
    p.add_argument("--device")
    p.add_argument("--url")
    p.add_argument("--streams", type=numbers, default=[])
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--prompt", type=int, default=1100)
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--vocab", type=int, default=VOCAB, help="ids that random prompts are made of")
    p.add_argument("--first-minute", type=float, default=0.0, metavar="SECONDS")
    p.add_argument("--folder", type=Path, help="where the server's log is kept")
    p.add_argument("--flags", default="", help="more flags for halfbyte serve, as one word")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    if a.url is None and a.device != "cpu":
        environment.need_gpu()
    results = list[Result]()
    loops = {n: loops_of(a.vocab, n, a.rounds, a.prompt, a.tokens) for n in a.streams}
    flags = {"flags": a.flags} if a.flags else {}
    endless = mixture(a.vocab)
    made = list(itertools.islice(endless, int(a.first_minute * PREPARED)))
    mixed = itertools.chain(made, endless)

    def measure(url: str, ready: float | None, ceilings: Ceilings | None = None) -> None:
        base = Cell("serving", model=a.model or "", preset=a.preset, path="http")
        if a.first_minute:
            traffic = Traffic(url)
            asyncio.run(traffic.mixed(a.first_minute, mixed))
            cell = Cell("first minute", base.model, base.preset, path="http", shape={"seconds": a.first_minute} | flags)
            results.append(first_minute(cell, traffic, ready))
            print(line_of(results[-1]), flush=True)
        for streams, asked in loops.items():
            traffic = Traffic(url)
            asyncio.run(traffic.closed_loop(asked))
            shape = {"pp": a.prompt, "tg": a.tokens, "concurrency": streams} | flags
            cell = Cell("serving", base.model, base.preset, path="http", shape=shape)
            result = steady(cell, traffic, streams, a.rounds, a.tokens)
            limits = {"speed": ceilings.closed_loop(a.prompt, a.tokens, streams)} if ceilings else {}
            results.append(under(result, limits))
            print(line_of(results[-1]), flush=True)

    if not (a.first_minute or a.streams):
        print("nothing was asked for; give --streams or --first-minute.", file=sys.stderr)
        return UsageError.exit_code
    sources: dict[str, str] = {}  # of a server that runs elsewhere nobody knows them
    try:
        if a.url:
            measure(a.url, None)
        else:
            # Not before they are needed: with --url nothing is started.
            from halfbyte.lab.peers.halfbyte import HalfbytePeer
            from halfbyte.lab.peers.process import Limits, PeerProcess

            gates = gates_.parse(preset=a.preset)
            sources = receipts.served(a.model, [gates], a.device)
            ceilings = ceilings_here(load.resolve_model(a.model), gates, a.device)
            with tempfile.TemporaryDirectory() as scratch:
                setup = Setup(a.model, gates, a.device, flags=tuple(shlex.split(a.flags)))
                folder, limits = a.folder or Path(scratch), Limits(start_s=600.0)
                with PeerProcess(HalfbytePeer(), setup, folder, limits) as server:
                    measure(server.url, server.startup.healthy_s, ceilings)
    except HalfbyteError as e:
        print(f"serving: {e}", file=sys.stderr)
        return e.exit_code
    return finish("python -m halfbyte.lab.measure.serving", results, sources, a.out)


if __name__ == "__main__":
    sys.exit(main())
