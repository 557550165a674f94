"""Texts about people's lives and a question about one of them, for training alone: two to four people with two to four
facts each, in sentences that join facts or go on with "she"; asked by first or full name, for the value or the person."""

# ruff: noqa: E501  (a table of sentences reads best with one per line)
from __future__ import annotations

from remarks import Remarks
from turns import Turn
from wordings import expand

from halfbyte.evals import words
from halfbyte.evals.grading import Grade
from halfbyte.evals.problem import final, think, user

# (what is said of a person, rules that ask for the value, rules that ask for the person, what the value is)
LIFE: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str], ...] = (
    ("lives in {v}", ("Where [does {n} live|is {n}'s home|has {n} a home][| now]?", "[What|Which] [town|city|place] does {n} live in?", "[Tell me|Say|I want to know] where {n} lives."), ("Who lives in {v}?", "[Which person|Who of them] [lives|has a home] in {v}?"), "name"),
    ("was born in {v}", ("Where was {n} born?", "[In which|What] [town|city|place] was {n} born[| in]?", "[What is|Tell me] {n}'s place of birth[?|.]"), ("Who was born in {v}?", "[Which person|Who of them] was born in {v}?"), "name"),
    ("works as {v}", ("What does {n} [do for a living|work as|do for work]?", "[What|Which] [is {n}'s job|job does {n} have|work does {n} do]?", "[Tell me|Say|Name] the job of {n}."), ("Who works as {v}?", "Who is {v}?", "[Which person|Who of them] is {v}?"), "job"),
    ("works for {v}", ("[Who|Which company|Which firm|Whom] does {n} work for?", "Where does {n} work?", "Who [pays|employs] {n}?"), ("Who works for {v}?", "[Which person|Who of them] works for {v}?"), "name"),
    ("is {v} years old", ("How old is {n}[| now]?", "[What|Tell me what] [is {n}'s age|is the age of {n}][?|.]", "How many years [old is {n}|has {n} lived]?"), ("Who is {v}[| years old]?", "[Which person|Who of them] is {v} years old?"), "number"),
    ("drives {v}", ("What does {n} drive?", "Which [car|thing|vehicle] does {n} drive?", "[Tell me|Say] what {n} drives."), ("Who drives {v}?", "[Which person|Who of them] drives {v}?"), "a goods"),
    ("bought {v}", ("What did {n} buy?", "What has {n} bought?", "[Tell me|Say] what {n} bought."), ("Who bought {v}?", "[Which person|Who of them] bought {v}?"), "a goods"),
    ("plays {v}", ("[What|Which game|Which sport] does {n} play?", "What is {n}'s [sport|game]?"), ("Who plays {v}?", "[Which person|Who of them] plays {v}?"), "sport"),
    ("speaks {v}", ("[What|Which] language does {n} speak?", "What does {n} speak?"), ("Who speaks {v}?", "[Which person|Who of them] speaks {v}?"), "language"),
    ("likes {v}", ("What does {n} like[| to eat]?", "[What|Which food] is {n} fond of?", "[Tell me|Say] what {n} likes."), ("Who likes {v}?", "[Which person|Who of them] likes {v}?"), "food"),
    ("hates {v}", ("What does {n} [hate|not like]?", "[Tell me|Say] what {n} hates."), ("Who [hates|does not like] {v}?",), "food"),
    ("is married to {v}", ("[Who|Whom] is {n} married to?", "Who is the [husband or wife|partner] of {n}?"), ("Who is married to {v}?",), "name"),
    ("has a dog called {v}", ("[What|How] is {n}'s dog called?", "What is the [name of {n}'s dog|dog of {n} called]?"), ("Whose dog is [called |]{v}?", "Who has a dog called {v}?"), "name"),
    ("has a daughter called {v}", ("[What|How] is {n}'s daughter called?", "What is the name of {n}'s [daughter|child]?", "Who is {n}'s daughter?"), ("Whose daughter is {v}?", "Who has a daughter called {v}?"), "name"),
    ("studied in {v}", ("Where did {n} study?", "[In which|What] [town|city|place] did {n} study[| in]?"), ("Who studied in {v}?",), "name"),
    ("moved to {v}", ("Where did {n} move[| to]?", "[What|Which] [town|city|place] did {n} move to?"), ("Who moved to {v}?",), "name"),
    ("gets up at {v}", ("When does {n} get up?", "[At what|What] time does {n} get up?"), ("Who gets up at {v}?",), "clock"),
    ("comes home at {v}", ("When does {n} come home?", "[At what|What] time does {n} come home?"), ("Who comes home at {v}?",), "clock"),
    ("has time on {v}", ("When does {n} have time?", "[On which|What] day does {n} have time?"), ("Who has time on {v}?",), "day"),
    ("was born on {v}", ("[When|On what day] was {n} born?", "When is {n}'s birthday?"), ("Who was born on {v}?",), "day"),
    ("sits in room {v}", ("Where does {n} sit?", "[Which|What] room [is {n} in|does {n} sit in|is {n}'s]?"), ("Who sits in room {v}?", "Who is in room {v}?"), "name"),
    ("earns {v} coins", ("How much does {n} earn?", "How many coins does {n} earn?", "What does {n} earn?"), ("Who earns {v} coins?",), "number"),
    ("pays {v} coins of rent", ("How much rent does {n} pay?", "What is {n}'s rent?", "[How high|What] is the rent of {n}?"), ("Who pays {v} coins[| of rent]?",), "number"),
    ("owns {v} books", ("How many books does {n} [own|have]?",), ("Who owns {v} books?", "Who has {v} books?"), "number"),
    ("has the phone number {v}", ("What is [{n}'s phone number|the phone number of {n}|{n}'s number]?", "[Which|What] phone number does {n} have?", "How can I call {n}?"), ("Whose phone number is {v}?",), "digits"),
    ("has the code {v}", ("What is [{n}'s code|the code of {n}]?", "Which code does {n} have?"), ("Whose code is {v}?", "Who has the code {v}?"), "name"),
    ("goes to work by {v}", ("How does {n} go to work?", "[What|Which way] does {n} take to work?"), ("Who goes to work by {v}?",), "ride"),
    ("paints in {v}", ("[What|Which] colour does {n} paint in?",), ("Who paints in {v}?",), "colour"),
    ("collects {v}", ("What does {n} collect?",), ("Who collects {v}?",), "item"),
    ("is afraid of the {v}", ("What is {n} afraid of?", "What does {n} fear?"), ("Who is afraid of the {v}?",), "thing"),
)  # fmt: skip
FILLERS = (
    "The weather is fine.", "It is a long story.", "They have known each other for years.", "Nobody was surprised.",
    "That is how it was.", "Everybody likes them.", "Some of it is in the paper.", "More will follow.",
    "There is a letter about it.", "The house has a green door.",
)  # fmt: skip
ABSENT = "The text does not say that."
# Beginnings of facts that answer each other's questions, more or less: none is asked as missing beside another.
RELATED = (
    ("lives", "moved", "studied", "was born in"), ("works", "goes to work"), ("likes", "hates", "is afraid"), ("drives", "bought", "collects", "owns"),
    ("is married", "has a daughter"), ("was born on", "has time", "is {v} years"), ("earns", "pays"), ("has the phone", "has the code"),
    ("gets up", "comes home"), ("was born in", "was born on"), ("sits", "lives", "works"),
)  # fmt: skip


