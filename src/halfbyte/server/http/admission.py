"""Who may come in: a slot for each request, taken before anything expensive is done for it.

Admission counts requests and their sequences (a prompt and a choice each), not tokens: the engine queues within it. One
request more than `max_requests`, or one of a client that has as many sequences as it may, is refused while it is still
cheap to refuse, before its conversation is rendered. A client is a key or, without keys, an address (`middleware.py`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter

from halfbyte.engine.request import TokenSource
from halfbyte.server.http.errors import ApiError, bad_request
from halfbyte.server.http.metrics import Metrics
from halfbyte.server.http.workroom import Workroom
from halfbyte.server.settings import ServerSettings
from halfbyte.server.watchdog import Watchdog

log = logging.getLogger("halfbyte.server")


class RequestSlot:
    """One request's place. It is free again as soon as the engine has done its part, so that a client which has read
    the end of its answer finds room for the next; whoever took it releases it in any case."""

    def __init__(self, admission: Admission, client: str) -> None:
        self._admission: Admission | None = admission
        self.client = client
        self._sequences = 1
        self._lock = threading.Lock()  # a large request is counted in the workroom's thread, and its client may leave

    def hold(self, sequences: int, param: str = "n") -> None:
        """Count the request's sequences, or raise the refusal. `param` is the field that asks for them."""
        with self._lock:
            if self._admission is not None:
                self._admission.hold(self.client, sequences, sequences - self._sequences, param)
                self._sequences = sequences

    def release(self) -> None:
        with self._lock:
            admission, self._admission = self._admission, None
        if admission is not None:
            admission.release(self.client, self._sequences)


class Admission:
    def __init__(self, source: TokenSource, settings: ServerSettings, metrics: Metrics) -> None:
        self.source = source
        self.max_requests = settings.max_requests
        self.max_sequences_per_request = settings.max_sequences_per_request
        self.max_sequences_per_client = settings.max_sequences_per_client
        self.metrics = metrics
        self.watchdog = Watchdog(settings.min_available_bytes, settings.last_available_bytes)
        self.draining = False
        self.active = 0
        self._sequences: Counter[str] = Counter()  # running and waiting, by client
        self._lock = threading.Lock()
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

    def take_slot(self, client: str) -> RequestSlot:
        """A place for one request with one sequence, or the refusal."""
        self.check()
        self._take_sequences(client, 1)
        self.active += 1
        self.metrics.active.set(self.active)
        self._idle.clear()
        return RequestSlot(self, client)

    def hold(self, client: str, sequences: int, more: int, param: str) -> None:
        """Count `more` sequences of a request that has `sequences` in all, or raise the refusal."""
        limits = (
            (self.max_sequences_per_request, "--max-sequences-per-request"),
            (self.max_sequences_per_client, "--max-sequences-per-client"),
        )
        limit, flag = min(limits)
        if sequences > limit:
            self.metrics.refused("client")
            raise bad_request(
                f"The request asks for {sequences} sequences (its prompts times 'n'), but this server takes {limit} in "
                f"one request ({flag}); send it in parts.",
                param,
            )
        self._take_sequences(client, more)

    def _take_sequences(self, client: str, more: int) -> None:
        with self._lock:
            count = self._sequences[client]
            if fits := count + more <= self.max_sequences_per_client:
                self._sequences[client] += more
        if not fits:
            text = (
                f"This client has {count} sequences running or waiting and asks for {more} more, but it may have "
                f"{self.max_sequences_per_client} (--max-sequences-per-client); wait until some have ended."
            )
            self._refuse("client", 429, text, 1 + count / 64)

    def release(self, client: str, sequences: int) -> None:
        with self._lock:
            self._sequences[client] -= sequences
            if not self._sequences[client]:
                del self._sequences[client]
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
