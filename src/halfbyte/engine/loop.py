"""The loop around a core, in a thread or in a process: take requests, step, deliver the outputs of the step.

An exception while a request is submitted ends only that request, because a core changes nothing before it has accepted
it. An exception that leaves a step ends the loop, because the state of the core is then unknown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from halfbyte.engine.request import EngineStats, Output, Request
from halfbyte.errors import EngineError, HalfbyteError

log = logging.getLogger("halfbyte")

STATS_S = 0.05  # seconds between counters, which are also sent when a request ends; not every step, for small models

Ask = Request | str | None  # a request, the id of one to cancel, or None to stop


class Core(Protocol):
    """A core that the loop can run: EngineCore, or vLLM's engine with the same interface (`vllm_core.py`)."""

    working: bool  # busy with a step; False while it waits for a GPU

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
        """`receive(wait)` returns what has arrived; with `wait` it may sleep until something arrives."""
        self._core, self._receive, self._refuse, self._deliver = core, receive, refuse, deliver
        self._counted = 0.0  # time of the last counters

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
                        self._refuse(ask.id, e.with_traceback(None))
                    except Exception as e:
                        log.exception("a request could not be submitted")
                        text = f"the engine could not take this request ({type(e).__name__}); its log has the details."
                        self._refuse(ask.id, EngineError(text))
                if core.has_work:
                    outputs, refused = core.step(), core.refusals()
                    self._deliver(outputs, self._stats(outputs, bool(refused)))
                    for id, error in refused:
                        # Frames of its traceback hold the request, and with it megabytes of a schema.
                        self._refuse(id, error.with_traceback(None))
        finally:
            core.close()

    def _stats(self, outputs: list[Output], refused: bool) -> EngineStats | None:
        now = time.monotonic()
        if now - self._counted < STATS_S and not refused and all(delta.finish is None for _, delta in outputs):
            return None
        self._counted = now
        return self._core.stats()
