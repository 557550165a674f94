"""An engine in a thread of this process, as a TokenSource: for the Python API, the terminal and tests.

Callers may use any thread or event loop; each gets its deltas where it waits. A crash of the engine is a crash of the
whole program: use EngineProcess where that matters.

The thread ends before the interpreter does, even if it was never closed: a thread that Python stops inside native code
aborts the process.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from halfbyte.engine.checked import checked
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.loop import Ask, EngineLoop
from halfbyte.engine.request import Delta, EngineStats, Output, Request, SourceHealth, SourceInfo
from halfbyte.errors import CapacityError, EngineDiedError, HalfbyteError

Item = Delta | HalfbyteError
AT_ONCE = 64  # requests of one call that the engine has at a time
EXIT_SECONDS = 60.0  # the most that the end of the program waits for the step that runs


@dataclass
class _Caller:
    put: Callable[[Item], None]
    choices: int
    closed: set[int] = field(default_factory=set)

    def take(self, item: Item) -> Delta:
        if isinstance(item, HalfbyteError):
            raise item
        if item.finish is not None:
            self.closed.add(item.index)
        return item

    @property
    def ended(self) -> bool:
        return len(self.closed) == self.choices


def _put_numbered(items: queue.SimpleQueue[tuple[int, Item]], number: int, item: Item) -> None:
    items.put((number, item))


class EngineThread:
    def __init__(self, core: EngineCore, info: SourceInfo) -> None:
        self._core, self._info = core, info
        self._asks: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        self._callers: dict[str, _Caller] = {}
        self._lock = threading.Lock()
        self._dead: HalfbyteError | None = None
        self._stats = core.stats()
        self._last_step = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="halfbyte-engine", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_program)

    # ---- TokenSource --------------------------------------------------------------------------

    @property
    def info(self) -> SourceInfo:
        return self._info

    @property
    def ready(self) -> bool:
        return self._dead is None

    def stats(self) -> EngineStats:
        return self._stats

    def health(self) -> SourceHealth:
        dead, waiting = self._dead, bool(self._callers)
        since = time.monotonic() - self._last_step if waiting else None
        return SourceHealth("" if dead is None else str(dead).rstrip("."), dead is not None, since)

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()

        def put(item: Item) -> None:
            with suppress(RuntimeError):  # the loop was closed, and its waiting tasks ended with it
                loop.call_soon_threadsafe(items.put_nowait, item)

        caller = self._enter(request, put)
        try:
            while not caller.ended:
                yield caller.take(await items.get())
        finally:
            self._leave(request, caller)

    async def close(self) -> None:
        await asyncio.to_thread(self.shutdown)

    # ---- without an event loop ----------------------------------------------------------------

    def iterate(self, request: Request) -> Iterator[Delta]:
        """Deltas of one request, like `stream`, for code without an event loop."""
        for _, delta in self.iterate_all([request]):
            yield delta

    def iterate_all(self, requests: Sequence[Request]) -> Iterator[tuple[int, Delta]]:
        """Deltas of many requests as they come, each with the number of its request. The first that fails ends all."""
        items: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
        waiting = deque(enumerate(requests))
        callers: dict[int, _Caller] = {}
        try:
            while waiting or callers:
                while waiting and len(callers) < AT_ONCE:
                    number, request = waiting.popleft()
                    callers[number] = self._enter(request, partial(_put_numbered, items, number))
                number, item = items.get()
                caller = callers[number]
                delta = caller.take(item)
                if caller.ended:
                    self._leave(requests[number], callers.pop(number))
                yield number, delta
        finally:
            for number, caller in callers.items():
                self._leave(requests[number], caller)

    def shutdown(self, *, wait: bool = True) -> None:
        """The engine ends after the step that runs; with `wait`, it has ended when this returns."""
        self._asks.put(None)
        if not wait:
            return
        self._thread.join()
        atexit.unregister(self._end_with_program)

    def _end_with_program(self) -> None:
        """Notify no request: a thread that still waits is a daemon, which ends with the program."""
        if not self._thread.is_alive():  # also in a fork of the process that had it
            return
        with self._lock:
            self._callers = {}
        self._asks.put(None)
        self._thread.join(EXIT_SECONDS)

    # ---- both sides of the queue --------------------------------------------------------------

    def _enter(self, request: Request, put: Callable[[Item], None]) -> _Caller:
        request = checked(request)
        caller = _Caller(put, request.sampling.n)
        with self._lock:
            if self._dead is not None:
                raise self._dead
            if request.id in self._callers:
                raise CapacityError(f"a request with the id {request.id!r} is already running; ids must differ.")
            if not self._callers:
                self._last_step = time.monotonic()
            self._callers[request.id] = caller
        self._asks.put(request)
        return caller

    def _leave(self, request: Request, caller: _Caller) -> None:
        with self._lock:
            waiting = self._callers.get(request.id) is caller
            if waiting:
                del self._callers[request.id]
        if waiting and not caller.ended:
            self._asks.put(request.id)

    def _receive(self, wait: bool) -> list[Ask]:
        asks = [self._asks.get()] if wait else []
        while not self._asks.empty():
            asks.append(self._asks.get())
        return asks

    def _refuse(self, id: str, error: HalfbyteError) -> None:
        with self._lock:
            caller = self._callers.pop(id, None)
        if caller is not None:
            caller.put(error)

    def _deliver(self, outputs: list[Output], stats: EngineStats | None) -> None:
        if stats is not None:
            self._stats = stats
        self._last_step = time.monotonic()
        for id, delta in outputs:
            caller = self._callers.get(id)
            if caller is not None:
                caller.put(delta)

    def _run(self) -> None:
        error: HalfbyteError = EngineDiedError("the engine was shut down before this request ended.")
        try:
            EngineLoop(self._core, self._receive, self._refuse, self._deliver).run()
        except HalfbyteError as e:
            error = e if isinstance(e, EngineDiedError) else EngineDiedError(str(e))
        except BaseException as e:
            error = EngineDiedError(f"the engine died of {type(e).__name__}: {e}.")
            raise
        finally:
            with self._lock:
                self._dead = error
                callers, self._callers = self._callers, {}
            for caller in callers.values():
                caller.put(error)
