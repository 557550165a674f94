"""Selection and Record: what was chosen and why, and what ran on the device. Plain values that travel into results.

The record holds kernels, not intentions: every launch counts under the name and the hash of the binary that was loaded,
for the phase and the regime it ran in. A captured graph is asked for its nodes, so that what a replay runs is what the
driver holds; each replay adds one to a number. `differences` holds the record against what the chosen phases declare
and names every difference. Nothing here launches or corrects anything.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from halfbyte.plan.launches import OTHER, SAMPLING, Counts, state
from halfbyte.plan.step import Regime

GRAPH_READER = "halfbyte.kernels.graph_nodes"  # asks the driver; found when a graph is read, as kernels are


@dataclass(frozen=True)
class Refusal:
    phase: str
    regime: Regime
    reason: str


@dataclass(frozen=True)
class Selection:
    """The phases of each regime in running order, the layout each weight takes, and every refusal."""

    arch: str
    chosen: Mapping[Regime, tuple[str, ...]]
    layouts: Mapping[str, str]
    formats: Mapping[str, str]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class NodeKernel(NamedTuple):
    """A kernel of a captured graph, as the driver names it."""

    name: str
    module: str  # hash of its binary; empty for torch's own kernels, which halfbyte did not load


@dataclass(frozen=True)
class Declared:
    """A kernel that a phase declares that it may launch."""

    name: str
    modules: frozenset[str]  # hashes of the binaries that its compiler gave; empty: none was compiled here


@dataclass
class PhaseRun:
    """One phase as it ran in one regime: with the formats it was bound to, and the kernels it launched."""

    phase: str
    category: str
    covers: tuple[str, ...]
    regime: Regime
    formats: Mapping[str, str]  # role -> format of the bound weight
    dtype: str
    activation: str
    runs: int = 0  # launches of the phase, one a layer
    fewest_rows: int = 1 << 62
    most_rows: int = 0
    kernels: Counts = field(default_factory=Counts)

    def as_dict(self, times: int = 1) -> dict[str, Any]:
        return {
            "phase": self.phase, "category": self.category, "covers": list(self.covers), "formats": dict(self.formats),
            "dtype": self.dtype, "activation": self.activation, "runs": self.runs * times,
            "rows": [self.fewest_rows, self.most_rows], "kernels": _kernels(self.kernels, times),
        }  # fmt: skip


@dataclass
class Runs:
    """Phases that ran one way: eagerly, or in one graph. `outside`: launches of no phase (sampling)."""

    phases: dict[tuple[str, Regime], PhaseRun] = field(default_factory=dict)
    outside: Counts = field(default_factory=Counts)

    def loaded(self) -> Counter[NodeKernel]:
        """Launches of kernels that were loaded here."""
        counts: Counter[NodeKernel] = Counter()
        for kernels in (*(run.kernels for run in self.phases.values()), self.outside):
            for (image, _), count in kernels.items():
                if image.loaded:
                    counts[NodeKernel(image.name, image.module)] += count
        return counts


@dataclass
class GraphRun(Runs):
    """The kernels of one captured graph, and how often it was replayed."""

    regime: Regime = "decode"
    rows: int = 0
    replays: int = 0
    nodes: Counter[NodeKernel] | None = None  # None: the launches counted while it was captured are all that is known
    unread: str = ""  # why

    def read(self, graph: int) -> None:
        """Read the kernels from the driver. If that fails, the record shows the reason."""
        try:
            self.nodes = Counter(importlib.import_module(GRAPH_READER).kernels(graph))
        except Exception as e:  # a record must not cost the step that it describes
            self.unread = f"{type(e).__name__}: {e}"

    @property
    def others(self) -> Counter[NodeKernel]:
        """Nodes of kernels that halfbyte did not load: torch's own."""
        return Counter({node: n for node, n in (self.nodes or {}).items() if not node.module})


@dataclass(frozen=True)
class Difference:
    """A kernel that ran and was not declared, or the reverse."""

    regime: Regime
    phase: str  # empty: of no phase
    problem: str

    def __str__(self) -> str:
        return f"{self.phase or 'outside of the phases'} ({self.regime}): {self.problem}"


