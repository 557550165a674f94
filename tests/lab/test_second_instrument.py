"""The real llama-benchy beside our client: its result, a disagreement, and both on a server of known speed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from typing import Any

import pytest

from halfbyte.errors import PeerError
from halfbyte.lab.result import Cell
from halfbyte.lab.second_instrument import compare, read_benchy, results_of, workload
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
    """10 ms a token in chunks of four, 200 ms to the first."""
    with running(ChatServer(0.01, 0.2)) as url:
        results = compare(url, load.EMBEDDED, 32, 81, 3, 2, CELL)
    by_name = {r.cell.path: r for r in results}
    speed, ttft = by_name["speed"], by_name["ttft"]
    assert speed.figure("speed").value == pytest.approx(100.0, rel=0.03)
    assert speed.figure("llama_benchy").value == pytest.approx(100.0, rel=0.03)
    assert ttft.figure("ttft").value == pytest.approx(200.0, rel=0.03)
    assert speed.targets[0].ok, speed.targets
    assert ttft.targets[0].ok or ttft.targets[0].note  # its own includes the connection, and says so


def test_instruments_that_disagree_say_why() -> None:
    close, far = results_of({"speed": [100.0], "ttft": [50.0]}, {"speed": [101.0], "ttft": [60.0]}, CELL)
    assert close.targets[0].ok
    assert not far.targets[0].ok
    assert "connection" in far.targets[0].note
    assert far.figure("ratio").value == pytest.approx(50 / 60)


def test_a_result_of_another_form_is_one_sentence() -> None:
    good = {"benchmarks": [{"tg_throughput": {"mean": 5.0, "std": 0.1}, "e2e_ttft": {"mean": 20.0, "std": 1.0}}]}
    assert read_benchy(good).speed == 5.0
    for wrong in ({}, {"benchmarks": []}, {"benchmarks": [{"tg_throughput": None}]}):
        with pytest.raises(PeerError, match="llama-benchy has no figure"):
            read_benchy(wrong)


def test_prompts_are_the_same_for_the_same_seed_and_differ_otherwise() -> None:
    assert workload(64, 8, 1).session(0) == workload(64, 8, 1).session(0)
    assert workload(64, 8, 1).session(0) != workload(64, 8, 1).session(1) != workload(64, 8, 2).session(1)
