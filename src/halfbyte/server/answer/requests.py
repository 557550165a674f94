"""How a prompt reaches the engine: one request, or a few in a row where a call or a JSON answer is owed.

Whatever the model does, what was asked for comes out. A tool call that was required is asked for in steps: the model
reasons until its message ends, then the name of a tool is generated among those allowed, then arguments that fit its
schema. The prefix cache makes the later steps cheap. A structured answer runs in one request under a trigger; if the
model ended without ever beginning its answer, one more request begins it.

Every token goes through the choice's reader as it arrives, and what to ask next is read off that reader. Tokens that
the server writes in the middle of an answer take room of the context as generated ones do; only generated ones count
against `max_tokens`. An answer that runs out of either ends with the reason "length".
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Protocol

from halfbyte.engine.offered_functions import offered_recipient
from halfbyte.engine.request import Constraint, Delta, Logprob, ReasoningLimit, Request, Usage
from halfbyte.errors import RequestError
from halfbyte.server.answer.answer import Update
from halfbyte.server.answer.prompt import Prompt
from halfbyte.server.answer.pump import merge
from halfbyte.server.answer.reader import ChoiceReader
from halfbyte.server.answer.service import Service
from halfbyte.server.answer.tools import Function
from halfbyte.server.http.connection import auto_close
from halfbyte.server.http.errors import ApiError


class Reader(Protocol):
    """Tokens of one choice in, updates out: chat's parses harmony, completions' is plain text."""

    done: bool  # nothing the model still says can matter (a stop string, the one call that was allowed)

    @property
    def repairs(self) -> dict[str, int]: ...

    def read(self, tokens: list[int], logprobs: list[Logprob] | None, *, forced: bool = False) -> Update: ...

    def end(self, reason: str) -> Update: ...


def chat_updates(service: Service, prompt: Prompt, readers: list[ChoiceReader], client: str) -> AsyncIterator[Update]:
    """All choices of a conversation, in as few engine requests as what it owes the client allows."""
    required = prompt.conversation.tool_choice.mode == "required"
    if required or prompt.tools.strict or prompt.constraint is not None:
        streams = [ChoiceRequests(service, prompt, reader, client).updates() for reader in readers]
        return streams[0] if len(streams) == 1 else merge(streams)
    bound = bool(prompt.tools) and service.settings.bind_tools
    constraint = offered_recipient(service.tokenizer, prompt.tools.recipients) if bound else None
    timeout = service.settings.request_timeout
    request = Request(prompt.tokens, prompt.sampling, constraint, timeout, client=client, reasoning=prompt.reasoning)
    request.scope = service.settings.prefix_scope(client)
    return single_request(service, request, readers, "tools" if bound else None)


def count_cached(update: Update, usage: Usage) -> None:
    update.cached_tokens, update.memory_tokens = usage.cached_tokens, usage.memory_tokens
    update.disk_tokens = usage.disk_tokens


async def single_request(
    service: Service, request: Request, readers: Sequence[Reader], grammar_field: str | None = None
) -> AsyncIterator[Update]:
    """One engine request that makes all n choices. `grammar_field` is what its constraint came from."""
    running = set(range(len(readers)))
    try:
        async with auto_close(service.source.stream(request)) as deltas:
            async for delta in deltas:
                if delta.index not in running:
                    continue
                raise_failure(delta)
                if delta.prompt_logprobs:  # the prompt is the same for all choices
                    for reader in readers:
                        scored = reader.read([], None)
                        scored.prompt_logprobs = delta.prompt_logprobs
                        yield scored
                    continue
                reader = readers[delta.index]
                update = reader.read(delta.tokens, delta.logprobs)
                update.reasoning_cut = delta.reasoning_cut
                if delta.usage is not None:
                    count_cached(update, delta.usage)
                if delta.finish is not None or reader.done:
                    running.discard(delta.index)
                    update.add(reader.end(delta.finish or "stop"))
                yield update
                if not running and delta.finish is None:
                    return  # closing the engine's stream cancels what nobody waits for
    except RequestError as e:
        raise naming(e, grammar_field) from None


def naming(error: RequestError, grammar_field: str | None) -> Exception:
    """The engine's refusal of a grammar, with the field that the grammar came from."""
    if grammar_field is None or type(error) is not RequestError:  # a context that is too long is another matter
        return error
    return ApiError(400, str(error), param=grammar_field)


def raise_failure(delta: Delta) -> None:
    if delta.finish == "timeout":
        raise ApiError(504, "The request took longer than the server allows.", code="timeout")
    if delta.finish == "cancelled":
        raise ApiError(503, "The request was cancelled by the server.", code="cancelled", retry_after=5)
    if delta.finish == "error":
        raise ApiError(500, delta.error or "The engine failed on this request.", code="engine_error")


class _OutOfTokensError(Exception):
    """Neither the context nor `max_tokens` leaves a token for the next step of an answer."""


