"""Who may come in: a slot for each request, taken before anything expensive is done for it.

Admission counts requests, not tokens: the engine queues within it, and one more than `max_requests` is refused while it
is still cheap to refuse, before its conversation is rendered.
"""

from __future__ import annotations

import asyncio
import logging

from halfbyte.engine.request import TokenSource
from halfbyte.server.http.errors import ApiError
from halfbyte.server.http.metrics import Metrics
from halfbyte.server.http.workroom import Workroom
from halfbyte.server.settings import ServerSettings
from halfbyte.server.watchdog import Watchdog

log = logging.getLogger("halfbyte.server")


class Slot:
    """One request's place. It is free again as soon as the engine has done its part, so that a client which has read
    the end of its answer finds room for the next; whoever took it releases it in any case."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.release()


class Admission:
    def __init__(self, source: TokenSource, settings: ServerSettings, metrics: Metrics) -> None:
        self.source = source
        self.max_requests = settings.max_requests
        self.metrics = metrics
        self.watchdog = Watchdog(settings.min_available_bytes, settings.last_available_bytes)
        self.draining = False
        self.active = 0
        self.workroom = Workroom()
        self._idle = asyncio.Event()
        self._idle.set()

    def check(self) -> None:
        """Raises the refusal that says when to come back, if no request is taken now."""
        if self.draining:
            self._refuse("draining", 503, "The server is shutting down; try again elsewhere or later.", 10)
        if self.watchdog.shedding:
            self._refuse("memory", 503, f"The server is short of memory: {self.watchdog.reason}.", 5)
        if not self.source.ready:
            self._refuse("not_ready", 503, f"No request can be served now: {self.source.health().trouble}.", 5)
        if self.active >= self.max_requests:
            text = f"{self.active} requests are running or waiting, which is the most this server takes at once."
            self._refuse("queue", 429, text, 1 + self.active / 64)

    def take_slot(self) -> Slot:
        """A place for one request, or the refusal."""
        self.check()
        self.active += 1
        self.metrics.active.set(self.active)
        self._idle.clear()
        return Slot(self)

    def release(self) -> None:
        self.active -= 1
        self.metrics.active.set(self.active)
        if not self.active:
            self._idle.set()

    def _refuse(self, reason: str, status: int, text: str, retry: float) -> None:
        self.metrics.refused(reason)
        code = "rate_limit_exceeded" if status == 429 else "overloaded"
        raise ApiError(status, text, code=code, retry_after=retry)

    def reasons_against(self) -> list[str]:
        """Why no new work is taken now; empty while it is."""
        reasons = []
        if not self.source.ready:
            reasons.append(self.source.health().trouble)
        if self.draining:
            reasons.append("the server is shutting down")
        if self.watchdog.shedding:
            reasons.append(self.watchdog.reason)
        return reasons

    async def drain(self, seconds: float) -> bool:
        """Refuse new work and wait for the running; True if all of it ended in time."""
        self.draining = True
        if self.active:
            log.info("draining: %d requests are still running, at most %.0f s", self.active, seconds)
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            log.warning("drain time is over with %d requests running; they are cancelled", self.active)
            return False
        return True
