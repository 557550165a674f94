"""Does every request get an answer of its own, whichever way it is asked?

Prompts that hardly differ (a letter's case, a space, some tokens in the middle) must have log probabilities of their
own: an engine that keeps answers by a normalised prompt, or by parts of one, gives the same ones. A prompt as text must
be answered like its tokens, and a sampled stream like the same seed in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfbyte.errors import AskError
from halfbyte.lab.levels.scores import difference
from halfbyte.lab.peers.asker import Asker, Question, Reply
from halfbyte.lab.result import Check

TEXTS = (
    "The three primary colours are",
    "To boil an egg, you first",
    "In 1969, the first people",
    "A list of the months: January, February,",
)
MIDDLE = slice(120, 152)  # tokens of a prompt that are turned round
COMPARED, DRAWN = 4, 6  # tokens of greedy and of sampled answers
SEEDS = 6
Encode = Callable[[str], list[int]]


def own_answer_checks(asker: Asker, encode: Encode, natural: Sequence[int], bound: float) -> list[Check]:
    """`natural` is a prompt of some hundred tokens; `bound` is in nats, what two ways to compute an answer may differ
    by."""
    return [similar_check(asker, encode, natural), text_check(asker, encode, bound), seeded_stream_check(asker)]


def similar_check(asker: Asker, encode: Encode, natural: Sequence[int]) -> Check:
    groups: list[tuple[str, list[str | list[int]]]] = [
        (f"texts like {text!r}", [*{tuple(encode(t)): t for t in variants(text)}.values()]) for text in TEXTS[:2]
    ]
    turned = [*natural[: MIDDLE.start], *reversed(natural[MIDDLE]), *natural[MIDDLE.stop :]]
    groups.append((f"prompts with other tokens at {MIDDLE.start} to {MIDDLE.stop}", [list(natural), turned]))
    wrong, judged = [], 0
    for name, prompts in groups:
        questions = [Question(p, tokens=COMPARED, logprobs=2, exactly=True) for p in prompts]
        scores = [(r.pieces, r.logprobs, tuple(tuple(t.items()) for t in r.top)) for r in map(asker.ask, questions)]
        same = len(scores) - len(set(scores))
        judged += len(scores)
        if same:
            wrong.append(f"{same} of {len(scores)} {name} have another's answer and log probabilities")
    return Check("similar prompts have answers of their own", not wrong, judged - len(wrong), judged, "; ".join(wrong))


def variants(text: str) -> list[str]:
    """Texts that a careless comparison takes for this one."""
    return [text, text.lower(), text.upper(), text.replace(" ", "  ", 1), f" {text}", f"{text}."]


def text_check(asker: Asker, encode: Encode, bound: float) -> Check:
    """Every prompt must count its tokens; a near tie may decide one of the answers."""
    wrong, other = [], []
    for text in TEXTS:
        ids = encode(text)
        by_ids, by_text = (
            asker.ask(Question(p, tokens=COMPARED, logprobs=2, exactly=True)) for p in (ids, text)
        )  # fmt: skip
        if by_text.prompt_tokens != len(ids):
            wrong.append(f"{text!r} counts as {by_text.prompt_tokens} tokens instead of {len(ids)}")
        if other_answer := difference(by_ids, by_text, bound):
            other.append(f"{text!r}: {other_answer.text}")
    wrong += other if len(other) > 1 else []
    return Check("a prompt as text is its tokens", not wrong, len(wrong), 0, "; ".join(wrong[:2]))


def seeded_stream_check(asker: Asker) -> Check:
    """A draw close to an edge may fall otherwise, which half of the answers are forgiven for."""
    sides = []
    for stream in (False, True):
        questions = [
            Question(TEXTS[2], tokens=DRAWN, temperature=1.0, seed=seed, exactly=True, stream=stream)
            for seed in range(SEEDS)
        ]
        sides.append([_ids_or_text(reply) for reply in asker.ask_all(questions, 1)])
    other = sum(a != b for a, b in zip(*sides))
    note = f"of {SEEDS} sampled answers, which came as streams, too"
    return Check("a seed gives the same tokens in a stream", other <= SEEDS // 2, other, SEEDS // 2, note)


def _ids_or_text(reply: Reply | AskError) -> object:
    if isinstance(reply, AskError):
        raise reply
    return reply.tokens or reply.text
