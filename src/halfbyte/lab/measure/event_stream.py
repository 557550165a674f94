"""One streamed answer of an OpenAI-compatible server: kept as it comes, read afterwards.

Blocks are noted with the time at which they came; parsing must not cost time that is measured. Tokens are never counted
by chunks. Where an event names its token ids, those count; where it carries the usage so far, that does; where neither
is told, the usage of the end is spread evenly over the events that had text, and `counted_by` says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.errors import EngineError

LIMIT = 1 << 22  # bytes of a line
Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Reading:
    """What a stream held. Times are those of its blocks."""

    arrivals: list[tuple[float, float]] = field(default_factory=list)  # when, how many tokens
    tokens: list[int] = field(default_factory=list)  # ids, where the server names them
    counted_by: str = ""  # ids, running usage, spread
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached: int = 0
    usable_at: float | None = None  # the first token that a reader can use: a role or a control token is none
    answer_at: float | None = None  # the first that is no reasoning either
    finish: str = ""

    @property
    def first(self) -> float:
        return self.arrivals[0][0]

    @property
    def last(self) -> float:
        return self.arrivals[-1][0]


FEWEST = 16  # tokens of an event, at most, where nobody says how many there are


def read_blocks(blocks: Sequence[tuple[float, bytes]]) -> Reading:
    """An event may be cut anywhere. An error in the stream, or an end without usage, is an EngineError."""
    reading, left = Reading(), b""
    texts: list[float] = []  # times of events that had something to read
    so_far = 0
    by_usage: list[tuple[float, float]] = []
    for at, block in blocks:
        *lines, left = (left + block).split(b"\n")
        ids = 0
        for line in lines:
            if not line.startswith(b"data:") or line[5:].strip() in (b"", b"[DONE]"):
                continue
            event = _parsed(line[5:])
            for choice in event.get("choices") or ():
                named = choice.get("token_ids") or []
                reading.tokens += named
                ids += len(named)
                reading.finish = choice.get("finish_reason") or reading.finish
                some, answer = _content(choice)
                if some or ("text" in choice and not choice.get("finish_reason")):  # a token may have no letters
                    texts.append(at)
                if reading.usable_at is None and (some or (named and "delta" not in choice)):
                    reading.usable_at = at
                if answer and reading.answer_at is None:
                    reading.answer_at = at
            usage = event.get("usage")
            if usage:
                counted = int(usage["completion_tokens"])
                if counted > so_far and event.get("choices"):
                    by_usage.append((at, counted - so_far))
                so_far = reading.completion_tokens = counted
                reading.prompt_tokens = int(usage.get("prompt_tokens") or 0)
                reading.cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if ids:
            reading.arrivals.append((at, ids))
    total = reading.completion_tokens
    if reading.tokens:
        reading.counted_by = "ids"
        if total != len(reading.tokens):
            raise EngineError(f"the server counts {total} tokens and sent {len(reading.tokens)}.")
    elif total is None:
        raise EngineError("the server never said its usage, so it counts None tokens; it must, to be measured.")
    elif by_usage and sum(n for _, n in by_usage) == total and (len(by_usage) > 1 or not texts):
        # Said once, with the last event (llama.cpp), it is no running usage.
        reading.counted_by, reading.arrivals = "running usage", _joined(by_usage)
    elif texts:
        if total > FEWEST * len(texts):
            raise EngineError(f"{total} tokens came in {len(texts)} events, which says nothing about when.")
        reading.counted_by = "spread"
        reading.arrivals = _joined([(at, total / len(texts)) for at in texts])
    return reading


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise EngineError(f"the server sent an event that is no JSON: {data[:200]!r}.") from None
    if not isinstance(event, dict) or "error" in event:
        raise EngineError(f"the server failed on a request: {event.get('error') if isinstance(event, dict) else event}")
    return event


def _content(choice: dict[str, Any]) -> tuple[bool, bool]:
    """Whether there is something to read at all, and whether it is part of the answer."""
    delta = choice.get("delta") or {}
    answer = bool(choice.get("text") or delta.get("content") or delta.get("tool_calls"))
    return answer or bool(delta.get("reasoning_content") or delta.get("reasoning")), answer


def _joined(arrivals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Tokens of one block came together."""
    together: dict[float, float] = {}
    for at, count in arrivals:
        together[at] = together.get(at, 0.0) + count
    return sorted(together.items())


# ---- over a socket ---------------------------------------------------------------------------------------------------


async def exchange(link: Link, request: bytes, clock: Callable[[], float]) -> list[tuple[float, bytes]]:
    """Sends a request and keeps what comes, by the clock, until it ends. Another status than 200 is an EngineError."""
    reader, writer = link
    blocks: list[tuple[float, bytes]] = []
    try:
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            rest = (await reader.read(2000)).decode(errors="replace")
            raise EngineError(f"the server answered {head.splitlines()[0].decode()}: {rest}")
        chunked = b"transfer-encoding: chunked" in head.lower()
        while block := await (_chunk(reader) if chunked else reader.read(1 << 16)):
            blocks.append((clock(), block))
    except (asyncio.IncompleteReadError, ConnectionError) as e:
        raise EngineError(
            f"the server closed the connection in the middle of an answer ({type(e).__name__})."
        ) from None
    finally:
        writer.close()
    return blocks


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line:
        raise asyncio.IncompleteReadError(b"", None)
    size = int(line, 16)
    return (await reader.readexactly(size + 2))[:-2]
