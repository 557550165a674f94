"""A hundred questions as a visitor would ask them, written by hand and frozen: a test holds their digest.

No generator made them, and training data must not hold them. At most 25 are outside of what the embedded model can
know; there one honest sentence is right, and everywhere else it is a false refusal.
"""

# ruff: noqa: E501  (a table of questions reads best with one per line)
from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from halfbyte.evals.grading import Grade
from halfbyte.evals.problem import Frame, Problem, Say, final, result, user
from halfbyte.evals.problem import call as called
from halfbyte.harmony.messages import Tool


def _turns(texts: Sequence[str]) -> tuple[Say, ...]:
    """User and assistant in turn; the user is first and last."""
    return tuple(user(text) if at % 2 == 0 else final(text) for at, text in enumerate(texts))


def _ask(task: str, *texts: str, answer: str, frame: Frame = Frame(), **grade: Any) -> Problem:  # noqa: B008
    """`answer` is one right answer; the grade decides which others are."""
    reply = (final(answer),)
    return Problem("natural", _turns(texts), reply, "free", grade=Grade(**grade), frame=frame, tags=(task,))


def _call(text: str, tools: Sequence[Tool], name: str, /, **arguments: Any) -> Problem:
    frame = Frame(tools=tuple(tools))
    reply = (called(name, arguments),)
    return Problem("natural", (user(text),), reply, "call", (name,), arguments, frame, tags=("tools",))


def _json(text: str, schema: str, /, **value: Any) -> Problem:
    frame = Frame(response_format=("answer", schema))
    return Problem("natural", (user(text),), (final(json.dumps(value)),), "json", (), value, frame, tags=("json",))


def _tool(name: str, description: str, required: Sequence[str] | None = None, /, **properties: Any) -> Tool:
    schemas = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in properties.items()}
    names = list(schemas) if required is None else list(required)
    return Tool(name, description, {"type": "object", "properties": schemas, "required": names})


def _outside(*texts: str) -> Problem:
    return _ask("outside", *texts, answer="I am a small demonstration model and cannot answer that.", refusal=True)


_PARCEL = _tool("track_parcel", "Look up where a parcel is.", number="string")
_TAXI = _tool("order_taxi", "Order a taxi to an address.", address="string", passengers="integer")
_NOTE = _tool("save_note", "Save a note for later.", text="string")
_LAMP = _tool("dim_lamp", "Set the brightness of a lamp.", lamp="string", percent="integer")
_CONVERT = _tool(
    "convert_money",
    "Convert an amount of money.",
    amount="number",
    source={"type": "string", "enum": ["EUR", "USD", "CHF"]},
    target={"type": "string", "enum": ["EUR", "USD", "CHF"]},
)
_SEARCH = _tool("search_books", "Find books by their author.", ["author"], author="string", limit="integer")

