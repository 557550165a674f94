"""Answers in a form: notes in prose whose values fill a schema, and questions whose answer alone is wanted.

`PARTS` has more ways in which a note says what a form asks for, as a grammar (`wordings.py`), for training alone; its
keys are those of `FIELDS`. A yes or no has two halves, parted by ` / `.
"""

# ruff: noqa: E501  (a table of sentences reads best with one per line)
from __future__ import annotations

import json
from typing import Any

from errands import DOING, Errands
from turns import COMMON, Turn
from wordings import drawn_from

from halfbyte.evals import words
from halfbyte.evals.problem import final, think, user

# key: (names in a schema, JSON type, how the text says it)
FIELDS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "name": (("name", "person", "customer", "who", "guest"), "string", ("name {v}", "my name is {v}", "{v} is the name", "the guest is {v}")),
    "age": (("age", "years", "age_in_years"), "integer", ("{v} years old", "aged {v}", "age {v}", "of {v} years")),
    "city": (("city", "town", "place", "home"), "string", ("from {v}", "living in {v}", "lives in {v}", "home in {v}")),
    "price": (("price", "cost", "euros", "amount"), "integer", ("costs {v} euros", "for {v} euros", "price {v} euros", "{v} euros")),
    "colour": (("colour", "color", "paint"), "string", ("in {v}", "comes in {v}", "colour {v}", "painted {v}")),
    "day": (("day", "date", "weekday", "delivery"), "string", ("on {v}", "due on {v}", "day {v}", "until {v}")),
    "gate": (("gate", "door", "exit"), "string", ("gate {v}", "from gate {v}", "at gate {v}", "leaves at gate {v}")),
    "room": (("room", "hall", "office"), "string", ("room {v}", "in room {v}", "meets in room {v}", "goes to room {v}")),
    "code": (("code", "id", "reference", "number"), "string", ("code {v}", "with the code {v}", "id {v}", "reference {v}")),
    "count": (("count", "pieces", "quantity"), "integer", ("{v} pieces", "count {v}", "{v} times", "quantity {v}")),
    "items": (("items", "things", "products", "list"), "array", ("wants {v}", "to buy: {v}", "list: {v}", "needs {v}")),
    "paid": (("paid", "is_paid", "payment_done"), "boolean", ("already paid|not paid", "paid|not paid yet", "payment is done|payment is open", "has paid|has not paid")),
    "mood": (("mood", "feeling", "sentiment"), "enum:happy,angry,sad,calm,tired,bored,worried,proud,pleased", ("is {v}", "feels {v}", "seems {v}", "sounds {v}")),
    "status": (("status", "state", "stage"), "enum:open,closed,waiting,lost,late,new,broken,ready", ("status {v}", "it is {v}", "marked as {v}", "now {v}")),
    "time": (("time", "at", "hour"), "string", ("at {v}", "time {v}", "begins at {v}", "leaves at {v}")),
    "line": (("line", "bus", "train"), "string", ("line {v}", "bus {v}", "train {v}", "with line {v}")),
    "author": (("author", "writer", "by"), "string", ("by {v}", "written by {v}", "author {v}", "from the pen of {v}")),
    "title": (("title", "book", "film"), "string", ("title {v}", "the book {v}", "called {v}", "the film {v}")),
    "email": (("email", "mail", "address"), "string", ("mail {v}", "email {v}", "write to {v}", "reach me under {v}")),
    "weight": (("weight", "kilos", "kg"), "integer", ("{v} kg", "weighs {v} kg", "weight {v} kg", "heavy {v} kg")),
    "company": (("company", "employer", "firm"), "string", ("works at {v}", "of the company {v}", "from the firm {v}", "with {v}")),
    "goal": (("goal", "task", "wish"), "string", ("wants to {v}", "has to {v}", "would like to {v}", "is here to {v}")),
    "size": (("size", "fit"), "enum:small,medium,large,tiny,huge", ("size {v}", "a {v} one", "in {v}", "takes a {v}")),
    "phone": (("phone", "telephone", "phone_number"), "string", ("phone {v}", "call {v}", "reach me at {v}", "telephone {v}")),
    "pet": (("pet", "animal"), "object", ("with a {k} named {n}", "has a {k} called {n}", "and the {k} {n}", "brings the {k} {n}")),
}  # fmt: skip
PARTS: dict[str, tuple[str, ...]] = {
    "name": ("[|the ][customer|person|visitor|buyer|caller|client][| is|:| is called| named] {v}", "[this is|I am|here is|it is] {v}", "[booked|asked|ordered|signed] by {v}", "[Mr|Mrs|Ms|Dr] {v}", "for {v}", "{v} [calls|writes|asks|comes|wants this]", "name: {v}", "{v}"),
    "age": ("{v} years[| of age| of life]", "[is|just turned|now|about] {v}[| years old]", "age: {v}", "[a|one] {v}-year-old", "born {v} years ago", "[at the age of|at age] {v}", "{v}"),
    "city": ("[in|near|at home in|a citizen of|comes from|based in|resides in] {v}", "[city|town|home|place]:[| is] {v}", "[moved to|staying in|now in] {v}"),
    "price": ("[costs|at|worth|price is|priced at|it is|sells for] {v} [euros|euro|EUR]", "[pays|paid|offers|asks] {v} euros", "[price|cost]: {v}[| euros]", "[a price of|a cost of] {v} euros"),
    "colour": ("[is|it is|all|mostly|a bright|a dark] {v}", "[colour|color]: {v}", "[painted in|coloured|dyed|wants it in|of] {v}", "the {v} [one|kind|model]"),
    "day": ("[by|before|from|this|next|every|starts on|ready on|comes on] {v}", "[day|date|delivery]: {v}", "[on|for] {v}[| at the latest]", "{v} [is the day|would be good|works]"),
    "gate": ("[at|to|through|via|by|near] gate {v}", "gate[:| is| number] {v}", "[boards|boarding|departs] at gate {v}", "door {v}"),
    "room": ("[is|sits|sleeps|waits|takes place] in [room|hall|office] {v}", "[room|hall|office][:| is| number] {v}", "[moves to|booked|reserved] room {v}"),
    "code": ("[the code is|code:|reference:|ref|id:|number|ticket] {v}", "[under|quoting|see|booking] [code|reference|number] {v}", "the [id|reference|code] {v}"),
    "count": ("[takes|orders|needs|wants|sends|has] {v} [pieces|of them|units]", "[a total of|altogether|about] {v}[| pieces]", "[amount|count|quantity|number]: {v}", "{v} [of them|units|items|boxes]"),
    "items": ("[buys|brings|orders|takes|has|asks for|is out of|bought|packs] {v}", "[items|list|things|products|shopping|order]: {v}", "[please buy|please bring|do not forget|on the list:] {v}"),
    "paid": ("[was paid|fully paid|paid in cash|money has arrived|bill is settled|has been paid] / [was not paid|unpaid|still to pay|money has not arrived|bill is not settled|has not been paid]", "[paid: yes|paid: true] / [paid: no|paid: false]", "[already payed|payment complete] / [nothing paid|payment missing]"),
    "mood": ("[looks|was|very|a bit|rather|quite|seems to be|is feeling] {v}", "[mood|feeling]: {v}", "[in a|with a] {v} mood", "the {v} [one|person|customer]", "makes people {v}"),
    "status": ("[is|was|still|already|currently|marked] {v}", "[status|state|stage]: {v}", "[set to|counts as|the order is|we call it] {v}"),
    "time": ("[from|starts at|opens at|departs at|arrives at|comes at|around|exactly at] {v}", "[time|hour]: {v}", "{v} [o'clock|sharp|in the morning|in the evening]"),
    "line": ("[takes|by|on|uses|comes by|rides] [line|bus|train] {v}", "[line|bus|train]: {v}", "[the|our] [bus|line|train] {v}"),
    "author": ("[from|a work by|made by|the writer is|the author is|penned by|composed by] {v}", "[author|writer]: {v}", "{v} [wrote it|is the author|is the writer]"),
    "title": ("[titled|named|under the title|the title is|reads|watches] {v}", "[title|book|film]: {v}", "[a|the|one] [book|film|work] [called|named] {v}"),
    "email": ("[email|mail|address|contact]: {v}", "[send it to|answers at|contact|reply to|mail me at|my address is] {v}", "{v} [is my address|is the mail]"),
    "weight": ("[weighs|has|is|about|at|carries] {v} [kg|kilos]", "weight: {v}[| kg]", "a weight of {v} [kg|kilos]", "{v} kilos"),
    "company": ("[employed at|works for|joined|sent by|comes from|hired by] {v}", "[company|employer|firm]: {v}", "[for the company|at the firm|of the firm|on behalf of] {v}", "{v} [is the employer|employs me]"),
    "goal": ("[plans to|hopes to|needs to|must|tries to|came to|was told to|goes there to] {v}", "[goal|task|wish]: {v}", "[the goal is to|the plan is to|it is about how to] {v}"),
    "size": ("[wears|needs|orders|wants|comes in] [|size |a ]{v}", "size: {v}", "the {v} [size|one|box]", "{v} [fits|is right]"),
    "phone": ("[phone|telephone|mobile|number]: {v}", "[ring|dial|text me on|phone number|under the number|the number is] {v}", "{v} [is my number|is the phone]"),
    "pet": ("[owns|keeps|and|has|together with] a {k} [called|named|by the name of] {n}", "[the|my|our|her|his] {k} [|is called |is named ]{n}", "pet: {k} {n}", "{n}, a {k}"),
}  # fmt: skip


