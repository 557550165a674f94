"""A grammar of wordings for training: thousands of ways to ask for each task, instead of a list of them.

`[a|b]` stands for either, and may hold further brackets; `{field}` is filled later. A table's entries are noun phrases
(asked and told for), deeds (commanded and begged for), clauses that follow "tell me", and whole sentences. What
`phrasings.py` and the tables hold out is drawn again, so that it stays unseen.
"""

# ruff: noqa: E501  (a grammar reads best with one rule per line)
from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

_INNERMOST = re.compile(r"\[([^\[\]]*)\]")
_ASKED = "[What is|What is|What's|What's|whats|What would be|Which is|Do you know|Can you tell me|Could you tell me|Would you tell me|Can you say|Could you name|May I have|Can I get|Could I have|And what is|So what is|Now what is|Please, what is] {p}[||||, please| now| then| for me]?"
_TOLD = "[Tell me|Give me|Say|Name|Find|Show me|Write|Write down|Print|I need|I want|I would like|I'd like|I am looking for|Please give me|Please tell me|Please say|Let me have|Get me|Figure out|Work out|Determine|State|Answer with|Just give me|Just tell me|I want to know|I have to know|I am interested in|Reply with|Look for|Help me with] {p}[||||, please| now| quickly| for me]."
_BEGGED = "[Can you|Could you|Would you|Will you|Can you please|Could you please|Would you please|Could you kindly|Are you able to|Is it possible to|May I ask you to] {p}[|||, please| for me| now]?"
_COMMANDED = "[||||Please |Please |please |Kindly |I want you to |I need you to |I would like you to |I'd like you to |Your task is to |Your job is to |Now |Next, |Just |Quickly |Try to |Go ahead and |Be so kind and |Help me |Let us |Let's |You have to |You should |My wish: |Do this: |I ask you to |Go and ]{p}[||||, please| for me| now]."
_CLAUSE_TOLD = "[Tell me|Please tell me|Say|I want to know|I need to know|I wonder|Let me know|Find out|Work out|Just say|I would like to know|I'd like to know|Remind me|I forgot|Explain] {p}[|||, please]."
_CLAUSE_ASKED = "[Do you know|Can you tell me|Could you tell me|Can you say|Would you say|Do you remember|Can you find out|Have you any idea|Could you say|Will you tell me] {p}[|||, please]?"


@dataclass(frozen=True)
class Wording:
    things: tuple[str, ...] = ()
    deeds: tuple[str, ...] = ()
    clauses: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    @functools.cached_property
    def rules(self) -> tuple[str, ...]:
        """Whole rules, those with more expansions no more likely than the others."""
        out = [*self.whole, *self.whole]
        out += [_framed(frame, p) for p in self.things for frame in (_ASKED, _TOLD)]
        out += [_framed(frame, p) for p in self.deeds for frame in (_COMMANDED, _COMMANDED, _BEGGED)]
        out += [_framed(frame, p) for p in self.clauses for frame in (_CLAUSE_TOLD, _CLAUSE_ASKED)]
        return tuple(out)


def _framed(frame: str, phrase: str) -> str:
    """A phrase in its frame; behind a list nothing follows that would read as its last thing."""
    before, after = frame.split("{p}")
    return f"{before}{phrase}{after[-1] if phrase.endswith('{l}') else after}"


def expand(rng: Random, rule: str) -> str:
    """One sentence of a rule, with a capital."""
    while found := _INNERMOST.search(rule):
        rule = rule[: found.start()] + rng.choice(found[1].split("|")) + rule[found.end() :]
    rule = re.sub(r" +", " ", rule).strip()
    return rule[:1].upper() + rule[1:]


def without_choices(rule: str) -> str:
    """What stands in every sentence of a rule."""
    while _INNERMOST.search(rule):
        rule = _INNERMOST.sub("", rule)
    return rule


def ways(rule: str) -> int:
    """How many sentences a rule has, some of them perhaps alike."""
    numbers: list[int] = []  # a bracket that is counted becomes the text <n>

    def count(text: str) -> int:
        product = 1
        for at in re.findall(r"<(\d+)>", text):
            product *= numbers[int(at)]
        return product

    while found := _INNERMOST.search(rule):
        numbers.append(sum(count(part) for part in set(found[1].split("|"))))
        rule = f"{rule[: found.start()]}<{len(numbers) - 1}>{rule[found.end() :]}"
    return count(rule)


def plain(template: str) -> str:
    """A template by its words alone, to compare wordings."""
    return re.sub(r"[^a-z0-9{}+*/<>-]+", " ", template.lower()).strip()


def worded(rng: Random, task: str, held_out: Collection[str]) -> str:
    """A wording of a task that is none of the held-out ones."""
    return drawn_from(rng, WORDINGS[task].rules, held_out)


def drawn_from(rng: Random, rules: Sequence[str], held_out: Collection[str]) -> str:
    """A sentence of one of the rules that is none of the held-out ones."""
    unseen = {plain(template) for template in held_out}
    while True:
        template = expand(rng, rng.choice(rules))
        if plain(template) not in unseen:
            return template


_COMPUTE = "[compute|calculate|evaluate|work out|do|solve|determine|find]"
_LARGE = "[largest|biggest|highest|greatest]"
_SMALL = "[smallest|lowest|least|tiniest]"
_UP = "[|| upwards| ascending| by size| from small to large| from the smallest to the largest| from low to high| in ascending order| with the smallest first|, smallest first|, lowest first| from the bottom up]"
_DOWN = "[ downwards| descending| from large to small| from the largest to the smallest| from high to low| in descending order| with the largest first|, largest first|, highest first|, biggest first| from the top down]"
_SORT = "[sort|order|arrange|rank|list]"
_GIVEN = "[Numbers|My numbers|Values|Here are some numbers|These are the scores|Prices|The ages are|I measured|The results|My list|The temperatures were|Points of the players]"
_NAMED = "[Words|My words|Here is a list|My list|The list|These are on my list|Names|Given]"
_MANY = "[How many {i}s [does {n} have|are there|is that|has {n}|does that make][| now| altogether| in all| in total| together| then]?|What is the total?|How many in [all|total]?|[Tell me|Say|Work out|I want to know] how many {i}s [{n} has|there are][| now| in all].|How many are there in the end?|That makes how many {i}s?]"
_LEFT = "[How many {i}s [are left|remain|does {n} still have|does {n} keep|stay|are still there|has {n} now]?|How many are left[| now| over| in the end]?|What [is left|remains|stays]?|How many [stay|remain]?|[Tell me|Say|Work out] how many are [left|still there].|How many does {n} have after that?]"
_WHO = "[{n}|{n}|{n}|{n}|My friend {n}|Our neighbour {n}|Little {n}|Old {n}|Uncle {n}|The teacher {n}]"
_WHEN = "[|||| on {d}| in the morning| today| yesterday| at first| this week]"

