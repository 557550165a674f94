"""Functions that are known by their description alone, for training: a verb, a thing, and one to four parameters of any
name, which the question gives by name. What a visitor's own tools look like, where nothing can be known beforehand."""

# ruff: noqa: E501, SIM905  (a grammar reads best with one rule per line, word lists as text)
from __future__ import annotations

import json
from typing import Any

from forms import Forms
from turns import COMMON, Turn
from wordings import expand

from halfbyte.evals import words
from halfbyte.evals.grading import Grade
from halfbyte.evals.problem import call, final, think, user
from halfbyte.harmony.messages import Tool

VERBS = (
    "create generate convert compute validate fetch format schedule search encode decode compress resize summarize "
    "extract archive publish register estimate simulate measure monitor scan merge split rotate filter export import "
    "upload download render optimize reset renew approve reject compare calculate analyze build clean copy delete "
    "describe detect draw edit find fix get inspect install join list load make move open order plan predict print "
    "process query rank record remove replace request save score select set share show sort start stop store submit "
    "test track transform update verify watch write "
).split()
THINGS = (
    "QR code|barcode|thumbnail|certificate|loan|mortgage|url|sitemap|log file|backup|meeting|image|video|playlist|"
    "report|postal address|tax|temperature|crossword|calendar event|profile picture|invoice|webhook|database row|"
    "spreadsheet|slide deck|chat room|ticket|subscription|coupon|parcel label|shipment|warehouse|recipe book|menu|"
    "hotel room|train seat|rental car|parking lot|weather station|sensor|camera|printer|server|container|cluster|"
    "firewall|domain name|mailbox|mailing list|survey|quiz|exam|course|lesson|library book|article|blog post|comment|"
    "photo album|song text|podcast|translation|dictionary entry|map|route|satellite picture|star chart|protein|"
    "molecule|blood test|prescription|patient file|insurance claim|contract|passport|visa|bank account|stock order|"
    "exchange rate|budget|expense|salary|time sheet|holiday request|project plan|milestone|bug list|code review|"
    "test suite|password|key pair|robot arm|drone|lamp|heater|washing machine|garden hose|aquarium|fridge|"
    "vacuum cleaner|window blind|doorbell|solar panel|battery"
).split("|")
# name of a parameter -> its type; an enumeration has its values behind a colon
PARAMETERS = {
    "title": "string", "text": "string", "size": "integer", "width": "integer", "height": "integer", "color": "enum:red,green,blue,black,white",
    "format": "enum:pdf,png,svg,csv,json", "date": "day", "start": "string", "end": "string", "count": "integer", "limit": "integer",
    "unit": "enum:metres,feet,grams,pounds", "language": "language", "country": "string", "city": "string", "email": "mail", "path": "string",
    "user": "string", "id": "string", "code": "string", "amount": "number", "rate": "number", "years": "integer", "price": "number", "weight": "number",
    "age": "integer", "name": "string", "topic": "string", "level": "enum:low,medium,high", "mode": "enum:fast,slow,auto", "currency": "enum:EUR,USD,GBP",
    "tags": "strings", "values": "integers", "enabled": "boolean", "public": "boolean", "verbose": "boolean", "recursive": "boolean", "author": "string",
    "owner": "string", "priority": "enum:low,normal,urgent", "duration": "integer", "speed": "number", "angle": "integer", "depth": "integer",
    "version": "string", "style": "enum:plain,bold,round", "source": "string", "target": "string", "room": "string", "key": "string", "message": "string",
    "subject": "string", "query": "string", "max_items": "integer", "page": "integer", "time_zone": "string", "file_name": "string", "first_name": "string",
    "last_name": "string", "phone_number": "string", "street": "string", "zip_code": "string", "due_date": "day", "start_time": "time", "end_time": "time",
    "is_active": "boolean", "include_all": "boolean", "threshold": "number", "temperature": "number", "min_value": "integer", "max_value": "integer",
}  # fmt: skip
_A = "[a|the|a new|one|this|my|our]"
ASKED = (
    f"[|Please |Could you |Can you |I want you to |I need you to |Would you |Now |Just |Go ahead and |Help me ]{{v}} {_A} {{t}}{{p}}[.|?|!|].",
    f"[I need|I want|I would like|We need|Let me have] {_A} {{t}} [to {{v}}|that you {{v}}]{{p}}.",
    f"[My task|Task|To do|Next|Job]: {{v}} {_A} {{t}}{{p}}",
    f"[Use the tool to|Call the function that can|There is a tool to] {{v}} {_A} {{t}}{{p}}.",
    "{v} {t}{p}",
    f"[Hey|Hi|Hello], [I have to|I must|we should] {{v}} {_A} {{t}}{{p}}. [Can you do it?|Please do.|Thanks!]",
)
JOINED = (
    (" with ", ", ", " and "),
    (" with ", ", ", ", and "),
    (": ", ", ", ", "),
    (". ", ". ", ". "),
    (" (", ", ", ", "),
    (", ", ", ", " and "),
    (" using ", ", ", " and "),
    ("; ", "; ", "; "),
)
GIVEN = (
    "{p} {v}",
    "{p} {v}",
    "a {p} of {v}",
    "{p}: {v}",
    "{p} = {v}",
    "the {p} {v}",
    "{v} as {p}",
    "the {p} is {v}",
    "{p} should be {v}",
    "{p}={v}",
    "{v} for the {p}",
)
DESCRIBED = (
    "[|Use this to |Call this to |A tool to |Lets you |This function can ]{v} [a|the|one] {t}.",
    "{v} {t}",
    "{v}s a {t}[| and returns the result| for the user].",
    "{v} a {t} [by|from|with] {p}.",
    "[Tool|Function|Helper] that {v}s [a|the] {t}.",
)


