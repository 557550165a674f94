"""Plan: selected phases bound to one model's weights; running a step is running its regime's launches in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import OTHER, Part, state
from halfbyte.plan.phase import ALL_LAYERS, OPERATIONS, ROLES, SEGMENTS, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Declared, Difference, PhaseRun, Record, Selection
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import Regime, RegimeLimits, Step


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
        return self.limits.regime(step.rows)

    def run(self, step: Step, acts: Activations | None = None) -> Activations:
        """All launches of the step's regime. Returns the activations; `logits` is the result."""
        acts = Activations() if acts is None else acts
        for _ in self.walk(step, acts):
            pass
        return acts

    def walk(self, step: Step, acts: Activations) -> Iterator[Bound]:
        """The same, phase by phase, for whoever looks on between them. Every launch of a plan is recorded here."""
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
        """Between what ran and what the chosen phases declare."""
        declared: dict[tuple[str, Regime], tuple[Declared, ...]] = {}
        for regime, bound in self.bound.items():
            for phase in dict.fromkeys(b.phase for b in bound):
                declared[phase.name, regime] = tuple(phase.declares(self.spec.at(regime), self.arch))
        return self.record.differences(self.selection.chosen, declared)


def bind(
    chosen: Chosen,
    selection: Selection,
    spec: Spec,
    arch: Arch,
    binding_of: Callable[[int | None], Binding],
) -> Plan:
    """Bind every chosen phase once per layer. A phase that serves several regimes alike is bound once and shared."""
    cache: dict[tuple[int, int | None, str], Bound] = {}
    parts = {phase: Part(phase.category, phase.covers) for phases in chosen.values() for phase in phases}

    def at(phase: Phase, layer: int | None, regime: Regime) -> Bound:
        regime_spec = spec.at(regime)
        key = (id(phase), layer, regime_spec.activation)
        if key not in cache:
            roles = [r for op in phase.covers for r in ROLES.get(op, ())]
            launch = phase.bind(replace(binding_of(layer), spec=regime_spec))
            cache[key] = Bound(phase, launch, {r: spec.formats[r] for r in roles}, parts[phase])
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
    return Plan(spec, selection, bound, arch, arch.limits)


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
