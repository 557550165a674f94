"""A server on a machine that runs out of memory: it refuses, then it ends, and everybody is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from scripted import Play, ScriptedSource, say

from halfbyte.errors import NotEnoughMemoryError
from halfbyte.memory import GIB, MemoryState
from halfbyte.server import run, watchdog
from halfbyte.server.settings import ServerSettings

SETTINGS = ServerSettings(port=0, min_available_bytes=4 * GIB, last_available_bytes=2 * GIB)
ENOUGH = MemoryState(total=100 * GIB, available=50 * GIB)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[MemoryState], None]:
    """What the machine says of its memory, and faster looks."""
    now = [ENOUGH]
    defaults = watchdog.Watchdog.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "read", lambda: now[0])
    monkeypatch.setitem(defaults, "every", 0.01)

    def say_(state: MemoryState) -> None:
        now[0] = state

    return say_


async def test_it_sheds_then_ends_and_closes_the_engine_first(machine: Callable[[MemoryState], None]) -> None:
    source = ScriptedSource(lambda request, choice: Play(say("word " * 2000), delay=0.02))
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(run.serve_source(SETTINGS, source, source.tokenizer, started=started.set_result))
    url = await started
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": source.model, "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as stream:
            assert stream.status_code == 200
            machine(replace(ENOUGH, available=3 * GIB))
            while (answer := await client.get(f"{url}/health")).status_code == 200:
                await asyncio.sleep(0.01)
            assert "3.00 GiB" in answer.text
            assert not source.closed  # shedding takes nothing from those who run
            machine(replace(ENOUGH, available=1 * GIB))
            with pytest.raises(NotEnoughMemoryError, match=r"need not swap: only 1\.00 GiB .* last 2\.00 GiB"):
                await serving
    assert source.closed


def test_loading_ends_too(machine: Callable[[MemoryState], None]) -> None:
    """Others may take what a start was promised."""
    closed = []

    async def factory() -> tuple[ScriptedSource, object]:
        machine(replace(ENOUGH, available=1 * GIB))
        try:
            await asyncio.sleep(60)
        finally:
            closed.append(True)
        raise AssertionError

    start = time.monotonic()
    with pytest.raises(NotEnoughMemoryError, match="need not swap"):
        run.serve(SETTINGS, factory)  # type: ignore[arg-type]
    assert closed
    assert time.monotonic() - start < 50
