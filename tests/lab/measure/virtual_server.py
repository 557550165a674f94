"""A server of known speed with a time of its own: its clock jumps to the next event, so no machine is too slow for it.

`VirtualLoop` is an asyncio loop whose time is the server's schedule. `KnownServer` speaks HTTP over streams in memory:
every request is read as bytes and answered as bytes, with chunked transfer, at scheduled instants.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from itertools import takewhile
from typing import Any

from halfbyte.lab.measure.event_stream import LIMIT, Link
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.model.tokenizer import Tokenizer

PAGE = 4  # tokens that its cache holds together


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waits for nothing: when nobody is ready, it is already the time of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Pipe:
    """The client's end of a connection: what is written goes to the server."""

    def __init__(self, server: KnownServer, reader: asyncio.StreamReader) -> None:
        self.server, self.reader, self.data = server, reader, b""

    def write(self, data: bytes) -> None:
        self.data += data
        head, _, body = self.data.partition(b"\r\n\r\n")
        sizes = [int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length")]
        if sizes and len(body) == sizes[0]:
            path = head.split()[1].decode()
            task = asyncio.get_running_loop().create_task(self.server.answer(path, json.loads(body), self.reader))
            self.server.tasks.append(task)

    async def drain(self) -> None: ...

    def close(self) -> None: ...


def alike(a: list[int], b: list[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


class KnownServer:
    """`prefill` seconds to the first token, then `pace` a token; `together` tokens a chunk; at most `slots` requests at
    once, others wait. `pauses`: when it stands still before a token, once each, and for how long. `ids`, `running`:
    what it tells of its tokens beside the usage at the end, which also has how much of a prompt of token ids it has
    seen before. `holds`: all tokens are kept back and sent in a burst; `spells`: the share of tokens that have text.
    `waits`: so many seconds pass before every answer, in which tokens are computed that are then sent in a burst;
    `greets`: an event without text comes at once, which claims a token; `reads`: the most tokens of a prompt that it
    reads; `claims`: times its tokens that the usage at the end says; `gathers`: so many tokens are computed before the
    first is sent, and all are sent evenly until the last is computed. `stalls`: nothing is sent before so many seconds
    have passed, as on a machine where the server does not run; its engine does meanwhile."""

    def __init__(
        self, prefill: float, pace: float, together: int = 1, slots: int = 1 << 30, ids: bool = True,
        running: bool = False, thinks: int = 0, short_by: int = 0, pauses: Sequence[tuple[float, float]] = (),
        holds: bool = False, spells: float = 1.0, waits: float = 0.0, reads: int = 1 << 30, claims: float = 1.0,
        greets: bool = False, gathers: int = 0, stalls: float = 0.0,
    ) -> None:  # fmt: skip
        self.prefill, self.pace, self.together, self.ids, self.running = prefill, pace, together, ids, running
        self.thinks, self.short_by, self.pauses = thinks, short_by, list(pauses)
        self.holds, self.spells, self.waits, self.reads, self.claims = holds, spells, waits, reads, claims
        self.greets, self.gathers, self.stalls = greets, gathers, stalls
        self.loop = VirtualLoop()
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.sent: list[float] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._slots = asyncio.Semaphore(slots)
        self._seen: list[list[int]] = []

    def client(self, tokenizer: Tokenizer | None = None) -> HttpClient:
        return HttpClient("http://known", self.loop.time, self._connect, "known", tokenizer)

    async def _connect(self) -> Link:
        reader = asyncio.StreamReader(LIMIT)
        return reader, Pipe(self, reader)  # type: ignore[return-value]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def answer(self, path: str, body: dict[str, Any], reader: asyncio.StreamReader) -> None:
        self.bodies.append((path, body))
        self.sent.append(self.loop.time())
        reader.feed_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        async with self._slots:
            try:
                await self._tokens(path, body, reader)
            except Exception as e:  # its client would wait for ever
                reader.set_exception(e)
                raise
        self._chunk(reader, b"data: [DONE]\n\n")
        reader.feed_data(b"0\r\n\r\n")
        reader.feed_eof()

    async def _tokens(self, path: str, body: dict[str, Any], reader: asyncio.StreamReader) -> None:
        chat, count = "chat" in path, body["max_tokens"] - self.short_by
        if chat:
            self._event(reader, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        if self.greets:
            usage = {"prompt_tokens": 9, "completion_tokens": 1}
            self._event(reader, {"choices": [{"index": 0, "text": ""}], **({"usage": usage} if self.running else {})})
        held = count if self.holds else min(self.gathers, count)
        await asyncio.sleep(self.prefill + self.waits + held * self.pace)
        pace = self.pace * (count - held) / (count - 1) if held and not self.holds and count > 1 else self.pace
        done, ready = 0, int(self.waits / self.pace) if self.waits else 0
        if count > 1:
            stalled = min(self.stalls, (count - 1) * self.pace)
            await asyncio.sleep(stalled)
            ready += round(stalled / self.pace) + 1 if stalled else 0
        while done < count:
            n = min(1 if not done else self.together, count - done)
            if done:
                quick = self.holds or done < ready
                await asyncio.sleep(n * (self.pace / 200 if quick else pace) + self._pause())
            done += n
            field = "reasoning_content" if done <= self.thinks else "content"
            text = " a" * sum(int(k * self.spells) < int((k + 1) * self.spells) for k in range(done - n, done))
            choice: dict[str, Any] = {"index": 0, "delta": {field: text}} if chat else {"index": 0, "text": text}
            if self.ids and body.get("return_token_ids"):
                choice["token_ids"] = [7] * n
            event: dict[str, Any] = {"choices": [choice]}
            if self.running and body["stream_options"].get("continuous_usage_stats"):
                event["usage"] = {"prompt_tokens": 9, "completion_tokens": done}
            self._event(reader, event)
        usage: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens": int(self.claims * count)}
        if isinstance(prompt := body.get("prompt"), list):
            usage["prompt_tokens"] = min(len(prompt), self.reads)
            shared = max((alike(prompt, old) for old in self._seen), default=0)
            self._seen.append(prompt)
            usage["prompt_tokens_details"] = {"cached_tokens": shared // PAGE * PAGE}
        self._event(reader, {"choices": [], "usage": usage})

    def _pause(self) -> float:
        """Of those whose time has come, the first."""
        due = self.pauses and self.pauses[0][0] <= self.loop.time()
        return self.pauses.pop(0)[1] if due else 0.0

    def _event(self, reader: asyncio.StreamReader, event: dict[str, Any]) -> None:
        self._chunk(reader, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, reader: asyncio.StreamReader, data: bytes) -> None:
        reader.feed_data(b"%x\r\n" % len(data) + data + b"\r\n")

    def close(self) -> None:
        self.loop.close()
