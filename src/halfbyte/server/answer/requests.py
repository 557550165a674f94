"""How a prepared turn reaches the engine: one request, or a few in a row where a call or a JSON answer is owed.

Whatever the model does, what was asked for comes out. A tool call that was required is asked for in steps: the model
reasons until its message ends, then the name of a tool is generated among those allowed, then arguments that fit its
schema. The prefix cache makes the later steps cheap. A structured answer runs in one request under a trigger; if the
model ended without ever beginning its answer, one more request begins it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from halfbyte.engine.request import Constraint, Delta, FinishReason, Request, Usage
from halfbyte.errors import RequestError
from halfbyte.server.answer.answer import ChoiceState
from halfbyte.server.answer.conversation import Prepared
from halfbyte.server.answer.stream import closing
from halfbyte.server.answer.tools import Function
from halfbyte.server.service import Service


@dataclass(frozen=True)
class Forced(Delta):
    """Tokens that the server put into the prompt in the middle of an answer; the client never pays for them."""


@dataclass(frozen=True)
class Ended(Delta):
    """The end of several requests in a row; `dropped` tokens were generated but stood only for structure."""

    dropped: int = 0


class Sequence:
    """The engine requests of one choice, one after the other, as one stream of deltas."""

    def __init__(self, service: Service, prepared: Prepared, index: int) -> None:
        self.service = service
        self.prepared = prepared
        self.index = index
        self.tokens = list(prepared.prompt + prepared.prefill)
        self.left = prepared.sampling.max_tokens or 0
        self.cached: int | None = None
        self.made = self.dropped = 0
        self.ended: str | None = None
        seed = prepared.sampling.seed
        self.sampling = replace(prepared.sampling, n=1, seed=None if seed is None else seed + index)

    async def run(
        self,
        *,
        until: frozenset[int] = frozenset(),
        at: tuple[int, ...] = (),
        constraint: Constraint | None = None,
    ) -> AsyncIterator[Delta]:
        """One engine request from where the tokens stand.

        It ends at a token of `until`, which is not passed on, or of `at`, which is.
        """
        sampling = replace(
            self.sampling,
            max_tokens=self.left,
            min_tokens=0 if until or at else self.sampling.min_tokens,
            stop_token_ids=(*self.sampling.stop_token_ids, *until, *at),
        )
        request = Request(self.tokens.copy(), sampling, constraint, self.service.settings.request_timeout)
        self.ended = None
        async with closing(self.service.source.stream(request)) as deltas:
            async for delta in deltas:
                tokens = delta.tokens
                kept = [t for t in tokens if t not in until] if until else tokens
                self.left -= len(tokens)
                self.made += len(tokens)
                self.dropped += len(tokens) - len(kept)
                self.tokens += kept
                if delta.usage is not None and self.cached is None:
                    self.cached = delta.usage.cached_tokens  # later requests find this one's own tokens
                self.ended = delta.finish
                logprobs = delta.logprobs
                if logprobs is not None and len(kept) != len(tokens):
                    logprobs = [lp for t, lp in zip(tokens, logprobs) if t not in until]
                failed = delta.finish in ("error", "timeout", "cancelled")
                yield Delta(
                    kept,
                    self.index,
                    logprobs,
                    finish=delta.finish if failed else None,
                    error=delta.error,
                )
                if failed:
                    return

    def force(self, ids: list[int]) -> Delta:
        self.tokens += ids
        return Forced(list(ids), self.index)

    def end(self, reason: str) -> Delta:
        used = Usage(len(self.prepared.prompt), self.cached or 0, self.made)
        finish: FinishReason = "length" if reason == "length" else "stop"
        return Ended([], self.index, finish=finish, usage=used, dropped=self.dropped)

    @property
    def failed(self) -> bool:
        return self.ended in ("error", "timeout", "cancelled")

    @property
    def cut(self) -> bool:
        return self.ended == "length" or self.left <= 0


def _stream(service: Service, request: Request) -> AsyncIterator[Delta]:
    return service.source.stream(request)


async def required_call(service: Service, prepared: Prepared, index: int) -> AsyncIterator[Delta]:
    """Reason, then call one of the allowed tools, whatever the model would rather do."""
    dialect, functions = service.dialect, prepared.tools.functions
    seq = Sequence(service, prepared, index)
    c = dialect.controls
    if prepared.turn.effort != "none":
        yield seq.force(dialect.analysis_header)
        async for delta in seq.run(until=dialect.structural):
            yield delta
        if seq.failed:
            return
        if seq.cut:
            yield seq.end("length")
            return
        yield seq.force(dialect.new_message)
    chosen = functions[0]
    if len(functions) == 1:
        yield seq.force(dialect.call_to(chosen.recipient))
    else:
        # The dot often shares a token with what follows, so it is left to the model.
        roots = sorted({f.namespace for f in functions})
        pattern = "|".join(
            re.escape(f.recipient.removeprefix(roots[0]) if len(roots) == 1 else f.recipient) for f in functions
        )
        lead = f" to={roots[0]}" if len(roots) == 1 else " to="
        yield seq.force(dialect.tokenizer.encode(lead))
        start = len(seq.tokens)
        constraint = Constraint("regex", f"({pattern})", end_tokens=(c.channel,))
        async for delta in seq.run(until=dialect.structural, constraint=constraint):
            yield delta
        if seq.failed:
            return
        name = dialect.tokenizer.decode(seq.tokens[start:])
        name = roots[0] + name if len(roots) == 1 else name
        found = next((f for f in functions if f.recipient == name), None)
        if found is None:  # cut off within the name
            yield seq.end("length")
            return
        chosen = found
        header = dialect.call_to(chosen.recipient)
        yield seq.force(header[header.index(c.channel) :])
    async for delta in _arguments(service, seq, chosen):
        yield delta
    if seq.failed:
        return
    if not seq.cut:
        yield seq.force([c.call])
    yield seq.end("length" if seq.cut else "stop")


async def _arguments(service: Service, seq: Sequence, function: Function) -> AsyncIterator[Delta]:
    """Arguments under the tool's schema. A schema that no grammar can hold binds only if the tool is strict."""
    c = service.dialect.controls
    ends = (c.call,)
    until = service.dialect.structural
    schema = Constraint("json_schema", json.dumps(function.schema), end_tokens=ends)
    try:
        async for delta in seq.run(until=until, constraint=schema):
            yield delta
        return
    except RequestError:
        if function.strict:
            raise
    async for delta in seq.run(until=until, constraint=Constraint("json_object", '{"type":"object"}', end_tokens=ends)):
        yield delta


