"""A relay between somebody else's client and a server: it passes everything on and notes when each piece came by.

    with Relay("http://127.0.0.1:8000") as relay:
        ...                       # a client that asks relay.url
    relay.streams                 # every streamed answer, with our own times

So that two instruments can be held against each other on the same requests, whatever the machine did meanwhile. Changes
nothing on the way; every request has a connection of its own to the server. Plain HTTP of one host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.lab.measure.event_stream import LIMIT, Link, StreamReading, read_blocks


@dataclass
class Stream:
    """One streamed answer: what was asked, when the request had come whole, and the answer's pieces."""

    request: Mapping[str, Any]
    sent: float
    blocks: list[tuple[float, bytes]] = field(default_factory=list)

    def read(self) -> StreamReading:
        return read_blocks(self.blocks)


class Relay:
    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"a relay needs an address such as http://127.0.0.1:8000, not {url!r}.")
        self._to = parts.hostname, parts.port or 80
        self.url = ""
        self.streams: list[Stream] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._client, "127.0.0.1", 0, limit=LIMIT)

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, one after the other."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    body = await reader.readexactly(_length(head) or 0)
                    await self._pass(head + body, _streamed(body), writer)
            finally:
                writer.close()

    async def _pass(self, request: bytes, streamed: Mapping[str, Any], client: asyncio.StreamWriter) -> None:
        server: Link = await asyncio.open_connection(*self._to, limit=LIMIT)
        reader, writer = server
        try:
            stream = Stream(streamed, time.perf_counter())
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            client.write(head)
            if streamed and head.startswith(b"HTTP/1.1 200"):
                self.streams.append(stream)
            if b"transfer-encoding: chunked" in head.lower():
                await _chunks(reader, client, stream)
            else:
                client.write(await reader.readexactly(_length(head) or 0))
            await client.drain()
        finally:
            writer.close()


async def _chunks(reader: asyncio.StreamReader, client: asyncio.StreamWriter, stream: Stream) -> None:
    while True:
        line = await reader.readline()
        data = await reader.readexactly(int(line, 16) + 2)
        stream.blocks.append((time.perf_counter(), data[:-2]))
        client.write(line + data)
        await client.drain()
        if len(data) == 2:
            return


def _length(head: bytes) -> int | None:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return None


def _streamed(body: bytes) -> Mapping[str, Any]:
    """A request that asks for a stream; another is empty."""
    try:
        request = json.loads(body)
    except ValueError:
        return {}
    return request if isinstance(request, dict) and request.get("stream") else {}
