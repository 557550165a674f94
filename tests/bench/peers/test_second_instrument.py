"""The real llama-benchy beside our client: its result, a disagreement, and both on a server of known speed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from typing import Any

import pytest

from bench.peers.relay import Relay
from bench.peers.second_instrument import SpeedReading, compare, read_benchy, read_streams, result_of, workload
from halfbyte.errors import PeerError, UsageError
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.measure.traffic import measure_traffic
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.result import Cell
from halfbyte.lab.served import serving
from halfbyte.lab.workloads.arrivals import ClosedLoop
from halfbyte.lab.workloads.workload import chat
from halfbyte.model import load
from tests.lab.measure.test_http_client import PacedServer, running

CELL = Cell("second instrument", "paced", shape={"pp": 32, "tg": 80})


class ChatServer(PacedServer):
    """Chat completions: a role at once, the first token after `first`, then chunks of four, each when it is due."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            return await self._whole(writer, {"data": [{"id": "paced"}]})
        size = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length"))
        body = json.loads(await reader.readexactly(size))
        start, count = time.perf_counter(), body["max_tokens"]
        if not body.get("stream"):
            usage = {"prompt_tokens": 9, "completion_tokens": count}
            return await self._whole(writer, {"choices": [{"message": {"content": "a"}}], "usage": usage})
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")

        async def send(event: Any, at: float) -> None:
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
            writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
            await writer.drain()

        await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "token_ids": []}]}, 0.0)
        sent = 0
        while sent < count:
            n = min(4 if sent else 1, count - sent)
            sent += n
            choice = {"index": 0, "delta": {"content": "a" * n}, "token_ids": [7] * n}
            await send({"choices": [choice]}, self.first + (sent - 1) * self.pace)
        await send({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": count}}, 0.0)
        await send(b"[DONE]", 0.0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def _whole(self, writer: asyncio.StreamWriter, answer: Any) -> None:
        body = json.dumps(answer).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        writer.write(head % len(body) + body)
        await writer.drain()
        writer.close()


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.skipif(importlib.util.find_spec("llama_benchy") is None, reason="llama-benchy is not installed")
def test_both_instruments_see_the_speed_of_a_known_server() -> None:
    """10 ms a token in chunks of four, half a second to the first: more than a busy machine is late."""
    with running(ChatServer(0.01, 0.5)) as url:
        results = compare(url, load.EMBEDDED, 32, 81, 3, 2, CELL)
    by_name = {(r.cell.shape["asked"], r.cell.path): r for r in results}
    for asked in ("same requests", "in turn"):
        speed, ttft = by_name[asked, "speed"], by_name[asked, "ttft"]
        assert speed.figure("speed").value == pytest.approx(100.0, rel=0.03)
        assert speed.figure("llama_benchy").value == pytest.approx(100.0, rel=0.03)
        assert ttft.figure("ttft").value == pytest.approx(500.0, rel=0.03)
        assert speed.targets[0].ok, speed.targets
        assert ttft.targets[0].ok or ttft.targets[0].note  # its own includes the connection, and says so


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.skipif(importlib.util.find_spec("llama_benchy") is None, reason="llama-benchy is not installed")
def test_both_instruments_on_the_embedded_model() -> None:
    """Of the same requests both say the same, however busy the machine is."""
    with serving("halfbyte", Setup(None, device="cpu"), print) as served:
        results = compare(served.url, load.EMBEDDED, 64, 48, 3, 2, Cell("second instrument", "tiny"))
    by_name = {(r.cell.shape["asked"], r.cell.path): r for r in results}
    assert by_name["same requests", "speed"].targets[0].ok, by_name["same requests", "speed"]
    assert all(r.targets[0].ok or r.targets[0].note for r in results)


def test_a_relay_changes_nothing_and_knows_when_everything_came() -> None:
    with running(ChatServer(0.01, 0.05)) as url, Relay(url) as relay:
        client = HttpClient(relay.url)
        result = measure_traffic(client, chat(1, 9), ClosedLoop(1, 2), CELL)
        assert client.model == "paced"
    assert result.figure("speed").value > 0
    asked, *streams = relay.streams  # the client asks first whether events name their tokens
    assert len(asked.read().tokens) == 2
    assert [s.read().tokens for s in streams] == [[7] * 9, [7] * 9]
    for stream in streams:
        times = [stream.sent, *(at for at, _ in stream.read().arrivals)]
        assert times == sorted(times)
        assert times[1] - times[0] >= 0.05  # the server's clock and ours are one
    seen = read_streams(streams)
    assert seen.ttft_ms >= 50.0
    assert 0 < seen.speed <= 110.0
    again = workload(streams, 9)  # the same prompts, and none of them in a cache
    for k, stream in enumerate(streams):
        (turn,) = again.session(k).turns
        first, *rest = turn.body["messages"]
        was, *others = stream.request["messages"]
        assert (first["content"], rest) == (f"[1] {was['content']}", others)
    with pytest.raises(UsageError, match="a relay needs an address"):
        Relay("unix:/socket")


def test_instruments_that_disagree_say_why() -> None:
    ours, theirs = [SpeedReading(100.0, 50.0)], [SpeedReading(101.0, 60.0)]
    close, far = (result_of("same requests", name, ours, theirs, CELL) for name in ("speed", "ttft"))
    assert close.targets[0].ok
    assert not far.targets[0].ok
    assert "connection" in far.targets[0].note
    assert "ran after the other" in result_of("in turn", "ttft", ours, theirs, CELL).targets[0].note
    assert far.figure("ratio").value == pytest.approx(50 / 60)


def test_a_result_of_another_form_is_one_sentence() -> None:
    good = {"benchmarks": [{"tg_throughput": {"mean": 5.0, "std": 0.1}, "e2e_ttft": {"mean": 20.0, "std": 1.0}}]}
    assert read_benchy(good).speed == 5.0
    for wrong in ({}, {"benchmarks": []}, {"benchmarks": [{"tg_throughput": None}]}):
        with pytest.raises(PeerError, match="llama-benchy has no figure"):
            read_benchy(wrong)