@dataclass
class Record:
    """The kernels that ran, eagerly and in graphs."""

    eager: Runs = field(default_factory=Runs)
    graphs: list[GraphRun] = field(default_factory=list)
    into: Runs = field(init=False)  # where launches count now

    def __post_init__(self) -> None:
        self.into = self.eager

    @contextmanager
    def capturing(self, regime: Regime, rows: int) -> Iterator[GraphRun]:
        """Count launches for a graph while it is captured: they do not run."""
        graph = GraphRun(regime=regime, rows=rows)
        self.into = graph
        now = state()
        now.sink, now.part = graph.outside, OTHER
        try:
            yield graph
        finally:
            self.into = self.eager
            self.step_done()
        self.graphs.append(graph)

    def step_done(self) -> None:
        """Count this thread's launches as sampling until the next step."""
        now = state()
        now.sink, now.part = self.into.outside, SAMPLING

    def ran(self) -> Iterator[tuple[Runs, int]]:
        """The eager runs and each graph that was replayed, with the number of replays."""
        yield self.eager, 1
        for graph in self.graphs:
            if graph.replays:
                yield graph, graph.replays

    def phases(self, regime: Regime | None = None) -> set[str]:
        return {name for runs, _ in self.ran() for name, where in runs.phases if regime in (None, where)}

    def runs(self, regime: Regime | None = None) -> list[PhaseRun]:
        """Phase runs over eager and graph execution; a graph counts one replay."""
        return [run for runs, _ in self.ran() for run in runs.phases.values() if regime in (None, run.regime)]

    def launches(self, regime: Regime | None = None) -> Counter[NodeKernel]:
        """How often each kernel of a phase ran on the device."""
        total: Counter[NodeKernel] = Counter()
        for runs, times in self.ran():
            for run in runs.phases.values():
                if regime in (None, run.regime):
                    for (image, _), count in run.kernels.items():
                        total[NodeKernel(image.name, image.module)] += count * times
        return total

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `regimes`, each with the ways it ran, and `outside`, the launches of no phase."""
        regimes: dict[str, list[dict[str, Any]]] = {}
        outside: list[dict[str, Any]] = []
        for runs, times in self.ran():
            way: dict[str, Any] = {"way": "eager"}
            if isinstance(runs, GraphRun):
                way = {"way": f"graph of {runs.rows} rows", "replays": runs.replays} | _nodes(runs)
            for regime in dict.fromkeys(where for _, where in runs.phases):
                mine = [run.as_dict(times) for run in runs.phases.values() if run.regime == regime]
                regimes.setdefault(regime, []).append(way | {"phases": mine})
            outside += [{"way": way["way"]} | kernel for kernel in _kernels(runs.outside, times)]
        return {"regimes": regimes, "outside": outside}

    def differences(
        self, chosen: Mapping[Regime, Sequence[str]], declared: Mapping[tuple[str, Regime], Iterable[Declared]]
    ) -> list[Difference]:
        """The differences from what the chosen phases declare; empty where exactly those ran."""
        named: dict[Difference, None] = {}
        for runs, _ in self.ran():
            for regime in dict.fromkeys(where for _, where in runs.phases):
                for name in chosen[regime]:
                    if (name, regime) not in runs.phases:
                        named[Difference(regime, name, "was chosen and never ran")] = None
            for (name, regime), run in runs.phases.items():
                if name not in chosen[regime]:
                    named[Difference(regime, name, "ran and was not chosen")] = None
                modules: dict[str, frozenset[str]] = {}
                for d in declared.get((name, regime), ()):
                    modules[d.name] = modules.get(d.name, frozenset()) | d.modules
                named |= dict.fromkeys(Difference(regime, name, text) for text in _undeclared(run, modules))
            if isinstance(runs, GraphRun):
                named |= dict.fromkeys(_graph_differences(runs))
        return list(named)


def _undeclared(run: PhaseRun, modules: Mapping[str, frozenset[str]]) -> Iterator[str]:
    if not run.kernels:
        yield "ran without a kernel on record"
    for image in dict.fromkeys(image for image, _ in run.kernels):
        if image.name not in modules:
            yield f"launched {image.name} ({image.module}), which it does not declare"
        elif image.module not in modules[image.name]:
            built = ", ".join(sorted(modules[image.name])) or "none was compiled here"
            yield f"launched another build of {image.name} ({image.module}; declared: {built})"


def _graph_differences(graph: GraphRun) -> Iterator[Difference]:
    """Between the nodes that the driver holds and the launches that were counted while they were captured."""
    if graph.nodes is None:
        return
    counted = graph.loaded()
    nodes = Counter({node: n for node, n in graph.nodes.items() if node.module})
    where = f"in the graph of {graph.rows} rows"
    for node in dict.fromkeys((*counted, *nodes)):
        if counted[node] != nodes[node]:
            text = f"{where} {node.name} ({node.module}) stands {nodes[node]} times, launched {counted[node]} times"
            yield Difference(graph.regime, "", text)


def _nodes(graph: GraphRun) -> dict[str, Any]:
    if graph.nodes is None:
        return {"source": f"launches counted at capture ({graph.unread or 'the graph was not read'})"}
    others = [{"name": node.name, "launches": n * graph.replays} for node, n in sorted(graph.others.items())]
    return {"source": "graph nodes", "nodes": graph.nodes.total(), "other": others}


def _kernels(counts: Counts, times: int) -> list[dict[str, Any]]:
    total: Counter[tuple[str, str, str, tuple[str, ...]]] = Counter()
    for (image, part), count in counts.items():
        total[image.name, image.module, part.category, part.operations] += count * times
    return [
        {"name": name, "module": module, "category": category, "operations": list(operations), "launches": count}
        for (name, module, category, operations), count in total.items()
    ]
