"""Level 6: gates in combination. Every pair of values that can run together runs in some cell, and every preset does.

Values that the engine refuses by themselves, and pairs that it refuses together, are found without a start and listed
with their reasons; the rest is covered by few cells (a pairwise covering array). A cell is started, asked in every
regime, held against the reference's shortest answer, and timed briefly. Counted are cells that ran, that were refused
and that are INVALID.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.evals.suite import Suite
from halfbyte.gates import AXES, PRESETS, Gates, parse
from halfbyte.lab.levels.answers import MARGIN, MOST, Reference, first_difference
from halfbyte.lab.levels.benchmark import Works, measure
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.peers.asker import Question
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Cell, Check, Result
from halfbyte.model import load

Refuse = Callable[[Gates], str]  # why an engine cannot run these; empty if it can
# Axes of the matrix. Instruction sets and threads are the host's, and have tests of their own.
CROSSED = ("moe_kernel", "linear_kernel", "activation", "layers", "tile", "attention", "sinks", "kv_dtype", "speculate",
           "graphs")  # fmt: skip
LAYERS = ("checkpoint", "q8", "mxfp4", "qkv=q8,o=q8,lm_head=q8")
SHORT = Works(prompts=(128,), tokens=(16,), repeats=1)
ANSWERS = 1  # of the reference, in every cell


@dataclass
class Array:
    """The cells to run, and what was refused before: single values and pairs, with reasons."""

    cells: list[Gates] = field(default_factory=list)
    refused_values: dict[tuple[str, str], str] = field(default_factory=dict)
    refused_pairs: dict[tuple[tuple[str, str], tuple[str, str]], str] = field(default_factory=dict)


def values_of(axis: str) -> tuple[str, ...]:
    if axis == "layers":
        return LAYERS
    return next(a.values for a in AXES if a.field == axis)


def gates_of(values: Mapping[str, str]) -> Gates:
    """Gates from the text of some axes, the others at their defaults."""
    return parse(dict(values), env={})


def covering(refuse: Refuse, axes: Mapping[str, Sequence[str]] | None = None) -> Array:
    """Cells that together hold every pair of values which an engine accepts together."""
    axes = axes or {name: values_of(name) for name in CROSSED}
    array = Array()
    usable: dict[str, list[str]] = {}
    for axis, values in axes.items():
        usable[axis] = []
        for value in values:
            why = refuse(gates_of({axis: value}))
            if why:
                array.refused_values[axis, value] = why
            else:
                usable[axis].append(value)
        if not usable[axis]:
            raise UsageError(f"the engine refuses every value of {axis}: {why}")
    wanted: set[frozenset[tuple[str, str]]] = set()
    for (a, xs), (b, ys) in itertools.combinations(usable.items(), 2):
        for x, y in itertools.product(xs, ys):
            why = refuse(gates_of({a: x, b: y}))
            if why:
                array.refused_pairs[(a, x), (b, y)] = why
            else:
                wanted.add(frozenset([(a, x), (b, y)]))
    array.cells = [gates_of(row) for row in _rows(usable, wanted, set(array.refused_pairs), refuse)]
    return array


Value = tuple[str, str]  # axis, value


def _rows(
    usable: Mapping[str, Sequence[str]],
    wanted: set[frozenset[Value]],
    refused: set[tuple[Value, Value]],
    refuse: Refuse,
) -> list[dict[str, str]]:
    """Greedily: a pair that is still missing, then axis by axis the value that brings most missing pairs with it.

    A library would do this without the refusals; with them nearly every row of it is refused. What a row cannot take,
    because an engine refuses three values together, stays at its default."""
    bad = {frozenset(pair) for pair in refused}
    missing, rows = set(wanted), list[dict[str, str]]()
    order = sorted(usable, key=lambda axis: -len(usable[axis]))
    while missing:
        seed = min(missing, key=lambda pair: (-_weight(pair, missing), sorted(pair)))
        row = dict(seed)
        for axis in order:
            if axis in row:
                continue
            fitting = [v for v in usable[axis] if not any(frozenset([(axis, v), o]) in bad for o in row.items())]
            for value in sorted(
                fitting, key=lambda v: -_gain((axis, v), row, missing)
            ):  # the default first, where even
                if not refuse(gates_of({**row, axis: value})):
                    row[axis] = value
                    break
        rows.append(row)
        missing -= {frozenset(two) for two in itertools.combinations(row.items(), 2)}
    seen = {value for row in rows for value in row.items()}
    return rows + [{axis: v} for axis, values in usable.items() for v in values if (axis, v) not in seen]


def _weight(pair: frozenset[Value], missing: set[frozenset[Value]]) -> int:
    return sum(1 for other in missing if pair & other)


def _gain(value: Value, row: Mapping[str, str], missing: set[frozenset[Value]]) -> int:
    return sum(frozenset([value, other]) in missing for other in row.items())


# ---- running ---------------------------------------------------------------------------------------------------------


def check_matrix(
    subject: Subject, works: Works = SHORT, reference: Reference | None = None, full: Sequence[str] = ()
) -> list[Result]:
    """Presets first, then the covering array, or all combinations of the axes in `full`; refusals without a start
    last."""

    def refuse(gates: Gates) -> str:
        return " ".join(subject.peer.launch(replace(subject.setup, gates=gates)).refusals)

    array = every(refuse, full) if full else covering(refuse)
    todo: dict[Gates, str] = {}
    for name, preset in PRESETS.items():
        todo.setdefault(preset.gates, name)
    for gates in array.cells:
        todo.setdefault(gates, "")
    results: list[Result] = []
    for number, (gates, name) in enumerate(todo.items(), 1):
        subject.progress(f"matrix, cell {number} of {len(todo)}")
        why = refuse(gates)
        if why:
            results.append(Result(_cell(subject, gates, name), refused=_first_line(why)))
        else:
            results.append(run_cell(subject, gates, name, works, reference))
    for (axis, value), why in array.refused_values.items():
        results.append(Result(_cell(subject, gates_of({axis: value}), ""), refused=_first_line(why)))
    for pair, why in array.refused_pairs.items():
        results.append(Result(_cell(subject, gates_of(dict(pair)), ""), refused=_first_line(why)))
    return results


def every(refuse: Refuse, axes: Sequence[str]) -> Array:
    """All combinations of these axes' values."""
    if unknown := [a for a in axes if a not in CROSSED]:
        raise UsageError(f"there is no axis {unknown[0]!r} in the matrix; use {', '.join(CROSSED)}.")
    array = Array()
    for values in itertools.product(*(values_of(a) for a in axes)):
        gates = gates_of(dict(zip(axes, values)))
        if gates not in array.cells:
            array.cells.append(gates)
    return array


