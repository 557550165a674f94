"""The Python API: `from halfbyte import Engine`.

    with Engine() as engine:                       # the embedded model
        print(engine.chat("What is 17 + 25?").text)

`chat` puts a question into the format that gpt-oss was trained on and takes the answer out of it. `generate`, `iterate`
and `stream` take prompts, text or token ids, as they are: they continue them, without a chat format.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import index
from types import TracebackType
from typing import Any

from halfbyte.engine.build import build_core
from halfbyte.engine.checked import checked
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import (
    Constraint,
    Delta,
    EngineStats,
    FinishReason,
    Logprob,
    Request,
    SamplingParams,
    SourceInfo,
    Usage,
)
from halfbyte.engine.thread import EngineThread
from halfbyte.errors import RequestError, StepError, UsageError
from halfbyte.gates import Gates
from halfbyte.harmony.messages import Message, ReasoningEffort, opening
from halfbyte.harmony.parse import Parser
from halfbyte.harmony.render import render_prompt
from halfbyte.model.tokenizer import Tokenizer

Prompt = str | Sequence[int]


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
    prompt_logprobs: list[Logprob] | None = None  # the first choice's


@dataclass(frozen=True)
class Answer:
    """What a model said: the answer, and apart from it what it thought before."""

    text: str
    reasoning: str
    completion: Completion


class Engine:
    """A model, loaded and ready, in this process. Thread-safe; requests from all threads share one batch.

    `model`: what `halfbyte pull` fetched ("20b"), a Hugging Face folder, a .gguf file, "random:20b"; None is the
    embedded model. Further options are those of EngineOptions (max_context, max_seqs, kv_gib, ...).
    """

    def __init__(
        self, model: str | None = None, *, gates: Gates | None = None, device: str | None = None, **options: Any
    ) -> None:
        try:
            engine_options = EngineOptions(model=model, gates=gates or Gates(), device=device, **options)
        except TypeError as e:
            names = ", ".join(EngineOptions.__dataclass_fields__)
            raise UsageError(f"{str(e).removeprefix('EngineOptions.__init__() ')}; Engine takes {names}.") from None
        core, info, tokenizer = build_core(engine_options)
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

        With n > 1 the choices of a prompt follow each other. Raises what the request was refused with, and StepError
        if the engine failed on it.
        """
        each: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        requests = [self._request(p, sampling, constraint) for p in each]
        if not requests:
            return []
        with ThreadPoolExecutor(max_workers=min(64, len(requests))) as pool:
            return [c for answer in pool.map(self._complete, requests) for c in answer]

    def chat(
        self,
        question: str | Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        effort: ReasoningEffort = "medium",
        instructions: str | None = None,
    ) -> Answer:
        """The model's answer to a question, or to a conversation of harmony messages; greedy unless `sampling` says."""
        asked = [Message.user(question)] if isinstance(question, str) else list(question)
        prompt = render_prompt(self.tokenizer, [*opening(effort, instructions), *asked])
        (done,) = self.generate([prompt], replace(sampling or SamplingParams(temperature=0.0), n=1))
        parser = Parser(self.tokenizer)
        events = [*parser.feed(done.tokens), *parser.finish()]
        reasoning = "".join(e.text for e in events if e.header.kind == "reasoning")
        return Answer("".join(e.text for e in events if e.header.kind == "content"), reasoning, done)

    def iterate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, constraint: Constraint | None = None
    ) -> Iterator[Delta]:
        """Deltas of one request as they come, for plain code."""
        return self._source.iterate(self._request(prompt, sampling, constraint))

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, constraint: Constraint | None = None
    ) -> AsyncIterator[Delta]:
        """Deltas of one request as they come. Closing the iterator cancels the request."""
        return self._source.stream(self._request(prompt, sampling, constraint))

    def _request(self, prompt: Prompt, sampling: SamplingParams | None, constraint: Constraint | None) -> Request:
        try:
            tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [index(t) for t in prompt]
        except TypeError as e:
            raise RequestError(f"a prompt is text or a list of token ids ({e}).") from None
        return checked(Request(tokens, sampling or SamplingParams(), constraint))

    def _complete(self, request: Request) -> list[Completion]:
        tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
        logprobs: list[list[Logprob]] = [[] for _ in tokens]
        last: dict[int, Delta] = {}
        scored: list[Logprob] = []
        for delta in self._source.iterate(request):
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
        self.close()
