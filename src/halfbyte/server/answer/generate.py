"""One API request on its way through the engine: deltas in, updates for the endpoint out, totals and metrics kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from halfbyte.engine.request import Delta, Logprob
from halfbyte.server.answer.answer import ChoiceState, Piece
from halfbyte.server.answer.conversation import Prepared
from halfbyte.server.answer.requests import Ended, Forced, guided, merged, plain, required_call, structured
from halfbyte.server.answer.stream import Pump, closing
from halfbyte.server.http.errors import ApiError
from halfbyte.server.service import Service


@dataclass
class Update:
    """What one choice gained. `finish` is set once, at its end."""

    index: int
    pieces: list[Piece]
    finish: str | None = None
    tokens: list[int] = field(default_factory=list)  # as generated, structure included


@dataclass
class Totals:
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


class ChoiceLike(Protocol):
    """One answer in the making: chat's parses harmony, completions' is plain text."""

    done: bool  # nothing the model still says can matter (a stop string, the one call that was allowed)
    finish: str | None
    reasoning_tokens: int

    @property
    def repairs(self) -> dict[str, int]: ...

    def feed(self, tokens: list[int], logprobs: list[Logprob] | None, *, forced: bool = False) -> list[Piece]: ...

    def end(self, reason: str) -> list[Piece]: ...


C = TypeVar("C", bound=ChoiceLike)


class Run(Generic[C]):
    """One API request on its way. Iterate `batches`; `choices` hold the finished state, `totals` what to bill."""

    def __init__(
        self,
        service: Service,
        api: str,
        choices: list[C],
        deltas: Callable[[], AsyncIterator[Delta]],
        *,
        prompt_tokens: int,
        streaming: bool,
    ) -> None:
        self.service = service
        self.api = api
        self.choices = choices
        self.deltas = deltas
        self.streaming = streaming
        self.totals = Totals(prompt=prompt_tokens)
        self.finish: list[str | None] = [None] * len(choices)

    async def batches(self) -> AsyncIterator[list[Update]]:
        with self.service.admitted():
            async with contextlib.AsyncExitStack() as stack:
                if self.streaming:
                    await stack.enter_async_context(self.service.pacer.stream())
                start = time.perf_counter()
                first: float | None = None
                pump = Pump(self.deltas())
                reason = "cancelled"
                try:
                    sent = start
                    while not all(self.finish):
                        deltas = await pump.take()
                        if deltas is None:
                            raise ApiError(500, "The engine ended the request without a result.", code="internal_error")
                        if first is None and any(d.tokens for d in deltas):
                            first = time.perf_counter() - start
                        if updates := self._take(deltas):
                            yield updates
                        if self.streaming and (pause := self.service.pacer.interval):
                            pause -= time.perf_counter() - sent
                            if pause > 0:
                                await asyncio.sleep(pause)
                            sent = time.perf_counter()
                    reason = ",".join(sorted({str(f) for f in self.finish}))
                except GeneratorExit:
                    raise
                except Exception:
                    reason = "error"
                    raise
                finally:
                    await pump.close()
                    self._record(reason, first, time.perf_counter() - start)

    def _take(self, deltas: list[Delta]) -> list[Update]:
        """Feed what arrived, each choice's tokens in one piece wherever nothing lies between."""
        updates: list[Update] = []
        grouped: dict[int, list[Delta]] = {}
        for delta in deltas:
            grouped.setdefault(delta.index, []).append(delta)
        for index, group in grouped.items():
            if self.finish[index] is not None:
                continue
            choice = self.choices[index]
            pieces: list[Piece] = []
            tokens: list[int] = []
            finish: str | None = None
            for delta in group:
                if delta.finish in ("error", "timeout", "cancelled"):
                    raise _failure(delta)
                if delta.tokens:
                    if isinstance(delta, Forced):
                        pieces += choice.feed(delta.tokens, None, forced=True)
                    else:
                        self.totals.completion += len(delta.tokens)
                        tokens += delta.tokens
                        pieces += choice.feed(delta.tokens, delta.logprobs)
                if isinstance(delta, Ended):
                    self.totals.completion += delta.dropped
                if delta.usage is not None:
                    self.totals.cached = max(self.totals.cached, delta.usage.cached_tokens)
                if delta.finish is not None or choice.done:
                    pieces += choice.end(delta.finish or "stop")
                    finish = choice.finish
                    break
            self.finish[index] = finish
            if pieces or finish or tokens:
                updates.append(Update(index, pieces, finish, tokens))
        self.totals.reasoning = sum(c.reasoning_tokens for c in self.choices)
        return updates

    def _record(self, reason: str, first: float | None, total: float) -> None:
        t, metrics = self.totals, self.service.metrics
        metrics.finished(
            self.api,
            reason,
            prompt=t.prompt,
            cached=t.cached,
            completion=t.completion,
            reasoning=t.reasoning,
        )
        metrics.latency(first, total, t.completion)
        for choice in self.choices:
            metrics.repairs(choice.repairs)

    async def all(self) -> None:
        """Run to the end without looking; the choices keep everything."""
        async with closing(self.batches()) as batches:
            async for _ in batches:
                pass


def _failure(delta: Delta) -> ApiError:
    if delta.finish == "timeout":
        return ApiError(504, "The request took longer than the server allows.", code="timeout")
    if delta.finish == "cancelled":
        return ApiError(503, "The request was cancelled by the server.", code="cancelled", retry_after=5)
    return ApiError(500, delta.error or "The engine failed on this request.", code="engine_error")


def chat_run(service: Service, prepared: Prepared, *, streaming: bool) -> Run[ChoiceState]:
    """The run of a conversation, in as few engine requests as what it owes the client allows."""
    service.log_prompt(prepared.prompt + prepared.prefill)
    choices = [ChoiceState(service.dialect, prepared) for _ in range(prepared.sampling.n)]

    def deltas() -> AsyncIterator[Delta]:
        if prepared.turn.choice.mode == "required":
            parts = [required_call(service, prepared, i) for i in range(len(choices))]
        elif any(f.strict and f.parameters is not None for f in prepared.tools.functions):
            parts = [guided(service, prepared, i, choice) for i, choice in enumerate(choices)]
        elif prepared.constraint is not None:
            parts = [structured(service, prepared, i, choice) for i, choice in enumerate(choices)]
        else:
            return plain(service, prepared)
        return parts[0] if len(parts) == 1 else merged(parts)

    prompt = len(prepared.prompt) + len(prepared.prefill)
    return Run(service, prepared.turn.api, choices, deltas, prompt_tokens=prompt, streaming=streaming)