def related(one: str, other: str) -> bool:
    return one == other or any(one.startswith(group) and other.startswith(group) for group in RELATED)


class Lives(Remarks):
    def life_value(self, kind: str) -> str:
        if kind == "clock":
            return self.detail_value(kind)
        if kind == "language":
            return self.rng.choice(words.LANGUAGES)
        if kind == "item":
            return f"{self.rng.choice(words.ITEMS[:18])}s"
        return words.a(self.value("goods")) if kind == "a goods" else self.value(kind)

    def life(self) -> Turn:
        rng = self.rng
        firsts = self._first_names(rng.randint(1, 3))
        names = [f"{n} {self.lookalike().capitalize()}" if rng.random() < 0.25 else n for n in firsts]
        used: set[str] = set()
        facts: list[tuple[int, int, str]] = []  # (person, row of LIFE, value)
        sentences: list[tuple[int, str]] = []  # (person or -1, sentence)
        saying: list[int] = []  # of each fact, the number of its sentence
        shared = rng.sample(range(len(LIFE)), 3) if rng.random() < 0.5 else []  # the same facts of everybody
        for person, name in enumerate(names):
            rows = rng.sample(shared, rng.randint(1, 3)) if shared else rng.sample(range(len(LIFE)), rng.randint(1, 4))
            said = []
            for row in rows:
                value = self.life_value(LIFE[row][3])
                while value in used:
                    value = self.life_value(LIFE[row][3])
                used.add(value)
                facts.append((person, row, value))
                said.append(LIFE[row][0].format(v=value))
            saying += self._told(person, name, said, sentences)
            if rng.random() < 0.15:
                sentences.append((-1, rng.choice(FILLERS)))
        text = " ".join(sentence for _, sentence in sentences)
        at = rng.randrange(len(facts))
        person, row, value = facts[at]
        predicate, for_value, for_person, _ = LIFE[row]
        called = rng.choice((names[person], firsts[person]))
        own = [s for p, s in sentences if p == person]
        read = [s for _, s in sentences[: saying[at] + 1]]  # up to the fact
        told = [s for p, s in sentences[: saying[at] + 1] if p == person]
        answer, bare, grade = f"{called} {predicate.format(v=value)}.", value, Grade(phrases=((value,),))
        kind = rng.random()
        if kind < 0.12:
            there = [LIFE[f[1]][0] for f in facts if f[0] == person]
            missing = [r for r in range(len(LIFE)) if not any(related(LIFE[r][0], fact) for fact in there)]
            other = LIFE[rng.choice(missing)]
            question = expand(rng, rng.choice(other[1])).format(n=called)
            asked = other[0].partition("{v}")[0].strip()
            thought = f"Asked: {called} {asked}. The text says: {' '.join(own)} It does not say that."
            answer, bare = ABSENT, "unknown"
            grade = Grade(phrases=(("does not say",),))
        elif kind < 0.4:
            question = expand(rng, rng.choice(for_person)).format(v=value)
            answer, bare = f"{names[person]} {predicate.format(v=value)}.", names[person]
            thought = f"Asked: who {predicate.format(v=value)}. I read: {' '.join(read)} It is {bare}."
            grade = Grade(phrases=((bare,),))
        else:
            question = expand(rng, rng.choice(for_value)).format(n=called)
            asked = predicate.partition("{v}")[0].strip()
            thought = f"Asked: {called} {asked}. The text says: {' '.join(told)}"
        wrap = rng.choice(_WRAPS)
        said = self.around(wrap.format(t=text, q=question))
        return Turn(
            "life",
            (user(said),), (think(thought), final(answer)), wrap, {"text": text},
            self.own(tuple(n for n in firsts if n not in words.NAMES)), grade, bare=bare,
        )  # fmt: skip

    def _first_names(self, count: int) -> list[str]:
        """Mostly what looks like a name."""
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            kind = self.rng.random()
            real = self.rng.choice(words.NAMES) if kind < 0.5 else self.lookalike().capitalize()
            drawn[real if kind < 0.8 else self.name()] = None
        return list(drawn)

    def _told(self, person: int, name: str, said: list[str], sentences: list[tuple[int, str]]) -> list[int]:
        """Add the sentences about a person; of each fact, the number of its sentence."""
        rng, where = self.rng, []
        pronoun = rng.choice(("He", "She"))
        while said:
            subject = name if not where or rng.random() < 0.3 else pronoun
            where.append(len(sentences))
            first, *said = said
            if said and rng.random() < 0.4:
                second, *said = said
                where.append(len(sentences))
                joined = f"{subject} {first} and {second}."
                if subject == name and rng.random() < 0.3:
                    joined = f"{subject}, who {first}, {second}."
                sentences.append((person, joined))
            else:
                sentences.append((person, f"{subject} {first}."))
        return where


_WRAPS = (
    "{t} {q}", "{t} {q}", "{t}\n{q}", "{t}\n\n{q}", "{q} {t}", "{q}\n\n{t}", "Text: {t} Question: {q}", "Read this: {t} {q}",
    "Here is what I know: {t} {q}", "{t} Now: {q}", "I read this: {t} {q}", "About some people: {t} {q}", "{t} So, {q}",
    "From a letter: {t} {q}", "Use this text. {t} {q}", "Here is a story. {t} {q}",
)  # fmt: skip
