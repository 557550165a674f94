"""What the HTTP front end costs: tokens from a scripted source, through the real server, to real clients.

    python -m bench run server

Concurrency 1: milliseconds added per token, against the source's own pace. Concurrency 64: tokens per second in all.
Server and client share the machine's cores, each in a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator

import psutil

from bench.measurement import Row, Run, measurement
from halfbyte.engine.request import Delta, EngineStats, Request, SourceHealth, SourceInfo, Usage
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, FigureCeiling, Result, figure
from halfbyte.model.tokenizer import Tokenizer

TOKENS = 400
STREAMS, STEP_S = 64, 0.005  # 12,800 tokens a second are offered


class PacedSource:
    """One step per tick for all streams, as an engine makes them; `pace` 0 means as fast as it is taken."""

    ready = True

    def __init__(self, pace: float) -> None:
        self.tokenizer = Tokenizer.gpt_oss()
        text = "The quick brown fox jumps over the lazy dog and runs away. " * 100
        head = self.tokenizer.encode("<|channel|>final<|message|>", allow_special=True)
        self.ids = (head + self.tokenizer.encode(text))[:TOKENS]
        self.pace = pace
        self.info = SourceInfo("bench", 131072, 201088, self.tokenizer.eos_tokens)
        self._tick: asyncio.Event = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    def stats(self) -> EngineStats:
        return EngineStats()

    def health(self) -> SourceHealth:
        return SourceHealth()

    async def close(self) -> None:
        pass

    async def _beat(self) -> None:
        due = time.perf_counter()
        while True:
            due += self.pace
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        if self.pace and self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._beat())
        ids = self.ids
        for at in range(len(ids)):
            await (self._tick.wait() if self.pace else asyncio.sleep(0))
            last = at == len(ids) - 1
            yield Delta(ids[at : at + 1], finish="length" if last else None, usage=Usage() if last else None)


def run_server(port: int, pace: float) -> None:
    """The server as `halfbyte serve` runs it, but for its engine."""
    from halfbyte.server.run import serve
    from halfbyte.server.settings import ServerSettings

    async def source() -> tuple[PacedSource, Tokenizer]:
        paced = PacedSource(pace)
        return paced, paced.tokenizer

    serve(ServerSettings(port=port, max_requests=2000, min_available_bytes=0), source)


BODY = json.dumps(
    {
        "model": "bench",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": TOKENS,
    }
).encode()


async def client(port: int) -> tuple[int, list[float]]:
    """One request over a raw socket: a client library would be the slowest part. Tokens and arrival times."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        "Connection: close",
    )
    writer.write("\r\n".join((*lines, f"Content-Length: {len(BODY)}", "", "")).encode() + BODY)
    data, times = b"", []
    while block := await reader.read(1 << 16):
        times.append(time.perf_counter())
        data += block
    writer.close()
    assert data.startswith(b"HTTP/1.1 200"), data[:200]
    at = data.rindex(b'"completion_tokens":') + len(b'"completion_tokens":')
    return int(data[at : data.index(b",", at)]), times


async def measure(port: int, concurrency: int, rounds: int) -> tuple[float, int, list[float]]:
    await client(port)
    tokens, gaps = 0, list[float]()
    start = time.perf_counter()
    for _ in range(rounds):
        for count, times in await asyncio.gather(*(client(port) for _ in range(concurrency))):
            tokens += count
            gaps += [b - a for a, b in itertools.pairwise(times)]
    return time.perf_counter() - start, tokens, gaps


def with_server(pace: float, concurrency: int, rounds: int) -> dict[str, float]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=run_server, args=(port, pace))
    process.start()
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
        server = psutil.Process(process.pid)
        before = server.cpu_times()
        seconds, tokens, gaps = asyncio.run(measure(port, concurrency, rounds))
        after = server.cpu_times()
        cpu = after.user + after.system - before.user - before.system
        return {
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "gap_ms": 1000 * statistics.median(gaps),
            "cpu_us": 1e6 * cpu / (tokens + TOKENS),  # the warm-up is in it
        }
    finally:
        process.terminate()
        process.join()


def measure_server() -> list[Result]:
    # One stream as fast as it goes: the whole of a token's time is the front end's.
    alone = with_server(0.0, 1, 10)
    figures = (
        figure("per_token", "ms", 1000 * alone["seconds"] / alone["tokens"]),
        figure("server_cpu", "us", alone["cpu_us"]),
    )
    results = [Result(Cell("front end", path="http", shape={"concurrency": 1}), figures)]
    many = with_server(STEP_S, STREAMS, 3)
    loaded = (
        figure("speed", "tok/s", many["tokens_per_s"], FigureCeiling(STREAMS / STEP_S, "what the source offers")),
        figure("server_cpu", "us", many["cpu_us"]),
        figure("chunk_every", "ms", many["gap_ms"]),
    )
    return [*results, Result(Cell("front end", path="http", shape={"concurrency": STREAMS}), loaded)]


@measurement(
    "server", seconds=120,
    rows=(
        Row("server in front of a scripted source, per token at 1 stream", "front end", "per_token", path="http",
            shape={"concurrency": 1}),
        Row("server in front of a scripted source, 64 streams", "front end", "speed", path="http",
            shape={"concurrency": 64}),
    ),
)  # fmt: skip
def server(run: Run) -> None:
    front_end = receipts.sources_of([receipts.PACKAGE / "server" / "app.py"], ("server", "harmony"))
    run.sources |= receipts.hashes(front_end)
    run.add(*measure_server())
