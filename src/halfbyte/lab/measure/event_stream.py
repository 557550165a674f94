"""One streamed answer of an OpenAI-compatible server: kept as it comes, read afterwards.

Bytes are noted with the time at which they came; taking chunks and events apart must not cost time that is measured.
Tokens are never counted by chunks. Where an event names its token ids, those count; where it carries the usage so far,
that does; where there is neither, the usage of the end is spread evenly over the events that had text, and `counted_by`
says so. `verify` compares the number of tokens with the text that came.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.errors import EngineError, InvalidFigureError
from halfbyte.model.tokenizer import Tokenizer

LIMIT = 1 << 22  # bytes of a line
Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class StreamReading:
    """What one request got. Times are those of a stream's blocks, or of an engine's steps since all were submitted."""

    arrivals: list[tuple[float, float]] = field(default_factory=list)  # when, how many tokens
    tokens: list[int] = field(default_factory=list)  # ids, where the server names them
    counted_by: str = ""  # ids, running usage, spread
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached: int = 0
    usable_at: float | None = None  # the first token that a reader can use: a role or a control token is none
    answer_at: float | None = None  # the first that is no reasoning either
    finish: str = ""
    text: str = ""  # of the answer, reasoning included
    spelled: int | None = None  # tokens that the text has when it is encoded again, where there are no ids

    @property
    def first(self) -> float:
        return self.arrivals[0][0]

    @property
    def last(self) -> float:
        return self.arrivals[-1][0]


FEWEST = 16  # tokens of an event, at most, where the server does not say how many


def read_blocks(blocks: Sequence[tuple[float, bytes]]) -> StreamReading:
    """An event may be cut anywhere. An error in the stream, or an end without usage, is an EngineError; another number
    of ids than the usage has, an InvalidFigureError."""
    reading, left = StreamReading(), b""
    texts: list[float] = []  # times of events that had something to read, or a token without letters
    read_at: float | None = None  # of the first that had something to read
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
                reading.text += _text(choice)
                if some or ("text" in choice and not choice.get("finish_reason")):  # a token may have no letters
                    texts.append(at)
                    read_at = at if read_at is None and some else read_at
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
    if total is None:
        raise EngineError("the server never said its usage, so it counts None tokens; it must, to be measured.")
    if reading.tokens:
        reading.counted_by = "ids"
        if total != len(reading.tokens):
            raise InvalidFigureError(f"the server counts {total} tokens and sent {len(reading.tokens)}.")
    elif by_usage and sum(n for _, n in by_usage) == total and (len(by_usage) > 1 or not texts):
        # Said once, with the last event (llama.cpp), it is no running usage.
        reading.counted_by, reading.arrivals = "running usage", _joined(_not_before(read_at, by_usage))
    elif texts:
        if total > FEWEST * len(texts):
            raise EngineError(f"{total} tokens came in {len(texts)} events, which says nothing about when.")
        reading.counted_by = "spread"
        reading.arrivals = _joined(_not_before(read_at, [(at, total / len(texts)) for at in texts]))
    return reading


def _not_before(read_at: float | None, arrivals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without ids nothing shows a token but its text: what is said to have come before the first text came with it, and
    an answer without any text came when it ended."""
    earliest = arrivals[-1][0] if read_at is None else read_at
    return [(max(at, earliest), count) for at, count in arrivals]


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


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    parts = [choice.get("text"), delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")]
    parts += [(call.get("function") or {}).get("arguments") for call in delta.get("tool_calls") or ()]
    return "".join(p for p in parts if isinstance(p, str))


# Ids may spell so many times the letters that came, and so many letters more.
IDS, SLACK = 1.5, 32
HEADER_SLACK = 128  # in conversations, where names of channels and tools are tokens and no text
# Texts without ids may have so many times fewer tokens than are claimed, over many answers: control tokens have no
# text, and a token that is repeated may be encoded again in half as many, so that one answer alone says little.
CLAIMED = 1.25
HEADER_TOKENS = 32  # of a conversation's answer


def verify(reading: StreamReading, tokenizer: Tokenizer | None, slack: int = SLACK) -> None:
    """Holds the tokens against the text; `counted_by` says what they were compared with. Ids are decoded, and an
    InvalidFigureError says that their text is missing. Without ids the text is encoded again, which `check_claims`
    judges, and without a tokenizer nothing is known."""
    if tokenizer is None:
        reading.counted_by += "" if reading.tokens else ", unverified"
        return
    if reading.tokens:
        spelled = tokenizer.decode(t for t in reading.tokens if tokenizer.special_name(t) is None)
        if len(spelled) > IDS * len(reading.text) + slack:
            raise InvalidFigureError(
                f"{len(reading.tokens)} token ids spell {len(spelled)} characters and {len(reading.text)} came."
            )
        return
    reading.spelled = len(tokenizer.encode(reading.text))
    reading.counted_by += ", compared with the text"


def check_claims(claimed: int, spelled: int, answers: int, slack: int = 0) -> None:
    """Raises InvalidFigureError where the texts of so many answers are too short for the tokens that are claimed."""
    if claimed > CLAIMED * spelled + slack * answers:
        raise InvalidFigureError(
            f"the server claims {claimed} tokens in {answers} answers, and their texts are {spelled} tokens long."
        )


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
        tail = b""
        while not (chunked and tail.endswith(END)) and (block := await reader.read(1 << 16)):
            blocks.append((clock(), block))
            tail = (tail + block)[-len(END) :]
        return unchunk(blocks) if chunked else blocks
    except (asyncio.IncompleteReadError, ConnectionError) as e:
        raise EngineError(
            f"the server closed the connection in the middle of an answer ({type(e).__name__})."
        ) from None
    finally:
        writer.close()


END = b"\r\n0\r\n\r\n"  # of a chunked body


def unchunk(blocks: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The data of a chunked body, each part with the time at which its chunk was complete. A body that is cut off is an
    IncompleteReadError."""
    data = b""
    parts: list[tuple[float, bytes]] = []
    for at, block in blocks:
        data += block
        while (head := data.find(b"\r\n")) >= 0:
            size = int(data[:head], 16)
            if not size:
                return parts
            end = head + 2 + size
            if len(data) < end + 2:
                break
            parts.append((at, data[head + 2 : end]))
            data = data[end + 2 :]
    raise asyncio.IncompleteReadError(data, None)