class Described(Forms):
    def _value(self, kind: str) -> Any:
        rng = self.rng
        if kind == "integer":
            return rng.randint(1, 999)
        if kind == "number":
            return rng.choice((rng.randint(1, 999), rng.randint(1, 999) / 10, rng.randint(1, 99) + 0.5))
        if kind == "boolean":
            return rng.random() < 0.5
        if kind.startswith("enum"):
            return rng.choice(kind.partition(":")[2].split(","))
        if kind == "strings":
            return self.names(rng.randint(1, 3))
        if kind == "integers":
            return [rng.randint(0, 99) for _ in range(rng.randint(2, 5))]
        if kind in ("day", "time", "mail", "language"):
            return self.slot_value(kind)
        return self.name() if rng.random() < 0.6 else rng.choice((*words.THINGS, *words.CITIES, *COMMON))

    def _function(self, taken: set[str]) -> tuple[Tool, str, str, list[tuple[str, str, bool]]]:
        """(the tool, its verb, its thing, its parameters with type and whether they are required)."""
        rng = self.rng
        while True:
            verb, thing = rng.choice(VERBS), rng.choice(THINGS)
            parts = thing.lower().split()
            name = rng.choice(
                (
                    f"{verb}_{'_'.join(parts)}",
                    verb + "".join(p.capitalize() for p in parts),
                    f"{'_'.join(parts)}_{verb}",
                    self.identifier(),
                )
            )
            if name not in taken:
                taken.add(name)
                break
        rows = []
        for key in rng.sample(list(PARAMETERS), rng.choice((0, 1, 1, 2, 2, 3, 4))):
            named = self.identifier() if rng.random() < 0.1 else key
            if rng.random() < 0.15 and "_" in named:
                first, *others = named.split("_")
                named = first + "".join(o.capitalize() for o in others)
            rows.append((named, PARAMETERS[key], rng.random() < 0.7))
        properties: dict[str, Any] = {}
        for named, kind, _ in rows:
            schema: dict[str, Any] = {"type": kind if kind in ("integer", "number", "boolean") else "string"}
            if kind.startswith("enum"):
                schema["enum"] = kind.partition(":")[2].split(",")
            if kind in ("strings", "integers"):
                schema = {"type": "array", "items": {"type": kind[:-1]}}
            if rng.random() < 0.3:
                schema["description"] = f"The {_spoken(named)}."
            properties[named] = schema
        whole: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": [n for n, _, needed in rows if needed],
        }
        if rng.random() < 0.3:
            whole["additionalProperties"] = False
        description = expand(
            rng, rng.choice(DESCRIBED).replace("{p}", " and ".join(_spoken(n) for n, _, _ in rows) or "name")
        ).format(v=verb, t=thing)
        return Tool(name, description[0].upper() + description[1:], whole), verb, thing, rows

    def described(self) -> list[tuple[Tool, str, str, list[tuple[str, str, bool]]]]:
        taken: set[str] = set()
        return [self._function(taken) for _ in range(self.rng.choice((1, 1, 1, 2, 3, 4, 5, 6, 8)))]

    def described_call(self, offered: list[tuple[Tool, str, str, list[tuple[str, str, bool]]]]) -> Turn:
        """A call of one of the functions offered; at times none does what is asked."""
        rng = self.rng
        tools = tuple(tool for tool, *_ in offered)
        tool, verb, thing, rows = rng.choice(offered)
        fits = rng.random() < 0.9
        if not fits:
            known = {(v, t) for _, v, t, _ in offered}
            while any(verb == v or thing == t for v, t in known):
                verb, thing = rng.choice(VERBS), rng.choice(THINGS)
        given = [(n, k) for n, k, needed in rows if needed or rng.random() < 0.6]
        arguments = {n: self._value(k) for n, k in given}
        wording = rng.choice(GIVEN)
        parts, matched = [], ""  # of the question; of the thought, which says which parameter each value is
        for n, v in rng.sample(list(arguments.items()), len(arguments)):
            said = wording if rng.random() < 0.7 else rng.choice(GIVEN)
            value = _said(v, rng.random())
            parts.append(said.format(p=_spoken(n) if rng.random() < 0.8 else n, v=value))
            matched += f" {value} is {n}."
        begin, between, last = rng.choice(JOINED)
        listed = between.join(parts[:-1]) + (last if len(parts) > 1 else "") + parts[-1] if parts else ""
        listed = f"{begin}{listed}{')' if begin == ' (' else ''}" if listed else ""
        template = expand(rng, rng.choice(ASKED))
        question = template.replace("{v}", verb).replace("{t}", thing).replace("{p}", listed)
        question = self.around(question[0].upper() + question[1:] if rng.random() < 0.85 else question)
        while question.endswith(("..", ".?", ".!", "?.", "!.")):
            question = question[:-1]
        tags = (f"{len(tools)} function{'s' * (len(tools) > 1)}", "fits" if fits else "none fits", "described")
        if not fits:
            reply = (think(f"Asked: {verb} {thing}. No function fits."), final("I have no function for that."))
            return Turn("described", (user(question),), reply, template, {}, (), Grade(refusal=True), tags, tools)
        ordered = {n: arguments[n] for n in json.loads(json.dumps(tool.parameters))["properties"] if n in arguments}
        wanted = f"Asked: {verb} {thing}. The user wants this: {tool.description.rstrip('.')}."
        thought = think(f"{wanted} I call {tool.name}.{matched}")
        return Turn(
            "described",
            (user(question),),
            (thought, call(tool.name, ordered)),
            template,
            {},
            (),
            tags=tags,
            tools=tools,
        )


def _spoken(name: str) -> str:
    """A parameter's name as it is said: max_items and maxItems are max items."""
    return "".join(
        f" {c.lower()}" if c.isupper() and i and name[i - 1].islower() else c for i, c in enumerate(name)
    ).replace("_", " ")


def _said(value: Any, chance: float) -> str:
    if isinstance(value, bool):
        pair = ("yes", "no") if chance < 0.4 else ("on", "off") if chance < 0.6 else ("true", "false")
        return pair[0] if value else pair[1]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