# How a note says a field that is named by words drawn anew: w is what the field is called, v its value.
CALLED = (
    "{w} {v}", "{w}: {v}", "the {w} is {v}", "with the {w} {v}", "{w} = {v}", "{v} is the {w}", "its {w} is {v}",
    "as {w} take {v}", "the {w} was {v}", "for the {w} we have {v}", "{w}, which is {v}", "{v} as {w}", "a {w} of {v}",
    "{w} equals {v}", "put {v} as the {w}", "has {v} as its {w}", "the {w} should be {v}", "{w} will be {v}",
)  # fmt: skip
OPPOSITES = (
    "known,unknown",
    "safe,unsafe",
    "locked,unlocked",
    "used,unused",
    "fair,unfair",
    "read,unread",
    "even,uneven",
    "legal,illegal",
    "complete,incomplete",
    "visible,invisible",
    "yes,no,maybe",
    "low,medium,high",
    "new,used",
)
# A note without one of these is a list of its parts; with one, the first part is said of it.
SUBJECTS = (
    "the {c}",
    "this {c}",
    "my {c}",
    "our {c}",
    "a {c}",
    "it",
    "she",
    "he",
    "they",
    "{n}",
    "{n}'s {c}",
    "one {c}",
)
# Sentences that say nothing that a form asks for.
ASIDES = (
    "the {c} is with the {d}",
    "I saw it near the {c}",
    "please answer soon",
    "thank you very much",
    "{n} said so",
    "nobody asked about the {c}",
    "that was before the {c} came",
    "we talked about the {c} and the {d}",
    "see you",
    "the {c} can wait",
    "this is all I know",
    "sent from my {c}",
    "have a look at the {c}",
    "no {c} was there",
    "greetings from {n}",
)
# What stands in a field that a note says nothing about, by JSON type.
UNSAID: dict[str, Any] = {"string": "", "integer": 0, "boolean": False, "array": [], "object": {"kind": "", "name": ""}}


