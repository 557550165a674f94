"""Plan: selected phases bound to one model's weights; running a step is running its regime's launches in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import OPERATIONS, ROLES, SEGMENTS, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Record, Run, Selection
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import Regime, RegimeLimits, Step


@dataclass
class Bound:
    phase: Phase
    launch: Launch
    formats: dict[str, str]  # role -> format of the weights it was bound to (the model checks that they are)


@dataclass
class Plan:
    spec: Spec
    selection: Selection
    bound: dict[Regime, list[Bound]]
    limits: RegimeLimits  # which regime a step's rows belong to
    record: Record = field(default_factory=Record)
    recording: bool = True

    def regime(self, step: Step) -> Regime:
        return self.limits.regime(step.rows)

    def run(self, step: Step, acts: Activations | None = None) -> Activations:
        """All launches of the step's regime. Returns the activations; `logits` is the result."""
        acts = Activations() if acts is None else acts
        regime = self.regime(step)
        for b in self.bound[regime]:
            b.launch(step, acts)
            if self.recording:
                self.record.add(self._run(b, regime, acts))
        return acts

    def _run(self, b: Bound, regime: Regime, acts: Activations) -> Run:
        tensors = acts.tensors()
        return Run(
            phase=b.phase.name,
            covers=b.phase.covers,
            regime=regime,
            formats=b.formats,
            dtype=self.spec.dtype,
            activation=self.spec.at(regime).activation,
            shapes={n: tuple(tensors[n].shape) for n in OUTPUTS[b.phase.covers[-1]] if n in tensors},
        )


# The activations an operation leaves behind.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "embed": ("x",), "attn_norm": ("h",), "qkv": ("q", "k", "v"), "rope": ("q", "k"), "kv_write": (),
    "attention": ("attn",), "o": ("x",), "mlp_norm": ("h",), "router": ("topk_ids", "topk_weights"), "moe": ("x",),
    "final_norm": ("h",), "lm_head": ("logits",),
}  # fmt: skip


def bind(
    chosen: Chosen,
    selection: Selection,
    spec: Spec,
    limits: RegimeLimits,
    binding_of: Callable[[int | None], Binding],
) -> Plan:
    """Bind every chosen phase once per layer. A phase that serves several regimes alike is bound once and shared."""
    cache: dict[tuple[int, int | None, str], Bound] = {}

    def at(phase: Phase, layer: int | None, regime: Regime) -> Bound:
        here = spec.at(regime)
        key = (id(phase), layer, here.activation)
        if key not in cache:
            roles = [r for op in phase.covers for r in ROLES.get(op, ())]
            launch = phase.bind(replace(binding_of(layer), spec=here))
            cache[key] = Bound(phase, launch, {r: spec.formats[r] for r in roles})
        return cache[key]

    bound: dict[Regime, list[Bound]] = {}
    for regime, phases in chosen.items():
        if phases[0].covers == OPERATIONS:
            bound[regime] = [at(phases[0], None, regime)]
            continue
        prologue, layer, epilogue = _split(phases)
        bound[regime] = [at(p, None, regime) for p in prologue]
        for index in range(spec.layers):
            bound[regime] += [at(p, index, regime) for p in layer]
        bound[regime] += [at(p, None, regime) for p in epilogue]
    return Plan(spec, selection, bound, limits)


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