class ChoiceRequests:
    """The engine requests of one choice, one after the other, as one stream of updates."""

    def __init__(self, service: Service, prompt: Prompt, reader: ChoiceReader, client: str) -> None:
        self.service = service
        self.client = client
        self.harmony = service.harmony
        self.prompt = prompt
        self.reader = reader
        self.tokens = prompt.tokens
        self.limit_left = prompt.sampling.max_tokens or 0  # tokens that may still be generated for the client
        self.context_left = service.source.info.max_context - len(self.tokens)  # tokens that still fit
        self.first_usage: Usage | None = None
        self.generated_tokens = self.dropped_tokens = self.reasoning_tokens = 0
        self.last_finish: str | None = None
        self.grammar_field: str | None = None  # what the last request's constraint came from
        seed = prompt.sampling.seed
        self.sampling = replace(prompt.sampling, n=1, seed=None if seed is None else seed + reader.index)

    async def updates(self) -> AsyncIterator[Update]:
        try:
            async with auto_close(self._steps()) as steps:
                async for update in steps:
                    if self.reader.done:
                        update.add(self._end("stop"))
                        yield update
                        return
                    yield update
        except RequestError as e:
            raise naming(e, self.grammar_field) from None
        except _OutOfTokensError:
            self.last_finish = "length"
        yield self._end("length" if self.cut else "stop")

    def _steps(self) -> AsyncIterator[Update]:
        if self.prompt.conversation.tool_choice.mode == "required":
            return self._required_call()
        bound = bool(self.prompt.tools) and self.service.settings.bind_tools
        return self._message_by_message() if bound or self.prompt.tools.strict else self._structured()

    @property
    def cut(self) -> bool:
        return self.last_finish == "length"

    def _end(self, reason: str) -> Update:
        update = self.reader.end(reason)
        count_cached(update, self.first_usage or Usage())
        update.dropped_tokens = self.dropped_tokens
        return update

    async def _request(
        self,
        *,
        until: frozenset[int] = frozenset(),
        stop_after: tuple[int, ...] = (),
        constraint: Constraint | None = None,
        closings: tuple[tuple[int, ...], ...] = (),
    ) -> AsyncIterator[Update]:
        """One engine request from where the tokens stand.

        It ends at a token of `until`, which is not passed on, or of `stop_after`, which is. `closings` replace those
        of the prompt's limit on reasoning.
        """
        max_tokens = min(self.limit_left, self.context_left)
        if max_tokens < 1:
            raise _OutOfTokensError
        min_tokens = 0 if until or stop_after else self.sampling.min_tokens - self.generated_tokens
        sampling = replace(
            self.sampling,
            max_tokens=max_tokens,
            min_tokens=max(0, min(min_tokens, self.context_left)),
            stop_token_ids=(*self.sampling.stop_token_ids, *until, *stop_after),
        )
        timeout = self.service.settings.request_timeout
        reasoning = self.prompt.reasoning
        if reasoning is not None:
            left = max(0, reasoning.tokens - self.reasoning_tokens)
            reasoning = ReasoningLimit(left, closings or reasoning.closings)
        request = Request(self.tokens.copy(), sampling, constraint, timeout, client=self.client, reasoning=reasoning)
        request.scope = self.service.settings.prefix_scope(self.client)
        self.last_finish = None
        self.grammar_field = self._field_of(constraint)
        async with auto_close(self.service.source.stream(request)) as deltas:
            async for delta in deltas:
                raise_failure(delta)
                tokens, logprobs = delta.tokens, delta.logprobs
                self.generated_tokens += len(tokens)
                self.limit_left -= len(tokens)
                self.context_left -= len(tokens)
                dropped = 0
                if not until.isdisjoint(tokens):
                    positions = [at for at, token in enumerate(tokens) if token not in until]
                    dropped = len(tokens) - len(positions)
                    logprobs = None if logprobs is None else [logprobs[at] for at in positions]
                    tokens = [tokens[at] for at in positions]
                self.tokens += tokens
                if delta.usage is not None and self.first_usage is None:
                    self.first_usage = delta.usage  # later requests find this one's own tokens
                self.last_finish = delta.finish
                update = self.reader.read(tokens, logprobs)
                update.reasoning_cut = delta.reasoning_cut
                self.reasoning_tokens += update.reasoning_tokens
                if not self.reader.done:  # else the answer ended before them
                    self.dropped_tokens += dropped
                yield update

    def _field_of(self, constraint: Constraint | None) -> str | None:
        format = self.prompt.conversation.format
        if constraint is not None and format is not None and constraint.source == format.source:
            return format.field
        return None if constraint is None else "tools"

    def _force(self, tokens: list[int]) -> Update:
        """Tokens that the server puts into the prompt in the middle of an answer that the model can still continue."""
        if self.limit_left < 1 or len(tokens) >= self.context_left:
            raise _OutOfTokensError
        self.context_left -= len(tokens)
        self.tokens += tokens
        return self.reader.read(list(tokens), None, forced=True)

    # ---- a call that must be made -------------------------------------------------------------

    async def _required_call(self) -> AsyncIterator[Update]:
        """Reason, then call one of the allowed tools, whatever the model would rather do."""
        harmony, functions = self.harmony, self.prompt.tools.functions
        if self.prompt.conversation.reasoning_limit != 0:
            yield self._force(harmony.analysis_header)
            async for update in self._request(until=harmony.structural, closings=((harmony.controls.end,),)):
                yield update
            if self.cut:
                return
            yield self._force(harmony.new_message)
        function = functions[0]
        if len(functions) == 1:
            yield self._force(harmony.call_header(function.recipient))
        else:
            async for update in self._name(functions):
                yield update
            recipient = self.reader.header.recipient if self.reader.header else None
            named = next((f for f in functions if f.recipient == recipient), None)
            if self.cut or named is None:  # cut off within the name
                self.last_finish = "length"
                return
            function = named
            yield self._force(harmony.call_format)
        async for update in self._arguments(function):
            yield update
        if not self.cut:
            yield self.reader.read([harmony.controls.call], None, forced=True)  # no request follows that would need it

    async def _name(self, functions: Sequence[Function]) -> AsyncIterator[Update]:
        # The dot often shares a token with what follows, so it is left to the model.
        roots = {f.namespace for f in functions}
        root = roots.pop() if len(roots) == 1 else ""
        pattern = "|".join(re.escape(f.recipient.removeprefix(root)) for f in functions)
        yield self._force(self.harmony.tokenizer.encode(f" to={root}"))
        constraint = Constraint("regex", f"({pattern})", end_tokens=(self.harmony.controls.channel,))
        async for update in self._request(until=self.harmony.structural, constraint=constraint):
            yield update

    async def _arguments(self, function: Function) -> AsyncIterator[Update]:
        """Arguments under the tool's schema, without further properties. A schema that no grammar can hold binds only
        if the tool is strict; one that turns out too costly after it has begun ends the request."""
        until, ends = self.harmony.structural, (self.harmony.controls.call,)
        schema = Constraint("json_schema", json.dumps(function.forced_schema), end_tokens=ends)
        begun = False
        try:
            async for update in self._request(until=until, constraint=schema):
                begun = True
                yield update
            return
        except RequestError:
            if function.strict or begun:
                raise
        any_object = Constraint("json_object", '{"type":"object"}', end_tokens=ends)
        async for update in self._request(until=until, constraint=any_object):
            yield update

    # ---- strict tools, structured answers -----------------------------------------------------

    async def _message_by_message(self) -> AsyncIterator[Update]:
        """Each body under the grammar its header calls for: a strict tool's schema, or the answer's. A header that
        names a recipient names one that was offered.

        The engine wakes one grammar at one set of triggers, so where several may be needed a request ends before each
        body, and the next one has the grammar of that body.
        """
        c = self.harmony.controls
        offered = offered_recipient(self.service.tokenizer, self.prompt.tools.recipients)
        while True:
            async for update in self._request(stop_after=(c.message,), constraint=offered):
                yield update
            if self.cut or self.tokens[-1] != c.message:
                break  # it ended
            if (constraint := self._body_constraint()) is None:
                continue
            async for update in self._request(constraint=constraint):
                yield update
            if self.cut or self.tokens[-1] != c.end:
                break
        async for update in self._missing_answer():
            yield update

    def _body_constraint(self) -> Constraint | None:
        if self.reader.answer_begins:
            assert self.prompt.constraint is not None
            return replace(self.prompt.constraint, triggers=())
        header = self.reader.header
        if header is None or header.kind != "call" or header.recipient is None:
            return None
        function = self.prompt.tools.find(header.recipient)
        if not function.strict or function.parameters is None:
            return None
        return Constraint("json_schema", json.dumps(function.parameters), end_tokens=(self.harmony.controls.call,))

    async def _structured(self) -> AsyncIterator[Update]:
        """A JSON answer in one request, its grammar asleep until the answer begins."""
        async for update in self._request(constraint=self.prompt.constraint):
            yield update
        async for update in self._missing_answer():
            yield update

    async def _missing_answer(self) -> AsyncIterator[Update]:
        """If a structured answer is owed and the model ended without beginning one, begin it for it."""
        constraint, reader = self.prompt.constraint, self.reader
        called = reader.called and bool(self.prompt.tools)  # a call stands in an answer's place
        if constraint is None or self.cut or called or reader.answered:
            return
        while self.tokens and self.tokens[-1] in self.harmony.structural:
            self.tokens.pop()
        header = self.harmony.json_header if constraint.kind.startswith("json") else self.harmony.final_header
        yield self._force([*self.harmony.new_message, *header])
        async for update in self._request(constraint=replace(constraint, triggers=())):
            yield update
