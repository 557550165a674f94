"""A client of any server that speaks OpenAI's /v1/completions: the same work as `engine_timing.py`, over HTTP.

Raw sockets, since a client library would be the slowest part. Prompts are token ids; how tokens are counted, which is
never by chunks, is `event_stream.py`'s to say. Starts nothing: `lab/peers` does."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.lab.measure.event_stream import LIMIT, Link, StreamReading, exchange, read_blocks, verify
from halfbyte.model.tokenizer import Tokenizer


class HttpClient:
    """`clock` and `connect` are the machine's own, unless a test brings a server with a time of its own. With the
    model's tokenizer the text of every answer is compared with its tokens."""

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.perf_counter,
        connect: Callable[[], Awaitable[Link]] | None = None,
        model: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"--url takes an address such as http://127.0.0.1:8000, not {url!r}.")
        self._host, self._port = parts.hostname, parts.port or 80
        self.base = f"http://{self._host}:{self._port}"
        self.clock, self.tokenizer = clock, tokenizer
        self.connect = connect or (lambda: asyncio.open_connection(self._host, self._port, limit=LIMIT))
        self.model = self._first_model() if model is None else model
        self._names_ids: dict[str, bool] = {}  # path -> whether its events carry token ids

    def _first_model(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.base}/v1/models", timeout=30) as reply:
                return str(json.load(reply)["data"][0]["id"])
        except (OSError, ValueError, LookupError) as e:
            raise UsageError(f"{self.base} does not answer /v1/models: {e}.") from None

    def request(self, path: str, body: Mapping[str, Any]) -> bytes:
        """A streamed request, usage at its end, token ids with every event or, where the server has none, the usage so
        far; who does not know that either leaves it out."""
        usage: dict[str, Any] = {"include_usage": True}
        fields = {"model": self.model, "stream": True, "stream_options": usage, **body}
        if self._names_ids.get(path, True):
            fields["return_token_ids"] = True
        else:
            usage["continuous_usage_stats"] = True
        data = json.dumps(fields).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    async def learn(self, path: str, body: Mapping[str, Any]) -> None:
        """Asks once, whether events of that path carry token ids."""
        if path not in self._names_ids:
            request = self.request(path, dict(body) | {"max_tokens": 2, "temperature": 0})
            reading = read_blocks(await exchange(await self.connect(), request, self.clock))
            self._names_ids[path] = reading.counted_by == "ids"

    # ---- prompts all at once, each answered with exactly so many tokens ------------------------------------------

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> list[StreamReading]:
        return asyncio.run(self.complete_all(prompts, tokens))

    async def complete_all(self, prompts: Sequence[list[int]], tokens: int) -> list[StreamReading]:
        await self.learn("/v1/completions", {"prompt": prompts[0][-8:]})
        body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        requests = [self.request("/v1/completions", body | {"prompt": prompt}) for prompt in prompts]
        links = await asyncio.gather(*(self.connect() for _ in requests))
        start = self.clock()
        since = lambda: self.clock() - start  # noqa: E731
        streams = await asyncio.gather(*(exchange(link, r, since) for link, r in zip(links, requests)))
        readings = [read_blocks(blocks) for blocks in streams]
        for reading in readings:
            verify(reading, self.tokenizer)
            reading.tokens = reading.tokens or [-1] * (reading.completion_tokens or 0)  # ids that nothing names
        return readings