def _cell(subject: Subject, gates: Gates, preset: str) -> Cell:
    return replace(subject.cell("matrix", gates), preset=preset)


def _first_line(why: str) -> str:
    lines = why.splitlines()
    return " ".join(line.strip() for line in lines[:3])[:400]


def run_cell(subject: Subject, gates: Gates, name: str, works: Works, reference: Reference | None) -> Result:
    """One start: its figures in one result."""
    cell = _cell(subject, gates, name)

    def first(engine: PeerProcess) -> list[Check]:
        judged = reference is not None and gates.sinks != "off"  # without sinks the answers are wrong, as they say
        return short_answers(subject, engine, reference) if judged and reference is not None else []

    parts = measure(subject, gates, works, f"matrix {name or 'cell'}", first)
    bad = next((r for r in parts if r.refused), None)
    if bad is not None:
        return replace(bad, cell=cell)
    figures = []
    for r in parts:
        speed = r.figure("speed")
        figures.append(replace(speed, name="prompt" if "pp" in r.cell.shape else "decode"))
    detail: dict[str, Any] = {"start_s": parts[0].detail.get("start_s")}
    return Result(cell, tuple(figures), record=parts[0].record, detail=detail)


def counts(results: Sequence[Result]) -> Counter[str]:
    return Counter("INVALID" if r.invalid else "refused" if r.refused else "run" for r in results)


def counted(results: Sequence[Result]) -> str:
    found = counts(results)
    return ", ".join(f"{found[state]} {state}" for state in ("run", "refused", "INVALID"))


def short_answers(subject: Subject, engine: PeerProcess, reference: Reference) -> list[Check]:
    """The reference's shortest answers: where they first differ, the reference must not have been sure."""
    suite = Suite(reference.suite, reference.seed, reference.per_task)
    items = suite.items(load.tokenizer_of(subject.model))
    shortest = sorted(zip(items, reference.answers), key=lambda pair: len(pair[0].prompt) + 4 * len(pair[1].tokens))
    worst = 0.0
    for item, answer in shortest[:ANSWERS]:
        reply = engine.asker.ask(Question(item.prompt, tokens=MOST))
        at = first_difference(reply.tokens or (), answer.tokens)
        if at is not None:
            worst = max(worst, answer.margins[at] if at < len(answer.margins) else math.inf)
    return [Check("margin at the first difference", worst <= MARGIN, worst if math.isfinite(worst) else None, MARGIN)]
