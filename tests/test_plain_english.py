"""Names are nouns that a stranger can guess, docstrings are sentences, and a class name has one meaning.

Reads the sources with `ast`; nothing is imported.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import halfbyte

SOURCE = Path(halfbyte.__file__).parent
BENCH = Path(__file__).parents[1] / "bench"

# Participles and pronouns that say nothing about the value: use the noun of its type (findings, lines, results).
VAGUE = frozenset(
    (
        "found",
        "known",
        "words",
        "what",
        "asked",
        "each",
        "place",
        "whole",
        "wanted",
        "said",
        "told",
        "made",
        "kept",
        "ours",
        "theirs",
        "shown",
        "given",
        "held",
        "taken",
    )
)
# (module, name) -> why the name is right there.
ALLOWED_NAMES = {
    ("harmony/header.py", "words"): "the words of a header",
    ("harmony/parse.py", "words"): "the words of a header",
    ("formats/rows16.py", "words"): "machine words of 32 bits",
    ("formats/tile16.py", "words"): "machine words of 32 bits",
    ("model/synthetic.py", "words"): "machine words of 64 bits",
    ("lab/kernel_table.py", "what"): "a key of stored results",
    ("lab/predict.py", "what"): "a key of stored results",
    ("lab/profile.py", "what"): "a key of stored results",
    ("lab/result.py", "what"): "a key of stored results",
}
# Beginnings of fragments that can only be understood after reading the body.
FRAGMENTS = ("Of", "As", "By", "Those", "The same")
# Class name -> why it may stand in several modules.
ALLOWED_CLASSES = {"Options": "the argument record of a measurement: one in each module of bench, registered with it"}


class Module(NamedTuple):
    room: str
    name: str  # path below src/halfbyte, or with bench/ in front
    tree: ast.Module


class Violation(NamedTuple):
    room: str
    text: str


@functools.cache
def modules() -> tuple[Module, ...]:
    parsed = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE)
        room = name.parts[0] if len(name.parts) > 1 else name.stem
        parsed.append(Module(room, name.as_posix(), ast.parse(path.read_text(encoding="utf-8"))))
    for path in sorted(BENCH.rglob("*.py")):
        name = f"bench/{path.relative_to(BENCH).as_posix()}"
        parsed.append(Module("bench", name, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(parsed)


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that the module gives: variables, attributes, arguments, functions, classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno


def vague_names(module: Module) -> Iterator[Violation]:
    for name, line in names(module.tree):
        noun = name.strip("_").lower()
        if noun in VAGUE and (module.name, noun) not in ALLOWED_NAMES:
            yield Violation(module.room, f"{module.name}:{line} {name}")


def fragments(module: Module) -> Iterator[Violation]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if any(text == start or text.startswith((f"{start} ", f"{start}:", f"{start},")) for start in FRAGMENTS):
                yield Violation(module.room, f"{module.name}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}")


def shared_class_names(all_modules: Iterable[Module]) -> Iterator[Violation]:
    """Class names with several definitions; the first in the order of the modules keeps its name."""
    homes: dict[str, list[Module]] = defaultdict(list)
    for module in all_modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and node.name not in ALLOWED_CLASSES:
                homes[node.name].append(module)
    for name, where in homes.items():
        for module in where[1:]:
            yield Violation(module.room, f"{module.name} {name} (also in {where[0].name})")


def violations() -> list[Violation]:
    in_modules = [v for m in modules() for v in (*vague_names(m), *fragments(m))]
    return [*in_modules, *shared_class_names(modules())]


def test_the_sources_have_no_violation() -> None:
    assert [v.text for v in violations()] == []


def test_allowed_names_and_classes_are_in_use() -> None:
    present = {(m.name, name.strip("_").lower()) for m in modules() for name, _ in names(m.tree)}
    assert set(ALLOWED_NAMES) <= present
    classes = Counter(n.name for m in modules() for n in m.tree.body if isinstance(n, ast.ClassDef))
    assert [name for name in ALLOWED_CLASSES if classes[name] < 2] == []


def test_the_rules_see_what_they_forbid() -> None:
    source = (
        '"""By name: a module."""\nclass Row: ...\nclass Held:\n    told: int = 0\n\n'
        'def given(asked, *, words):\n    """Of a function."""\n    self.kept = found = [each for each in asked]\n'
    )
    module = Module("plan", "plan/new.py", ast.parse(source))
    assert sorted(v.text.split()[-1] for v in vague_names(module)) == sorted(
        ["Held", "told", "given", "asked", "words", "kept", "found", "each"]
    )
    assert [v.text for v in fragments(module)] == ["plan/new.py:1 By name: a module.", "plan/new.py:6 Of a function."]
    other = Module("lab", "lab/new.py", ast.parse("class Row: ...\nclass Result: ...\n"))
    third = Module("lab", "lab/other.py", ast.parse("class Result: ...\n"))
    assert [v.text for v in shared_class_names([module, other, third])] == [
        "lab/new.py Row (also in plan/new.py)",
        "lab/other.py Result (also in lab/new.py)",
    ]
