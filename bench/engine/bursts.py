"""Prompts that arrive at once while a stream speaks, over HTTP: the longest gap of any stream, the last first token.

    python -m bench run bursts --set streams=8,64 --set speaking=1
    python -m bench run bursts --set model= --set preset=exact --set device=cpu --set streams=4 --set prompt=200

Each round begins with streams that speak (`speaking` of the `streams`; 0: nobody does, and the first of the burst is
the first that does). PAUSE_S after all of them have had a token the prompts of the others are sent in the same moment.
All prompts are drawn before, are random and differ.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measurement import Run, measurement, option
from halfbyte import gates as gates_
from halfbyte.lab import receipts
from halfbyte.lab.measure.event_stream import StreamReading, exchange, read_blocks
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.peers.halfbyte import HalfbytePeer
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import PeerProcess, TimeLimits
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.lab.statistics import quantile
from halfbyte.model import load

COMPLETIONS = "/v1/completions"
PAUSE_S = 0.5
GAP_MS, LAST_MS = 150.0, 2000.0  # what 64 prompts of 1,100 tokens are held to on an H200


@dataclass(frozen=True)
class Options:
    model: str | None = option("random:120b", "empty: the embedded model")
    preset: str = "fast"
    device: str | None = None
    url: str | None = option(None, "a running server; empty: one is started")
    streams: tuple[int, ...] = option((8, 64), "streams in all, each of these; a server has 64 slots by itself")
    speaking: int = option(1, "of them speak before the others arrive")
    rounds: int = 3
    prompt: int = 1100
    tokens: int = 256
    longer: int = option(3000, "tokens of the streams that speak, which must outlast the burst")
    flags: str = option("", "more flags for halfbyte serve, as one word")


@dataclass
class Burst:
    """Milliseconds of one round."""

    gap: float  # the longest of any stream
    gap_of_speakers: float
    first_median: float
    first_last: float


async def play(client: HttpClient, prompts: list[list[int]], speaking: int, tokens: int, longer: int) -> Burst:
    """The first `speaking` prompts speak, for `longer` tokens; the others are the burst."""
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    await client.learn(COMPLETIONS, {"prompt": prompts[0][-8:]})
    counts = [longer if i < speaking else tokens for i in range(len(prompts))]
    requests = [
        client.request(COMPLETIONS, body | {"prompt": p, "max_tokens": n}) for p, n in zip(prompts, counts, strict=True)
    ]
    links = await asyncio.gather(*(client.connect() for _ in requests))
    sent: list[float] = []
    heard = [asyncio.Event() for _ in requests]

    def send(i: int) -> asyncio.Task[list[tuple[float, bytes]]]:
        def clock() -> float:  # asked for whenever something comes
            heard[i].set()
            return client.clock()

        sent.append(client.clock())
        return asyncio.create_task(exchange(links[i], requests[i], clock))

    tasks = [send(i) for i in range(speaking)]
    if speaking:
        await asyncio.gather(*(event.wait() for event in heard[:speaking]))
        await asyncio.sleep(PAUSE_S)
    tasks += [send(i) for i in range(speaking, len(requests))]
    readings = [read_blocks(blocks) for blocks in await asyncio.gather(*tasks)]
    for reading, count in zip(readings, counts, strict=True):
        if reading.completion_tokens != count:
            raise ValueError(f"{reading.completion_tokens} tokens came where {count} were asked for")
    firsts = [1e3 * (r.first - at) for r, at in zip(readings[speaking:], sent[speaking:])]
    began = sent[speaking]
    over = max(r.first for r in readings[speaking:])
    if any(r.last < over for r in readings[:speaking]):
        raise ValueError("a stream that spoke had ended before the last of the burst had its first token")
    return Burst(
        max(_gaps(r, began) for r in readings), max((_gaps(r, began) for r in readings[:speaking]), default=0.0),
        quantile(firsts, 0.5), max(firsts),
    )  # fmt: skip


def _gaps(reading: StreamReading, since: float) -> float:
    """The longest gap that ends after `since`, in ms."""
    times = [at for at, _ in reading.arrivals]
    return max((1e3 * (b - a) for a, b in itertools.pairwise(times) if b > since), default=0.0)


def measure(client: HttpClient, options: Options, vocab: int, label: str) -> list[Result]:
    results, draw = [], random.Random(0)
    for count in options.streams:
        rounds = []
        for _ in range(options.rounds):
            prompts = [draw.choices(range(vocab), k=options.prompt) for _ in range(count)]
            rounds.append(asyncio.run(play(client, prompts, options.speaking, options.tokens, options.longer)))
        shape = {"pp": options.prompt, "tg": options.tokens, "streams": count, "speaking": options.speaking}
        if options.flags:
            shape["flags"] = options.flags
        gap, last = max(r.gap for r in rounds), max(r.first_last for r in rounds)
        results.append(Result(
            Cell("burst", label, options.preset, path="http", shape=shape),
            (
                figure("gap_longest", "ms", [r.gap for r in rounds]),
                figure("gap_of_speakers", "ms", [r.gap_of_speakers for r in rounds]),
                figure("first_median", "ms", [r.first_median for r in rounds]),
                figure("first_last", "ms", [r.first_last for r in rounds]),
            ),
            targets=(
                Check(f"no gap above {GAP_MS:g} ms", gap <= GAP_MS, gap, GAP_MS),
                Check(f"the last first token within {LAST_MS:g} ms", last <= LAST_MS, last, LAST_MS),
            ),
        ))  # fmt: skip
    return results


@measurement("bursts", needs=("gpu",), seconds=180)
def bursts(run: Run, options: Options) -> None:
    gates = gates_.parse(preset=options.preset)
    name = load.resolve_model(options.model)
    vocab = load.config_of(name).vocab * 94 // 100  # no special token
    label = name.random or name.label
    if options.url:  # of a server that runs elsewhere the sources are unknown
        run.add(*measure(HttpClient(options.url), options, vocab, label))
        return
    client = receipts.sources_of([receipts.PACKAGE / "lab" / "measure" / "http_client.py"], ("lab",))
    run.sources |= receipts.served(options.model, [gates], options.device) | receipts.hashes(client)
    with tempfile.TemporaryDirectory() as scratch:
        setup = Setup(options.model, gates, options.device, flags=tuple(shlex.split(options.flags)))
        with PeerProcess(HalfbytePeer(), setup, Path(scratch), TimeLimits(start_s=600.0)) as server:
            run.add(*measure(HttpClient(server.url), options, vocab, label))
