"""The grammar of wordings: it gives many, each with the fields of its task, and none that is held out."""

from __future__ import annotations

import re
from random import Random

import pytest
from asking import REQUESTS
from errands import ERRANDS
from everyday import COMPARE, LETTERS, LISTS, NAMED, OUTSIDE, PERSONA, REPEAT, STORIES, TALK, TOLD
from forms import FIELDS, PARTS
from phrasings import PHRASINGS, SEEN
from wordings import WORDINGS, drawn_from, expand, plain, ways, worded

# task -> wordings that training does not have, and wordings whose fields it may use
HELD_OUT = {task: table[SEEN:] for task, table in PHRASINGS.items()}
HELD_OUT |= {task: table[-(len(table) // 4) :] for task, table in (LISTS | LETTERS).items()}
HELD_OUT |= {f"story {op}": table[-(len(table) // 4) :] for op, table in STORIES.items()}
HELD_OUT |= {key: told[1][-(len(told[1]) // 4) :] for key, told in TOLD.items()}
for name, table in (("compare", COMPARE), ("persona", PERSONA), ("repeat", REPEAT), ("named", NAMED)):
    HELD_OUT[name] = table[-(len(table) // 4) :]
# Talk and questions about the world: several fields, not all in each.
LOOSE = {
    name: table[-(len(table) // 4) :] for name, table in (("beyond", OUTSIDE), *((k, v[0]) for k, v in TALK.items()))
}
HELD_OUT |= LOOSE


def test_a_rule_is_counted_and_expanded() -> None:
    rule = "[a|b [c|d]] {x}[|!]"
    assert ways(rule) == 6
    every = {expand(Random(i), rule) for i in range(200)}
    assert every == {"A {x}", "A {x}!", "B c {x}", "B c {x}!", "B d {x}", "B d {x}!"}


def test_every_task_has_many_wordings() -> None:
    counts = {task: sum(ways(rule) for rule in set(w.rules)) for task, w in WORDINGS.items()}
    for task in set(PHRASINGS) - {"outside"}:
        assert counts[task] >= 600, task
    assert sum(counts[task] >= 1000 for task in PHRASINGS if task in counts) >= 11
    assert all(counts[f"story {op}"] >= 1000 for op in "+-*")
    assert min(counts.values()) >= 40


@pytest.mark.parametrize("task", WORDINGS)
def test_wordings_have_the_fields_of_their_task_and_are_not_held_out(task: str) -> None:
    held_out = HELD_OUT.get(task, ())
    unseen = {plain(template) for template in held_out}
    known = {field for template in held_out for field in re.findall(r"{(\w)}", template)}
    drawn = {worded(Random(f"{task}/{i}"), task, held_out) for i in range(400)}
    assert len(drawn) > 30
    for template in drawn:
        assert not re.search(r"[\[\]|]", template.replace("{", "").replace("}", "")), template
        assert plain(template) not in unseen
        if known and not task.startswith("story") and task not in LOOSE:
            assert set(re.findall(r"{(\w)}", template)) == known, template


def test_a_held_out_wording_is_drawn_again() -> None:
    drawn = worded(Random(1), "turned", ())
    again = worded(Random(1), "turned", (drawn.lower().rstrip(".?!"),))
    assert plain(again) != plain(drawn)


@pytest.mark.parametrize("key", REQUESTS)
def test_requests_have_the_slots_of_their_function(key: tuple[str, str]) -> None:
    (row,) = [row for row in ERRANDS if row[:2] == key]
    slots = {slot for wording in row[3] for slot in re.findall(r"{(\w+)}", wording)}
    unseen = row[3][-(len(row[3]) // 4) :]
    drawn = {drawn_from(Random(f"{key}/{i}"), REQUESTS[key], unseen) for i in range(300)}
    assert len(drawn) >= 12
    for template in drawn:
        assert set(re.findall(r"{(\w+)}", template)) <= slots, template
        assert not re.search(r"[\[\]|]", template.replace("{", "").replace("}", "")), template
        assert plain(template) not in {plain(t) for t in unseen}


@pytest.mark.parametrize("key", PARTS)
def test_parts_of_notes_hold_their_value(key: str) -> None:
    kind, table = FIELDS[key][1], FIELDS[key][2]
    for rule in PARTS[key]:
        halves = rule.split(" / ")
        assert len(halves) == (2 if kind == "boolean" else 1)
        for i in range(60):
            for half in halves:
                said = drawn_from(Random(f"{rule}/{i}"), (half,), table[-(len(table) // 4) :])
                fields = set(re.findall(r"{(\w)}", said))
                assert fields == {"boolean": set(), "object": {"k", "n"}}.get(kind, {"v"}), said
                assert not re.search(r"[\[\]|]", said), said
