"""A server under traffic, by a client's clock: streams that ask again as soon as they have their answer, and the first
minute after a cold start.

    python -m bench run serving --set streams=1,8,32,64
    python -m bench run serving --set streams=64 --set "flags=--max-tokens-beside-decode 2048"
    python -m bench run serving --set model= --set preset=exact --set device=cpu --set streams=1,8
    python -m bench run first-minute

Starts `halfbyte serve` as a user does, or takes `url`. `halfbyte.lab.measure.traffic` plays the load and reads the
answers: prompts are random and all different, and a closed loop counts its steady state. The first minute mixes prompt
lengths, ways to sample and numbers of streams, and begins when the server says ready.
"""

from __future__ import annotations

import itertools
import random
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.measurement import Row, Run, measurement, option
from halfbyte import gates as gates_
from halfbyte.errors import UsageError
from halfbyte.lab import receipts
from halfbyte.lab.ceilings import ceilings_here, under
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.measure.traffic import measure_traffic, sessions_of
from halfbyte.lab.peers.halfbyte import HalfbytePeer
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import PeerProcess, TimeLimits
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.lab.workloads.arrivals import ClosedLoop, Staircase
from halfbyte.lab.workloads.workload import COMPLETIONS, Session, Turn, Workload, synthetic
from halfbyte.model import load

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 1.0}, {"top_p": 0.9}, {"top_k": 40}, {"temperature": 0, "logprobs": 3},
    {"frequency_penalty": 0.2}, {"min_p": 0.05},
)  # fmt: skip
LENGTHS = (20, 200, 1100, 1100, 4000, 12000)
LEVELS = (1, 2, 4, 8, 3, 16, 6, 32, 12, 64, 5, 24)  # streams at once, in turn
PREPARED = 20  # requests for each second of the first minute, drawn before it begins
GAP_MS = 200.0


@dataclass(frozen=True)
class Options:
    model: str | None = option("random:120b", "empty: the embedded model")
    preset: str = "fast"
    device: str | None = None
    url: str | None = option(None, "a running server; empty: one is started")
    streams: tuple[int, ...] = option((1, 8, 32, 64), "closed loops of so many streams")
    rounds: int = option(6, "requests of each stream")
    prompt: int = 1100
    tokens: int = 256
    first_minute: float = option(0.0, "seconds of mixed traffic after a cold start, before the loops")
    folder: Path | None = option(None, "where the server's log is kept; empty: nowhere")
    flags: str = option("", "more flags for halfbyte serve, as one word")


def mixture(vocab: int, longest: int, prepared: int) -> Workload:
    """Prompt lengths and ways to sample in turn, each a session of one request."""
    lengths = [n for n in LENGTHS if n < longest] or [longest // 2]

    def drawn() -> Iterator[Session]:
        draw = random.Random(0)
        for way in itertools.cycle(WAYS):
            tokens = draw.choice((16, 64, 160))
            body = {"prompt": draw.choices(range(vocab), k=draw.choice(lengths)), "ignore_eos": True, **way}
            yield Session((Turn(COMPLETIONS, body, tokens),))

    endless = drawn()
    sessions = list(itertools.islice(endless, prepared))  # a client that draws prompts sees no token arrive

    def session(k: int) -> Session:
        while k >= len(sessions):
            sessions.append(next(endless))
        return sessions[k]

    return Workload("mixture", session)


def first_minute(result: Result, ready: float | None) -> Result:
    """With the time to be ready, and a bound on the longest gap between two tokens."""
    if result.refused:
        return result
    figures = result.figures if ready is None else (*result.figures, figure("ready", "s", ready))
    longest = result.figure("gap_longest").value
    target = Check(f"no gap above {GAP_MS:g} ms", longest <= GAP_MS, longest, GAP_MS)
    return replace(result, figures=figures, targets=(*result.targets, target))


BASE: dict[str, Any] = {"path": "http", "model": "120b", "preset": "fast"}


@measurement(
    "first-minute",
    needs=("gpu",),
    seconds=240,
    first_minute=60.0,
    streams=(),
    rows=(
        Row(
            "longest gap between tokens in the first minute of mixed traffic after ready",
            "first minute",
            "gap_longest",
            **BASE,
        ),
        Row("from nothing to ready, random weights, warm-up included", "first minute", "ready", headline=True, **BASE),
    ),
)
@measurement(
    "serving", needs=("gpu",), seconds=240,
    rows=(Row("closed loop over HTTP, 1100 in, 256 out, total at 1 / 8 / 32 / 64 streams", "serving", "speed",
              headline=True, shape={"pp": 1100, "tg": 256}, over="concurrency", values=(1, 8, 32, 64), **BASE),),
)  # fmt: skip
def serving(run: Run, options: Options) -> None:
    if not (options.first_minute or options.streams):
        raise UsageError("nothing to measure: set streams or first_minute.")
    gates = gates_.parse(preset=options.preset)
    name = load.resolve_model(options.model)
    config = load.config_of(name)
    prepared = int(options.first_minute * PREPARED)
    mixed = (
        mixture(
            config.vocab * 94 // 100,  # no special token
            config.max_context // 2,
            prepared,
        )
        if prepared
        else None
    )
    loops = [ClosedLoop(n, n * options.rounds) for n in options.streams]
    cell = Cell("serving", name.random or name.label, options.preset, path="http")
    flags = {"flags": options.flags} if options.flags else {}

    def measure(url: str, ready: float | None) -> None:
        client = HttpClient(url)
        if mixed is not None:
            case = replace(cell, kind="first minute", shape={"seconds": options.first_minute} | flags)
            stairs = Staircase(LEVELS, options.first_minute)
            played = measure_traffic(client, mixed, stairs, case)
            run.add(first_minute(played, ready))
        work, seen = synthetic(options.prompt, options.tokens, config.vocab), 0
        for loop in loops:
            case = replace(cell, shape={"pp": options.prompt, "tg": options.tokens, **loop.shape} | flags)
            result = measure_traffic(client, work.after(seen), loop, case)
            seen += sessions_of(loop)
            if ceilings is not None:
                result = under(result, {"speed": ceilings.closed_loop(options.prompt, options.tokens, loop.streams)})
            run.add(result)

    ceilings = None if options.url else ceilings_here(name, gates, options.device)
    if options.url:  # of a server that runs elsewhere the sources are unknown
        measure(options.url, None)
        return
    client = receipts.sources_of([receipts.PACKAGE / "lab" / "measure" / "traffic.py"], ("lab",))
    run.sources |= receipts.served(options.model, [gates], options.device) | receipts.hashes(client)
    with tempfile.TemporaryDirectory() as scratch:
        setup = Setup(options.model, gates, options.device, flags=tuple(shlex.split(options.flags)))
        with PeerProcess(HalfbytePeer(), setup, options.folder or Path(scratch), TimeLimits(start_s=600.0)) as server:
            measure(server.url, server.startup.healthy_s)
