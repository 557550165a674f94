"""What a visitor tells and asks for later, and texts that are read for one detail; for the second edition.

Sentences are put together from a relation, a deed and a value, so that few of them come twice. Of each table of
wordings the last quarter is held out.
"""

# ruff: noqa: E501, SIM905  (a table of sentences reads best with one per line)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everyday import Everyday
from turns import Turn
from wordings import expand

from halfbyte.evals import words
from halfbyte.evals.grading import Grade
from halfbyte.evals.problem import final, think, user

RELATIONS = "aunt uncle cousin neighbour boss teacher grandmother grandfather roommate colleague daughter son mother father partner nephew niece trainer landlady dentist".split()
# (how it is told, how it is asked, the answer, what the value is)
DEEDS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("lives in {v}", ("Where does my {r} live?", "In which place does my {r} live?", "Do you know where my {r} lives?", "which town does my {r} live in"), "Your {r} lives in {v}.", "name"),
    ("works at {v}", ("Where does my {r} work?", "For whom does my {r} work?", "Do you know where my {r} works?", "Which company does my {r} work for?"), "Your {r} works at {v}.", "name"),
    ("is called {v}", ("What is my {r} called?", "What is the name of my {r}?", "What is my {r}'s name?", "Which name does my {r} have?"), "Your {r} is called {v}.", "name"),
    ("likes {v}", ("What does my {r} like?", "What is it that my {r} likes?", "Do you know what my {r} likes?", "Tell me what my {r} likes."), "Your {r} likes {v}.", "food"),
    ("drives {v}", ("What does my {r} drive?", "Do you know what my {r} drives?", "Which thing does my {r} drive?", "Tell me what my {r} drives."), "Your {r} drives {v}.", "goods"),
    ("comes on {v}", ("When does my {r} come?", "On which day does my {r} come?", "What day does my {r} come on?", "Do you know when my {r} comes?"), "Your {r} comes on {v}.", "day"),
    ("is {v} years old", ("How old is my {r}?", "What is the age of my {r}?", "What is my {r}'s age?", "Do you know how old my {r} is?"), "Your {r} is {v} years old.", "number"),
    ("plays {v}", ("What does my {r} play?", "Which game does my {r} play?", "Which sport does my {r} play?", "Tell me what my {r} plays."), "Your {r} plays {v}.", "sport"),
    ("works as {v}", ("What is my {r}'s job?", "What does my {r} work as?", "Which job does my {r} have?", "What is the job of my {r}?"), "Your {r} works as {v}.", "job"),
    ("wants {v}", ("What does my {r} want?", "What is it that my {r} wants?", "Which thing does my {r} want?", "Do you know what my {r} wants?"), "Your {r} wants {v}.", "goods"),
)  # fmt: skip
PUT = (
    ("put", "put"),
    ("left", "leave"),
    ("hid", "hide"),
    ("stored", "store"),
    ("placed", "place"),
    ("dropped", "drop"),
    ("locked", "lock"),
)
PUT_ASKED = (
    "Where is the {i}?",
    "Where did I {d} the {i}?",
    "Where did I {d} the {i} again?",
    "Do you know where the {i} is?",
    "In which place is the {i}?",
    "Where can I find the {i}?",
    "where's the {i}?",
    "Tell me where I {p} the {i}.",
)
FAVOURITES = {"animal": words.PETS, "food": words.FOODS, "month": words.MONTHS, "game": words.SPORTS, "town": None, "song": None, "book": None, "film": None, "team": None, "band": None, "shop": None}  # fmt: skip
FAVOURITE_TOLD = ("My favourite {k} is {v}.", "My favorite {k} is {v}.", "{v} is my favourite {k}.", "The {k} I like best is {v}.", "I like {v} best of every {k}.", "Of each {k} I know {v} is the best.")  # fmt: skip
FAVOURITE_ASKED = ("What is my favourite {k}?", "What was my favorite {k} again?", "Which {k} do I like best?", "Do you remember my favourite {k}?", "And my favourite {k}?", "Name my favourite {k}.", "My favourite {k} was which one?", "Tell me my favorite {k}.")  # fmt: skip
LIST_TOLD = ("I packed {l}.", "In my bag are {l}.", "My list is {l}.", "These are my things: {l}.", "I need {l}.", "On the table I see {l}.", "Here are some words: {l}.", "I met {l} today.", "The teams are {l}.", "I wrote down {l}.", "We visited {l}.", "My plan for today: {l}.")  # fmt: skip
LIST_NTH = ("What was the {o} one?", "Which was the {o} one?", "And the {o} one?", "What is the {o} of them?", "the {o} one?", "Tell me the {o} one.", "Which one was {o}?", "Can you tell me the {o} one?", "And what is the {o} one?", "Name the {o} one.", "Which did I name {o}?", "What came {o}?")  # fmt: skip
LIST_LAST = ("What was the last one?", "And the last one?", "Which one was last?", "the last one?", "Tell me the last of them.", "What did I name last?", "What is at the end?", "Which was the last of them?")  # fmt: skip
LIST_COUNT = ("How many are these?", "How many did I name?", "How many is that?", "Count them.", "How many of them are there?", "What is their number?", "how many", "How many things was that?")  # fmt: skip
LIST_BACK = ("Say them backwards.", "Now backwards.", "And in reverse?", "Reverse them.", "The same list in reverse, please.", "List them from the end.", "Can you turn them around?", "Reverse my list.")  # fmt: skip

