"""Where a request's heavy work is done: parsing, checking, rendering and tokenising of what is large.

Small work stays on the event loop, where it costs no hand-over. Larger work has a thread of its own, and the largest
another, so that an ordinary long prompt never waits for an absurd one. What runs here must let other threads run in
between: either it is Python, or it is native code that takes a few tens of milliseconds at the most.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from halfbyte.server.http.errors import ApiError

T = TypeVar("T")

SMALL = 8 * 1024  # bytes of a request that are read on the loop
HUGE = 1024 * 1024
_TRIM_SECONDS = 5.0


class Workroom:
    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(1, "large-requests")
        self._huge = ThreadPoolExecutor(1, "huge-requests")
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, done where `size` bytes of it belong."""
        if size <= SMALL:
            return work()
        pool = self._large if size < HUGE else self._huge
        result = await asyncio.get_running_loop().run_in_executor(pool, _refused_or_done, work)
        if isinstance(result, ApiError):
            raise result
        return result

    def trim_later(self) -> None:
        """What a huge request took goes back to the system, and not only to this process's allocator."""
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._give_back)

    def _give_back(self) -> None:
        self._trim = None
        self._huge.submit(_give_back_memory)

    def close(self) -> None:
        if self._trim is not None:
            self._trim.cancel()
        for pool in (self._large, self._huge):
            pool.shutdown(wait=False, cancel_futures=True)


def _refused_or_done(work: Callable[[], T]) -> T | ApiError:
    """A refusal as a value, without the frames it was raised in and what it was raised for: they hold the body, and
    whoever keeps a refusal, were it a cycle that nobody has collected yet, would keep them."""
    try:
        return work()
    except ApiError as e:
        e.__context__ = e.__cause__ = None
        return e.with_traceback(None)


def _give_back_memory() -> None:
    gc.collect(1)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
