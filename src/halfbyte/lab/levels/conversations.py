"""Conversations over every API that an engine offers (`chat_apis.py`).

Questions with known answers, some about an earlier turn, an instruction or a tool's result; a tool that must be called,
and an answer that must fit a JSON schema. Whatever the API, no control token of harmony may stand in a text, a stream
is the answer in one piece, an answer says why it ended and how many tokens it has, and temperature, seeds and stop
strings are read. An API that the engine does not have (404) is left
out, and so is a feature that it refuses (400, 422, 501); both are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from halfbyte.errors import AskError
from halfbyte.lab.levels.chat_apis import APIS, CITIES, TOOL, Api, ChatTurn, Spoken
from halfbyte.lab.peers.asker import Asker
from halfbyte.lab.result import Check

TOKENS, FEW = 320, 4  # of an answer at most; of one that is cut off
CUTS = (FEW, 16)  # tokens of answers whose counts are known
STOP = 3  # letters of a stop string
SEEDS = (1, 2, 3)
DRAWS = 24  # sampled answers, at most, of which two must differ
QUESTIONS = (("what is 17+25?", "42"), ("what is 9+8?", "17"), ("what is 40+30?", "70"), ("what is 12-5?", "7"))
RIGHT = 3  # of the questions, at least
MISSING, REFUSED = ("HTTP 404", "HTTP 405"), ("HTTP 400", "HTTP 422", "HTTP 501")
TOOL_QUESTION, SCHEMA_QUESTION = "What is the weather in Paris?", "Name a city as JSON with the key city."
OPEN_QUESTION = "Continue this list with ten more words: blue, seven, window, hat"  # no model is sure how
NAMES = ("Anna", "Bruno")  # that an earlier turn has
INSTRUCTION = "Give only the answer and nothing else."
GREETING = "Hello!"  # answered in words that its reasoning lacks
ARGUMENTS = '{"city": "Paris"}'
RESULT, FIGURE = '{"temperature": 21, "sky": "hail"}', "21"  # a tool's result, and the figure in it
Feature = Callable[[Asker, Api], Check | None]
Count = Callable[[str], int]  # tokens of a text


def conversation_checks(asker: Asker, gaps: list[str], count: Count, *, judged: bool = True) -> list[Check]:
    """Checks of every API; `gaps` gets a sentence for each feature that the engine refuses, `count` is the model's
    tokenizer. Unless `judged`, answers to questions need not be right (a model of random weights)."""
    checks: list[Check] = []
    for api in APIS:
        try:
            answers = [talk(asker, api, user_turn(question)) for question, _ in QUESTIONS]
        except AskError as e:
            if str(e).startswith(MISSING):
                continue
            if not str(e).startswith(REFUSED):
                raise
            gaps.append(f"{api.name}: the engine refuses a question, so that the API was not judged ({str(e)[:120]}).")
            continue
        if judged:
            checks.append(answer_check(api.name, answers))
        checks.append(control_check(api.name, answers))
        checks.append(end_check(api.name, answers))
        checks.append(stream_check(asker, api, user_turn(QUESTIONS[0][0]), answers[0], "a stream is its answer"))
        for title, feature in features_of(api, count, judged=judged):
            try:
                if (result := feature(asker, api)) is not None:
                    checks.append(result)
                else:
                    gaps.append(f"{api.name}: no answer shows whether {title} is read, which was not judged.")
            except AskError as e:
                if not str(e).startswith(REFUSED):
                    raise
                gaps.append(f"{api.name}: the engine refuses {title}, which was not judged ({str(e)[:120]}).")
    return checks


def features_of(api: Api, count: Count, *, judged: bool) -> list[tuple[str, Feature]]:
    """What an API can be asked besides a plain question; some of it needs a model that was trained."""
    features: list[tuple[str, Feature]] = [
        ("a limit of tokens", cut_check),
        ("a limit of tokens", partial(count_check, count=count)),
        ("a temperature", temperature_check),
    ]
    if api.seeded:
        features.append(("a seed", seed_check))
    if api.scored:
        features.append(("a small difference", similar_check))
    if api.stop is not None and judged:
        features.append(("a stop string", stop_check))
    if api.required:
        features += [("a required tool", tool_check), ("a streamed call", call_stream_check)]
    if api.schema:
        features.append(("a JSON schema", schema_check))
    if judged:
        features += [
            ("earlier turns", memory_check),
            ("instructions", instruction_check),
            ("a tool's result", result_check),
        ]
    return features


def user_turn(question: str) -> list[ChatTurn]:
    return [ChatTurn("user", question)]


def talk(
    asker: Asker, api: Api, turns: Sequence[ChatTurn], more: Mapping[str, Any] | None = None, tokens: int = TOKENS
) -> Spoken:
    raw = asker.post(api.path, body_of(asker, api, turns, more, tokens))
    try:
        return api.read(raw)
    except (LookupError, TypeError, AttributeError) as e:
        raise AskError(f"{api.path}: not an answer of this API ({type(e).__name__}: {e}): {str(raw)[:200]}") from None


def body_of(
    asker: Asker, api: Api, turns: Sequence[ChatTurn], more: Mapping[str, Any] | None = None, tokens: int = TOKENS
) -> dict[str, Any]:
    """The body of a request; what `more` has for an object is added to it."""
    body = {"model": asker.model, **api.body(turns, tokens)}
    for name, value in (more or {}).items():
        body[name] = {**body[name], **value} if isinstance(body.get(name), dict) else value
    return body


def _numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text.replace(",", ""))


# ---- checks ----------------------------------------------------------------------------------------------------------


def answer_check(name: str, answers: Sequence[Spoken]) -> Check:
    wrong = [s.text for (_, answer), s in zip(QUESTIONS, answers) if answer not in _numbers(s.text)]
    note = f"for example {wrong[0][:60]!r}" if wrong else ""
    right = len(answers) - len(wrong)
    return Check(f"{name}: right answers", right >= RIGHT, right, RIGHT, note)


def control_check(name: str, answers: Sequence[Spoken]) -> Check:
    leaks = [s for s in answers if "<|" in s.text + s.reasoning or not s.text.strip()]
    note = f"for example {(leaks[0].text or leaks[0].reasoning)[:60]!r}" if leaks else ""
    return Check(f"{name}: texts without control tokens", not leaks, len(leaks), 0, note)


def stream_check(
    asker: Asker,
    api: Api,
    turns: Sequence[ChatTurn],
    complete: Spoken,
    title: str,
    more: Mapping[str, Any] | None = None,
) -> Check:
    """The deltas of a stream, joined, against the answer in one piece: text, reasoning, calls and how it ended."""
    events = asker.post(api.path, {**body_of(asker, api, turns, more), "stream": True})
    try:
        streamed, ended = api.read_stream(events)
        streamed, complete = comparable(streamed), comparable(complete)
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        note = f"the stream cannot be read ({type(e).__name__}: {e})"
        return Check(f"{api.name}: {title}", False, note=note)
    note = ""
    for part in ("finish", "reasoning", "calls", "text"):
        a, b = getattr(streamed, part), getattr(complete, part)
        if a != b:
            note = f"{part} {str(a)[:60]!r} instead of {str(b)[:60]!r}"
    note = note if ended else "the stream has no end"
    return Check(f"{api.name}: {title}", not note, note=note)


def comparable(spoken: Spoken) -> Spoken:
    """With the arguments of calls as values. ValueError where they are no JSON."""
    calls = [(name, json.loads(a) if isinstance(a, str) else a) for name, a in spoken.calls]
    return replace(spoken, calls=calls)


def end_check(name: str, answers: Sequence[Spoken]) -> Check:
    """Answers that are shorter than their limit have ended by themselves."""
    wrong = [s for s in answers if s.finish == "length" and 0 < s.tokens < TOKENS]
    wrong += [s for s in answers if s.finish not in ("stop", "length")]
    note = (
        f"an answer of {wrong[0].tokens} tokens, of {TOKENS} at most, ended with {wrong[0].finish!r}" if wrong else ""
    )
    return Check(f"{name}: an answer that ends by itself says so", not wrong, len(wrong), 0, note)


def count_check(asker: Asker, api: Api, count: Count) -> Check:
    """Tokens of answers that are cut off, and those that a longer question has more."""
    wrong = []
    question = QUESTIONS[0][0]
    for cut in CUTS:
        spoken = talk(asker, api, user_turn(question), tokens=cut)
        if spoken.finish == "length" and spoken.tokens != cut:
            wrong.append(f"an answer of {cut} tokens counts as {spoken.tokens}")
    longer = f"{question} {OPEN_QUESTION}"
    read = [talk(asker, api, user_turn(text), tokens=FEW).prompt_tokens for text in (question, longer)]
    more = count(longer) - count(question)
    if read[1] - read[0] != more:
        wrong.append(f"{more} more tokens of a question count as {read[1] - read[0]}")
    return Check(f"{api.name}: tokens are counted", not wrong, len(wrong), 0, "; ".join(wrong))


def temperature_check(asker: Asker, api: Api) -> Check:
    """Sampled answers to a question that leaves much open are not all alike. It is asked until two differ: one answer
    may be likelier than all others together."""
    turns, tokens = user_turn(OPEN_QUESTION), 2 * CUTS[-1]
    first = spoken_parts(talk(asker, api, turns, api.sampled(0), tokens))
    for seed in range(1, DRAWS):
        if spoken_parts(talk(asker, api, turns, api.sampled(seed), tokens)) != first:
            return Check(f"{api.name}: a temperature is read", True, seed + 1, DRAWS)
    note = f"{DRAWS} sampled answers are alike: {first[1][:60]!r}"
    return Check(f"{api.name}: a temperature is read", False, DRAWS, DRAWS, note)


def seed_check(asker: Asker, api: Api) -> Check:
    """Equal seeds give equal answers, in one piece and as a stream."""
    title, turns = "a seed gives the same answer", user_turn(OPEN_QUESTION)
    for seed in SEEDS:
        first, again = (talk(asker, api, turns, api.sampled(seed)) for _ in range(2))
        if spoken_parts(first) != spoken_parts(again):
            note = f"{spoken_parts(again)[1][:60]!r} instead of {spoken_parts(first)[1][:60]!r}"
            return Check(f"{api.name}: {title}", False, note=note)
    return stream_check(asker, api, turns, first, title, api.sampled(seed))


def similar_check(asker: Asker, api: Api) -> Check | None:
    """Questions that hardly differ have log probabilities of their own. None where the engine names none."""
    question = QUESTIONS[0][0]
    questions = (question, question.capitalize(), question.upper(), question.replace(" ", "  ", 1))
    scores = [talk(asker, api, user_turn(text), api.scored).scores for text in questions]
    if not all(scores):
        return None
    own = len({repr(entries) for entries in scores})
    note = "" if own == len(scores) else f"{len(scores) - own} of {len(scores)} have another's"
    return Check(f"{api.name}: similar questions have answers of their own", not note, own, len(scores), note)


def spoken_parts(spoken: Spoken) -> tuple[str, str]:
    return spoken.reasoning, spoken.text


def stop_check(asker: Asker, api: Api) -> Check | None:
    """A stop string, taken from an answer, ends the same answer in front of it, in one piece and as a stream. None
    where no answer has one that its reasoning lacks."""
    assert api.stop is not None
    title = "a stop string ends the answer"
    for question in (OPEN_QUESTION, GREETING, *(q for q, _ in QUESTIONS)):
        complete = talk(asker, api, user_turn(question))
        stop = stop_of(complete)
        if not stop:
            continue
        more, expected = api.stop(stop), complete.text[: complete.text.index(stop)]
        spoken = talk(asker, api, user_turn(question), more)
        if spoken.text.strip() != expected.strip() or spoken.finish != "stop":
            note = f"{spoken.text[:60]!r} ({spoken.finish}) instead of {expected[:60]!r} (stop) for {stop!r}"
            return Check(f"{api.name}: {title}", False, note=note)
        return stream_check(asker, api, user_turn(question), spoken, title, more)
    return None


def stop_of(spoken: Spoken) -> str:
    """A string from an answer's second half that its reasoning does not have; empty where there is none."""
    begin, end = len(spoken.text) // 2, len(spoken.text) - STOP
    strings = (spoken.text[at : at + STOP] for at in range(begin, end))
    return next((s for s in strings if s == s.strip() and s not in spoken.reasoning), "")


