"""The Python API: `from halfbyte import Engine`.

    with Engine() as engine:                       # the embedded model
        print(engine.chat("What is 17 + 25?").text)

`chat` and `achat` render a conversation in gpt-oss's chat format and parse the answer. `generate`, `iterate` and
`stream` continue a prompt, text or token ids, as it is, without a chat format. docs/python.md shows each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack, overload

from halfbyte.engine.answers import Answer, AnswerReader, AnswerStream, AsyncAnswerStream
from halfbyte.engine.build import build_core
from halfbyte.engine.checked import checked
from halfbyte.engine.offered_functions import offered_recipient
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import (
    Constraint,
    Delta,
    EngineStats,
    FinishReason,
    Logprob,
    ReasoningLimit,
    Request,
    SamplingParams,
    SourceInfo,
    Usage,
)
from halfbyte.engine.thread import EngineThread
from halfbyte.errors import RequestError, StepError, UsageError
from halfbyte.gates import Gates, parse
from halfbyte.harmony.chat_messages import read_messages, read_tools
from halfbyte.harmony.messages import FUNCTIONS, Message, ReasoningEffort, Role, Tool, opening
from halfbyte.harmony.render import render_prompt
from halfbyte.harmony.triggers import reasoning_closings
from halfbyte.model.load import OpenCheckpoint
from halfbyte.model.tokenizer import Tokenizer

Prompt = str | Sequence[int]
ChatMessage = Mapping[str, Any] | Message | Any  # or any object with the fields of OpenAI's messages
EFFORTS = ("low", "medium", "high")


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.chat` and `Engine.achat`."""

    tools: Sequence[Mapping[str, Any] | Tool] | None  # functions in OpenAI's form
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    seed: int | None
    stop: str | Sequence[str] | None  # the text of the answer ends before the first of them
    effort: ReasoningEffort
    max_reasoning_tokens: int | None  # after so many the reasoning ends and the answer follows
    instructions: str | None


@dataclass(frozen=True)
class Completion:
    """One finished choice. `text` ends where a stop string begins and leaves out the end token."""

    text: str
    tokens: list[int]
    finish: FinishReason
    index: int = 0
    stop_match: str | None = None
    logprobs: list[Logprob] | None = None
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: list[Logprob] | None = None  # only in the first choice