async def guided(service: Service, prepared: Prepared, index: int, choice: ChoiceState) -> AsyncIterator[Delta]:
    """Message by message, each body under the grammar its header calls for: a strict tool's schema, or the answer's.

    The engine wakes one grammar at one set of triggers, so where several may be needed each message is two requests:
    its header, and then, known what it is, its body.
    """
    c = service.dialect.controls
    seq = Sequence(service, prepared, index)
    while True:
        start = len(seq.tokens)
        async for delta in seq.run(at=(c.message,)):
            yield delta
        if seq.failed:
            return
        if seq.cut or seq.tokens[-1] != c.message:
            break  # it ended, or never wrote a body
        rule = _rule(service, prepared, seq.tokens[start:])
        async for delta in seq.run(at=() if rule else (c.end,), constraint=rule):
            yield delta
        if seq.failed:
            return
        if seq.cut or seq.tokens[-1] != c.end:
            break
    async for delta in _answer_owed(service, seq, choice):
        yield delta


def _rule(service: Service, prepared: Prepared, header: list[int]) -> Constraint | None:
    c = service.dialect.controls
    if any(tuple(header[-len(t) :]) == t for t in service.dialect.final_headers):
        return None if prepared.constraint is None else replace(prepared.constraint, triggers=())
    named = re.search(r"to=\s*([^\s<]+)", service.dialect.tokenizer.decode(header))
    function = prepared.tools.find(named[1]) if named else None
    if function is None or not function.strict or function.parameters is None:
        return None
    return Constraint("json_schema", json.dumps(function.parameters), end_tokens=(c.call,))


async def structured(service: Service, prepared: Prepared, index: int, choice: ChoiceState) -> AsyncIterator[Delta]:
    """A JSON answer in one request, its grammar asleep until the answer begins."""
    seq = Sequence(service, prepared, index)
    async for delta in seq.run(constraint=prepared.constraint):
        yield delta
    if not seq.failed:
        async for delta in _answer_owed(service, seq, choice):
            yield delta


async def _answer_owed(service: Service, seq: Sequence, choice: ChoiceState) -> AsyncIterator[Delta]:
    """If a structured answer is owed and the model ended without beginning one, begin it for it; then the end."""
    dialect, constraint = service.dialect, seq.prepared.constraint
    if constraint is not None and not seq.cut and not _answered(seq, choice):
        while seq.tokens and seq.tokens[-1] in dialect.structural:
            seq.tokens.pop()
        yield seq.force([*dialect.new_message, *dialect.json_header])
        async for delta in seq.run(constraint=replace(constraint, triggers=())):
            yield delta
        if seq.failed:
            return
    yield seq.end("length" if seq.cut else "stop")


def _answered(seq: Sequence, choice: ChoiceState) -> bool:
    """Whether there is an answer, or a call in its place. The tokens are asked, not the choice's text: what it has
    been fed may lag behind what was generated."""
    c = seq.service.dialect.controls
    made = seq.tokens[len(seq.prepared.prompt) :]
    if seq.prepared.tools and made and made[-1] == c.call:
        return True
    for trigger in seq.service.dialect.final_headers:
        for at in range(len(made) - len(trigger)):
            if tuple(made[at : at + len(trigger)]) == trigger:
                return True
    return choice.answered


async def plain(service: Service, prepared: Prepared) -> AsyncIterator[Delta]:
    """One request; the engine makes all n choices of it."""
    settings = service.settings
    request = Request(
        prepared.prompt + prepared.prefill, prepared.sampling, prepared.constraint, settings.request_timeout
    )
    async with closing(service.source.stream(request)) as deltas:
        async for delta in deltas:
            yield delta


async def merged(parts: list[AsyncIterator[Delta]]) -> AsyncIterator[Delta]:
    """Several streams as one, in order of arrival."""
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

    async def drain(part: AsyncIterator[Delta]) -> None:
        try:
            async with closing(part):
                async for delta in part:
                    queue.put_nowait(delta)
        except Exception as e:
            queue.put_nowait(e)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(drain(part)) for part in parts]
    try:
        open_parts = len(tasks)
        while open_parts:
            item = await queue.get()
            if item is None:
                open_parts -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
