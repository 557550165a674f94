"""Sampling against the probabilities that an engine names: filters, bias, penalties and stop strings.

One-token answers of many seeds are counted and compared with their distribution (chi-square), and along sampled answers
every token is held against the probabilities at its place. Penalties are followed token by token along a greedy answer.
A setting that the engine refuses is not proven, never a PASS.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from halfbyte.errors import AskError
from halfbyte.lab.peers.asker import Asker, Question, Reply
from halfbyte.lab.result import Check

DRAWS, AT_ONCE = 96, 16
CHI_SQUARE = 6.0  # sigmas of its normal approximation
BIAS = -1.5  # nats
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
FREQUENCY = {"frequency_penalty": 1.0}
PENALISED, TOP = 32, 20  # tokens of the answer; best ones whose values are known
LAST_TOKENS = 64  # that llama.cpp penalises
FILTERS: tuple[dict[str, float], ...] = (
    {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.4}, {"temperature": 0.5, "top_k": TOP},
)  # fmt: skip
ANSWERS = 3  # to one request
TIE = 1e-6  # nats
LIKELY = 0.8  # probability of the best tokens, outside of which a fifth is drawn
END = -7.0  # nats: an end that is less likely changes nothing
LEAST_VARIANCE = 5.0  # of a count, for its deviation to mean anything


def sampling_checks(
    asker: Asker, prompts: Sequence[Sequence[int]], gaps: list[str], piece_of: Callable[[int], str]
) -> list[Check]:
    """`gaps` gets a sentence for every setting that the engine refuses; `piece_of` is the text of a token."""
    prompt, top = undecided_prompt(asker, prompts)
    if not top:
        return [Check("sampling", False, note="the engine names no probabilities to compare with")]
    counts, ids = draw(asker, prompt, {})
    checks = [distribution_check("temperature 1", top, counts, closed=False)]
    best = max(top, key=lambda piece: top[piece])
    settings: list[tuple[dict[str, Any], dict[str, float]]] = [(f, filtered(top, f)) for f in FILTERS]
    if best in ids:
        settings.append(({"logit_bias": {str(ids[best]): BIAS}}, biased(top, best, BIAS)))
    for setting, expected in settings:
        name = ", ".join(f"{k} {v}" for k, v in setting.items() if k != "logit_bias") or f"logit_bias {BIAS}"
        try:
            counts, _ = draw(asker, prompt, setting)
        except AskError as e:
            gaps.append(refusal(name, e))
            continue
        checks.append(distribution_check(name, expected, counts, closed="logit_bias" not in setting))
    for name, check in (
        ("penalties", partial(penalty_check, PENALTIES, piece_of=piece_of)),
        ("frequency_penalty", partial(penalty_check, FREQUENCY, piece_of=piece_of)),
        ("stop", stop_check),
        *(() if asker.native else (("n", several_check),)),  # llama.cpp's own API has none
    ):
        try:
            if (result := check(asker, prompts)) is not None:
                checks.append(result)
            else:
                gaps.append(f"{name} was not judged: it changes none of the answers.")
        except AskError as e:
            gaps.append(refusal(name, e))
    return checks


def refusal(name: str, error: AskError) -> str:
    """A refused setting as a sentence; any other error is raised again."""
    if not str(error).startswith("HTTP 4"):
        raise error
    return f"the engine refuses {name}, which was not judged ({str(error)[:120]})."


def undecided_prompt(asker: Asker, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Mapping[str, float]]:
    """The prompt after which the best token's probability is closest to 0.4, with the best tokens' log probabilities
    (by piece)."""
    best: tuple[float, list[int], Mapping[str, float]] = (math.inf, list(prompts[0]), {})
    for prompt in prompts:
        reply = asker.ask(Question(list(prompt), tokens=1, logprobs=TOP, exactly=True))
        if reply.top and (distance := abs(math.exp(max(reply.top[0].values())) - 0.4)) < best[0]:
            best = (distance, list(prompt), reply.top[0])
    return best[1], best[2]


def draw(asker: Asker, prompt: list[int], setting: Mapping[str, Any]) -> tuple[Counter[str], dict[str, int]]:
    """How often each piece was drawn, and its token id where the engine names ids."""
    questions = [
        Question(prompt, tokens=1, temperature=1.0, seed=seed, logprobs=1, exactly=True, settings=setting)
        for seed in range(DRAWS)
    ]
    counts: Counter[str] = Counter()
    ids: dict[str, int] = {}
    for reply in asker.ask_all(questions, AT_ONCE):
        if isinstance(reply, AskError):
            raise reply
        piece = reply.pieces[0] if reply.pieces else reply.text
        counts[piece] += 1
        if reply.tokens:
            ids[piece] = reply.tokens[0]
    return counts, ids


def filtered(top: Mapping[str, float], setting: Mapping[str, float]) -> dict[str, float]:
    """The pieces that a filter leaves, with their probabilities, from log probabilities at temperature 1. The best ones
    alone are known, so that another temperature needs a top_k."""
    ranked = sorted(((math.exp(v / setting.get("temperature", 1.0)), piece) for piece, v in top.items()), reverse=True)
    rest, total = [], 0.0
    for k, (p, piece) in enumerate(ranked):
        if k >= setting.get("top_k", math.inf) or total >= setting.get("top_p", math.inf):
            break
        if p < setting.get("min_p", 0.0) * ranked[0][0]:
            break
        rest.append((p, piece))
        total += p
    return {piece: p / total for p, piece in rest}


def biased(top: Mapping[str, float], piece: str, bias: float) -> dict[str, float]:
    """Log probabilities after a bias on the logit of one piece."""
    shares = {p: math.exp(v) for p, v in top.items()}
    scale = 1 - shares[piece] + shares[piece] * math.exp(bias)
    return {p: math.log((math.exp(bias) if p == piece else 1.0) * share / scale) for p, share in shares.items()}


def distribution_check(name: str, expected: Mapping[str, float], counts: Counter[str], *, closed: bool) -> Check:
    """`closed`: `expected` has probabilities, and nothing else may be drawn; else log probabilities of the best."""
    shares = expected if closed else {p: math.exp(v) for p, v in expected.items()}
    outside = sum(n for piece, n in counts.items() if piece not in shares) if closed else 0
    sigmas = chi_square([counts[p] for p in shares], list(shares.values()), DRAWS)
    note = f"{outside} of {DRAWS} tokens lie outside of it" if outside else f"{sigmas:.1f} sigmas"
    value = round(sigmas, 4) if math.isfinite(sigmas) else None
    return Check(f"sampling by its distribution: {name}", not outside and sigmas <= CHI_SQUARE, value, CHI_SQUARE, note)


def chi_square(counts: Sequence[int], shares: Sequence[float], draws: int) -> float:
    """Sigmas by which counts lie off their shares; what is rare, or not listed, is one class."""
    classes = [(n, p) for n, p in zip(counts, shares) if p * draws >= 5]
    rest_n, rest_p = draws - sum(n for n, _ in classes), 1 - sum(p for _, p in classes)
    if rest_p * draws >= 1:
        classes.append((rest_n, rest_p))
    freedom = len(classes) - 1
    if freedom < 1:
        return 0.0 if rest_n <= 5 + rest_p * draws else math.inf
    value = sum((n - p * draws) ** 2 / (p * draws) for n, p in classes)
    return (value - freedom) / math.sqrt(2 * freedom)


def walk_check(replies: Sequence[Reply]) -> Check | None:
    """Sampled answers at temperature 1, token by token: how often the best one is drawn, and how often one outside of
    the likeliest. Places where the answer could have ended are left out: llama.cpp does not draw what would end it
    (`drawable`). None where the model is too sure for the counts to mean anything."""
    counts = {"the best token": (0, 0.0, 0.0), f"a token outside of the likeliest {LIKELY:.0%}": (0, 0.0, 0.0)}
    places = ((v, t) for reply in replies for v, t in zip(reply.logprobs, reply.top))
    for value, top in ((v, t) for v, t in places if t and t.get("", -math.inf) < END):
        for name, (drawn, share) in zip(counts, classes_of(value, top)):
            count, mean, variance = counts[name]
            counts[name] = count + drawn, mean + share, variance + share * (1 - share)
    rows = [
        ((count - mean) / math.sqrt(variance), f"{name} was drawn {count} times instead of {mean:.0f}")
        for name, (count, mean, variance) in counts.items()
        if variance >= LEAST_VARIANCE
    ]
    if not rows:
        return None
    sigmas, note = max(rows, key=lambda row: abs(row[0]))
    ok = abs(sigmas) <= CHI_SQUARE
    return Check("sampled answers are drawn by their probabilities", ok, round(sigmas, 2), CHI_SQUARE, note)


def classes_of(value: float, top: Mapping[str, float]) -> list[tuple[bool, float]]:
    """For the best token, and for those outside of the likeliest: whether one of them was drawn, and how probable that
    was. Tokens are told by their log probabilities: several may have the same text."""
    ranked = sorted(top.values(), reverse=True)
    total, last = 0.0, math.inf
    for last in ranked:
        total += math.exp(last)
        if total >= LIKELY:
            break
    best = math.exp(ranked[0])
    outside = (value < last - TIE, 1 - total) if total >= LIKELY else (False, 0.0)
    return [(value >= ranked[0] - TIE, min(1.0, best)), outside]


def penalty_check(
    penalties: Mapping[str, float], asker: Asker, prompts: Sequence[Sequence[int]], piece_of: Callable[[int], str]
) -> Check | None:
    """Every token of a greedy answer with penalties is the best one after what the answer so far takes away from each;
    in llama.cpp the end of the prompt counts, too. An engine that names log probabilities after the penalties must take
    the best of these, and another answer than without."""
    name = "greedy with penalties" if len(penalties) > 1 else f"greedy with {next(iter(penalties))}"
    for prompt in prompts:
        question = Question(list(prompt), tokens=PENALISED, logprobs=TOP, exactly=True, settings=penalties)
        plain, reply = asker.ask(Question(list(prompt), tokens=PENALISED, exactly=True)), asker.ask(question)
        if plain.tokens == reply.tokens and not _repeats(reply):
            continue  # nothing to penalise after this prompt
        wrong = _wrong_choices(reply, penalties)
        if wrong:
            history = [piece_of(token) for token in prompt[-LAST_TOKENS:]]
            wrong = min(wrong, _wrong_choices(reply, penalties, history), key=len)
        if wrong and plain.text != reply.text:
            wrong = min(wrong, _wrong_choices(reply, {}), key=len)
        return Check(name, not wrong, len(wrong), 0, "; ".join(wrong[:2]))
    return None


def _repeats(reply: Reply) -> bool:
    return len(set(reply.pieces)) < len(reply.pieces)


def _wrong_choices(reply: Reply, penalties: Mapping[str, float], history: Sequence[str] = ()) -> list[str]:
    """A sentence for every token that is not the best one. Tokens without a text of their own are not judged."""
    earlier = list(history)
    wrong = []
    for at, (piece, value, top) in enumerate(zip(reply.pieces, reply.logprobs, reply.top)):
        counts = Counter(earlier[-LAST_TOKENS:] if history else earlier)
        after = {p: v - _penalty(counts[p], penalties) for p, v in {**top, piece: value}.items()}
        best = max(after, key=lambda p: after[p])
        if piece and best and after[best] > after[piece] + 1e-2:
            wrong.append(f"token {at} is {piece!r}, and {best!r} is better by {after[best] - after[piece]:.2f} nats")
        earlier.append(piece)
    return wrong


def _penalty(count: int, penalties: Mapping[str, float]) -> float:
    return penalties.get("presence_penalty", 0.0) * (count > 0) + penalties.get("frequency_penalty", 0.0) * count


def several_check(asker: Asker, prompts: Sequence[Sequence[int]]) -> Check:
    """`n` answers to one request: so many, not all alike, all of them counted."""
    question = Question(list(prompts[0]), tokens=PENALISED, temperature=1.0, seed=1, exactly=True)
    raw = asker.post("/v1/completions", question.body(asker.model) | {"n": ANSWERS})
    try:
        texts = [str(choice["text"]) for choice in raw["choices"]]
        counted = int(raw["usage"]["completion_tokens"])
    except (LookupError, TypeError, ValueError) as e:
        raise AskError(f"/v1/completions: not an answer ({type(e).__name__}: {e})") from None
    right = len(texts) == ANSWERS and len(set(texts)) > 1 and counted == ANSWERS * PENALISED
    note = f"{len(texts)} answers, {len(set(texts))} of them different, {counted} tokens counted"
    return Check(f"n of {ANSWERS} gives as many answers", right, len(texts), ANSWERS, note)


def stop_check(asker: Asker, prompts: Sequence[Sequence[int]]) -> Check | None:
    """A stop string, taken from an answer, ends the same answer in front of it."""
    for prompt in prompts:
        answer = asker.ask(Question(list(prompt), tokens=PENALISED, exactly=True)).text
        stop = answer[len(answer) // 2 :][:4]
        if len(stop.strip()) < 2 or not stop.isprintable():
            continue
        expected, note = answer[: answer.index(stop)], ""
        for stream in (False, True):
            question = Question(list(prompt), tokens=PENALISED, exactly=True, stream=stream, settings={"stop": [stop]})
            reply = asker.ask(question)
            if reply.text != expected or reply.finish != "stop":
                way = "as a stream " if stream else ""
                note = f"{way}{reply.text[-40:]!r} ({reply.finish}) instead of {expected[-40:]!r} (stop) for {stop!r}"
        return Check("a stop string ends the answer", not note, note=note)
    return None
