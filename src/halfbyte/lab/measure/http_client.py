"""A client of any server that speaks OpenAI's /v1/completions: the same work as `engine_timing.py`, over HTTP.

Raw sockets, since a client library would be the slowest part. Prompts are token ids; tokens are counted by the ids that
every event carries (`return_token_ids`) and held against the server's own usage, never by chunks. `ServeProcess` starts
`halfbyte serve` with the same gates on a free port and stops it; nothing of the server is imported here.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from halfbyte.errors import EngineError, UsageError
from halfbyte.gates import AXES, Gates
from halfbyte.lab.child import start_child
from halfbyte.lab.measure.engine_timing import Answer

START_S = 600.0  # a large model is read from disk
STOP_S = 60.0


class HttpClient:
    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"--url takes an address such as http://127.0.0.1:8000, not {url!r}.")
        self._host, self._port = parts.hostname, parts.port or 80
        self._base = f"http://{self._host}:{self._port}"
        try:
            with urllib.request.urlopen(f"{self._base}/v1/models", timeout=30) as reply:
                self.model = str(json.load(reply)["data"][0]["id"])
        except (OSError, ValueError, LookupError) as e:
            raise UsageError(f"{self._base} does not answer /v1/models: {e}.") from None

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
        return asyncio.run(self._complete(prompts, tokens))

    async def _complete(self, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
        bodies = [self._request(prompt, tokens) for prompt in prompts]
        links = await asyncio.gather(*(asyncio.open_connection(self._host, self._port) for _ in bodies))
        start = time.perf_counter()
        return list(await asyncio.gather(*(_exchange(link, body, start) for link, body in zip(links, bodies))))

    def _request(self, prompt: list[int], tokens: int) -> bytes:
        body = json.dumps(
            {
                "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
            }
        ).encode()  # fmt: skip
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


async def _exchange(link: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes, start: float) -> Answer:
    """Events are kept as they come and read afterwards: parsing must not cost time that is measured."""
    reader, writer = link
    blocks: list[tuple[float, bytes]] = []
    try:
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise EngineError(f"the server answered {head.splitlines()[0].decode()}: {await _rest(reader)}")
        chunked = b"transfer-encoding: chunked" in head.lower()
        while block := await (_chunk(reader) if chunked else reader.read(1 << 16)):
            blocks.append((time.perf_counter() - start, block))
    finally:
        writer.close()
    return read_events(blocks)


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    size = int(await reader.readline(), 16)
    return (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> str:
    return (await reader.read(2000)).decode(errors="replace")


def read_events(blocks: Sequence[tuple[float, bytes]]) -> Answer:
    """Tokens and when they came, from the blocks of an event stream; an event may be cut anywhere."""
    answer, left, counted = Answer(), b"", None
    for at, block in blocks:
        *lines, left = (left + block).split(b"\n")
        came = 0
        for line in lines:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise EngineError(f"the server failed on a request: {event['error']}")
            for choice in event["choices"]:
                answer.tokens += choice["token_ids"]
                came += len(choice["token_ids"])
            if event.get("usage"):
                counted = int(event["usage"]["completion_tokens"])
                answer.cached = int((event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if came:
            answer.arrivals.append((at, came))
    if counted != len(answer.tokens):
        raise EngineError(f"the server counts {counted} tokens and sent {len(answer.tokens)}.")
    return answer


class ServeProcess:
    """`halfbyte serve` in a process of its own, as a user starts it."""

    def __init__(
        self, model: str | None, gates: Gates, device: str | None, log: Path, more: Sequence[str] = ()
    ) -> None:
        flag_of = {axis.field: axis.flag for axis in AXES}
        flags = [*more]
        for name, value in gates.changes().items():
            flags += ["--enforce-eager"] if name == "graphs" else [flag_of[name], str(value)]
        command = [sys.executable, "-c", "from halfbyte.cli import main; main()", "serve", *([model] if model else [])]
        command += ["--port", "0", "--no-page", *flags, *(["--device", device] if device else [])]
        self._command, self._log = command, log
        self.url = ""

    def __enter__(self) -> ServeProcess:
        with self._log.open("w", encoding="utf-8") as log:
            self._process = start_child(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self.url:
            text = self._log.read_text(encoding="utf-8")
            self.url = next((w for line in text.splitlines() if "serving" in line for w in line.split()[-1:]), "")
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise EngineError(f"`halfbyte serve` did not start: {text[-600:].strip() or 'it said nothing'}")
            time.sleep(0.1)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> int:
        """Asks it to end, then makes it; its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return self._process.returncode
