"""What a prompt costs on its way over HTTP, without what a model takes: the real front end and the real process of the
engine, in which steps take no time.

    python -m bench run prompt-path --set lengths=512,2048

From a client's request, on a connection that is open, to its first token; and the processor time of both processes for
each prompt. What a prompt over HTTP takes longer than this, beside the engine's own time, is not the path. Server,
engine and client share the machine's cores.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from bench.measurement import Run, measurement, option
from halfbyte.engine.batch import Batch
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.process import EngineProcess
from halfbyte.engine.request import SourceInfo
from halfbyte.engine.runner import StepResult
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model.tokenizer import Tokenizer

VOCAB, CONTEXT = 201_088, 16_384
WARM_UP = 8  # prompts of each length before those that count
START_S, ANSWER_S = 60.0, 30.0


@dataclass
class Nothing:
    """The result of a step that computed nothing."""

    count: int

    def result(self) -> StepResult:
        return StepResult([1000] * self.count)


class NoDevice:
    """Takes no time for a step."""

    def launch(self, batch: Batch) -> Nothing:
        return Nothing(len(batch.samplers))

    def close(self) -> None: ...


def build(argument: Any, report: Callable[[str], None]) -> tuple[EngineCore, SourceInfo]:
    config = EngineConfig(pages=4096, max_rows_per_step=8192, max_context=CONTEXT, prefix_cache=False)
    return EngineCore(NoDevice(), config), SourceInfo("no model", CONTEXT, VOCAB, config.eos_tokens)


def run_server(port: int) -> None:
    """The server as `halfbyte serve` runs it, but for its model."""
    from halfbyte.server.run import serve
    from halfbyte.server.settings import ServerSettings

    async def source() -> tuple[EngineProcess, Tokenizer]:
        engine = EngineProcess("bench.engine.prompt_path:build", None)
        await engine.open()
        return engine, Tokenizer.gpt_oss()

    serve(ServerSettings(port=port, min_available_bytes=0), source)


def first_token(port: int, prompt: list[int]) -> float:
    """Seconds from sending a request to the first event that names a token."""
    fields = {"model": "no model", "prompt": prompt, "stream": True, "max_tokens": 1, "return_token_ids": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
        time.sleep(0.003)  # the server has accepted it
        sent, got, first = time.perf_counter(), b"", None
        connection.sendall(request)
        while block := connection.recv(1 << 16):
            got += block
            if first is None and b'"token_ids":[1000]' in got.replace(b" ", b""):
                first = time.perf_counter() - sent
    if first is None or not got.startswith(b"HTTP/1.1 200"):
        raise ValueError(f"no token came: {got[:300]!r}")
    return first


def wait_until_ready(port: int, process: multiprocessing.process.BaseProcess) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            first_token(port, [5])
            return
        except (OSError, ValueError):
            if time.monotonic() > deadline or not process.is_alive():
                raise
            time.sleep(0.2)


def measure(lengths: tuple[int, ...], prompts: int) -> list[Result]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=run_server, args=(port,))
    process.start()
    try:
        wait_until_ready(port, process)
        front_end = psutil.Process(process.pid)
        engine = next(c for c in front_end.children() if "halfbyte.engine.worker" in " ".join(c.cmdline()))
        results, draw = [], random.Random(0)
        for length in lengths:
            prompt_ids = [draw.choices(range(1000, VOCAB - 2000), k=length) for _ in range(WARM_UP + prompts)]
            for prompt in prompt_ids[:WARM_UP]:
                first_token(port, prompt)
            before = [_processor_time(p) for p in (front_end, engine)]
            firsts = [1e3 * first_token(port, prompt) for prompt in prompt_ids[WARM_UP:]]
            used = [1e6 * (_processor_time(p) - b) / prompts for p, b in zip((front_end, engine), before)]
            results.append(Result(
                Cell("prompt path", path="http", shape={"pp": length}),
                (
                    figure("first_token", "ms", firsts), figure("front_end_cpu", "us", used[0]),
                    figure("engine_cpu", "us", used[1]),
                ),
            ))  # fmt: skip
        return results
    finally:
        process.terminate()
        process.join()


def _processor_time(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass(frozen=True)
class Options:
    lengths: tuple[int, ...] = option((16, 512, 2048, 8192), "tokens of a prompt, each of these")
    prompts: int = option(200, "of each length")


@measurement("prompt-path", seconds=120)
def prompt_path(run: Run, options: Options) -> None:
    rooms = [receipts.PACKAGE / "server" / "app.py", receipts.PACKAGE / "engine" / "process.py"]
    run.sources |= receipts.hashes(receipts.sources_of(rooms, ("server", "engine")))
    run.add(*measure(options.lengths, options.prompts))
