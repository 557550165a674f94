"""A token source that plays what a test wrote down, at a given pace, and remembers what was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from halfbyte.engine.request import Delta, EngineStats, FinishReason, Logprob, Request, SourceHealth, SourceInfo, Usage
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
    finish: FinishReason | None = None  # instead of what would follow from the tokens


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
                for i, (play, ids, finish) in enumerate(plays):
                    if i in done:
                        continue
                    step = ids[left[i] : left[i] + play.per_step]
                    left[i] += len(step)
                    if play.fails_after is not None and left[i] > play.fails_after:
                        yield Delta([], i, finish="error", error="the scripted engine failed")
                        done.add(i)
                        continue
                    last = left[i] >= len(ids)
                    usage = Usage(len(request.prompt), play.cached, len(ids)) if last else None
                    yield Delta(step, i, self._logprobs(request, step), finish if last else None, usage=usage)
                    if last:
                        done.add(i)
                # A real engine answers from another process: even at full speed every step is a turn of the loop.
                await asyncio.sleep(plays[0][0].delay)
            whole = True
        finally:
            self.active -= 1
            (self.finished if whole else self.cancelled).append(request.id)

    def _cut(self, request: Request, play: Play, index: int) -> tuple[Play, list[int], FinishReason]:
        ids = self.tokenizer.encode(play.text, allow_special=True) if isinstance(play.text, str) else list(play.text)
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
        return play, ids, play.finish or finish

    def _logprobs(self, request: Request, step: list[int]) -> list[Logprob] | None:
        k = request.sampling.logprobs
        return None if k is None else self._scores(step, k)

    def _scores(self, tokens: list[int], k: int) -> list[Logprob]:
        return [Logprob(t, -0.25, tuple((t + j, -0.25 - j) for j in range(k))) for t in tokens]


def always(play: Play | str) -> Script:
    fixed = Play(play) if isinstance(play, str) else play
    return lambda request, index: fixed


def in_turn(*plays: Play | str) -> Script:
    """The first request gets the first play, and so on; the last one repeats."""
    fixed = [Play(p) if isinstance(p, str) else p for p in plays]
    count = iter(range(1 << 30))
    return lambda request, index: fixed[min(next(count), len(fixed) - 1)]
