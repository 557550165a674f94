"""A workload: sessions of turns, each one a request with the number of tokens that its answer should have.

A session's turns follow one another, each after the answer to the one before and some seconds of thinking; sessions
know nothing of each other. Everything is drawn from a seed, so that two engines are asked the very same. When sessions
begin is for `arrivals.py` to say, and sending them for `lab/measure/traffic.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from halfbyte.errors import UsageError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Turn:
    path: str
    body: Mapping[str, Any]  # without model and stream
    tokens: int | None = None  # of the answer, exactly; None: as many as it takes
    think_s: float = 0.0  # before it is sent: a person reads, a tool runs

    def request(self) -> dict[str, Any]:
        limit = {} if self.tokens is None else {"max_tokens": self.tokens, "ignore_eos": True}
        return {"temperature": 0, **self.body, **limit}


@dataclass(frozen=True)
class Session:
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Workload:
    """`session(k)` is the k-th of as many as are asked for; the same k is always the same session."""

    name: str
    session: Callable[[int], Session]
    shape: Mapping[str, Any] = field(default_factory=dict)  # what a cell says of it
    note: str = ""  # where recorded things come from
    all_new: bool = False  # no prompt has a beginning that any other one has: a server's cache helps none of them

    def after(self, sessions: int) -> Workload:
        """This workload, begun so many sessions later: what a server has seen already is not asked again."""
        return replace(self, session=lambda k: self.session(sessions + k))


# ---- random prompts -------------------------------------------------------------------------------------------------


def synthetic(prompt: int, tokens: int, vocab: int, seed: int = 0, temperature: float = 0.0) -> Workload:
    """Random token ids, all prompts different: nothing is found in a cache, and nothing helps speculation. On random
    weights greedy answers go round in circles, where a temperature keeps tokens, and so the experts, apart."""
    if prompt < 1 or tokens < 1 or vocab < 2:
        raise UsageError("a synthetic prompt needs a token at least, and so does its answer.")

    def session(k: int) -> Session:
        draw = random.Random(f"synthetic {seed} {prompt} {tokens} {k}")
        ids = [draw.randrange(vocab) for _ in range(prompt)]
        return Session((Turn(COMPLETIONS, {"prompt": ids, "temperature": temperature}, tokens),))

    note = f"answers are sampled at temperature {temperature:g}" if temperature else ""
    return Workload("synthetic", session, {"pp": prompt, "tg": tokens}, note, all_new=True)


# ---- chats ----------------------------------------------------------------------------------------------------------

OPENINGS = (
    "What is the difference between a process and a thread?", "Name three rivers of Europe and where they end.",
    "Write a short note that thanks a neighbour for watering the plants.", "How does a bicycle stay upright?",
    "Explain compound interest to a twelve-year-old.", "Which is larger, 0.9 or 0.11, and why?",
    "Give me a plan for learning the piano in a year.", "What should I check before I buy a used car?",
    "Translate 'good morning' into French, Italian and Polish.", "Why is the sky red in the evening?",
)  # fmt: skip
FOLLOWING = (
    "Shorter, please.", "Can you give an example?", "And what would change if it were twice as large?",
    "I do not understand the second part. Say it again in other words.", "Thank you. What should I read next?",
    "Put it into a table with three rows.", "Are you sure? Check it once more.", "What is the most common mistake?",
)  # fmt: skip
ANSWER = "That depends on a few things, so let us take them one after the other, and then see what follows from them."


def chat(turns: int = 4, tokens: int = 64, think_s: float = 1.0, seed: int = 0) -> Workload:
    """Conversations of several turns. Every request carries the whole conversation, the assistant's words in it being
    the same for every engine, so that all of them read the same prefix."""
    if turns < 1 or tokens < 1 or think_s < 0:
        raise UsageError("a chat needs a turn, a token and no less than 0 seconds of thinking.")

    def session(k: int) -> Session:
        draw = random.Random(f"chat {seed} {k}")
        messages: list[dict[str, str]] = [{"role": "system", "content": f"You are assistant number {k}. Be brief."}]
        turns_made = []
        for n in range(turns):
            text = draw.choice(FOLLOWING if n else OPENINGS)
            messages.append({"role": "user", "content": text})
            wait = draw.expovariate(1 / think_s) if n and think_s else 0.0
            turns_made.append(Turn(CHAT, {"messages": [dict(m) for m in messages]}, tokens, wait))
            messages.append({"role": "assistant", "content": f"{ANSWER} ({draw.randrange(10_000)})"})
        return Session(tuple(turns_made))

    return Workload("chat", session, {"turns": turns, "tg": tokens, "think_s": think_s})


def repeated(sessions: Sequence[Session], name: str, shape: Mapping[str, Any], note: str = "") -> Workload:
    """Recorded sessions in turn. Each repetition is somebody else's: its first message says which, so that only its own
    turns share a prefix."""

    def session(k: int) -> Session:
        turns = sessions[k % len(sessions)].turns
        return Session(tuple(_marked(turn, k // len(sessions)) for turn in turns))

    return Workload(name, session, shape, note)


def _marked(turn: Turn, repetition: int) -> Turn:
    if not repetition:
        return turn
    first, *rest = turn.body["messages"]
    marked = {**first, "content": f"[{repetition}] {first['content']}"}
    return Turn(turn.path, {**turn.body, "messages": [marked, *rest]}, turn.tokens, turn.think_s)
