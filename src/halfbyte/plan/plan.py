"""Plan: selected phases bound to one model's weights; running a step is running its regime's launches in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import OTHER, Part, state
from halfbyte.plan.phase import ALL_LAYERS, OPERATIONS, ROLES, SEGMENTS, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Declared, Difference, PhaseRun, Record, Selection
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import REGIMES, Regime, RegimeLimits, Step


@dataclass
class Bound:
    phase: Phase
    launch: Launch
    formats: dict[str, str]  # role -> format of the weights it was bound to (the model checks that they are)
    part: Part  # what its launches are for, unless the phase says more (`launches.begin`)


@dataclass
class Plan:
    spec: Spec
    selection: Selection
    bound: dict[Regime, list[Bound]]
    arch: Arch
    limits: RegimeLimits  # which regime a step's rows belong to: the architecture's, unless a test moves them
    record: Record = field(default_factory=Record)

    def regime(self, step: Step) -> Regime:
        return step.regime or self.limits.regime(step.rows)

    def run(self, step: Step, acts: Activations | None = None) -> Activations:
        """Run all launches of the step's regime. Returns the activations; `logits` is the result."""
        acts = Activations() if acts is None else acts
        for _ in self.walk(step, acts):
            pass
        return acts

    def walk(self, step: Step, acts: Activations) -> Iterator[Bound]:
        """Run the step and stop after each phase, for observers. Every launch of a plan is recorded here."""
        regime, rows, into, now = self.regime(step), step.rows, self.record.into, state()
        for b in self.bound[regime]:
            run = into.phases.get((b.phase.name, regime)) or self._first_run(b, regime)
            run.runs += 1
            if rows < run.fewest_rows:
                run.fewest_rows = rows
            if rows > run.most_rows:
                run.most_rows = rows
            now.sink, now.part = run.kernels, b.part
            b.launch(step, acts)
            now.sink, now.part = into.outside, OTHER
            yield b
        self.record.step_done()

    def _first_run(self, b: Bound, regime: Regime) -> PhaseRun:
        p, activation = b.phase, self.spec.at(regime).activation
        run = PhaseRun(p.name, p.category, p.covers, regime, b.formats, self.spec.dtype, activation)
        self.record.into.phases[p.name, regime] = run
        return run

    def differences(self) -> list[Difference]:
        """The differences between the kernels that ran and those that the chosen phases declare."""
        declared: dict[tuple[str, Regime], tuple[Declared, ...]] = {}
        for regime, bound in self.bound.items():
            for phase in dict.fromkeys(b.phase for b in bound):
                views = self.spec.at(regime).views(phase.covers)
                declared[phase.name, regime] = tuple(d for view in views for d in phase.declares(view, self.arch))
        return self.record.differences(self.selection.chosen, declared)


def bind(
    chosen: Chosen,
    selection: Selection,
    spec: Spec,
    arch: Arch,
    binding_of: Callable[[int | None], Binding],
    limits: RegimeLimits | None = None,
) -> Plan:
    """Bind every chosen phase once per layer. A phase that serves several regimes alike is bound once and shared."""
    cache: dict[tuple[int, int | None, str], Bound] = {}
    parts = {phase: Part(phase.category, phase.covers) for phases in chosen.values() for phase in phases}

    def at(phase: Phase, layer: int | None, regime: Regime) -> Bound:
        regime_spec = spec.at(regime).in_layer(phase.covers, layer)
        key = (id(phase), layer, regime_spec.activation)
        if key not in cache:
            roles = [r for op in phase.covers for r in ROLES.get(op, ())]
            launch = phase.bind(replace(binding_of(layer), spec=regime_spec))
            cache[key] = Bound(phase, launch, {r: spec.matrices.text(r) for r in roles}, parts[phase])
        return cache[key]

    bound: dict[Regime, list[Bound]] = {}
    for regime, phases in chosen.items():
        if phases[0].covers == OPERATIONS:
            bound[regime] = [at(phases[0], None, regime)]
            continue
        if phases[0].covers == ALL_LAYERS:
            bound[regime] = [at(p, None, regime) for p in phases]
            continue
        prologue, layer, epilogue = _split(phases)
        bound[regime] = [at(p, None, regime) for p in prologue]
        for index in range(spec.layers):
            bound[regime] += [at(p, index, regime) for p in layer]
        bound[regime] += [at(p, None, regime) for p in epilogue]
    return Plan(spec, selection, bound, arch, limits or arch.limits)


def _split(phases: list[Phase]) -> list[list[Phase]]:
    """Phases in running order, cut at the segment boundaries."""
    rest, parts = list(phases), []
    for operations in SEGMENTS:
        part: list[Phase] = []
        left = len(operations)
        while left > 0:
            part.append(rest.pop(0))
            left -= len(part[-1].covers)
        assert left == 0, f"{part[-1].name} crosses a segment boundary"
        parts.append(part)
    return parts


class Compilation:
    """Compiles what chosen phases will launch, on all cores, while the weights are loaded.

    It starts when it is made; `wait` raises the first error. Binaries go to the cache on disk, where binding and
    launching find them. Each phase names its own work (`Phase.compilations`)."""

    def __init__(self, spec: Spec, chosen: Chosen, arch: Arch, more: Iterable[Callable[[], object]] = ()) -> None:
        jobs: dict[object, Callable[[], object]] = {getattr(job, "args", job): job for job in more}
        for regime in REGIMES:
            for phase in dict.fromkeys(chosen[regime]):
                for view in spec.at(regime).views(phase.covers):
                    for job in phase.compilations(view, arch):
                        jobs.setdefault(getattr(job, "args", job), job)  # two phases may share a program
        self._pool = ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1), thread_name_prefix="halfbyte-compile")
        self._futures: list[Future[object]] = [self._pool.submit(job) for job in jobs.values()]

    def wait(self) -> None:
        try:
            for future in self._futures:
                future.result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
