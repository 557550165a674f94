"""Problems with functions: choose one and call it, answer from its result, say that none fits.

Function and parameter names vary, so the definitions in the developer message must be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from halfbyte.evals import words
from halfbyte.evals.problem import EFFORTS, Frame, Problem, call, final, result, think, user
from halfbyte.harmony.messages import Tool

Values = dict[str, Any]


@dataclass(frozen=True)
class Ability:
    """One thing functions can do, under several names. `parameters`: slot -> (possible names, JSON type)."""

    names: tuple[str, ...]
    description: str
    parameters: dict[str, tuple[tuple[str, ...], str]]
    asks: tuple[str, ...]
    draw: Callable[[Random], Values]
    answer: Callable[[Random], Values]
    reply: str
    purpose: str


ABILITIES: dict[str, Ability] = {
    "weather": Ability(
        ("get_weather", "weather_now", "get_current_weather"), "Get the weather in a city.",
        {"city": (("city", "location", "place"), "string")},
        ("What is the weather in {city}?", "How is the weather in {city} today?", "Is it warm in {city}?"),
        lambda r: {"city": words.city(r)},
        lambda r: {"temperature": r.randint(1, 35), "sky": r.choice(("sunny", "cloudy", "rainy", "windy"))},
        "In {city} it is {sky} and {temperature} degrees.", "the weather in {city}",
    ),
    "time": Ability(
        ("get_time", "clock", "local_time"), "Get the time of day in a city.",
        {"city": (("city", "zone", "place"), "string")},
        ("What time is it in {city}?", "Tell me the time in {city}."),
        lambda r: {"city": words.city(r)}, lambda r: {"time": f"{r.randint(1, 23)}:{r.randint(10, 59)}"},
        "In {city} it is {time}.", "the time in {city}",
    ),
    "price": Ability(
        ("get_price", "price_of", "lookup_price"), "Get the price of an item in coins.",
        {"item": (("item", "product", "name"), "string")},
        ("What does a {item} cost?", "How much is a {item} in the shop?", "Find the price of a {item}."),
        lambda r: {"item": r.choice(words.ITEMS)}, lambda r: {"coins": r.randint(2, 400)},
        "A {item} costs {coins} coins.", "the price of a {item}",
    ),
    "stock": Ability(
        ("get_stock", "count_stock", "inventory"), "Get how many pieces of an item are in stock.",
        {"item": (("item", "product", "article"), "string")},
        ("How many {item}s are in stock?", "Do we have any {item}s in stock?"),
        lambda r: {"item": r.choice(words.ITEMS[:18])}, lambda r: {"pieces": r.randint(2, 90)},
        "There are {pieces} {item}s in stock.", "the stock of {item}s",
    ),
    "timer": Ability(
        ("set_timer", "start_timer", "timer"), "Start a timer for some minutes.",
        {"minutes": (("minutes", "duration", "length"), "integer")},
        ("Set a timer for {minutes} minutes.", "Start a {minutes} minute timer.", "Remind me in {minutes} minutes."),
        lambda r: {"minutes": r.randint(2, 90)}, lambda r: {"id": r.randint(10, 99)},
        "Timer {id} is set for {minutes} minutes.", "a timer for {minutes} minutes",
    ),
    "message": Ability(
        ("send_message", "send_text", "message"), "Send a short message to a person.",
        {"person": (("to", "person", "receiver"), "string"), "text": (("text", "body", "content"), "string")},
        ("Send {person} the message: {text}", "Tell {person} this: {text}", "Write to {person}: {text}"),
        lambda r: {"person": words.person(r), "text": " ".join(r.sample(words.THINGS, r.randint(2, 4)))},
        lambda r: {"sent": True}, "I sent your message to {person}.", "a message to {person}",
    ),
    "event": Ability(
        ("add_event", "create_event", "calendar_add"), "Put an event into the calendar.",
        {"title": (("title", "name", "event"), "string"), "day": (("day", "date", "weekday"), "string")},
        ("Add {title} to my calendar on {day}.", "Put {title} on {day} in the calendar."),
        lambda r: {"title": r.choice(words.SPORTS), "day": r.choice(words.DAYS)}, lambda r: {"ok": True},
        "I added {title} on {day}.", "an event on {day}",
    ),
    "light": Ability(
        ("switch_light", "set_light", "light"), "Turn the light in a room on or off.",
        {"room": (("room", "where", "place"), "string"), "state": (("state", "value", "mode"), "string")},
        ("Turn {state} the light in the {room}.", "Please switch the {room} light {state}."),
        lambda r: {"room": r.choice(words.ROOMS), "state": r.choice(("on", "off"))}, lambda r: {"ok": True},
        "The light in the {room} is {state}.", "the light in the {room}",
    ),
    "translate": Ability(
        ("translate", "translate_word", "translator"), "Translate a word into a language.",
        {"word": (("word", "text", "term"), "string"), "language": (("language", "target", "into"), "string")},
        ("Translate {word} into {language}.", "What is {word} in {language}?", "How do you say {word} in {language}?"),
        lambda r: {"word": r.choice(words.THINGS), "language": r.choice(words.LANGUAGES)},
        lambda r: {"translation": words.invented(r).lower()},
        "In {language}, {word} is {translation}.", "{word} in {language}",
    ),
    "travel": Ability(
        ("find_train", "search_trains", "train_search"), "Find a train between two cities.",
        {"origin": (("origin", "from_city", "start"), "string"), "target": (("target", "to_city", "end"), "string")},
        ("Find a train from {origin} to {target}.", "When is the next train from {origin} to {target}?"),
        lambda r: dict(zip(("origin", "target"), r.sample(words.CITIES, 2), strict=True)),
        lambda r: {"departure": f"{r.randint(1, 23)}:{r.randint(10, 59)}", "platform": r.randint(1, 20)},
        "The train from {origin} to {target} leaves at {departure} from platform {platform}.",
        "a train from {origin} to {target}",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Offer:
    """A tool as one conversation names it."""

    ability: Ability
    tool: Tool
    slots: dict[str, str]  # slot -> this tool's parameter name


def offers(rng: Random, count: int) -> list[Offer]:
    drawn_offers = []
    for key in rng.sample(list(ABILITIES), count):
        ability = ABILITIES[key]
        slots = {slot: rng.choice(names) for slot, (names, _) in ability.parameters.items()}
        properties = {slots[slot]: {"type": kind} for slot, (_, kind) in ability.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        drawn_offers.append(Offer(ability, Tool(rng.choice(ability.names), ability.description, schema), slots))
    return drawn_offers


def _call_thought(frame: Frame, function: str, purpose: str) -> str:
    return (
        f"Call {function}.",
        f"The user wants {purpose}. I call {function}.",
        f"The user wants {purpose}. The function {function} can do that. I call {function} with the right arguments.",
    )[EFFORTS.index(frame.effort or "medium")]


def _answer_thought(frame: Frame, function: str) -> str:
    return (
        "I have the result.",
        f"The function {function} gave a result. I answer.",
        f"The function {function} gave a result. I have what I need, so I answer the user.",
    )[EFFORTS.index(frame.effort or "medium")]


def _tags(offered: list[Offer]) -> tuple[str, ...]:
    return (f"{len(offered)} function{'s' * (len(offered) > 1)}",)


def tool_call(rng: Random, frame: Frame, offered: list[Offer]) -> Problem:
    """Choose the function and fill its arguments. The reply holds the call alone."""
    offer = rng.choice(offered)
    values = offer.ability.draw(rng)
    arguments = {offer.slots[slot]: value for slot, value in values.items()}
    name = offer.tool.name
    return Problem(
        "tool_call",
        (user(rng.choice(offer.ability.asks).format(**values)),),
        (think(_call_thought(frame, name, offer.ability.purpose.format(**values))), call(name, arguments)),
        "call",
        (name,),
        arguments,
        frame,
        tags=_tags(offered),
    )


def tool_answer(rng: Random, frame: Frame, offered: list[Offer]) -> Problem:
    """The call was made and its result is there: say it."""
    offer = rng.choice(offered)
    values = offer.ability.draw(rng)
    arguments = {offer.slots[slot]: value for slot, value in values.items()}
    name, outcome = offer.tool.name, offer.ability.answer(rng)
    text = offer.ability.reply.format(**values, **outcome)
    turns = (
        user(rng.choice(offer.ability.asks).format(**values)),
        think(_call_thought(frame, name, offer.ability.purpose.format(**values))),
        call(name, arguments),
        result(name, outcome),
    )
    return Problem(
        "tool_answer",
        turns,
        (think(_answer_thought(frame, name)), final(text)),
        "text",
        (text,),
        None,
        frame,
        tags=_tags(offered),
    )


def tool_none(rng: Random, frame: Frame, offered: list[Offer]) -> Problem:
    """No offered function does what is asked: say so instead of calling one."""
    descriptions = {o.ability.description for o in offered}
    ability = rng.choice([x for x in ABILITIES.values() if x.description not in descriptions])
    values = ability.draw(rng)
    text = "I have no function for that."
    thought = (
        "No function fits.",
        f"The user wants {ability.purpose.format(**values)}. No function fits.",
        f"The user wants {ability.purpose.format(**values)}. I look at the functions. No function fits, so I say so.",
    )[EFFORTS.index(frame.effort or "medium")]
    question = rng.choice(ability.asks).format(**values)
    reply = (think(thought), final(text))
    return Problem("tool_none", (user(question),), reply, "text", (text,), None, frame, tags=_tags(offered))
