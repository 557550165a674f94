"""Five hundred connections for two minutes, a tenth dropped in mid-stream, a tenth with garbage for a body.

No error reaches the others, no request is left behind, memory stays flat.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections.abc import Callable

import psutil
import pytest
from live_server import Live, wait_until
from scripted import Play, ScriptedSource, always, say

from halfbyte.server.settings import ServerSettings

Serve = Callable[..., Live]
BODY = json.dumps({"model": "gpt-oss-test", "messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
GARBAGE = (b"{", b"\xff\x00", b'{"model": 1}', b'{"messages": "x"}', b"[" * 5000, b"null")


async def talk(port: int, draw: random.Random, counts: dict[str, int]) -> None:
    kind = draw.random()
    body = draw.choice(GARBAGE) if kind < 0.1 else BODY
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        lines = (
            "POST /v1/chat/completions HTTP/1.1",
            "Host: 127.0.0.1",
            "Content-Type: application/json",
            "Connection: close",
        )
        writer.write("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
        if 0.1 <= kind < 0.2:
            await reader.read(draw.randrange(1, 2000))
            counts["dropped"] += 1
            return
        data = await reader.read()
        status = int(data.split(b" ", 2)[1])
        if body is not BODY:
            assert status == 400, data
            counts["refused"] += 1
        else:
            assert status == 200, data
            assert b"data: [DONE]" in data, data[-300:]
            counts["whole"] += 1
    finally:
        writer.close()


async def storm(port: int, connections: int, seconds: float) -> dict[str, int]:
    counts = {"whole": 0, "dropped": 0, "refused": 0}
    end = time.monotonic() + seconds

    async def one(number: int) -> None:
        draw = random.Random(number)
        await asyncio.sleep(draw.random())
        while time.monotonic() < end:
            await talk(port, draw, counts)

    await asyncio.gather(*(one(i) for i in range(connections)))
    return counts


@pytest.mark.slow
def test_soak(serve: Serve) -> None:
    play = Play(say("word " * 60, "hm"), per_step=2, delay=0.05)
    live = serve(ScriptedSource(always(play)), ServerSettings(min_available_bytes=0, max_requests=2000))
    port = int(live.url.rpartition(":")[2])
    asyncio.run(storm(port, 500, 15))  # caches and pools fill
    gc.collect()
    before = psutil.Process().memory_info().rss
    live.source.requests.clear()
    live.source.finished.clear()
    live.source.cancelled.clear()
    counts = asyncio.run(storm(port, 500, 120))
    live.source.requests.clear()
    wait_until(lambda: live.source.active == 0 and live.service.admission.active == 0)
    assert live.service.pacer.active == 0
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    print(f"\n{counts}, memory {grown / 2**20:+.1f} MiB")
    assert min(counts.values()) > 200
    assert grown < 48 * 2**20