WORDINGS: dict[str, Wording] = {
    "add": Wording(
        ("the [sum|total|result|outcome|value] of {a} [plus|+] {b}", "the [sum|total] of {a} [and|with] {b}", "{a} [plus|+|added to|together with] {b}", "the result [if|when] {b} is added to {a}"),
        ("add {a} [and|to|with] {b}", "add {b} to {a}", "sum [|up ]{a} and {b}", f"{_COMPUTE} {{a}} [plus|+] {{b}}", f"{_COMPUTE} the [sum|total] of {{a}} and {{b}}", "put {a} and {b} together", "count {a} and {b} together", "combine {a} with {b}", "add [these|both|the] numbers: {a} and {b}", "[raise|lift] {a} by {b}", "join {a} and {b}"),
        ("what {a} [plus|+|and] {b} [is|makes|gives|comes to|equals]", "how much {a} [plus|+|and] {b} [is|makes|are]", "what I get if I add {b} to {a}"),
        ("{a} [plus|+|and] {b} [makes|gives|is|equals|comes to] [what|how much]?", "How [much|many] [is|are|makes|make] {a} [plus|+|and|added to] {b}[|| together| altogether| in all]?", "[I have|We have|There are|She has|He had|They own] {a} and [get|find|receive|buy|are given|win] {b} more. How [many|much] [is that|does that make|is it now|are there now]?", "{a} [+|plus] {b}[|?| =| = ?|: how much?|, please]", "What [does|do] {a} [and|plus|+] {b} [make|give|equal|come to]?", "What [do|will] [I|you|we] get [if|when] [I|you|we] add {b} to {a}?", "If [I|you|we] add {b} to {a}, what [is it|comes out|do I have|is the result]?", "[Start|Begin] with {a} and add {b}. [What is it?|What do you get?|Result?]", "[To|From] {a} [add|go up by] {b}."),
    ),
    "subtract": Wording(
        ("the [difference|distance|gap] [between|of] {a} and {b}", "{a} [minus|-|less|without|reduced by|lowered by] {b}", "the [result|value|outcome] of {a} [minus|-] {b}", "the rest [of {a} without {b}|if {b} goes from {a}|when {b} is subtracted from {a}]"),
        ("[subtract|take|remove|deduct|take away|pull] {b} from {a}", f"{_COMPUTE} {{a}} [minus|-] {{b}}", "[reduce|lower|diminish|shorten|cut] {a} by {b}", "count {b} back from {a}", "go back {b} from {a}", f"{_COMPUTE} the difference [between|of] {{a}} and {{b}}", "make {a} smaller by {b}", "step down {b} from {a}"),
        ("what {a} [minus|-|less] {b} [is|makes|gives|comes to|equals]", "what [is left|remains|stays] [of|from] {a} [without {b}|after {b} is gone|if {b} goes|when I remove {b}]", "how much {a} [minus|-|less] {b} is", "how much [more|bigger|larger|higher] {a} is [compared with|beside|next to] {b}", "how much [less|smaller|lower] {b} is than {a}", "how far it is from {b} to {a}"),
        ("How [much|many] [is|are] {a} [minus|-|less|without] {b}?", "How [much|many] [stays|remains|is left|are left] of {a} [without {b}|if {b} go|after losing {b}|when {b} are taken|if I use {b}]?", "How much [more|bigger|larger|higher|greater] is {a} than {b}?", "How much [less|smaller|lower] is {b} than {a}?", "By how much [is {a} more than {b}|does {a} exceed {b}|is {a} above {b}|is {b} under {a}|is {b} below {a}|do {a} and {b} differ]?", "How far [is it|is the way|do I have to go] from {b} to {a}?", "[What|How much] is missing [from {b} to {a}|to {a} if I have {b}]?", "[I have|We have|There are|She had|He had] {a} and [lose|spend|give away|pay|use|eat|sell|break] {b}. [What|How much|How many] [is left|remains|do I keep|stays]?", "{a} [-|minus] {b}[|?| =| = ?|: how much?|, please]", "What must I add to {b} to [get|reach] {a}?", "{b} of {a} are [gone|sold|lost]. How many are left?", "[Start|Begin] with {a} and [take away|subtract|remove] {b}. [What is it?|What do you get?|Result?]", "What [does|is] {a} [minus|-] {b}[| make| give| equal]?"),
    ),
    "multiply": Wording(
        ("the product of {a} and {b}", "{a} [times|*|x|multiplied by|multiplied with] {b}", "{b} times {a}", "{b} times as much as {a}", "the [result|value|outcome] of {a} [times|*|x] {b}"),
        ("multiply {a} [by|with|and] {b}", "multiply {b} by {a}", "take {a} {b} times", f"{_COMPUTE} {{a}} [times|*|x] {{b}}", f"{_COMPUTE} the product of {{a}} and {{b}}", "add {a} to itself until you have it {b} times"),
        ("what {a} [times|*|x] {b} [is|makes|gives|equals]", "how much {a} [times|*|x] {b} is", "what I get if I multiply {a} by {b}"),
        ("How [much|many] [is|are|makes] {a} [times|*|x] {b}?", "[Each|Every] [ticket|book|seat|cake|lamp] costs {a}. [What|How much] do {b} [of them |]cost?", "{b} [boxes|bags|groups|tables|boats|crates] with {a} [things|people|apples|seats] [each|in each]. How many [in all|together|is that|are there]?", "What [does|do] {a} [times|*|and then x] {b} [make|give|equal]?", "{a} [x|*|times] {b}[|?| =| = ?|: how much?|, please]", "If [every|each] [person|child|box] has {a} and there are {b}[| of them], how many is that?", "[Somebody|She|He|A worker] earns {a} a day. What is it in {b} days?"),
    ),
    "sort": Wording(
        ("{l} [sorted|in order|ordered by size|in ascending order|from low to high|from small to large]", "the [sorted list|right order|ascending order] of {l}", "these numbers in ascending order: {l}"),
        (f"{_SORT} {{l}}{_UP}", f"{_SORT} [these numbers|the numbers|this list|the following]{_UP}: {{l}}", "put {l} in [order|ascending order|order of size]", "bring {l} into [order|rising order]", "place {l} by size"),
        ("how {l} look [sorted|in order|from small to large]",),
        ("[Smallest first|Ascending|In order|Sorted|From low to high|Upwards|Sort|Order]: {l}", "{l} - [sort|order] [these|them]", "{l}: [sort|order|arrange] [these|them|it]", "[Which|What] order [do|would] {l} have by size?", f"{_GIVEN}: {{l}}. [Sort them|Put them in order|Order them|Sort these from low to high|Please sort|Sort them by size|Arrange them upwards].", "I have {l}. [Sort them|Put them in order|Order them from low to high|Can you sort them?]"),
    ),
    "down": Wording(
        ("{l} [in descending order|from high to low|from large to small]",),
        (f"{_SORT} {{l}}{_DOWN}", f"{_SORT} [these numbers|the numbers|this list|the following]{_DOWN}: {{l}}", "put {l} in [descending order|order, the largest in front]"),
        (),
        ("[Largest first|Descending|From high to low|Downwards|Biggest first|From the top]: {l}", f"{_GIVEN}: {{l}}. [Sort them downwards|Put the largest first|Order them from high to low|Sort these from large to small|Sort them in descending order]."),
    ),
    "largest": Wording(
        (f"the {_LARGE}[| number| value] [of|in|among|from] {{l}}", "the maximum [of|in] {l}"),
        (f"[find|pick|choose|pick out|point out|look for] the {_LARGE}[| number| value] [of|in|from|among] {{l}}", "find the maximum of {l}"),
        (f"which of {{l}} is {_LARGE}", f"which number is the {_LARGE}: {{l}}", "which of these is above all others: {l}"),
        (f"[Which|Which number|What number] is the {_LARGE}[: |, | of | in | among ]{{l}}?", f"{{l}}: [which|what] is the [maximum|{_LARGE}]?", f"{_GIVEN}: {{l}}. [Which is the {_LARGE}?|What is the {_LARGE}?|Name the {_LARGE}.|Tell me the {_LARGE}.]", f"[Of|From|Among] {{l}} which is the {_LARGE}?", f"[The |]{_LARGE} of {{l}}[|?]", f"I have {{l}}. [Which is the {_LARGE}?|What is the maximum?]"),
    ),
    "smallest": Wording(
        (f"the {_SMALL}[| number| value] [of|in|among|from] {{l}}", "the minimum [of|in] {l}"),
        (f"[find|pick|choose|pick out|point out|look for] the {_SMALL}[| number| value] [of|in|from|among] {{l}}", "find the minimum of {l}"),
        (f"which of {{l}} is {_SMALL}", f"which number is the {_SMALL}: {{l}}"),
        (f"[Which|Which number|What number] is the {_SMALL}[: |, | of | in | among ]{{l}}?", f"{{l}}: [which|what] is the [minimum|{_SMALL}]?", f"{_GIVEN}: {{l}}. [Which is the {_SMALL}?|What is the {_SMALL}?|Name the {_SMALL}.|Tell me the {_SMALL}.]", f"[Of|From|Among] {{l}} which is the {_SMALL}?", f"I have {{l}}. [Which is the {_SMALL}?|What is the minimum?]"),
    ),
    "total": Wording(
        ("the [sum|total] [of|from] {l}", "{l} [added up|in total|together|summed up]"),
        ("add [|up |together ]{l}", "sum [|up ]{l}", "total {l}", "add [all of these|these numbers|the numbers]: {l}", "compute the [sum|total] of {l}"),
        ("what {l} [make|give|are] [together|in total|in all]", "how much {l} is [together|in total]"),
        ("How much [is|are] {l} [together|in total|in all|altogether|added up]?", "What do {l} [make|give|come to][| in all| in total]?", f"{_GIVEN}: {{l}}. [What is the sum?|What is the total?|Add them up.|Sum them up.|How much is that in all?]", "{l}: [what is the sum?|add them up|total?|how much in all?]"),
    ),
    "nth": Wording(
        ("the {o} [item|word|thing|entry|name|element] [of|in|from] {l}", "the {o} of {l}", "what stands {o} in {l}"),
        ("[pick|choose|take|read] the {o} [item|word|thing|entry] [of|from|in] {l}",),
        ("what [comes|is|stands] {o} in {l}", "which [item|word|entry] is {o} in {l}"),
        ("[Which|What|Which word|Which item] [is|comes|stands] {o}[| here| in this list]: {l}?", "{l}: [which is|what is|tell me|name] the {o}?", f"{_NAMED}: {{l}}. [What is the {{o}}?|Which is the {{o}}?|Name the {{o}} item.|Give me the {{o}} word.]", "[Of|From|In] {l}, [what|which] is the {o}?"),
    ),
    "last": Wording(
        ("the last [item|word|thing|entry|name|element] [of|in|from] {l}", "the last of {l}", "the end of the list {l}"),
        ("[pick|choose|take|read] the last [item|word|thing|entry] [of|from|in] {l}",),
        ("what [comes|is|stands] last in {l}", "which [item|word|entry] is at the end of {l}"),
        ("[Which|What|Which word|Which item] [is|comes|stands] [last|at the end][| here| in this list]: {l}?", "{l}: [which is|what is|tell me|name] the last?", f"{_NAMED}: {{l}}. [What is the last?|Which is last?|Name the last item.|Give me the last word.|What comes at the end?]", "[Of|From|In] {l}, [what|which] is the last?"),
    ),
    "reverse": Wording(
        ("{l} [backwards|in reverse|in reverse order|from the end|turned around|from back to front]", "the reverse [of|order of] {l}", "the list {l} in reverse"),
        ("[reverse|turn around|flip|mirror] [|the list |the order of |these: ]{l}", "[say|write|list|read|name|give me|repeat] {l} [backwards|in reverse|in reverse order|from the last to the first|from the end on]", "[say|write|list|name] these [backwards|in reverse|from the end]: {l}", "put the last of {l} first and the first last"),
        ("how {l} [looks|is|goes] [backwards|in reverse]",),
        ("[Backwards|Reverse|In reverse|Reversed|From the end|Turn around]: {l}", "{l}: [backwards|reverse this|in reverse|turn this around|from the end][|, please]", f"{_NAMED}: {{l}}. [Reverse it|Turn it around|Say it backwards|Give it in reverse|List it from the end|Now in reverse order].", "What is {l} [backwards|in reverse|the other way around]?"),
    ),
    "count": Wording(
        ("the [number|count|amount] of [items|words|things|names|entries] in {l}", "the length of the list {l}", "the size of this list: {l}"),
        ("count [|these: |the items: |the words: |the things in |how many these are: |the entries of ]{l}",),
        ("how many [items|words|things|entries] [are in|there are in|I named in] {l}", "how many these are: {l}", "how long the list {l} is"),
        ("How many [items|words|things|names|entries|elements] [are|do you see|are there] [here|in this list|in this|in my list]: {l}?", "{l}: [how many|count them|count these|how many are these|how many is that][|?]", f"{_NAMED}: {{l}}. [How many are there?|Count them.|How many items is that?|How many entries does it have?|How long is it?]", "[I have|I bought|I see|We need|On the table are|In the bag are] {l}. How many [things |items |][is that|are there|are these|did I name]?", "How [long|big] is [this list|my list|the list]: {l}?"),
    ),
    "spell": Wording(
        ("the [letters|spelling|single letters] of [|the word ]{w}", "{w} [letter by letter|spelled out|in single letters]", "every letter of {w}"),
        ("spell [|out |the word |the name |the term ]{w}", "[write|say|read|list|name] [|the letters of |each letter of |all letters of ]{w}[| in order| letter by letter| with hyphens]", "[split|break|cut|take] {w} [into letters|into single letters|apart]"),
        ("how [to spell|you spell|people spell|I should spell] {w}", "which letters {w} has", "how {w} is spelled"),
        ("How [do you|does one|do I|would you|can I|should I|do we] spell [|the word ]{w}?", "{w}: [spell it|spell this|letter by letter|which letters?|its letters, please]", "[Spelling of|Letters of|Spell] {w}[|?|, please]", "[Which|What] letters [are in|does|make] {w}[| have]?", "The word is {w}. [Spell it.|How do you spell it?|Which letters does it have?|Letter by letter, please.]"),
    ),
    "letters": Wording(
        ("the [number|count|amount] of [{c}|letters {c}|the letter {c}|{c}'s] in [|the word ]{w}", "how often {c} [is|comes up|appears] in {w}"),
        ("count [|the letter |every |each |all |how many ]{c} in [|the word ]{w}", "count how often {c} [is|comes|appears|stands] in {w}", "[find|look for|search] [every|each|all] {c} in {w} and [count|say how many]"),
        ("how [often|many times] {c} [is|appears|occurs|comes up|stands] in {w}", "how many [{c}|{c}'s|letters {c}|times {c}] [are in|there are in|you see in] {w}"),
        ("How [often|many times] [is|does] [|the letter ]{c} [in|appear in|occur in|come in|stand in|show up in|turn up in] [|the word ]{w}?", "How many [{c}|{c}'s|letters {c}|of {c}] [are in|are there in|does|has|do you see in|do I need for] {w}[| have]?", "{w}: how [many|often] {c}?", "{c} in {w}[|: how many?|: how often?|, count it]", "[In|Inside|Within] {w}[|,] how [many|often] [are|is] {c}?", "The word is {w}. How [often|many times] does it have {c}?", "Does {w} have [any|a|the letter] {c}? How many?"),
    ),
    "first letter": Wording(
        ("the [first|initial|starting] letter [of|in] [|the word ]{w}", "the letter at the [beginning|start|front] of {w}"),
        (),
        ("[what|which] letter {w} [starts|begins] with", "[what|which] letter [stands|comes|is] first in {w}"),
        ("[What|Which] letter [does {w} start with|does {w} begin with|starts {w}|begins {w}|is at the start of {w}|is at the front of {w}|comes first in {w}]?", "[With|By] [what|which] letter [does {w} begin|does {w} start]?", "{w}: [first letter|which letter is at the start|what does it start with][|?]", "How does {w} [start|begin]? [Which letter?|The letter, please.]"),
    ),
    "last letter": Wording(
        ("the [last|final|closing] letter [of|in] [|the word ]{w}", "the letter at the [end|back] of {w}"),
        (),
        ("[what|which] letter {w} [ends|closes|stops] with", "[what|which] letter [stands|comes|is] last in {w}"),
        ("[What|Which] letter [does {w} end with|does {w} close with|ends {w}|closes {w}|is at the end of {w}|is at the back of {w}|comes last in {w}]?", "[With|By] [what|which] letter [does {w} end|does {w} stop]?", "{w}: [last letter|which letter is at the end|what does it end with][|?]", "How does {w} end? [Which letter?|The letter, please.]"),
    ),
    "length": Wording(
        ("the [number|count|amount] of letters [in|of] [|the word ]{w}", "the length of [|the word ]{w}", "how long {w} is"),
        ("count [|all |every one of |each of ]the letters [of|in] [|the word ]{w}", "count how many letters {w} has", "measure {w} in letters"),
        ("how many [letters|characters] {w} [has|is made of|consists of]", "how many letters [are|there are|stand] in {w}", "how long [|the word ]{w} is"),
        ("How many [letters|characters] [does|has|are in|are there in|do I write for|do you count in|form|make up] [|the word ]{w}[| have]?", "How long is [|the word |the name ]{w}[| in letters]?", "{w}: [how long|count its letters|its length|letters?|how many characters][|?]", "The word is {w}. [How long is it?|How many letters does it have?|Count its letters.]", "[Letters|Number of letters|Length] [in|of] {w}[|?]"),
    ),
    "backwards": Wording(
        ("[|the word ]{w} [backwards|in reverse|from the end|from back to front]", "the letters of {w} [backwards|from the end|in reverse order|from last to first]"),
        ("[spell|write|say|read|type] [|the word ]{w} [backwards|in reverse|from the end|from behind|from right to left|from the last letter on]", "[reverse|flip|mirror|turn around] [|the word |the letters of ]{w}"),
        ("how {w} [is|looks|goes|reads] [backwards|in reverse|from the end]",),
        ("{w}: [backwards|in reverse|reverse it|from the end][|, please]", "[Backwards|In reverse|Reverse|From the end]: {w}", "What is {w} [backwards|in reverse|from right to left|the other way around]?", "The word is {w}. [Spell it backwards.|Reverse it.|Say it from the end.]", "How do you [spell|write|say] {w} [backwards|in reverse|from the end]?"),
    ),
    "repeat": Wording(
        (), (), (),
        ("[Repeat|Say|Write|Type|Copy|Echo|Print|Reproduce|Give back|Answer with|Respond with|Reply with|Tell me|Send back|Return|Output][| exactly| only| just| again| after me| back to me| the following| this| this text| these words| word for word| literally| the same words| aloud]: {t}", "[Please|Could you|Can you|Would you|I want you to|I'd like you to|Now|Next,|Just|You should] [repeat|say|write|type|copy|echo|print][| exactly| only| just| after me| the following| this| this text| these words]: {t}", "[Repeat|Say|Write|Copy|Type|Echo|Print][| the words| the text| exactly| only] [\"{t}\"|'{t}']", "[The text|My text|My words|Here are words|This is the text|This]: {t}\n\n[Repeat it.|Say it again.|Copy it.|Write it again.|Say the same.]", "[After me|Echo|Once more|Again|Copy this|Say again]: {t}", "[Your answer|Your reply] [should|must|shall|has to] be: {t}", "[Let me hear|Let me see|I want to read|I want to hear|Give me] [this|the following|these words]: {t}"),
    ),
    "compare": Wording(
        (), ("[check|test|tell me|find out|say|decide] [if|whether] {a} is [more|greater|bigger|larger|higher] than {b}", "[check|test|say] [if|whether] {a} [exceeds|beats|passes|tops] {b}"),
        ("[if|whether] {a} is [more|greater|bigger|larger|higher] than {b}",),
        ("Is {a} [really |actually |][more|greater|bigger|larger|higher] than {b}?", "[Do you think|Would you say|Is it true|Is it right|Am I right|Do you agree] that {a} is [more|greater|bigger|larger|higher] than {b}?", "Does {a} [exceed|beat|pass|top|go beyond] {b}?", "{a} [is more than|is bigger than|is above|is over] {b}[?|, right?|, yes or no?|, isn't it?]", "[Is it true that|Is it right that|True or false:|Does this hold:|Check:] {a} > {b}[?|.]", "[Yes or no|True or not|Right or wrong]: {a} is [more|greater|bigger|larger|higher] than {b}[|?]", "Compare {a} with {b}: is {a} [more|greater|larger]?", "Of {a} and {b}, is {a} the [larger|bigger|greater][| number]?", "Is {a} [above|over|beyond] {b}[|, yes or no]?", "I say {a} is [more|bigger|higher] than {b}. [Is that so?|Is that true?|Right?|Do you agree?]"),
    ),
    "persona": Wording(
        ("your [name|first name|full name]", "the name [you have|of this assistant|you go by|they gave you]"),
        ("[introduce|present|name] yourself", "state your name", "say [who you are|how you are called|your name]"),
        ("[what|how] [you are|they have] called [|you]", "what your name is", "who you are", "what [I should|people|others|I may] call you", "who I am [talking|speaking|chatting|writing] to"),
        ("[Who|What] are you[| called| named]?", "[How|What] [do|should|can|may|shall] [I|we|people|they] [call|name] you?", "Who [is this|am I talking to|am I speaking with|is speaking|is there|answers me|am I writing to]?", "With whom [am I talking|do I speak|do I have the pleasure|am I chatting]?", "Do you have a name[|, and which]?", "[And|So] you are [called|named][|?| what?]", "[Hello|Hi|Hey|Good morning], [who are you|what is your name|who is this|and you are]?", "[Name|Your name][|, please|?]", "What did they [call|name] you?", "Which name [did they give you|are you using|is yours]?", "You have a name, [right|don't you]? [Which?|What is it?|Tell me.]"),
    ),
    "named": Wording(
        (), (), (),
        ("[Your name is|You are|You are called|They call you|You go by the name of|Call yourself|Act as|Play the role of|Pretend to be|Behave as|From now on you are|Everyone calls you|Present yourself as|Answer as|Your new name is|Users know you as|You will be|The user talks to|Your first name is|We named you|In this chat you are] {v}[|, a [helpful|friendly|polite|small|cheerful|clever] [assistant|robot|helper|guide|bot|butler]|, the [assistant|helper|voice|robot] of [our shop|the library|this house|a hotel]].[||| Be [friendly|brief|kind|polite].| Answer [shortly|politely|in one sentence].| Help the user.| You like to help.| You help people.]",),
    ),
    "recall": Wording(
        ("my {k}", "the {k} [I told you|I named|I gave you|of mine|I mentioned]"),
        ("[repeat|recall|say|state|name] my {k}",),
        ("what my {k} [is|was]", "which {k} [I have|is mine|I told you|I mentioned]", "what I [said|told you] about my {k}"),
        ("[And|So|Again,|Now,] [what is|what was|which is] my {k}?", "[What|Which] {k} [did I tell you|do I have|was mine|is mine|did I mention|did I name]?", "My {k} [is|was] [what|which][|?]", "[Remember|You remember|You know] my {k}[|?|, right? What is it?]", "I [told|gave] you my {k}. [What is it?|Which is it?|Say it again.|What was it?]", "My {k}[|?|, please|, again|: what is it?]"),
    ),
    "read": Wording(
        (), (), (),
        ("[||Text: |Read this: |Read this text: |Facts: |Notes: |I know this: |Look at this: |Given: |From my notes: |A page says: ]{t} [|||Question: |Now: |My question: |Then ][what is|what's|which is|tell me|name|do you know|I need|please say|can you tell me] [the {k} of {n}|{n}'s {k}][?|?|.|]", "[What is|What's|Tell me|Name|Find|Give me|I need|Please say|Can you tell me] [the {k} of {n}|{n}'s {k}][| from this| here| in this text]: {t}", "{t}\n\n[What|Which] {k} [does {n} have|has {n}|is listed for {n}|belongs to {n}|stands beside {n}|goes with {n}]?", "{t} [Look for|Find|Search for|Take] {n}: [what is|which is] the {k}?", "I am looking for {n}'s {k}. {t}", "{t} [For|As for|About|Concerning] {n}, [what|which] {k} [is it|is given|does it say]?"),
    ),
    "tool": Wording(
        (),
        ("{v} the {o} [of|for|belonging to] {x}", "{v} {x}'s {o}"),
        (),
        ("[There is|It is about|I am calling about|This concerns|Look at] {x}[.|:] {v} the {o}[.| now.| please.]", "[We|I] [need|have|want|wish|would like] to {v} the {o} of {x}.", "{x}: {v} the {o}[|, please|.]", "[It would be good|It would help me|I would be glad] if you could {v} the {o} of {x}.", "The {o} of {x} [is what you should|is what I want you to|please] {v}."),
    ),
    "errand": Wording((), (), (), ("[Hi|Hello|Hey|Good day|Good morning][, |! |. ]{q}", "{q} [Please|Thanks|Thank you|Do it now|It is important|I have no time|Use what you have|Right now, please].", "[Please|Next|Quick|My wish|A task|Task|Now|Also|And this|For today]: {q}", "[I need help|I have a task for you|There is something to do|Help me|I am busy|You can do this].[| Please.] {q}", "[Can you do this|Could you do something|Would you do this|Is that possible|Can you manage this]? {q}", "{q} [Can you do that|Is that possible|Will you|Could you]?")),
    "json": Wording(
        (), (), (),
        ("[Extract|Read|Take|Get|Pull|Collect] the [data|values|fields|facts|entries] [from|out of|in] this[| text| message| note| line]: {t}", "[Turn|Convert|Put|Bring|Change|Make] this [into|in] [JSON|an object|the format|the right form|a record|data]: {t}", "[Text|Message|Note|Record|Input|Data|Entry|Mail|Line]: {t}", "[Please|Could you|Can you|Now|Just] [fill in|complete|write|give me|make] the [JSON|format|object|record|fields] [for|from|with] this[| text]: {t}", "{t}[| As JSON, please.| Give me the fields.| Write it as an object.]", "[This is what I have|I got this|They wrote|It says|I read|Someone wrote|The note says]: {t}", "[JSON|Fields|Values|The object|A record] [for|of|from] this: {t}"),
    ),
    "story +": Wording(
        (), (), (),
        (f"{_WHO} [has|had|owns|keeps|collected|counted|bought|found|picked|saw|carries] {{a}} {{i}}s{_WHEN} and [gets|finds|buys|receives|adds|is given|wins|brings|collects|counts] {{b}} [more|others|extra|further {{i}}s|new {{i}}s]. {_MANY}", f"There are {{a}} {{i}}s in the {{r}} and {{b}} [|more |others ][in the [garden|attic|car|bag|box|yard]|under the table|outside|upstairs]. {_MANY}", "{n} has {a} {i}s and {m} has {b}. How many [{i}s |][do they have|are there|is that] [together|in all|in total|altogether]?", "[On {d}|Yesterday|In the morning|Last week] [I|we|they] [sold|ate|read|baked|earned|saved|washed|counted] {a} [{i}s|pages|coins|cakes|plates], [today|later|in the evening] {b}. How many [is that|are that|in all|together]?", "A [book|box|ticket|trip|lamp] costs {a} [coins|euros|dollars] and a [map|bag|cap|stamp|drink] {b}. What do [both|they] cost[| together]?", "{n} [walks|drives|runs|rides|swims] {a} [km|metres|miles] [before lunch|to the shop|on {d}] and then {b}. How far is that?", "[In|At] the {r} [stand|lie|are] {a} {i}s. {n} [brings|puts|places|carries in] {b}[| more]. How many [are there|is that|stand there] now?", "{a} [people|children|birds|guests|cars] are [in the park|in the hall|on the bridge|on the boat]. {b} [come|join them|arrive|follow]. How many are [there|in the place] now?", "{n} is {a} years old. How old will {n} be in {b} years?", "The [bus|train|film|talk|lesson] takes {a} minutes and the [walk|break|way home|second part] {b}. How long [is it|does it take] in all?"),
    ),
    "story -": Wording(
        (), (), (),
        (f"{_WHO} [has|had|owns|bought|found] {{a}} {{i}}s{_WHEN} and [loses|sells|breaks|gives away|uses|throws away|drops|forgets|returns|lends out] {{b}}[| of them]. {_LEFT}", f"{_WHO} [has|had] {{a}} {{i}}s. {{m}} [takes|gets|borrows|buys|steals|wins|breaks] {{b}}[| of them]. {_LEFT}", f"[Of|From] {{a}} {{i}}s {{b}} [are broken|are sold|were eaten|are lost|got wet|went missing|were stolen|are gone]. {_LEFT}", "There [are|were] {a} [people|birds|children|guests|cars] [on the bus|in the park|in the room|on the roof] and {b} [leave|go home|go away|are taken|disappear]. How many [stay|are left|remain|are still there]?", "A [rope|road|film|book|trip|wall] has {a} [metres|km|minutes|pages|parts]. {n} has done {b}. How many [are left|remain|are still to do|are missing]?", "{n} has {a} {i}s, {m} has {b}. How many more does {n} have[| than {m}]?", "{n} needs {a} {i}s and has {b}. How many [are missing|more are needed|does {n} still need]?", "[I|We|They] had {a} [coins|euros|dollars] and [spent|paid|lost|gave away] {b}. How [much|many] [is left|do we have|remains|are left]?", "A [lamp|coat|bike|table] costs {a} coins. It is {b} cheaper [today|now|on {d}]. What does it cost?", "{n} [is|was] {a} years old. How old was {n} {b} years ago?", "The [tank|box|bag|shelf] holds {a} [litres|{i}s]. {b} are [used|taken out|gone]. How many are [in it|left in it|left]?", "{a} {i}s were [ordered|planned|wanted], {b} [came|arrived|were made]. How many are missing?"),
    ),
    "story *": Wording(
        (), (), (),
        (f"{_WHO} [buys|has|fills|carries|packs] {{b}} [boxes|bags|packs|crates|baskets|shelves] [with|of] {{a}} {{i}}s[| each| in each]. {_MANY}", "[Each|Every] [box|bag|child|shelf|table|car] [has|holds|gets|brings] {a} {i}s. How many [{i}s |]are in {b}?", "A {i} costs {a} [coins|euros|dollars]. [What|How much] do {b} [{i}s |]cost?", "{n} [works|runs|reads|saves|earns|walks|drives] {a} [hours|km|pages|coins|minutes] [a day|every day|each week|per trip]. How [much|many] is that [in|after] {b} [days|weeks|trips]?", "There are {b} [tables|rooms|buses|teams|groups] with {a} [people|chairs|players|seats] [each|in each]. How many [people|seats|players|chairs] [are there|is that]?", "{b} [people|friends|children] [pay|bring|get|eat|have] {a} [coins|{i}s] each. How many [is that|are there|in all|together]?", "{n} [plants|lays|paints|writes] {b} rows of {a} {i}s. How many is that?", "A [week|day|lesson|game] has {a} [hours|minutes|parts|points]. How many have {b}?", "[There are|We are|I see|They sent] {b} [guests|children|workers|cars|tables] and [every one of them|each one|each of them] [gets|needs|eats|takes|wants] {a} {i}s. How many {i}s [is that|do we need|are needed]?", "[One|A] [box|shelf|bus|lorry|basket|drawer] [takes|carries|holds|fits] {a} {i}s. [I fill|We have|There are] {b} of them. How many {i}s [go in|are there|is that in all]?", "[A|One] [ticket|meal|night|lesson] is {a} [euros|coins|dollars] [a person|per head|for one]. What do {b} [of us |people ]pay?", "{n} has {b} [purses|jars|folders|pages], [all with|every one with|each with] {a} {i}s. How many {i}s in all?"),
    ),
    "more": Wording((), (), (), ("[And|Now|Then|Also|Okay, and|So] [plus|add] {c}[|| to that| to it| on top]?", "[Add|Put|Lay] {c} [to that|to it|to the result|on top|onto it|to the last number].", "[What if|And if|And when|What happens if] [I|you|we] add {c}[|| to it| more]?", "[And|Now|Then] {c} [more|on top|extra|added][|?|.]", "[Increase|Raise|Lift] [it|that|the result|this] by {c}.", "[What is|How much is|What's] [that|it|the result] [plus|and|with] {c}?", "[Plus|+] {c}[|?|!|, please]", "[Can|Could] you add {c}[| to that| to it| now]?")),
    "less": Wording((), (), (), ("[And|Now|Then|Also|So] [minus|subtract|take off|less] {c}[|| from that| from it][?|.]", "[Subtract|Take|Remove|Deduct] {c} [from that|from it|from the result|now].", "[What if|And if|And when] [I|you|we] [subtract|remove|lose|take off] {c}[|| from it]?", "[And|Now|Then] {c} [less|fewer|gone][|?|.]", "[Reduce|Lower|Cut] [it|that|the result|this] by {c}.", "[What is|How much is|What's] [that|it|the result] [minus|less|without] {c}?", "[Minus|-] {c}[|?|!|, please]", "[Can|Could] you [subtract|take off|remove] {c}[| from that| from it| now]?")),
    "times": Wording((), (), (), ("[And|Now|Then|Also|So] [times|multiply by|multiplied by] {c}[?|.]", "[Multiply|Take] [that|it|the result] [by|with|times] {c}.", "[What if|And if] [I|you|we] multiply [it|that] by {c}?", "[What is|How much is|What's] [that|it|the result] [times|multiplied by] {c}?", "[Times|*|x] {c}[|?|, please]", "[And|Now] {c} [times that|of those|times the result][|?|.]", "[Can|Could] you [multiply|take] [that|it] [by|times] {c}?")),
    "turned": Wording((), (), (), ("[And|Now|Then|Please|And please][|,] [in the other direction|backwards|the other way|in the opposite order|in reverse|from the other end|the other way around][?|.|, please.|]", "[Reverse|Turn around|Flip|Mirror] [that|it|them|the list|the order|this][|, please| now].", "[Can|Could] you [reverse|turn around|flip] [that|it|them|the order]?", "[The opposite|The reverse|The other direction|Downwards or upwards, the other way]: please.", "[What is|How is|What about] [that|it|the list] [in the other direction|the other way around|in reverse]?")),
    "again": Wording((), (), (), ("[And|Now|Then|Next|Also|Okay, now][|:|,] {w}[|?|.|, please]", "[What about|How about|And what about|The same for|Do the same for|Now do|And now for|Next comes|Also for|Repeat that for|Try] {w}[?|.|]", "{w}[?| next| now| as well| too][|.]", "[Can|Could] you do [|it for |the same for |that with ]{w}[|, too| as well]?")),
    "of list": Wording((), (), (), ("[What|Which] [was|is] the {o} one in my list[| again]?", "[Tell me|Say|Give me|Name|Repeat|I need] the {o} one in my list[|, please| again].", "[And|So|Now|Then] the {o} one in my list[|?|, please?]", "[Can|Could] you [tell me|say|name] the {o} one in my list?", "[Do you know|Do you remember|Do you still have] the {o} one in my list?")),
    "name told": Wording((), (), (), ("[Hi|Hello|Hey|Good morning|Good day][, |! |. ][my name is|I am|I'm|it's|this is|here is] {v}.", "[My name is|I am called|I'm|Call me|You can call me|People call me|I go by|They call me|My name's|The name is|You may call me|Everybody calls me|I am known as] {v}[|, by the way| here].", "[By the way|Just so you know|For your notes|Please note|So], [my name is|I am|I'm called] {v}.")),
    "name": Wording(("my name", "the name I [told|gave] you"), (), ("who I am", "what [I am|they] [called|call me]", "what my name is", "how I am called"), ("Who am I[| again| to you]?", "[What|How] am I called[| again]?", "[What|Which] name [do I have|did I tell you|is mine|did I give you]?", "[And|So|Now] my name[|?| is what?]", "You know my name, [right|don't you]?", "How do [people|others|you] call me?")),
    "place": Wording(("the [place|town|city] I live in", "my [home town|town|city]"), (), ("where I [live|am at home|have my home]", "where my [home|house|flat] is", "in which [town|place|city] I live"), ("Where [do I live|am I at home|is my flat|do I have my home][| again| now]?", "[In|At] [which|what] [town|city|place] do I live?", "[What|Which] [town|city|place] [is my home|do I call home|is mine]?", "[And|So] where do I live?")),
    "number": Wording(("the number[| I told you| I gave you| I chose| to remember]", "my [lucky |]number"), (), ("what [the number was|number I said|my number is]", "which number [I told you|I chose|it was]"), ("[What|Which] number [was it|did I tell you|did I choose|did I give you|is it|do you remember]?", "[And|So] the number[|?| was what?| again?]", "You noted a number. [Which?|What is it?]")),
    "word": Wording(("the word[| I told you| I gave you| to remember]", "my [secret |]word"), (), ("what [the word was|word I said|my word is]", "which word [I told you|it was]"), ("[What|Which] word [was it|did I tell you|did I give you|is it|do you remember]?", "[And|So] the word[|?| was what?| again?]", "You noted a word. [Which?|What is it?]")),
    "key": Wording((), (), ("where [I put|I left|I laid|you can find] the key", "where [the|my] key [is|lies]"), ("Where [did I leave|did I lay|can I find|lies|should I look for] [the|my] key[| again]?", "Under [what|which thing] [is|lies|did I put] [the|my] key?", "I [need|want|look for] my key. Where is it?", "[And|So] [the|my] key[|?| is where?]")),
    "pet": Wording(("my cat's name", "the name of my cat"), (), ("[what|how] my cat is called", "which name [I gave my cat|my cat has]", "what we call [my|our] cat"), ("[What|How] [is my cat called|do I call my cat|do we call the cat]?", "[What|Which] name does my cat [have|go by]?", "[And|So] my cat[|?| is called?]", "My cat is called what?")),
    "meeting": Wording(("the room of [the|my] meeting",), (), ("where [the|my] meeting is", "where we meet", "in [which|what] room [the|my] meeting is"), ("[Which|What] room [is|was] [the|my] meeting in?", "Where [do I have to go for|is|was] [the|my] meeting[| again]?", "[And|So] [the|my] meeting[|?| is where?]")),
    "day": Wording(("the day of [the|my] party",), (), ("when [the|my] party is", "on [which|what] day [the|my] party is", "when we celebrate"), ("[Which|What] day [is|was] [the|my] party on?", "When [is|was|do we have] [the|my] party[| again]?", "[And|So] [the|my] party[|?| is when?]")),
    "drink": Wording(("my [favourite |]drink", "what I like to drink"), (), ("what I [drink|like to drink|always order]", "which drink I [like|order|chose]"), ("What [do I drink|should I order|did I say I drink|do I usually drink]?", "[Which|What] drink [do I like|is my favourite|do I order]?", "[And|So] my drink[|?| is what?]")),
    "car": Wording(("the [colour|color] of my car", "my car's [colour|color]"), (), ("[what|which] [colour|color] my car [is|has]",), ("[What|Which] [colour|color] [is|has|does] my car[| have]?", "[And|So] my car[|?| is what colour?]", "In [which|what] [colour|color] is my car?")),
    "nth of them": Wording((), (), (), ("[What|Which] [was|is] the {o}[| one| of them| thing][| again]?", "[Tell me|Say|Give me|Name|Repeat] the {o}[| one| of them][|, please].", "[And|So|Now|Then] the {o}[| one][|?| of them?]", "[Can|Could] you [tell me|say|name] the {o}[| one| of them]?")),
    "last of them": Wording((), (), (), ("[What|Which] [was|is|came|did I say] [the last one|last|at the end][| again]?", "[Tell me|Say|Give me|Name|Repeat] the last[| one| of them][|, please].", "[And|So|Now|Then] the last[| one][|?| of them?]", "[Can|Could] you [tell me|say|name] the last[| one| of them]?")),
    "count of them": Wording((), (), (), ("How many [things |words |][are these|did I name|is that|are there|are they|have I said|did I list|was that][| in all| together]?", "[Count|Please count|Can you count|Now count] [them|these|what I named|my list][|.|, please]", "[What is|Tell me|Say|Give me] [the number of them|their number|how many these are][|.|?]")),
    "them back": Wording((), (), (), ("[Say|List|Name|Repeat|Write|Give me] them [backwards|in reverse|from the end|from last to first|in reverse order][|, please| now].", "[And|Now|Then|So][|,] [backwards|in reverse|from the end|the other way around][?|.|, please.]", "[Reverse|Turn around|Flip|Mirror] [them|my list|the list|these][|, please| now].", "[Can|Could] you [reverse them|say them backwards|turn them around|list them from the end]?")),
    "a greeting": Wording((), (), (), ("[Hello|Hi|Hey|Good [morning|afternoon|evening]|Greetings|Howdy|Hello again|Hallo|Heya|Yo|Morning|Evening|Good to see you|Nice to see you|Welcome back|Hi hi|Hello hello|Salutations][|| [friend|computer|assistant|bot|machine|there|again|to you|everyone|dear]|, [friend|bot|assistant|it is me|I am back|I am here]]",)),
    "thanks": Wording((), (), (), ("[Thanks|Thank you|Many thanks|Thx|thx|Tnx|thank u|Thanks [a lot|so much|a million|a bunch|again|very much]|Thank you [so much|very much|again|kindly]|Cheers|Much appreciated|I appreciate [it|that|your help]|[Great|Perfect|Cool|Good|Super|Nice|Wonderful|Excellent|Awesome|ok|okay|Alright][,|] [thanks|thank you|thx]|That [helps|helped|was helpful|was quick][| me][, thanks|, thank you]|You are [very kind|a great help|helpful][, thanks|, thank you]|[My|A big|A thousand|Best] thanks|I want to thank you|I am grateful|You helped me[| a lot]|You were a great help]",)),
    "a goodbye": Wording((), (), (), ("[Bye|Goodbye|Bye bye|See you[| later| tomorrow| soon]|Good night|Take care|Farewell|Cya|Later|Until [next time|tomorrow|Monday]|I am leaving|I [must|have to|need to] [go|leave]|I'm off|Got to go|That is all|That is it for today|Enough for today|Ciao|Talk to you later|So long|We are done|I am done|Have a nice [day|evening|weekend]][|| then| for now| for today| now| friend| computer|, good night|, see you]",)),
    "a joke": Wording((), (), (), ("[Tell|Give|Write] me [a|another|one more|a short|a good|a funny|a silly] [joke|pun]", "[Do you|Don't you] [know|have] [a|any|some|a good|another] joke[|s]", "[Say|Tell me] something [funny|silly|that makes me laugh]", "[A|One|Another|One more|Now a|Quick, a] joke", "I [need|want|would like] [a joke|something funny|a laugh]", "[Can|Could|Would] you [tell|give] me a joke", "[Can|Could] you make me [laugh|smile]", "[Cheer me up|Be funny|Got a joke|Got any jokes|Joke time|What is a good joke|Your best joke|Amuse me|Entertain me|I like jokes, tell me one]",)),
    "a remark": Wording((), (), (), ("[ok|okay|Okay|Alright|All right|I see|I understand|Got it|Good|Very good|Fine|Sure|Right|Makes sense|Nice|Cool|Great|Wow|Interesting|Perfect|Correct|Exactly|That is correct|That works|Sounds good|Good to know|Yes|Yep|True|Aha|Oh|Hm|Well done|Excellent|Wonderful|Amazing|Not bad|I agree|Noted|Clear|As I thought|I thought so][||| then| now| indeed| so far|, ok|, fine|, I see]",)),
    "how I am": Wording((), (), (), ("How [are|r] [you|u|things|we][| doing| feeling| getting on]", "How [is|'s] [it going|your day|your day going|your week|your morning|life treating you|everything going|business]", "[How do you feel|How goes it|How have things been|How was your [day|night|week]]", "[Are|Do] you [feel |feeling |][well|okay|all right|good|happy]", "[You okay|You good|Everything [fine|okay|all right|good][| with you]|All good[| there| with you]|I hope you are well|Did you sleep well|Are things going well|Having a good day|How are we|Is everything in order]",)),
    "what I am": Wording((), (), (), ("Are you [|really |actually |perhaps ][human|a person|a real person|alive|somebody real|a man or a woman|a human being|made of flesh|a child|someone in an office]", "Am I [talking|speaking|writing|chatting] [to|with] [a human|a person|a real person|somebody|a woman|a man]", "Do you [have feelings|breathe|eat|have a heart|have parents|have a family|get tired|have a mother|have eyes|go to school]", "[Is there|Is it] [a person|a human|somebody|someone] [behind this|answering|at the keyboard|typing|on the other side]",)),
    "who I am": Wording((), (), (), ("[Who|What] [is this|am I talking to|am I speaking with|are you exactly|answers here|is on the other side|do I talk to]", "[Tell|Show] me [who you are|what you are|something about yourself|more about yourself]", "[Introduce|Describe] yourself[| to me| briefly| in a sentence]", "[What|Which] [model|system|program|assistant|network|language model] [are you|is this|do I use|am I talking to|answers me|runs here]", "What [kind|sort|type] of [assistant|program|thing|network|system] are you", "[Where do you come from|Who made you|Who trained you|What should I know about you|How [big|large|small] are you|How were you made|What are you made of|What stands behind you|Are you a big model|What is your story]",)),
    "what I can do": Wording((), (), (), ("What [|else |exactly |kind of things ]can you [do|help with|offer|handle|answer|show me]", "How can you [help|be of use|support me|assist|help me today]", "What [are you able to do|are your skills|are your abilities|is your purpose|are you for|are you made for|can I ask you|should I ask you|do you offer|works here|is possible here|are you capable of|were you trained for]", "[Show|Tell] me what you [can do|know|are good at|are able to do]", "[List|Name] your [skills|abilities|talents]", "[Which|What kind of] [questions|tasks|things] [can I ask|may I ask you|do you know|can you handle|do you understand]", "[Give me an example of what you can do|Can you help me|I need help, what can you do|What use are you|Why should I use you]",)),
    "beyond": Wording((), (), (), ("[Write|Make|Compose|Create] [|me ]a [|short |long |funny |sad ][poem|song|story|speech|essay|report|article|novel] [about|on|for] [{g}|{p}|a {j}|the {i}].", "[Write|Give|Show] me [a|the|some] [code|program|script|query|app|website] [for|about|that handles|that shows] [{g}|{i}s].", "[Write|Make] [a|me a] [Java|Rust|shell|web|SQL|spreadsheet] [program|script|function|page|macro] [for|about|with] [{g}|{x}s].", "[Give|Offer] me [some |a bit of |your |][advice|tips|ideas|guidance] [on|about|for] [{g}|my {t}|{p}|my neighbours|my marriage|my taxes|my boss and {g}].", "[Who|Which person] [was|is] the [first|last|best|greatest|richest|youngest] [{j}|king|queen|player|writer] [of|in] {p}?", "[When|Where|By whom] was the [first {i}|{t} of {p}] [built|invented|found|made]?", "[What|Which] is the [largest|smallest|highest|longest|oldest|deepest|richest] [city|river|mountain|lake|building|island|bridge|forest] [in|of|near] {p}?", "How much [does|would] [a {t}|a {i}|{f}] cost in {p}?", "[Is|Was] [{g}|{f}|{s}] [good|bad|dangerous|useful|hard|important][| for me| for children| for a {j}]?", "[How|Why|Where|When] do [people|birds|{j}s|children] {y}?", "[How|Why|Where] [does|did] {g} [start|begin|end|come from|matter|exist]?", "[Do you believe in|What is your opinion on|Have you heard of|What do you know about|Teach me about|Define|Summarize|Lecture me on|I want to understand] {g}[|, please].", "[Which|What] [book|film|song|game|phone|car|laptop] [should I|can I|would you] [buy|recommend|read|watch|choose][| in {p}]?", "[Say|Write|Put] '{i}' in {l}.", "[Which|What] [stocks|shares|lottery numbers|horse] should I [buy|bet on|pick][| today| in {p}]?", "[Will|Can|Could] [people|robots|we|{x}s] [ever |][live on the moon|rule the world|travel in time|stop {g}]?", "Is it [true|known|possible] that {x}s {y}?", "[Prove|Solve|Integrate|Derive] [the theorem|the equation|the formula|the law] of {g}.", "What is [the square root of {a}|{b} to the power of {a}|{b} percent of {a}|the logarithm of {a}|{a} in Roman numerals|{a} in binary]?", "[Paint|Sketch|Show me|Make] [a picture of a|a drawing of a|a logo with a] {x}[| and a {i}].", "[What|Who] [happened|ruled|was born|died|was famous] in [{p} in {a}|the year {a}]?", "How many [people|{x}s|{j}s|tourists] [are there in|does one find in|live near] {p}?", "How [far|deep|old|big|cold|hot|high] is [the moon|the sea near {p}|the {t} of {p}|the ground in {p}|Mars]?", "[I feel sick|I have a headache|My {x} is ill|My tooth hurts|I cannot sleep|My {i} is broken]. What [should|can] I do?", "[Who|Which company|Which country] [makes|sells|invented|exports] the [best|most|cheapest|first] {i}s[| in the world]?", "[What|Which] [team|player|country] [won|lost] [the {s} game|the cup|the last match][| in {p}]?",)),
}  # fmt: skip
