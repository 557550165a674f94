"""One API request on its way through the engine: updates for the endpoint in batches, totals and metrics kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from halfbyte.server.answer.answer import ChoiceAnswer, Update
from halfbyte.server.answer.call_memory import OwnCalls
from halfbyte.server.answer.prompt import Prompt
from halfbyte.server.answer.pump import Pump
from halfbyte.server.answer.reader import ChoiceReader
from halfbyte.server.answer.requests import Reader, chat_updates
from halfbyte.server.answer.service import Service
from halfbyte.server.http.admission import RequestSlot
from halfbyte.server.http.connection import auto_close
from halfbyte.server.http.errors import ApiError, is_cancellation


@dataclass
class Totals:
    prompt: int = 0
    cached: int = 0
    from_memory: int = 0  # of the cached ones
    from_disk: int = 0  # of the cached ones
    completion: int = 0
    reasoning: int = 0
    reasoning_cut: bool = False  # the request's limit has ended the reasoning of a choice


class UpdateSink(Protocol):
    """What keeps an answer: chat's has items, completions' is plain text."""

    def add(self, update: Update) -> None: ...


A = TypeVar("A", bound=UpdateSink)


class Generation(Generic[A]):
    """Iterate `batches`; `answers` hold what the batches so far said, `totals` what to bill."""

    def __init__(
        self,
        service: Service,
        api: str,
        readers: Sequence[Reader],
        answers: list[A],
        updates: Callable[[], AsyncIterator[Update]],
        *,
        slot: RequestSlot,
        prompt_tokens: int,
        streaming: bool,
        calls: OwnCalls | None = None,
    ) -> None:
        self.service = service
        self.api = api
        self.readers = readers
        self.answers = answers
        self.updates = updates
        self.slot = slot
        self.streaming = streaming
        self.calls = calls
        self.totals = Totals(prompt=prompt_tokens)
        self.finish: list[str | None] = [None] * len(answers)
        self._gaps = service.metrics.gaps
        self._last_token: list[float | None] = [None] * len(answers)

    async def batches(self) -> AsyncIterator[list[Update]]:
        async with contextlib.AsyncExitStack() as stack:
            if self.streaming:
                await stack.enter_async_context(self.service.pacer.stream())
            start = time.perf_counter()
            first: float | None = None
            settings = self.service.settings
            pump = Pump(
                self.updates(),
                most_tokens=settings.most_unread_tokens if self.streaming else None,
                silence=settings.silence_seconds or None,
                arrived=self._arrived,
            )
            reason = "cancelled"
            try:
                last_batch = start
                while not all(self.finish):
                    updates = await pump.take()
                    if updates is None:
                        raise ApiError(500, "The engine ended the request without a result.", code="internal_error")
                    if first is None and any(u.tokens for u in updates):
                        first = time.perf_counter() - start
                    if batch := self._merge(updates):
                        yield batch
                    if self.streaming and not all(self.finish) and (pause := self.service.pacer.interval):
                        pause -= time.perf_counter() - last_batch
                        if pause > 0:
                            await asyncio.sleep(pause)
                        last_batch = time.perf_counter()
                reasons = {str(f) for f in self.finish}
                reason = reasons.pop() if len(reasons) == 1 else "mixed"
            except BaseException as e:
                if not is_cancellation(e):
                    reason = "error"
                raise
            finally:
                await pump.close()
                self.slot.release()
                self._record(reason, first, time.perf_counter() - start)

    def _arrived(self, update: Update, now: float) -> None:
        """Something came from the engine, whether or not the client is ready for it."""
        if update.tokens:
            last, self._last_token[update.index] = self._last_token[update.index], now
            if last is not None:
                self._gaps.add(now - last, len(update.tokens))

    def _merge(self, updates: list[Update]) -> list[Update]:
        """What arrived, as one update for each choice that has something to say; answers and totals follow it."""
        by_choice: dict[int, Update] = {}
        for update in updates:
            earlier = by_choice.setdefault(update.index, update)
            if earlier is not update:
                earlier.add(update)
        totals = self.totals
        for index, update in by_choice.items():
            answer = self.answers[index]
            answer.add(update)
            if update.finish is not None and self.calls is not None and isinstance(answer, ChoiceAnswer):
                self.calls.keep(answer)
            self.finish[index] = update.finish
            totals.completion += len(update.tokens) + update.dropped_tokens
            totals.reasoning += update.reasoning_tokens
            totals.reasoning_cut = totals.reasoning_cut or update.reasoning_cut
            totals.cached = max(totals.cached, update.cached_tokens)
            totals.from_memory = max(totals.from_memory, update.memory_tokens)
            totals.from_disk = max(totals.from_disk, update.disk_tokens)
        return [update for update in by_choice.values() if update]

    def _record(self, reason: str, first: float | None, total: float) -> None:
        t, metrics = self.totals, self.service.metrics
        metrics.finished(
            self.api,
            reason,
            prompt=t.prompt,
            cached=t.cached,
            completion=t.completion,
            reasoning=t.reasoning,
            reasoning_cut=t.reasoning_cut,
        )
        metrics.latency(first, total)
        for reader in self.readers:
            metrics.repairs(reader.repairs)

    async def finish_all(self) -> None:
        """Run to the end without looking; the answers keep everything."""
        async with auto_close(self.batches()) as batches:
            async for _ in batches:
                pass


def generate(service: Service, prompt: Prompt, slot: RequestSlot, *, streaming: bool) -> Generation[ChoiceAnswer]:
    """The answers to a conversation, not yet begun: the first batch asked for starts the engine."""
    service.log_prompt(prompt.tokens)
    slot.hold(prompt.sampling.n)
    bound = service.settings.bind_tools
    readers = [ChoiceReader(service.harmony, prompt, i, bound=bound) for i in range(prompt.sampling.n)]
    return Generation(
        service,
        prompt.conversation.api,
        readers,
        [ChoiceAnswer() for _ in readers],
        lambda: chat_updates(service, prompt, readers, slot.client),
        slot=slot,
        prompt_tokens=prompt.length,
        streaming=streaming,
        calls=service.calls.of(prompt.conversation.owner),
    )