def cut_check(asker: Asker, api: Api) -> Check:
    spoken = talk(asker, api, user_turn(QUESTIONS[0][0]), tokens=FEW)
    note = "" if spoken.finish == "length" else f"an answer of {FEW} tokens ended with {spoken.finish!r}"
    return Check(f"{api.name}: an answer that is cut off says so", not note, note=note)


def tool_check(asker: Asker, api: Api) -> Check:
    spoken = talk(asker, api, user_turn(TOOL_QUESTION), {**api.offer, **api.required})
    if not spoken.calls:
        problem = f"no call: {spoken.text[:60]!r}"
    elif spoken.calls[0][0] != TOOL:
        problem = f"called {spoken.calls[0][0]!r}"
    else:
        problem = misfit(spoken.calls[0][1])
    if not problem and spoken.finish != "call":
        problem = f"the answer with the call ended with {spoken.finish!r}"
    return Check(f"{api.name}: a required tool is called", not problem, note=problem)


def call_stream_check(asker: Asker, api: Api) -> Check:
    more, turns = {**api.offer, **api.required}, user_turn(TOOL_QUESTION)
    return stream_check(asker, api, turns, talk(asker, api, turns, more), "a streamed call is its call", more)


def schema_check(asker: Asker, api: Api) -> Check:
    problem = misfit(talk(asker, api, user_turn(SCHEMA_QUESTION), api.schema).text)
    return Check(f"{api.name}: an answer fits its schema", not problem, note=problem)