def in_prose(value: Any) -> str:
    """A value of a form in a thought."""
    if isinstance(value, dict):
        return " ".join(f"{k} {v}" for k, v in value.items())
    return (
        ", ".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)
    )


def kind_of(key: str) -> str:
    """The JSON type of a field: `enum:` and its options for one of several strings."""
    return key.split("|")[1] if "|" in key else FIELDS[key][1]


class Forms(Errands):
    """Turns whose answer is JSON for a schema."""

    def drawn_field(self) -> str:
        """A key that is not in FIELDS: the words of a name and, behind a bar, its JSON type."""
        rng = self.rng
        words_of = rng.sample(COMMON, rng.choice((1, 2, 2))) if rng.random() < 0.7 else [self.identifier()]
        options = rng.choice((",".join(self.names(rng.randint(2, 4))), *OPPOSITES))
        kind = rng.choice(("string", "string", "integer", "array", f"enum:{options}"))
        return f"{' '.join(words_of)}|{kind}"

    def form(self) -> tuple[tuple[str, str], dict[str, str], dict[str, list[str]]]:
        """((name, schema) of a response format, key of FIELDS or drawn -> name of its field, key -> what its enum offers)."""
        rng = self.rng
        keys = rng.sample(list(FIELDS), rng.randint(1, 5))
        if self.wording == "train":
            keys = [self.drawn_field() if rng.random() < 0.3 else k for k in keys]
        named: dict[str, str] = {}
        for k in keys:
            own = (k.split("|")[0].replace(" ", "_"),) if "|" in k else FIELDS[k][0]
            named[k] = rng.choice([n for n in own if n not in named.values()] or [self.identifier()])
        properties: dict[str, Any] = {}
        for k, name in named.items():
            kind = kind_of(k)
            if kind.startswith("enum"):
                every = kind.split(":")[1].split(",")
                properties[name] = {"type": "string", "enum": rng.sample(every, rng.randint(2, min(4, len(every))))}
            elif kind == "array":
                properties[name] = {"type": "array", "items": {"type": "string"}}
            elif kind == "object":
                inner = {"kind": {"type": "string"}, "name": {"type": "string"}}
                properties[name] = {"type": "object", "properties": inner, "required": ["kind", "name"]}
            else:
                properties[name] = {"type": kind}
        if rng.random() < 0.15:
            properties = {n: {**p, "description": f"the {n.replace('_', ' ')}"} for n, p in properties.items()}
        options = {k: properties[n]["enum"] for k, n in named.items() if "enum" in properties[n]}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        if rng.random() < 0.3:
            schema["additionalProperties"] = False
        title = rng.choice(("answer", "record", "form", "response", "data", self.identifier()))
        return (title, json.dumps(schema, separators=(",", ":") if rng.random() < 0.7 else None)), named, options

    def part_of_a_note(self, key: str) -> str:
        """How a note says the value of a field; for yes and no both, parted by a bar."""
        if "|" in key:
            return self.rng.choice(CALLED).replace("{w}", key.split("|")[0].replace("_", " "))
        table = FIELDS[key][2]
        if self.wording != "train" or self.rng.random() < 0.4:
            return self.pick(table)
        *halves, last = self.rng.choice(PARTS[key]).split(" / ")
        said = "|".join(drawn_from(self.rng, (half,), table[-(len(table) // 4) :]) for half in (*halves, last))
        return said[0].lower() + said[1:] if not said.startswith("{") else said

    def note(self, response_format: tuple[str, str], named: dict[str, str], options: dict[str, list[str]]) -> Turn:
        """A note in prose, with more in it than the form wants at times."""
        rng = self.rng
        extra = [k for k in FIELDS if k not in named]
        shown = [*named, *rng.sample(extra, rng.choice((0, 0, 1, 2)))]
        if self.wording == "train" and rng.random() < 0.06:  # a note that does not say everything, or nothing of it
            unsaid = rng.sample(list(named), rng.randint(1, len(named)))
            shown = [k for k in shown if k not in unsaid] or rng.sample(extra, 1)
        value: dict[str, Any] = {}
        parts: list[str] = []
        reading: list[str] = []  # of the thought, which reads along and says which field each part is
        if sentence := self.wording == "train" and rng.random() < 0.35:
            subject = self.aside(rng.choice(SUBJECTS))
        for k in rng.sample(shown, len(shown)):
            kind, said = kind_of(k), self.part_of_a_note(k)
            v: Any
            if kind == "integer":
                v = rng.randint(1, 99) if k == "age" else rng.randint(1, 999)
            elif kind == "boolean":
                v = rng.random() < 0.5
                said = said.split("|")[0 if v else 1]
            elif kind == "array":
                v = (
                    self.names(rng.randint(1, 4))
                    if rng.random() < 0.4
                    else rng.sample((*words.FOODS, *words.ITEMS), rng.randint(1, 4))
                )
                said = said.format(v=" and ".join(v) if rng.random() < 0.3 else ", ".join(v))
            elif kind == "object":
                v = {"kind": rng.choice(words.PETS), "name": self.name()}
                said = said.format(k=v["kind"], n=v["name"])
            elif kind.startswith("enum"):
                v = rng.choice(options.get(k) or kind.split(":")[1].split(","))
            else:
                v = {
                    "colour": lambda: rng.choice(words.COLORS),
                    "day": lambda: rng.choice(words.DAYS),
                    "time": lambda: self.slot_value("time"),
                    "email": lambda: self.slot_value("mail"),
                    "goal": lambda: f"{rng.choice(DOING)} the {rng.choice(COMMON)}",
                    "phone": lambda: words.digits(rng, 5, 8),
                }.get(k, self.person if k == "name" else self.name)()
            said = said.format(v=v)
            if sentence and not parts:
                said = f"{subject} {said}"
            parts.append(said)
            reading.append(f"{said}: {f'{named[k]} {in_prose(v)}' if k in named else 'no field'}.")
            value[k] = v
            if self.wording == "train" and rng.random() < 0.08:
                parts.append(self.aside(rng.choice(ASIDES)))
                reading.append(f"{parts[-1]}: no field.")
        joined = rng.choice((", ", "; ", ". ")).join(parts) + "."
        if sentence:
            between = " " if len(parts) < 4 and rng.random() < 0.4 else rng.choice((", ", ", ", " and "))
            joined = between.join(parts) + "."
            if between == ", ":
                joined = f"{between.join(parts[:-1])} and {parts[-1]}." if parts[1:] else joined
        begins = [part for v in value.values() for part in in_prose(v).split()]
        text = joined[0].upper() + joined[1:] if rng.random() < 0.5 and not joined.startswith(tuple(begins)) else joined
        template, question = self.ask("json", t=text) if rng.random() < 0.5 else ("{t}", text)
        wanted = {name: value[k] if k in value else self.unsaid(k, options) for k, name in named.items()}
        if silent := [name for k, name in named.items() if k not in value]:
            reading.append(f"Not said: {', '.join(silent)}.")
        reply = (think(f"The fields are {', '.join(named.values())}. {' '.join(reading)}"), final(json.dumps(wanted)))
        return Turn(
            "note",
            (user(question),),
            reply,
            template,
            {"value": wanted, "text": text},
            tags=(f"{len(wanted)} fields",),
            response_format=response_format,
        )

    def aside(self, template: str) -> str:
        return template.format(c=self.rng.choice(COMMON), d=self.rng.choice(COMMON), n=self.person())

    def unsaid(self, key: str, options: dict[str, list[str]]) -> Any:
        """What stands in a field that a note says nothing about."""
        return options[key][0] if key in options else UNSAID[kind_of(key)]

    def answer_form(self) -> Turn:
        """A question whose answer alone is wanted, in a schema of one or two fields."""
        rng = self.rng
        make = rng.choice((self.comparing, self.comparing, self.story, self.detail))
        asked: Turn = make()
        key = rng.choice(("answer", "result", "value", "reply", self.identifier()))
        yes = rng.choice(("answer", "is_true", "yes", "correct", self.identifier()))
        if asked.task == "compare":
            name, kind, value = yes, "boolean", asked.bare == "yes"
        elif asked.bare.isdigit() and asked.task == "story":
            name, kind, value = key, "integer", int(asked.bare)
        else:
            name, kind, value = key, "string", asked.bare
        schema = {"type": "object", "properties": {name: {"type": kind}}, "required": [name]}
        title = rng.choice(("answer", "result", "output", "response", self.identifier()))
        return Turn(
            "note", asked.says, (asked.reply[0], final(json.dumps({name: value}))), asked.phrasing,
            {"value": {name: value}, "text": asked.says[0].text}, tags=("an answer",),
            response_format=(title, json.dumps(schema, separators=(",", ":"))),
        )  # fmt: skip
