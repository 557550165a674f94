"""A 20-turn harmony conversation with tools over a 2k-token shared prefix: what is reusable is reused.

Lengths: system and developer messages about 2,100 tokens; each turn a user message of about 60, reasoning of about
60 and an answer of about 50; every third turn first calls a tool (result about 150), so it is two requests. Harmony
drops the reasoning of finished turns, so a turn's first prompt continues from the *prompt* of the turn before, not
from what was generated, while the request after a tool call continues from everything.

Reusable, per request: the longest prefix it has in common with anything computed before (prompts and generated
tokens; the last token of an answer is never computed), at most all but its last token. Page granularity counts as
loss.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from engine_fakes import FakeRunner

from halfbyte.engine.batch import Batch
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.harmony import DeveloperContent, Message, Role, SystemContent, Tool, ToolNamespace, render_prompt
from halfbyte.harmony.render import render_conversation_for_training
from halfbyte.model.tokenizer import Tokenizer

SENTENCE = "the engine reads pages of keys and values and gives back what its window has passed so memory stays small"


class ScriptedModel(FakeRunner):
    """Says what the script says, if the prefix it reads through the pages is the one it should be."""

    script: list[int] = []

    def _read(self, batch: Batch, row: int) -> np.ndarray:
        s, p, size = int(batch.row_sequence[row]), int(batch.positions[row]), self.page_size
        at = np.arange(p + 1)
        prefix = self.store[batch.full_table[s, at // size], at % size] // 2
        assert prefix.tolist() == self.script[: p + 1], "the cache gave another prefix than the prompt's"
        at = at[max(0, p - self.window + 1) :]
        window = self.store[batch.sliding_table[s, at // size], at % size] // 2
        assert window.tolist() == self.script[at[0] : p + 1], "the cache gave another window than the prompt's"
        logits = np.zeros(self.vocab, np.float32)
        logits[self.script[p + 1]] = 9.0
        return logits


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(SENTENCE.split()) for _ in range(words))


def requests_of(tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """(prompt, what the model says) of every request, in order."""
    rng = random.Random(0)
    tool = Tool("look", text(rng, 30), {"type": "object", "properties": {"q": {"type": "string"}}})
    history = [
        Message(Role.SYSTEM, SystemContent(conversation_start_date="2025-01-01")),
        Message(Role.DEVELOPER, DeveloperContent(text(rng, 1900), (ToolNamespace("functions", (tool,)),))),
    ]
    out = []

    def ask(*said: Message) -> None:
        prompt = render_prompt(tokenizer, history)
        whole = render_conversation_for_training(tokenizer, [*history, *said], drop_analysis=False)
        kept = len(prompt)
        stale = render_conversation_for_training(tokenizer, [*history], drop_analysis=False)
        answer = whole[len(stale) + 2 :]  # after <|start|>assistant, which ends the prompt
        assert prompt[-2:] == whole[len(stale) : len(stale) + 2]
        assert kept <= len(whole)
        out.append((prompt, answer))
        history.extend(said)

    for turn in range(20):
        history.append(Message(Role.USER, text(rng, 55)))
        if turn % 3 == 2:
            ask(
                Message(Role.ASSISTANT, text(rng, 50), channel="analysis"),
                Message(
                    Role.ASSISTANT, '{"q": "pages"}', channel="commentary", recipient="functions.look",
                    content_type="<|constrain|>json",
                ),
            )  # fmt: skip
            history.append(Message(Role.TOOL, text(rng, 140), channel="commentary", name="functions.look"))
        ask(
            Message(Role.ASSISTANT, text(rng, 50), channel="analysis"),
            Message(Role.ASSISTANT, text(rng, 40), channel="final"),
        )
    return out


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def play(requests: list[tuple[list[int], list[int]]], vocab: int, eos: tuple[int, ...], cache: bool):
    pages = 700
    config = EngineConfig(
        pages=pages, page_size=64, window=128, vocab=vocab, eos_tokens=eos, max_rows_per_step=2048, prefix_cache=cache
    )
    model = ScriptedModel(pages, 64, 128, vocab=vocab)
    core = EngineCore(model, config)
    said, cached = [], []
    for prompt, answer in requests:
        model.script = prompt + answer
        core.submit(Request(prompt, SamplingParams(temperature=0, max_tokens=len(answer))))
        tokens: list[int] = []
        while core.has_work:
            for _, delta in core.step():
                tokens += delta.tokens
                if delta.finish is not None:
                    assert delta.finish in ("stop", "length"), delta.error
                    assert delta.usage is not None
                    cached.append(delta.usage.cached_tokens)
        core.check()
        said.append(tokens)
    assert core.pages.available == core.pages.capacity
    return said, cached


@pytest.mark.exact
def test_twenty_turns_reuse_95_percent_of_what_is_reusable() -> None:
    tokenizer = Tokenizer.gpt_oss()
    requests = requests_of(tokenizer)
    assert len(requests) == 26
    assert common(requests[0][0], requests[1][0]) > 2000
    vocab, eos = 201088, (200002, 200012)
    said, cached = play(requests, vocab, eos, cache=True)
    plain, nothing = play(requests, vocab, eos, cache=False)
    assert said == plain == [answer for _, answer in requests]
    assert sum(nothing) == 0
    computed: list[list[int]] = []
    reusable = []
    for prompt, answer in requests:
        best = max((common(prompt, earlier) for earlier in computed), default=0)
        reusable.append(min(best, len(prompt) - 1))
        computed.append((prompt + answer)[:-1])
    share = sum(cached) / sum(reusable)
    print(f"prompts {sum(len(p) for p, _ in requests)}, reusable {sum(reusable)}, cached {sum(cached)}: {share:.1%}")
    assert all(c <= r for c, r in zip(cached, reusable))
    assert share >= 0.95