class Engine:
    """A model, loaded and ready, in this process. Thread-safe; requests from all threads share one batch.

    `model`: what `halfbyte pull` fetched ("20b"), a Hugging Face folder, a .gguf file, "random:20b"; None is the
    embedded model. `preset` names a set of kernels and number formats ("exact", "balanced", "fast"; by default
    "balanced" on a GPU and "int8" on a CPU); `gates` sets them one by one. `deterministic` makes tokens independent of
    other requests (docs/deterministic.md). `checkpoint` is the model where the caller has opened it already. Further
    options are those of EngineOptions (max_context, max_seqs, kv_gib, ...).
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        preset: str | None = None,
        gates: Gates | None = None,
        deterministic: bool = False,
        device: str | None = None,
        checkpoint: OpenCheckpoint | None = None,
        **options: Any,
    ) -> None:
        if preset is not None:
            if gates is not None:
                raise UsageError("Engine was given a preset and gates; give one of them.")
            gates = parse(env={}, preset=preset)
        if deterministic:
            gates = replace(gates or Gates(), deterministic="on")
        try:
            engine_options = EngineOptions(model=model, gates=gates or Gates(), device=device, **options)
        except TypeError as e:
            names = ", ".join(EngineOptions.__dataclass_fields__)
            raise UsageError(
                f"{str(e).removeprefix('EngineOptions.__init__() ')}; Engine takes preset, {names}, deterministic."
            ) from None
        core, info, tokenizer = build_core(engine_options, checkpoint)
        self.tokenizer: Tokenizer = tokenizer
        self._source = EngineThread(core, info)

    @property
    def info(self) -> SourceInfo:
        return self._source.info

    @property
    def source(self) -> EngineThread:
        """The engine as a TokenSource."""
        return self._source

    def stats(self) -> EngineStats:
        return self._source.stats()

    # ---- generating ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
    ) -> list[Completion]:
        """Completions of one text, or of a list of prompts (texts or lists of token ids), in order.

        With n > 1 the choices of a prompt follow each other. Raises the error that a request was refused with, or
        StepError if the engine failed on it.
        """
        prompt_list: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        requests = [self._request(p, sampling, constraint) for p in prompt_list]
        deltas: list[list[Delta]] = [[] for _ in requests]
        for number, delta in self._source.iterate_all(requests):
            deltas[number].append(delta)
        return [c for request, parts in zip(requests, deltas, strict=True) for c in self._completions(request, parts)]

    @overload
    def chat(
        self,
        messages: str | Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Answer: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> AnswerStream: ...

    def chat(
        self,
        messages: str | Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Answer | AnswerStream:
        """The model's answer to a question or to a conversation.

        `messages` is text, or OpenAI's chat messages as dicts or objects; `tools` are functions in OpenAI's form.
        `temperature`, `top_p`, `max_tokens`, `seed` and `stop` replace those of `sampling`; without either the answer
        is greedy. Stop strings end the text of the answer, not the reasoning. `max_reasoning_tokens` ends the reasoning
        after so many tokens and goes on to the answer. With `stream` the result is an iterator of pieces whose `answer`
        is complete when it ends.
        """
        request, reader = self._chat_request(messages, sampling, **options)
        answers = AnswerStream(self._source.iterate(request), reader)
        if stream:
            return answers
        for _ in answers:
            pass
        return answers.answer

    @overload
    async def achat(
        self,
        messages: str | Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Answer: ...

    @overload
    async def achat(
        self,
        messages: str | Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> AsyncAnswerStream: ...

    async def achat(
        self,
        messages: str | Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Answer | AsyncAnswerStream:
        """`chat` for an event loop; a stream is read by `async for piece in await engine.achat(..., stream=True)`.

        Cancelling the task that waits cancels the request.
        """
        request, reader = self._chat_request(messages, sampling, **options)
        answers = AsyncAnswerStream(self._source.stream(request), reader)
        if stream:
            return answers
        async with answers:
            async for _ in answers:
                pass
        return answers.answer

    def _chat_request(
        self,
        messages: str | Sequence[ChatMessage],
        sampling: SamplingParams | None,
        *,
        tools: Sequence[Mapping[str, Any] | Tool] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        effort: ReasoningEffort = "medium",
        max_reasoning_tokens: int | None = None,
        instructions: str | None = None,
        **unknown: Any,
    ) -> tuple[Request, AnswerReader]:
        if unknown:
            raise RequestError(
                f"chat takes no {', '.join(unknown)}; it takes {', '.join(ChatOptions.__annotations__)}, and for more "
                "sampling=SamplingParams(...)."
            )
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling is of type {type(sampling).__name__}; give SamplingParams(...).")
        if effort not in EFFORTS:
            raise RequestError(f"there is no effort {effort!r}; use one of {', '.join(EFFORTS)}.")
        if isinstance(messages, Mapping | Message) or not isinstance(messages, str | Sequence):
            raise RequestError(f"messages is of type {type(messages).__name__}; give text or a list of messages.")
        system, turns = read_messages(
            [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        )
        text = "\n\n".join(part for part in (instructions, system) if part)
        functions = read_tools(tools)
        if turns and turns[0].role is Role.SYSTEM:
            start = []  # the caller wrote harmony's own first message
        else:
            start = opening(effort, text or None, functions)
        prompt = render_prompt(self.tokenizer, [*start, *turns])
        stops = (stop,) if isinstance(stop, str) else None if stop is None else tuple(stop)
        settings = {
            "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed, "stop": stops,
        }  # fmt: skip
        changes: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        sampling = replace(sampling or SamplingParams(temperature=0.0), n=1, **changes)
        called = bool(functions)
        limit = None if max_reasoning_tokens is None else self.reasoning_limit(max_reasoning_tokens, tools=called)
        recipients = [f"{FUNCTIONS}.{function.name}" for function in functions]
        offered = offered_recipient(self.tokenizer, recipients) if called else None
        request = self._request(prompt, sampling, offered, limit)
        request.sampling = replace(request.sampling, stop=())  # matched in the answer's text, not in the reasoning
        return request, AnswerReader(self.tokenizer, functions={f.name for f in functions}, stop=sampling.stop)

    def reasoning_limit(self, tokens: int, *, tools: bool = False) -> ReasoningLimit:
        """A limit for `iterate` and `stream`, for prompts in the chat format. With `tools` a call may follow the
        reasoning, else the answer does."""
        return ReasoningLimit(tokens, reasoning_closings(self.tokenizer, tools=tools))

    def iterate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
        reasoning: ReasoningLimit | None = None,
    ) -> Iterator[Delta]:
        """Deltas of one request as they come, for code without an event loop."""
        return self._source.iterate(self._request(prompt, sampling, constraint, reasoning))

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
        reasoning: ReasoningLimit | None = None,
    ) -> AsyncIterator[Delta]:
        """Deltas of one request as they come. Closing the iterator cancels the request."""
        return self._source.stream(self._request(prompt, sampling, constraint, reasoning))

    def _request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        constraint: Constraint | None,
        reasoning: ReasoningLimit | None = None,
    ) -> Request:
        try:
            tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [index(t) for t in prompt]
        except TypeError as e:
            raise RequestError(f"a prompt is text or a list of token ids ({e}).") from None
        return checked(Request(tokens, sampling or SamplingParams(), constraint, reasoning=reasoning))

    def _completions(self, request: Request, deltas: list[Delta]) -> list[Completion]:
        tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
        logprobs: list[list[Logprob]] = [[] for _ in tokens]
        last: dict[int, Delta] = {}
        scored: list[Logprob] = []
        for delta in deltas:
            tokens[delta.index] += delta.tokens
            logprobs[delta.index] += delta.logprobs or []
            scored += delta.prompt_logprobs or []
            if delta.finish is not None:
                last[delta.index] = delta
        out = []
        for i, ids in enumerate(tokens):
            end = last[i]
            if end.finish == "error":
                raise StepError(end.error or "the engine failed on this request.")
            visible = ids
            if end.finish == "stop" and end.stop_match is None and ids:
                visible = ids[:-1]
            data = self.tokenizer.decode_bytes(visible)
            if end.visible_bytes is not None:
                data = data[: end.visible_bytes]
            assert end.finish is not None
            out.append(
                Completion(
                    data.decode("utf-8", "replace"), ids, end.finish, i, end.stop_match,
                    logprobs[i] if request.sampling.logprobs is not None else None, end.usage or Usage(),
                    scored if request.sampling.prompt_logprobs is not None and i == 0 else None,
                )
            )  # fmt: skip
        return out

    # ---- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        self._source.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.shutdown(wait=kind is not KeyboardInterrupt)  # a step may take longer than a person waits
