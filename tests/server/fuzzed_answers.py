"""Answers that a model might give in a long conversation with tools, drawn from a seed: what clients have to carry."""

from __future__ import annotations

import json
import random

from scripted import Play, call, say

from halfbyte.engine.request import Request

TOOLS = ("get_weather", "search_notes")
_WORDS = ("Bern", "Zürich", "sonnig ☀️", "2 + 2", "`code`", "\n\nA new paragraph", '"quoted"', "<b>", "\\n", "日本", "…")


def words(draw: random.Random, least: int = 1) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(draw.randint(least, 6)))


def answer(draw: random.Random, *, may_call: bool) -> str:
    """Harmony text of one answer: with and without reasoning, with preambles, calls with any arguments."""
    reasoning = words(draw) if draw.random() < 0.8 else ""
    if may_call and draw.random() < 0.7:
        arguments = json.dumps({"place": words(draw)}, ensure_ascii=draw.random() < 0.5)
        preamble = words(draw) if draw.random() < 0.4 else ""
        return call(f"functions.{draw.choice(TOOLS)}", arguments, reasoning, preamble)
    return say(words(draw), reasoning)


class FuzzedScript:
    """At most three calls in a row; what was said is kept."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.said: list[str] = []
        self._calls = 0

    def __call__(self, request: Request, index: int) -> Play:
        text = answer(self.draw, may_call=self._calls < 3)
        self._calls = self._calls + 1 if text.endswith("<|call|>") else 0
        self.said.append(text)
        return Play(text, per_step=self.draw.choice((1, 3, 50)))