def memory_check(asker: Asker, api: Api) -> Check:
    """What was said two turns ago."""
    wrong = []
    for name in NAMES:
        turns = [ChatTurn("user", f"My name is {name}."), ChatTurn("assistant", f"Nice to meet you, {name}.")]
        text = talk(asker, api, [*turns, *user_turn("What is my name?")]).text
        if name not in text:
            wrong.append(f"{text[:60]!r} for {name}")
    return Check(
        f"{api.name}: earlier turns are read", not wrong, len(NAMES) - len(wrong), len(NAMES), "; ".join(wrong)
    )


def instruction_check(asker: Asker, api: Api) -> Check:
    """An instruction that changes the form of an answer, and not what it says."""
    question, answer = QUESTIONS[0]
    text = talk(asker, api, [ChatTurn("system", INSTRUCTION), *user_turn(question)]).text
    bare = re.sub(r"[\s.*`$]", "", text) == answer
    return Check(
        f"{api.name}: instructions are read", bare, note="" if bare else f"{text[:60]!r} instead of {answer!r}"
    )


def result_check(asker: Asker, api: Api) -> Check:
    """What a tool gave back, after its call."""
    turns = [*user_turn(TOOL_QUESTION), ChatTurn("call", ARGUMENTS), ChatTurn("result", RESULT)]
    text = talk(asker, api, turns, api.offer).text
    right = FIGURE in _numbers(text)
    note = "" if right else f"{text[:60]!r} after {RESULT!r}"
    return Check(f"{api.name}: a tool's result is read", right, note=note)


def misfit(value: Any) -> str:
    """How JSON text, or a value, does not fit the schema; empty if it does."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return f"not JSON: {value[:60]!r}"
    if not isinstance(value, dict) or set(value) != {"city"} or value["city"] not in CITIES:
        return f"not as the schema has it: {str(value)[:60]}"
    return ""
