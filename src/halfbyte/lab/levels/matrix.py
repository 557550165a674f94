"""Level 6: gates in combination. Every pair of values that can run together runs in some cell, and every preset does.

Values that the engine refuses by themselves, and pairs that it refuses together, are found without a start and listed
with their reasons; the rest is covered by few cells (a pairwise covering array). A cell is started, asked in every
regime, held against the reference's shortest answer, and timed briefly. On a CPU as many engines as it has cores are
started and asked side by side, since most of a start is one thread's work, each with its share of the threads: two that
both take all cores wait for one another. They are timed one at a time, the others idle. Counted are cells that ran,
that were refused and that are INVALID.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from halfbyte.errors import UsageError
from halfbyte.evals.suite import Suite
from halfbyte.gates import AXES, PRESETS, Gates, inherited, parse
from halfbyte.lab.levels.benchmark import EngineMeasurement, play_works
from halfbyte.lab.levels.correctness import MARGIN, MOST, Reference, ReferenceAnswer, first_difference
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.machine import cores
from halfbyte.lab.measure.rounds import RunLog
from halfbyte.lab.options import Works
from halfbyte.lab.peers.asker import Question
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import DISTURBED, Cell, Check, Result, read_result
from halfbyte.model import load

Refuse = Callable[[Gates], str]  # why an engine cannot run these; empty if it can
ReferencePair = tuple[Sequence[int], ReferenceAnswer]  # a prompt, and what the reference answers to it
# Axes of the matrix. Instruction sets and threads are the host's, and have tests of their own.
CROSSED = ("moe_kernel", "linear_kernel", "activation", "layers", "tile", "attention", "sinks", "kv_dtype", "speculate",
           "graphs")  # fmt: skip
LAYERS = ("checkpoint", "q8", "mxfp4", "qkv=q8,o=q8,lm_head=q8")
SHORT = Works(prompts=(128,), tokens=(32,), repeats=1)
ANSWERS = 1  # of the reference, in every cell
SIDE_BY_SIDE = 4  # engines that are started together, at most
THREADS = "OMP_NUM_THREADS"  # of torch, of halfbyte's CPU kernels and of most other engines
NOT_TIMED = "not_timed"  # in a result's detail: why a cell that ran has no figures
ROOM = 2 << 30  # bytes of memory that one of these needs beside its weights


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
    uncovered: set[frozenset[tuple[str, str]]] = set()
    for (a, xs), (b, ys) in itertools.combinations(usable.items(), 2):
        for x, y in itertools.product(xs, ys):
            why = refuse(gates_of({a: x, b: y}))
            if why:
                array.refused_pairs[(a, x), (b, y)] = why
            else:
                uncovered.add(frozenset([(a, x), (b, y)]))
    array.cells = [gates_of(row) for row in _rows(usable, uncovered, set(array.refused_pairs), refuse)]
    return array


Value = tuple[str, str]  # axis, value


def _rows(
    usable: Mapping[str, Sequence[str]],
    uncovered: set[frozenset[Value]],
    refused: set[tuple[Value, Value]],
    refuse: Refuse,
) -> list[dict[str, str]]:
    """Greedily: a pair that is still missing, then axis by axis the value that brings most missing pairs with it.

    A library would do this without the refusals; with them nearly every row of it is refused. What a row cannot take,
    because an engine refuses three values together, stays at its default."""
    bad = {frozenset(pair) for pair in refused}
    missing, rows = set(uncovered), list[dict[str, str]]()
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
    subject: Subject,
    works: Works = SHORT,
    reference: Reference | None = None,
    full: Sequence[str] = (),
    log: RunLog | None = None,
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
    refusals = {gates: why for gates in todo if (why := refuse(gates))}
    started = [(gates, name) for gates, name in todo.items() if gates not in refusals]
    results = run_cells(subject, started, works, reference, log)
    results += [Result(_cell(subject, gates, todo[gates]), refused=_first_line(why)) for gates, why in refusals.items()]
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


def side_by_side(subject: Subject) -> int:
    """Engines that can be started together. A GPU's memory is one engine's; so is one that somebody else started."""
    if subject.peer.launch(subject.setup).url or load.resolve_device(subject.setup.device).type != "cpu":
        return 1
    engine_bytes = ROOM + 2 * load.weight_bytes(subject.model, Gates())
    return max(1, min(cores(), SIDE_BY_SIDE, int(psutil.virtual_memory().available) // engine_bytes))


def with_threads(subject: Subject, count: int) -> Subject:
    """Its engines take so many threads each, unless somebody said otherwise."""
    environment = {THREADS: str(count), **{k: v for k, v in inherited().items() if k == THREADS}}
    setup = replace(subject.setup, environment={**environment, **subject.setup.environment})
    return replace(subject, setup=setup)


def run_cells(
    subject: Subject,
    cells: Sequence[tuple[Gates, str]],
    works: Works,
    reference: Reference | None,
    log: RunLog | None = None,
) -> list[Result]:
    """One start each: a cell's figures in one result. What an interrupted run measured, its log has."""
    logged = {gates: entry for gates, _ in cells if log is not None and (entry := log.result(_key(gates))) is not None}
    results = {gates: read_result(entry) for gates, entry in logged.items()}
    cells, all_cells = [(gates, name) for gates, name in cells if gates not in results], cells
    together = side_by_side(subject)
    subject = with_threads(subject, max(1, cores() // together)) if together > 1 else subject
    pairs = [] if reference is None else shortest_answers(subject, reference)
    with ThreadPoolExecutor(together) as pool:  # for all of them: an engine ends with the thread that started it
        for at in range(0, len(cells), together):
            group = cells[at : at + together]
            subject.progress(f"matrix, cells {at + 1} to {at + len(group)} of {len(cells)}")
            running = [_measurement(subject, gates, name, works, pairs) for gates, name in group]
            try:
                list(pool.map(EngineMeasurement.start, running))
                for measurement in running:
                    measurement.time()
            finally:
                list(pool.map(EngineMeasurement.end, running))
            for measurement, (gates, name) in zip(running, group):
                results[gates] = _result(subject, measurement, name)
                if log is not None and results[gates].figures:  # what failed, or was not timed, is tried again
                    log.keep(_key(gates), results[gates])
    return [results[gates] for gates, _ in all_cells]


def _key(gates: Gates) -> str:
    return str(sorted(gates.changes().items()))


def _measurement(
    subject: Subject, gates: Gates, name: str, works: Works, pairs: Sequence[ReferencePair]
) -> EngineMeasurement:
    def first(engine: PeerProcess) -> list[Check]:
        # Without sinks the answers are wrong, as they say.
        return compare_answers(engine, pairs) if pairs and gates.sinks != "off" else []

    engine = subject.process(f"matrix {name or 'cell'}", gates)
    return EngineMeasurement(subject, gates, play_works(works, subject), engine, first)


def _result(subject: Subject, ended: EngineMeasurement, name: str) -> Result:
    cell, parts = _cell(subject, ended.gates, name), ended.results()
    busy = [r for r in parts if r.detail.get(DISTURBED)]
    parts = [r for r in parts if r not in busy]
    bad = next((r for r in parts if r.refused), None)
    if bad is not None and ended.failed is None and not bad.invalid:  # it ran: nobody refused anything
        bad = bad.invalidated("it ran and could not be measured")
    if bad is not None:
        return replace(bad, cell=cell)
    figures = []
    for r in parts:
        speed = r.figure("speed")
        figures.append(replace(speed, name="prompt" if "pp" in r.cell.shape else "decode"))
    record, first = (parts or busy)[0].record, (parts or busy)[0].detail
    detail: dict[str, Any] = {"start_s": first.get("start_s")}
    if busy:  # started, asked and right, which is what a matrix is about
        detail[NOT_TIMED] = busy[0].refused
    if THREADS in subject.setup.environment:
        detail["threads"] = subject.setup.environment[THREADS]
    return Result(cell, tuple(figures), record=record, detail=detail)


def counts(results: Sequence[Result]) -> Counter[str]:
    return Counter("INVALID" if r.invalid else "refused" if r.refused else "run" for r in results)


def counted(results: Sequence[Result]) -> str:
    states, busy = counts(results), sum(NOT_TIMED in r.detail for r in results)
    text = ", ".join(f"{states[state]} {state}" for state in ("run", "refused", "INVALID"))
    return f"{text}; {busy} were not timed, because the machine did other work" if busy else text


def shortest_answers(subject: Subject, reference: Reference) -> list[ReferencePair]:
    """The values that cost an engine least."""
    suite = Suite(reference.suite, reference.seed, reference.per_task)
    items = suite.items(load.tokenizer_of(subject.model))
    pairs: list[ReferencePair] = [(item.prompt, answer) for item, answer in zip(items, reference.answers)]
    return sorted(pairs, key=lambda pair: len(pair[0]) + 4 * len(pair[1].tokens))[:ANSWERS]


def compare_answers(engine: PeerProcess, pairs: Sequence[ReferencePair]) -> list[Check]:
    """Where an answer first differs from the reference's, that must not have been sure."""
    worst = 0.0
    for prompt, answer in pairs:
        reply = engine.asker.ask(Question(prompt, tokens=MOST))
        at = first_difference(reply.tokens or (), answer.tokens)
        if at is not None:
            worst = max(worst, answer.margins[at] if at < len(answer.margins) else math.inf)
    return [Check("margin at the first difference", worst <= MARGIN, worst if math.isfinite(worst) else None, MARGIN)]
