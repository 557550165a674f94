"""The HTTP client: calibrated against a server of known pace, and what it makes of an event stream cut anywhere."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from halfbyte.errors import EngineError, InvalidFigureError, UsageError
from halfbyte.lab.measure.engine_timing import TimedWork, time_work
from halfbyte.lab.measure.event_stream import read_blocks
from halfbyte.lab.measure.http_client import HttpClient


def event(tokens: list[int], **more: Any) -> bytes:
    return (
        b"data: " + json.dumps({"choices": [{"index": 0, "text": "", "token_ids": tokens}], **more}).encode() + b"\n\n"
    )


def end(tokens: int, cached: int = 0) -> bytes:
    usage = {"completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"


class PacedServer:
    """Answers /v1/completions with a token every `pace` seconds, by an absolute schedule, in chunks of two tokens."""

    def __init__(self, pace: float, first: float) -> None:
        self.pace, self.first, self.bodies = pace, first, list[dict[str, Any]]()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models"):
            body = json.dumps({"data": [{"id": "paced"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
            await writer.drain()
            writer.close()
            return
        size = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length"))
        request = json.loads(await reader.readexactly(size))
        self.bodies.append(request)
        start = time.perf_counter()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

        async def send(data: bytes, at: float) -> None:
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
            await writer.drain()

        count, sent = request["max_tokens"], 1
        await send(event([7]), self.first)
        while sent < count:
            n = min(2, count - sent)
            sent += n
            await send(event([7] * n), self.first + (sent - 1) * self.pace)
        await send(end(count), 0.0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()


@contextmanager
def running(server: PacedServer) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listening.close()
        loop.run_until_complete(loop.shutdown_asyncgens())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.close()


def test_a_server_of_known_speed() -> None:
    """20 ms a token, two tokens a chunk: 50 tokens a second, whatever the chunks; first tokens after 100 ms."""
    server = PacedServer(0.02, 0.1)
    with running(server) as url:
        client = HttpClient(url)
        assert client.model == "paced"
        decode = time_work(client, TimedWork(tokens=21, concurrency=2), 1000, repeats=1)
        prompt = time_work(client, TimedWork(prompt=64), 1000, repeats=1)
    assert decode.rates == pytest.approx([100.0], rel=0.15)
    assert prompt.first == pytest.approx([0.1], rel=0.3)
    body = server.bodies[-1]
    assert len(body["prompt"]) == 64
    assert body["ignore_eos"]
    assert body["temperature"] == 0


def test_events_may_be_cut_anywhere() -> None:
    whole = event([1, 2]) + event([]) + event([3]) + end(3, 64)
    for cut in range(1, len(whole)):
        answer = read_blocks([(1.0, whole[:cut]), (2.0, whole[cut:])])
        assert answer.tokens == [1, 2, 3]
        assert answer.cached == 64
        assert sum(n for _, n in answer.arrivals) == 3


def test_usage_that_comes_with_the_last_event_is_spread_over_all() -> None:
    """As llama.cpp has it: no ids, and the count of all tokens beside the last choice."""

    def piece(text: str, finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": finish}
        return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"

    blocks = [(0.1, piece("a")), (0.2, piece("b")), (0.3, piece("")), (0.4, piece("d"))]
    answer = read_blocks([*blocks, (0.4, piece("", "length", usage={"completion_tokens": 4, "prompt_tokens": 8}))])
    assert answer.counted_by == "spread"
    assert answer.arrivals == [(0.1, 1.0), (0.2, 1.0), (0.3, 1.0), (0.4, 1.0)]  # the third has no letters
    with pytest.raises(EngineError, match="40 tokens came in 1 events"):
        read_blocks([(0.1, piece("a")), (0.2, piece("", "length", usage={"completion_tokens": 40}))])


def test_what_the_server_says_is_held_against_what_it_sent() -> None:
    with pytest.raises(InvalidFigureError, match="counts 4 tokens and sent 3"):
        read_blocks([(1.0, event([1, 2, 3]) + end(4))])
    with pytest.raises(EngineError, match="counts None"):
        read_blocks([(1.0, event([1]))])
    with pytest.raises(EngineError, match="out of pages"):
        read_blocks([(1.0, b'data: {"error": {"message": "out of pages"}}\n\n')])


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "http://127.0.0.1:1"])
def test_no_server_is_one_sentence(url: str) -> None:
    with pytest.raises(UsageError, match=r"--url takes|does not answer"):
        HttpClient(url)
