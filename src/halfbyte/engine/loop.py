"""The loop around a core: take what clients ask, step, hand out what the step gave. The same in a thread or a process.

Whatever submitting a request raises ends that request alone: a core changes nothing before it has taken it. An
exception that leaves a step ends the loop, because then the core's state cannot be trusted any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from halfbyte.engine.request import EngineStats, Output, Request
from halfbyte.errors import EngineError, HalfbyteError

log = logging.getLogger("halfbyte")

STATS_S = (
    0.05  # counters go out this often, and whenever a request ends: a small model steps thousands of times a second
)

Ask = Request | str | None  # a request, the id of one to cancel, or None to stop


class Core(Protocol):
    """What a loop turns: our own engine's core, or another engine behind the same calls (`vllm_core.py`)."""

    working: bool  # busy with a step; not while it waits for a GPU's

    @property
    def has_work(self) -> bool: ...

    @property
    def waits_for_grammars(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, id: str) -> bool: ...

    def step(self) -> list[Output]: ...

    def refusals(self) -> list[tuple[str, HalfbyteError]]: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class EngineLoop:
    def __init__(
        self,
        core: Core,
        receive: Callable[[bool], list[Ask]],
        refuse: Callable[[str, HalfbyteError], None],
        deliver: Callable[[list[Output], EngineStats | None], None],
    ) -> None:
        """`receive(wait)` returns what was asked since; with `wait` it may sleep until something is."""
        self._core, self._receive, self._refuse, self._deliver = core, receive, refuse, deliver
        self._counted = 0.0  # when counters went out last

    def run(self) -> None:
        core = self._core
        try:
            while True:
                for ask in self._receive(not core.has_work):
                    if ask is None:
                        return
                    if isinstance(ask, str):
                        core.cancel(ask)
                        continue
                    try:
                        core.submit(ask)
                    except HalfbyteError as e:
                        self._refuse(ask.id, e)
                    except Exception as e:
                        log.exception("a request could not be submitted")
                        text = f"the engine could not take this request ({type(e).__name__}); its log has the details."
                        self._refuse(ask.id, EngineError(text))
                if core.has_work:
                    outputs, refused = core.step(), core.refusals()
                    self._deliver(outputs, self._stats(outputs, bool(refused)))
                    for id, error in refused:
                        self._refuse(id, error)
        finally:
            core.close()

    def _stats(self, outputs: list[Output], refused: bool) -> EngineStats | None:
        now = time.monotonic()
        if now - self._counted < STATS_S and not refused and all(delta.finish is None for _, delta in outputs):
            return None
        self._counted = now
        return self._core.stats()
