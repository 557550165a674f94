"""What every endpoint shares: the engine, the model's name, who may come in, and whether we are closing.

Admission counts requests, not tokens: the engine queues within it, and one more than `max_requests` is refused while it
is still cheap to refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from halfbyte.engine.request import TokenSource
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server.answer.conversation import Dialect
from halfbyte.server.answer.stream import Pacer
from halfbyte.server.api.response_store import ResponseStore
from halfbyte.server.http.errors import ApiError
from halfbyte.server.http.metrics import Metrics
from halfbyte.server.settings import ServerSettings
from halfbyte.server.watchdog import Watchdog

log = logging.getLogger("halfbyte.server")
prompts = logging.getLogger("halfbyte.prompts")


class Service:
    def __init__(self, source: TokenSource, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.settings = settings
        self.dialect = Dialect(tokenizer)
        self.metrics = Metrics(source)
        self.pacer = Pacer()
        self.watchdog = Watchdog(settings.min_available_bytes)
        self.responses = ResponseStore(settings.stored_responses, settings.stored_bytes)
        self.draining = False
        self.active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        if settings.log_prompts:
            prompts.setLevel(logging.INFO)

    @property
    def model(self) -> str:
        return self.settings.model_name or self.source.info.model

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.model, self.source.info.model, *self.settings.aliases)))

    @property
    def ready(self) -> bool:
        return self.source.ready and not self.draining and not self.watchdog.shedding

    def check_model(self, name: str) -> str:
        """The name to answer under: the one that was asked for, if it is one of ours."""
        if self.settings.any_model or name in self.names:
            return name
        known = ", ".join(repr(n) for n in self.names)
        raise ApiError(
            404, f"The model {name!r} is not served here; ask for {known}.", param="model", code="model_not_found"
        )

    def log_prompt(self, prompt: list[int]) -> None:
        if self.settings.log_prompts:
            prompts.info("%s", self.tokenizer.decode(prompt))

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Room for one request, or the refusal that says when to come back."""
        if self.draining:
            self._refuse("draining", 503, "The server is shutting down; try again elsewhere or later.", 10)
        if self.watchdog.shedding:
            self._refuse("memory", 503, f"The server is short of memory: {self.watchdog.reason}.", 5)
        if not self.source.ready:
            self._refuse("not_ready", 503, "The model is still loading.", 5)
        if self.active >= self.settings.max_requests:
            text = f"{self.active} requests are running or waiting, which is the most this server takes at once."
            self._refuse("queue", 429, text, 1 + self.active / 64)
        self.active += 1
        self.metrics.active.set(self.active)
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            self.metrics.active.set(self.active)
            if not self.active:
                self._idle.set()

    def _refuse(self, reason: str, status: int, text: str, retry: float) -> None:
        self.metrics.refused(reason)
        code = "rate_limit_exceeded" if status == 429 else "overloaded"
        raise ApiError(status, text, code=code, retry_after=retry)

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