# (the sentence, (question, answer, which of the values) ..., what the values are)
PAIRS: tuple[tuple[str, tuple[tuple[str, str, str], ...], str, str], ...] = (
    ("{n} starts at {v} and ends at {w}.", (("When does {n} start?", "{n} starts at {v}.", "v"), ("When does {n} end?", "{n} ends at {w}.", "w"), ("At what time does {n} end?", "{n} ends at {w}.", "w")), "hour", "hour"),
    ("{n} comes from {v} and works in {w}.", (("Where does {n} come from?", "{n} comes from {v}.", "v"), ("Where does {n} work?", "{n} works in {w}.", "w")), "name", "name"),
    ("{n} was in {v} first and is in {w} now.", (("Where was {n} first?", "{n} was in {v} first.", "v"), ("Where is {n} now?", "{n} is in {w} now.", "w")), "name", "name"),
    ("{n} grew up in {v} and studies in {w} today.", (("Where did {n} grow up?", "{n} grew up in {v}.", "v"), ("Where does {n} study?", "{n} studies in {w}.", "w")), "name", "name"),
    ("{n} has a horse called {v} and a rabbit called {w}.", (("What is the horse called?", "The horse is called {v}.", "v"), ("What is the rabbit's name?", "The rabbit is called {w}.", "w"), ("What's the name of the horse?", "The horse is called {v}.", "v")), "name", "name"),
    ("{n} bought {v} for {w} coins.", (("What did {n} buy?", "{n} bought {v}.", "v"), ("How much did {n} pay?", "{n} paid {w} coins.", "w"), ("How many coins did {n} pay?", "{n} paid {w} coins.", "w")), "food", "number"),
    ("{n} leaves on {v} and comes back on {w}.", (("When does {n} leave?", "{n} leaves on {v}.", "v"), ("When does {n} come back?", "{n} comes back on {w}.", "w"), ("What day does {n} leave?", "{n} leaves on {v}.", "v")), "day", "day"),
    ("The talk of {n} is on {v} in hall {w}.", (("On which day is the talk?", "The talk is on {v}.", "v"), ("Which hall is it in?", "The talk is in hall {w}.", "w"), ("Who talks?", "{n} talks.", "n")), "day", "name"),
    ("The code for {n} is {v} and the pin is {w}.", (("What is the code for {n}?", "The code for {n} is {v}.", "v"), ("What is the pin?", "The pin is {w}.", "w"), ("What's the code?", "The code for {n} is {v}.", "v")), "name", "digits"),
    ("The train to {n} goes at {v} from platform {w}.", (("When does the train go?", "The train goes at {v}.", "v"), ("Which platform is it?", "It is platform {w}.", "w"), ("Where does the train go to?", "The train goes to {n}.", "n")), "clock", "hour"),
    ("{n} paid for {v} and forgot {w}.", (("What did {n} pay for?", "{n} paid for {v}.", "v"), ("What did {n} forget?", "{n} forgot {w}.", "w")), "food", "food"),
)  # fmt: skip
MORE_OR_LESS = (("older", "younger"), ("faster", "slower"), ("stronger", "weaker"), ("heavier", "lighter"), ("bigger", "smaller"), ("louder", "quieter"), ("richer", "poorer"), ("happier", "sadder"))  # fmt: skip
OWNING = (("carries", "carry"), ("sells", "sell"), ("owns", "own"), ("repairs", "repair"), ("wears", "wear"), ("uses", "use"), ("paints", "paint"), ("steers", "steer"), ("lends", "lend"))  # fmt: skip
FRAMES = ("{t} {q}", "{t} {q}", "{t}\n{q}", "{q} {t}", "Text: {t} Question: {q}", "{t}\n\n{q}", "I heard this: {t} {q}", "Note: {t} {q}")  # fmt: skip