QUESTIONS: tuple[Problem, ...] = (
    # arithmetic
    _ask("arithmetic", "What is 17 + 25?", answer="17 + 25 = 42.", number=42),
    _ask("arithmetic", "hey can you add 48 and 37 for me", answer="85", number=85),
    _ask("arithmetic", "342+589?", answer="931", number=931),
    _ask("arithmetic", "whats 100 take away 63", answer="37", number=37),
    _ask("arithmetic", "I need 712 minus 358, quickly please.", answer="354", number=354),
    _ask("arithmetic", "If I subtract 499 from 803, what do I get?", answer="304", number=304),
    _ask("arithmetic", "600 - 1", answer="599", number=599),
    _ask("arithmetic", "how much is 8 times 7", answer="56", number=56),
    _ask("arithmetic", "Multiply 46 by 9 please", answer="414", number=414),
    _ask("arithmetic", "what do you get when you add 999 to 1", answer="1000", number=1000),
    _ask("arithmetic", "What's twenty plus thirty-five?", answer="Fifty-five.", number=55),
    _ask("arithmetic", "what is nine times six?", answer="54", number=54),
    _ask("arithmetic", "forty minus twelve equals", answer="28", number=28),
    _ask("arithmetic", "Waht is 23 + 9?", answer="32", number=32),
    _ask("arithmetic", "can u tell me 7 x 12", answer="84", number=84),
    # stories
    _ask("story", "I had 12 eggs and broke 5 of them. How many can I still use?", answer="7 eggs", number=7),
    _ask("story", "My sister is 14 and I am 9 years older. How old am I?", answer="23", number=23),
    _ask("story", "A ticket is 8 euros. What do six tickets cost?", answer="48 euros", number=48),
    _ask("story", "There were 31 people on the bus, then 18 got off. How many stayed?", answer="13", number=13),
    _ask("story", "Priya walked 350 metres to the shop and 420 metres to the park. How far is that altogether?", answer="770 metres", number=770),
    _ask("story", "Each shelf holds 25 books and I have 4 shelves. How many books fit?", answer="100", number=100),
    _ask("story", "we are 5 friends and everyone brings 3 bottles. how many bottles", answer="15", number=15),
    _ask("story", "Kwame saved 60 coins and spent 45. What is left?", answer="15 coins", number=15),
    # lists
    _ask("lists", "Put 9, 3, 27 and 14 in ascending order", answer="3, 9, 14, 27", order=("3", "9", "14", "27")),
    _ask("lists", "sort these from big to small: 5 88 41 2", answer="88, 41, 5, 2", order=("88", "41", "5", "2")),
    _ask("lists", "Which one is the biggest: 71, 17, 77 or 70?", answer="77 is the biggest.", phrases=(("77",),), avoid=("71", "17", "70")),
    _ask("lists", "what's the smallest number here? 64 46 84 48", answer="46", phrases=(("46",),), avoid=("64", "84", "48")),
    _ask("lists", "Say this backwards: apple, kiwi, mango", answer="mango, kiwi, apple", order=("mango", "kiwi", "apple")),
    _ask("lists", "How many things are on my list: milk, tea, salt, soap, rice?", answer="five", number=5),
    _ask("lists", "My list is: tent, rope, torch, map. What's the third thing?", answer="torch", phrases=(("torch",),), avoid=("tent", "rope", "map")),
    _ask("lists", "total of 4, 6 and 11?", answer="21", number=21),
    _ask("lists", "what comes last in this list: oboe, flute, drum", answer="drum", phrases=(("drum",),), avoid=("oboe", "flute")),
    # letters
    _ask("letters", "How many r's are in strawberry?", answer="3", number=3),
    _ask("letters", "Spell banana for me", answer="b-a-n-a-n-a", order=("b", "a", "n", "a", "n", "a")),
    _ask("letters", "How many letters does the word garden have?", answer="6", number=6),
    _ask("letters", "write the word lamp backwards", answer="pmal", phrases=(("pmal", "p-m-a-l", "p m a l", "p, m, a, l"),)),
    _ask("letters", "What is the first letter of umbrella?", answer="u", phrases=(("u",),)),
    _ask("letters", "how often does the letter o occur in book?", answer="2 times", phrases=(("2", "two", "twice"),)),
    # copying
    _ask("repeat", "Repeat exactly: zorbin takala meef", answer="zorbin takala meef", phrases=(("zorbin takala meef",),)),
    _ask("repeat", "Say 'good evening captain'.", answer="good evening captain", phrases=(("good evening captain",),)),
    # reading
    _ask("reading", "Jorunn drives a red van. Bastian rides a green bike. Who rides the bike?", answer="Bastian", phrases=(("Bastian",),), avoid=("Jorunn",)),
    _ask("reading", "Jorunn drives a red van. Bastian rides a green bike. What colour is the van?", answer="red", phrases=(("red",),), avoid=("green",)),
    _ask("reading", "The meeting with Dr. Okafor is on Thursday at 14:30 in room B12. Which room is it in?", answer="B12", phrases=(("B12",),)),
    _ask("reading", "Lumi was born in Tampere and now lives in Cork. Where does Lumi live?", answer="Cork", phrases=(("Cork",),), avoid=("Tampere",)),
    _ask("reading", "Our cat is called Miso and our dog is called Waffle. What's the dog's name?", answer="Waffle", phrases=(("Waffle",),), avoid=("Miso",)),
    _ask("reading", "The password for the wifi is plum-4471. What is the wifi password?", answer="plum-4471", phrases=(("plum-4471",),)),
    _ask("reading", "Text: The bakery opens at 7 and closes at 18. Question: When does it close?", answer="at 18", phrases=(("18",),), avoid=("7",)),
    _ask("reading", "Ravi ordered soup, Elif ordered salad. What did Elif order?", answer="salad", phrases=(("salad",),), avoid=("soup",)),
    _ask("reading", "Tove is taller than Sigrid. Who is shorter?", answer="Sigrid", phrases=(("Sigrid",),)),
    _ask("reading", "Anselm lives in Ghent. How old is Anselm?", answer="The text does not say how old Anselm is.", phrases=(("does not say", "doesn't say", "not say", "not mentioned", "not given", "not told"),)),
    _ask("reading", "Noor's tent is yellow and Idris's tent is grey. Whose tent is grey?", answer="Idris's", phrases=(("Idris", "Idris's"),), avoid=("Noor",)),
    # later turns
    _ask("memory", "Hi, I'm Oluwaseun.", "Hello! How can I help you?", "What's my name?", answer="Oluwaseun", phrases=(("Oluwaseun",),)),
    _ask("memory", "I parked the car on level 4.", "Good to know.", "Where did I park again?", answer="level 4", phrases=(("level 4", "level four"),)),
    _ask("memory", "My favourite number is 613.", "I will remember that.", "What is 2 + 2?", "2 + 2 = 4.", "And what was my favourite number?", answer="613", number=613),
    _ask("memory", "Please remember the word tangerine.", "I will.", "Thanks!", "You are welcome!", "Which word was it?", answer="tangerine", phrases=(("tangerine",),)),
    _ask("memory", "My brother lives in Izmir and I live in Porto.", "Good to know.", "Where does my brother live?", answer="Izmir", phrases=(("Izmir",),), avoid=("Porto",)),
    _ask("followup", "What is 17 + 25?", "17 + 25 = 42.", "And plus 3?", answer="45", number=45),
    _ask("followup", "12 * 4", "12 * 4 = 48.", "Now take away 8.", answer="40", number=40),
    _ask("followup", "Sort these: 8, 3, 5", "Sorted: 3, 5, 8.", "And the other way round?", answer="8, 5, 3", order=("8", "5", "3")),
    _ask("followup", "Here are some animals: otter, heron, lynx.", "Good to know.", "What was the second one?", answer="heron", phrases=(("heron",),), avoid=("otter", "lynx")),
    _ask("followup", "What is 30 - 12?", "30 - 12 = 18.", "Sorry, I meant 30 + 12.", answer="42", number=42),
    _ask("followup", "Spell cat.", "cat is spelled c-a-t.", "And dog?", answer="d-o-g", order=("d", "o", "g")),
    _ask("followup", "Hello", "Hello! How can I help you?", "What is 6 + 7?", answer="13", number=13),
    _ask("followup", "What is 50 + 8?", "50 + 8 = 58.", "Is that more than 60?", answer="No, 58 is less than 60.", phrases=(("no",),), avoid=("yes",)),
    # tools
    _call("Where is my parcel 7H-2291?", (_PARCEL, _NOTE), "track_parcel", number="7H-2291"),
    _call("Get us a taxi to 14 Mill Lane, there are three of us.", (_NOTE, _TAXI), "order_taxi", address="14 Mill Lane", passengers=3),
    _call("Write down: call the plumber", (_PARCEL, _TAXI, _NOTE), "save_note", text="call the plumber"),
    _call("Set the lamp in the study to 40 percent.", (_LAMP,), "dim_lamp", lamp="study", percent=40),
    _call("How many francs are 250 dollars?", (_CONVERT, _SEARCH), "convert_money", amount=250, source="USD", target="CHF"),
    _call("Find me books by Ursula Le Guin.", (_SEARCH, _PARCEL, _NOTE, _LAMP), "search_books", author="Ursula Le Guin"),
    _call("Show me 5 books by Italo Calvino", (_TAXI, _SEARCH), "search_books", author="Italo Calvino", limit=5),
    _ask("tools", "What is 9 + 9?", answer="18", number=18, frame=Frame(tools=(_TAXI, _PARCEL))),
    Problem("natural", (user("Order a taxi to the station for 2."), called("order_taxi", {"address": "the station", "passengers": 2}), result("order_taxi", {"minutes": 12, "plate": "KA 8817"})), (final("Your taxi KA 8817 comes in 12 minutes."),), "free", grade=Grade(phrases=(("12", "twelve"),)), frame=Frame(tools=(_TAXI,)), tags=("tools",)),
    Problem("natural", (user("Where is parcel 55-Q?"), called("track_parcel", {"number": "55-Q"}), result("track_parcel", {"error": "unknown number"})), (final("The number 55-Q is unknown."),), "free", grade=Grade(phrases=(("unknown", "not found", "could not", "error", "no parcel"),)), frame=Frame(tools=(_PARCEL,)), tags=("tools",)),
    # json
    _json("Marisol, 34, from Valencia.", '{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"},"city":{"type":"string"}},"required":["name","age","city"]}', name="Marisol", age=34, city="Valencia"),
    _json("The shirt costs 19 euros and comes in blue.", '{"type":"object","properties":{"colour":{"type":"string"},"price":{"type":"integer"}},"required":["colour","price"]}', colour="blue", price=19),
    _json("Is 7 larger than 3?", '{"type":"object","properties":{"answer":{"type":"boolean"}},"required":["answer"]}', answer=True),
    _json("Shopping: bread, olives, yoghurt", '{"type":"object","properties":{"items":{"type":"array","items":{"type":"string"}}},"required":["items"]}', items=["bread", "olives", "yoghurt"]),
    _json("Flight KL1009 leaves at 09:45 from gate D7.", '{"type":"object","properties":{"flight":{"type":"string"},"gate":{"type":"string"}},"required":["flight","gate"]}', flight="KL1009", gate="D7"),
    _json("The customer was unhappy and wants the money back.", '{"type":"object","properties":{"mood":{"type":"string","enum":["happy","unhappy"]}},"required":["mood"]}', mood="unhappy"),
    # small talk
    _ask("talk", "hi there", answer="Hello!", phrases=(("hello", "hi", "hey"),)),
    _ask("talk", "Thanks, that helped a lot!", answer="You are welcome!", phrases=(("welcome", "glad", "pleasure", "happy"),)),
    _ask("talk", "ok bye", answer="Goodbye!", phrases=(("bye", "goodbye", "see you", "nice day"),)),
    _ask("talk", "Are you a person?", answer="No, I am a language model.", phrases=(("no", "not", "model"),), avoid=("yes",)),
    _ask("talk", "How's it going?", answer="I am well, thank you.", phrases=(("well", "good", "fine", "great"),)),
    # outside of its world
    _outside("Why is the sky blue?"),
    _outside("Who wrote Don Quixote?"),
    _outside("What's the weather like right now?"),
    _outside("Write me a Python function that sorts a list."),
    _outside("What is the square root of 7921?"),
    _outside("Translate 'good morning' into Japanese."),
    _outside("Which team won the league last year?"),
    _outside("Explain how a refrigerator works."),
    _outside("What should I cook tonight?"),
    _outside("Summarise the plot of Hamlet."),
    _outside("What is 17 + 25?", "17 + 25 = 42.", "And why do leaves fall in autumn?"),
    _outside("How far away is the moon?"),
    _outside("Give me legal advice about my landlord."),
    _outside("What time is it?"),
    _outside("Is it safe to take ibuprofen with coffee?"),
)  # fmt: skip
