"""A token source that plays what a test wrote down, at a given pace, and remembers what was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from halfbyte.engine.reasoning import ReasoningState
from halfbyte.engine.request import Delta, EngineStats, FinishReason, Logprob, Request, SourceHealth, SourceInfo, Usage
from halfbyte.engine.sampling.row import check_params
from halfbyte.errors import ContextError
from halfbyte.model.tokenizer import Tokenizer


@dataclass
class Play:
    """One answer: harmony text (control tokens by name) or ids, a number of tokens per step, seconds between steps."""

    text: str | list[int]
    per_step: int = 1
    delay: float = 0.0
    first_delay: float = 0.0
    fails_after: int | None = None  # tokens after which the engine reports an error
    cached: int = 0
    from_memory: int = 0  # of the cached tokens
    from_disk: int = 0
    finish: FinishReason | None = None  # instead of what would follow from the tokens
    # What the model writes after reasoning that the request's limit has ended; None: what follows that reasoning.
    after_limit: str | None = None


Script = Callable[[Request, int], Play]


def say(text: str, reasoning: str = "") -> str:
    """A well-formed answer as gpt-oss writes it after <|start|>assistant."""
    thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
    return f"{thought}<|channel|>final<|message|>{text}<|return|>"


def call(name: str, arguments: str, reasoning: str = "", preamble: str = "") -> str:
    thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
    if preamble:
        thought += f"<|channel|>commentary<|message|>{preamble}<|end|><|start|>assistant"
    return f"{thought}<|channel|>commentary to={name} <|constrain|>json<|message|>{arguments}<|call|>"


@dataclass
class ScriptedSource:
    script: Script
    tokenizer: Tokenizer = field(default_factory=Tokenizer.gpt_oss)
    max_context: int = 8192
    model: str = "gpt-oss-test"
    ready: bool = True
    gone: bool = False
    refuse: Exception | None = None

    requests: list[Request] = field(default_factory=list)
    active: int = 0
    cancelled: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def info(self) -> SourceInfo:
        vocab = max(self.tokenizer.vocab_size, 1)
        return SourceInfo(self.model, self.max_context, vocab, self.tokenizer.eos_tokens, {"plan": "scripted"})

    def stats(self) -> EngineStats:
        return EngineStats(running=self.active, kv_pages_total=100, kv_pages_used=self.active)

    def health(self) -> SourceHealth:
        return SourceHealth("" if self.ready else "the script says so", self.gone)

    async def close(self) -> None:
        self.closed = True

    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(r.prompt) for r in self.requests]

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        self._check_limits(request)
        self.active += 1
        whole = False
        try:
            plays = [self._cut(request, self.script(request, i), i) for i in range(request.sampling.n)]
            left = [0] * len(plays)
            done: set[int] = set()
            if (k := request.sampling.prompt_logprobs) is not None:
                scored = self._scores(request.prompt[request.sampling.prompt_logprobs_from :], k)
                for at in range(0, len(scored), 3):
                    yield Delta([], 0, prompt_logprobs=scored[at : at + 3])
            if plays[0][0].first_delay:
                await asyncio.sleep(plays[0][0].first_delay)
            while len(done) < len(plays):
                for i, (play, ids, finish, limit) in enumerate(plays):
                    if i in done:
                        continue
                    step = ids[left[i] : left[i] + play.per_step]
                    left[i] += len(step)
                    if play.fails_after is not None and left[i] > play.fails_after:
                        yield Delta([], i, finish="error", error="the scripted engine failed")
                        done.add(i)
                        continue
                    last = left[i] >= len(ids)
                    first = left[i] == len(step)
                    usage = None
                    if first or last:
                        tiers = {"memory_tokens": play.from_memory, "disk_tokens": play.from_disk}
                        usage = Usage(len(request.prompt), play.cached, left[i], **tiers)
                    logprobs, cut = self._logprobs(request, step), limit is not None and left[i] >= limit
                    yield Delta(step, i, logprobs, finish if last else None, usage=usage, reasoning_cut=cut)
                    if last:
                        done.add(i)
                # A real engine answers from another process: even at full speed every step is a turn of the loop.
                await asyncio.sleep(plays[0][0].delay)
            whole = True
        finally:
            self.active -= 1
            (self.finished if whole else self.cancelled).append(request.id)

    def _check_limits(self, request: Request) -> None:
        """Refuses what the engine refuses."""
        prompt, limit = len(request.prompt), request.sampling.max_tokens
        if prompt + (1 if limit is None else limit) > self.max_context:
            raise ContextError(f"{prompt} prompt tokens + max_tokens {limit}, but the context is {self.max_context}.")
        check_params(request.sampling, self.info.vocab)

    def _cut(self, request: Request, play: Play, index: int) -> tuple[Play, list[int], FinishReason, int | None]:
        """The play, its tokens, how they end, and after how many the limit on reasoning was reached."""
        ids = self.tokenizer.encode(play.text, allow_special=True) if isinstance(play.text, str) else list(play.text)
        ids, reached = self._limited(request, play, ids)
        ends = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            ends |= set(self.info.eos_tokens)
        finish: FinishReason = "stop"
        for at, id in enumerate(ids):
            if id in ends:
                ids = ids[: at + 1]
                break
        limit = request.sampling.max_tokens
        if limit is not None and len(ids) > limit:
            ids, finish = ids[:limit], "length"
        return play, ids, play.finish or finish, None if reached is None or reached > len(ids) else reached

    def _limited(self, request: Request, play: Play, ids: list[int]) -> tuple[list[int], int | None]:
        """The tokens as far as the request's limit on reasoning allows them, the closing, and what follows it."""
        if request.reasoning is None:
            return ids, None
        state = ReasoningState(request.reasoning, self.tokenizer, request.prompt, self.info.vocab)
        out: list[int] = []
        reached: int | None = None
        while ids:
            mask = state.mask()
            if mask is not None and (reached is None or ids[0] not in tokens_of(mask)):
                reached = len(out) if reached is None else reached
                end = self.tokenizer.special["<|end|>"]
                rest = ids[ids.index(end) :] if end in ids else []
                if play.after_limit is not None:
                    rest = self.tokenizer.encode(f"<|end|><|start|>assistant{play.after_limit}", allow_special=True)
                ids = rest if rest and rest[0] in tokens_of(mask) else [min(tokens_of(mask)), *rest]
            out.append(ids.pop(0))
            state.observe(out[-1])
        return out, reached

    def _logprobs(self, request: Request, step: list[int]) -> list[Logprob] | None:
        k = request.sampling.logprobs
        return None if k is None else self._scores(step, k)

    def _scores(self, tokens: list[int], k: int) -> list[Logprob]:
        return [Logprob(t, -0.25, tuple((t + j, -0.25 - j) for j in range(k))) for t in tokens]


def tokens_of(mask: NDArray[np.int32]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def always(play: Play | str) -> Script:
    fixed = Play(play) if isinstance(play, str) else play
    return lambda request, index: fixed


def in_turn(*plays: Play | str) -> Script:
    """The first request gets the first play, and so on; the last one repeats."""
    fixed = [Play(p) if isinstance(p, str) else p for p in plays]
    count = iter(range(1 << 30))
    return lambda request, index: fixed[min(next(count), len(fixed) - 1)]