# What a user has, and what it has; for training.
OWNED = (
    "horse|parrot|brother|aunt|school|office|garden|boat|bike|house|phone|laptop|bank|doctor|teacher|team|band|shop|dentist|landlord|street|village|"
    "company|hotel|library|gym|guitar|camera|watch|tent|recipe|book|project|server|printer|car key|roommate|hamster|goldfish|rabbit|grandson"
).split("|")
FEATURES = {
    "name": "name", "colour": "colour", "number": "number", "age": "number", "code": "name", "password": "name", "price": "number", "nickname": "name",
    "address": "name", "phone number": "digits", "size": "number", "owner": "name", "birthday": "day", "favourite food": "food", "brand": "name",
}  # fmt: skip
ATTRIBUTE_TOLD = (
    "[|Note that |Remember that |By the way, |You should know that |I think ]the {f} of my {t} is {v}.", "[|Note: |Well, ]my {t}'s {f} is {v}.", "My {t} has the {f} {v}.",
    "[As for|About] my {t}[:|,] its {f} is {v}.", "{v} is [the {f} of my {t}|my {t}'s {f}].", "I have a {t}, [the {f} is|its {f} is] {v}.",
)  # fmt: skip
ATTRIBUTE_ASKED = (
    "[What is|What was|What's|Which is] [the {f} of my {t}|my {t}'s {f}][| again]?", "[Do you know|Do you remember|Can you tell me|Could you say|Tell me|Say|Remind me of|Name] [the {f} of my {t}|my {t}'s {f}].",
    "[Which|What] {f} [does my {t} have|has my {t}|did I say for my {t}|did I give my {t}]?", "[The {f} of my {t}|My {t}'s {f}][?|, please|: what was it?]", "My {t}: [which|what] {f}?",
)  # fmt: skip
EVENTS = (
    "wedding|exam|concert|interview|course|dinner|match|lesson|appointment|funeral|flight|picnic|workshop|rehearsal|lecture|training|ceremony|auction|race|"
    "conference|reunion|opening|market|festival|class|breakfast|presentation|celebration|trip|show"
).split("|")
EVENT_TOLD = (
    "[|By the way, |Remember: |Note that |You know, ][the|my|our] {e} is {v}.", "[The|My|Our] {e} [takes place|will be|happens|begins|was moved, it is now] {v}.", "We [have|hold|planned] [the|our|a] {e} {v}.",
    "{v} [is|will be] [the|my|our] {e}.", "I [go|have to go|am invited] to [the|a] {e} {v}.", "There [is|will be] a {e} {v}.",
)  # fmt: skip
WHEN_ASKED = (
    "When [is|was|will be|does] [the|my|our] {e}[| again| take place| begin]?", "[On which day|What day|What time|At what time|Which day] is [the|my|our] {e}?", "[Tell me|Say|Do you know|Do you remember|Remind me] when [the|my|our] {e} is.",
    "When do [I|we] [have|go to] [the|our] {e}?", "[The|My] {e}: when[| is it]?",
)  # fmt: skip
WHERE_ASKED = (
    "Where [is|was|will be|does] [the|my|our] {e}[| again| take place]?", "[In which place|At what place|In which room|Which place] is [the|my|our] {e}?", "[Tell me|Say|Do you know|Do you remember|Remind me] where [the|my|our] {e} is.",
    "Where do [I|we] [have|go for|meet for] [the|our] {e}?", "[The|My] {e}: where[| is it]?",
)  # fmt: skip


@dataclass(frozen=True)
class Told:
    """Something that the user tells: the turn that says it, and one that asks for it later."""

    say: Callable[[], Turn]
    ask: Callable[[], Turn]


class Remarks(Everyday):
    """Turns from the tables above."""

    def noted(self, text: str, value: str, **facts: object) -> Turn:
        reply = (think("The user tells me something."), final("I will remember that."))
        facts = {"key": "", "value": value, **facts}
        return Turn("tell", (user(text),), reply, facts=facts, names=self.own((value,)))

    def own(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those that were drawn from the open vocabulary."""
        return tuple(name for name in names if self.drawn(name))

    def asked(self, question: str, answer: str, value: str) -> Turn:
        template, text = self.fill(question)
        return Turn(
            "memory", (user(text),), (think(f"The user told me: {value}."), final(answer)), template, {"value": value},
            self.own((value,)), Grade(phrases=((value,),)), bare=value,
        )  # fmt: skip

    def relative(self) -> Told:
        """One or two relatives and what they do; asked for one of them, or for one that was not named."""
        rng = self.rng
        chosen = rng.sample(RELATIONS, 3)
        rows = [rng.choice(DEEDS) for _ in "ab"]
        if rng.random() < 0.4:
            rows[1] = rows[0]
        values = [self.deed_value(row[3]) for row in rows]
        while values[1] == values[0]:
            values[1] = self.deed_value(rows[1][3])
        parts = [f"my {r} {row[0].format(v=v)}" for r, row, v in zip(chosen, rows, values, strict=False)]
        both = rng.random() < 0.5
        text = f"{parts[0]}{rng.choice((' and ', ', '))}{parts[1]}." if both else f"{parts[0]}."
        at = rng.randrange(2) if both else 0
        question = self.pick(rows[at][1])
        if rng.random() < 0.12:
            missing = question.format(r=chosen[2])
            reply = ("The user has not told me that.", "You have not told me that.")
            ask = lambda: self.turn(  # noqa: E731
                "not told", missing, self.fill(missing)[1], *reply, Grade(phrases=(("have not told",),)), bare="unknown"
            )
        else:
            answer = rows[at][2].format(r=chosen[at], v=values[at])
            ask = lambda: self.asked(question.format(r=chosen[at]), answer, values[at])  # noqa: E731
        said = self.around(text[0].upper() + text[1:])
        return Told(lambda: self.noted(said, values[at]), ask)

    def deed_value(self, kind: str) -> str:
        return words.a(self.value(kind)) if kind == "goods" else self.value(kind)

    def stored(self) -> Told:
        """Where something was put."""
        rng = self.rng
        item = rng.choice([i for i in words.ITEMS if i not in ("key", "shoe")])
        place = rng.choice(
            (
                f"in the {rng.choice(words.ROOMS)}", f"under the {rng.choice(words.THINGS)}", f"behind the {rng.choice(words.THINGS)}",
                f"on floor {rng.randint(1, 40)}", f"on shelf {rng.randint(1, 99)}", f"in box {rng.randint(1, 99)}",
                f"in room {self.name()}", f"at {self.name()}", f"near {self.name()}",
            )
        )  # fmt: skip
        past, deed = rng.choice(PUT)
        mine = rng.choice(("the", "the", "my"))
        said = self.around(f"I {past} {mine} {item} {place}.")
        question = self.pick(PUT_ASKED).format(i=item, d=deed, p=past).replace(f"the {item}", f"{mine} {item}")
        its = "Your" if mine == "my" else "The"
        return Told(lambda: self.noted(said, place), lambda: self.asked(question, f"{its} {item} is {place}.", place))

    def favourite(self) -> Told:
        key = self.rng.choice(list(FAVOURITES))
        pool = FAVOURITES[key]
        value = self.name() if pool is None or self.rng.random() < 0.5 else self.rng.choice(pool)
        said = self.around(self.pick(FAVOURITE_TOLD).format(k=key, v=value))
        question = self.pick(FAVOURITE_ASKED).format(k=key)
        return Told(
            lambda: self.noted(said, value),
            lambda: self.asked(question, f"Your favourite {key} is {value}.", value),
        )

    def new_topic(self, draw: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """What the user has not told anything about in this conversation."""
        while (topic := draw()) in self.topics:
            pass
        self.topics.add(topic)
        return topic

    def attribute(self) -> Told:
        """A feature of something that the user has, for training."""
        rng = self.rng
        thing, feature = self.new_topic(lambda: (rng.choice(OWNED), rng.choice(list(FEATURES))))
        value = self.value(FEATURES[feature])
        said = self.around(expand(rng, rng.choice(ATTRIBUTE_TOLD)).format(t=thing, f=feature, v=value))
        question = expand(rng, rng.choice(ATTRIBUTE_ASKED)).format(t=thing, f=feature)
        answer = f"The {feature} of your {thing} is {value}."
        return Told(lambda: self.noted(said, value), lambda: self.asked(question, answer, value))

    def event(self) -> Told:
        """Where or when something takes place, for training."""
        rng = self.rng
        (name,) = self.new_topic(lambda: (rng.choice(EVENTS),))
        when = rng.random() < 0.5
        value = (
            rng.choice((f"on {rng.choice(words.DAYS)}", f"at {rng.randint(0, 23)}:{rng.randint(10, 59)}", f"in {rng.choice(words.MONTHS)}"))
            if when
            else rng.choice((f"in {self.name()}", f"at {self.name()}", f"in room {self.name()}", f"in the {rng.choice(words.ROOMS)}"))
        )  # fmt: skip
        said = self.around(expand(rng, rng.choice(EVENT_TOLD)).format(e=name, v=value))
        question = expand(rng, rng.choice(WHEN_ASKED if when else WHERE_ASKED)).format(e=name)
        answer = f"The {name} is {value}."
        return Told(lambda: self.noted(said, value), lambda: self.asked(question, answer, value))

    def list_told(self) -> Turn:
        """A list without a question; `list_asked` refers to it."""
        values = self.things()
        listed = self.listed(values)
        return self.noted(self.pick(LIST_TOLD).format(l=listed), listed, values=values)

    def list_asked(self, values: list[str]) -> Turn:
        rng = self.rng
        kind = rng.random()
        at = rng.randrange(len(values))
        if kind < 0.2:
            question, answer, grade = LIST_COUNT, f"There are {len(values)}.", Grade(number=len(values))
            thought, bare = f"I count: {', '.join(f'{i} {v}' for i, v in enumerate(values, 1))}.", str(len(values))
        elif kind < 0.35:
            bare = ", ".join(reversed(values))
            question, answer, thought = LIST_BACK, f"{bare}.", f"The last is {values[-1]}."
            grade = Grade(order=tuple(reversed(values)))
        else:
            at = len(values) - 1 if kind < 0.5 else at
            question = LIST_LAST if kind < 0.5 else LIST_NTH
            counted = ", ".join(f"{i} {v}" for i, v in enumerate(values[: at + 1], 1))
            thought, bare, grade = f"I count: {counted}.", values[at], Grade(phrases=((values[at],),))
            answer = f"The {'last' if kind < 0.5 else words.ORDINALS[at]} is {values[at]}."
        asked = {
            LIST_COUNT: "count of them",
            LIST_BACK: "them back",
            LIST_LAST: "last of them",
            LIST_NTH: "nth of them",
        }
        template, text = self.fill(self.pick(question, asked[question]), o=words.ORDINALS[at])
        facts = {"values": values}
        return Turn("of them", (user(text),), (think(thought), final(answer)), template, facts, grade=grade, bare=bare)

    # ---- reading ------------------------------------------------------------------------------

    def detail(self) -> Turn:
        """One detail of a text: half of a sentence, the colour of a thing, who has it, who is more or less."""
        make = self.rng.choice((self._half, self._half, self._coloured, self._coloured, self._compared))
        text, question, thought, answer, wanted, others = make()
        wrap = self.pick(FRAMES)
        asked = self.around(wrap.format(t=text, q=question))
        return Turn(
            "detail", (user(asked),), (think(thought), final(answer)), wrap, {"text": text}, self.own((wanted,)),
            Grade(phrases=((wanted,),), avoid=tuple(o for o in others if o.lower() not in answer.lower())), bare=wanted,
        )  # fmt: skip

    def _half(self) -> tuple[str, str, str, str, str, tuple[str, ...]]:
        rng = self.rng
        sentence, asks, first, second = rng.choice(PAIRS)
        n, v, w = self.person(), self.detail_value(first), self.detail_value(second)
        while w == v:
            w = self.detail_value(second)
        said = sentence.format(n=n, v=v, w=w)
        question, answer, which = (part.format(n=n, v=v, w=w) for part in rng.choice(asks))
        text = said
        if rng.random() < 0.4:
            other = rng.choice([row for row in PAIRS if row[0] != sentence])
            more = other[0].format(n=self.person(), v=self.detail_value(other[2]), w=self.detail_value(other[3]))
            text = f"{said} {more}" if rng.random() < 0.5 else f"{more} {said}"
        wanted = {"n": n, "v": v, "w": w}[which]
        return text, question, f"The text says: {said}", answer, wanted, ()

    def detail_value(self, kind: str) -> str:
        rng = self.rng
        if kind == "hour":
            return str(rng.randint(1, 24))
        if kind == "clock":
            return f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"
        return self.value(kind)

    def _coloured(self) -> tuple[str, str, str, str, str, tuple[str, ...]]:
        rng = self.rng
        count = rng.randint(1, 3)
        people, colours = self.people(count), rng.sample(words.COLORS, count)
        things = rng.sample((*words.ITEMS, *words.VEHICLES), count)
        verb, _ = rng.choice(OWNING)
        possessive = rng.random() < 0.35
        if possessive:
            things = [things[0]] * count
            sentences = [f"{n}'s {i} is {c}" for n, i, c in zip(people, things, colours, strict=True)]
        else:
            sentences = [f"{n} {verb} {words.a(c)} {i}" for n, i, c in zip(people, things, colours, strict=True)]
        joiner = rng.choice((". ", ". ", ", ", " and "))
        text = joiner.join(sentences) + "."
        at = rng.randrange(count)
        n, i, c, said = people[at], things[at], colours[at], f"{sentences[at]}."
        if possessive:
            kind = rng.randrange(3)
            question = (f"Whose {i} is {c}?", f"What colour is {n}'s {i}?", f"Who has the {c} {i}?")[kind]
            if kind == 1:
                return text, question, f"Asked: the colour of {n}'s {i}. The text says: {said}", said, c, ()
            before = " ".join(f"{s}." for s in sentences[: at + 1])
            return text, question, f"Asked: who, {c} {i}. I read: {before} It is {n}.", said, n, ()
        kind = rng.randrange(5)
        question, answer, wanted = (
            (f"What colour is the {i}?", f"The {i} is {c}.", c),
            (f"Who {verb} the {i}?", said, n),
            (f"Which color does the {i} have?", f"The {i} is {c}.", c),
            (f"Who {verb} something {c}?", said, n),
            (f"What colour is the {i} of {n}?", f"The {i} is {c}.", c),
        )[kind]
        before = " ".join(f"{s}." for s in sentences[: at + 1])
        sought = (
            f"the colour of the {i}",
            f"who {verb} the {i}",
            f"the colour of the {i}",
            f"who, {c}",
            f"the colour of the {i}",
        )
        return text, question, f"Asked: {sought[kind]}. I read: {before} It is {wanted}.", answer, wanted, ()

    def _compared(self) -> tuple[str, str, str, str, str, tuple[str, ...]]:
        rng = self.rng
        a, b = self.people(2)
        more, less = rng.choice(MORE_OR_LESS)
        if rng.random() < 0.5:
            more, less = less, more
        text = f"{a} is {more} than {b}."
        who, word = rng.choice(((a, more), (b, less)))
        question = rng.choice(("Who is {w}?", "Which of them is {w}?", "Who of the two is {w}?")).format(w=word)
        other = b if who == a else a
        thought = f"Asked: {word}. {more}: {a}, {less}: {b}. {word}: {who}."
        return text, question, thought, f"{who} is {word}.", who, (other,)
