"""Choosing phases: every regime's operations covered, one physical layout per weight, a reason for each refusal.

`auto` takes the phase of highest rank that does not refuse; an explicit gate runs exactly what it names or fails with
every reason. The reference is never taken by `auto` on a GPU. Kernels are found by module name and imported lazily,
so a machine without Triton or CUDA can still explain what another machine would run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from halfbyte.errors import PlanError
from halfbyte.gates import Gates
from halfbyte.plan.phase import ALL_LAYERS, AXIS, OPERATIONS, Arch, Phase, Spec
from halfbyte.plan.record import Refusal, Selection
from halfbyte.plan.step import REGIMES, Regime, kernels_of

# Modules that define `PHASES: tuple[Phase, ...]`. Listed by name so that plan imports no kernel.
PROVIDERS = ("halfbyte.plan.reference", "halfbyte.kernels.catalog")

# Gate values that belong to engines we lend kernels to, or to kernels that do not exist for an operation.
ABSENT = {
    "cutlass": "FlashInfer's CUTLASS kernel multiplies experts, not dense layers",
    "flash_attn": "FlashAttention runs inside vLLM only (serve --engine vllm)",
    "vllm": "vLLM's own kernels run inside vLLM only (serve --engine vllm)",
}
# Backends that cannot be had for a part of a step.
INDIVISIBLE = {
    "cpu": "the CPU kernels run a step in one piece: --moe-kernel, --linear-kernel and --attention take cpu or auto",
}

Chosen = dict[Regime, list[Phase]]


@dataclass(frozen=True)
class PlanChoice:
    """How a model will run: its spec, the phases of every regime, and the reasons for them."""

    spec: Spec
    chosen: Chosen
    selection: Selection


def all_phases() -> list[Phase]:
    phases: list[Phase] = []
    for name in PROVIDERS:
        phases += importlib.import_module(name).PHASES
    return phases


def select(spec: Spec, arch: Arch, gates: Gates, phases: Iterable[Phase] | None = None) -> tuple[Chosen, Selection]:
    """The phases of every regime in running order (a layer's phases stand once), and the reasons."""
    candidates = list(all_phases() if phases is None else phases)
    _check_deterministic(spec, arch, gates)
    refusals: list[Refusal] = []
    usable: dict[Regime, list[Phase]] = {}
    for regime in REGIMES:
        usable[regime] = []
        for phase in candidates:
            reason = _refusal(phase, spec.at(regime), arch, gates, regime)
            if reason is None:
                usable[regime].append(phase)
            else:
                refusals.append(Refusal(phase.name, regime, reason))
    conflicts: list[Refusal] = []
    chosen = _cover(usable, spec, conflicts)
    if chosen is None:
        raise PlanError(_explain_failure(usable, candidates, refusals, conflicts, gates, arch))
    if not any(spec.tile in phase.tiles for phases_of in chosen.values() for phase in phases_of):
        moe = ", ".join(dict.fromkeys(p.name for phases_of in chosen.values() for p in phases_of if "moe" in p.covers))
        raise PlanError(
            f"--tile {spec.tile} would have no effect on {arch.name}: {moe} cuts no such tiles; leave it out."
        )
    if gates.cpu_instructions != "auto" and not any(_for_cpu(p) for phases_of in chosen.values() for p in phases_of):
        cpu_phases = [p.name for p in candidates if _for_cpu(p)]
        why = dict.fromkeys(f"{r.phase}: {r.reason}" for r in refusals if r.phase in cpu_phases)
        raise PlanError(
            f"--cpu-instructions {gates.cpu_instructions} would have no effect on {arch.name} ({'; '.join(why)}); "
            f"leave it out."
        )
    layouts: dict[str, str] = {}
    for regime, phases_of in chosen.items():
        for phase in phases_of:
            layouts |= layouts_of(phase, spec.at(regime))
    for regime in REGIMES:
        names = {p.name for p in chosen[regime]}
        for phase in usable[regime]:
            if phase.name not in names:
                refusals.append(Refusal(phase.name, regime, _why_not(phase, chosen, regime, spec)))
    return chosen, Selection(
        arch=arch.name,
        chosen={r: tuple(p.name for p in chosen[r]) for r in REGIMES},
        layouts=layouts,
        formats=spec.matrices.texts(),
        refusals=tuple(refusals),
    )


def _check_deterministic(spec: Spec, arch: Arch, gates: Gates) -> None:
    """--deterministic has one set of kernels and formats for prompts and one for answers: refuse gates with more."""
    if gates.deterministic == "off" or not arch.is_gpu:
        return
    for one, other in (("decode", "batch"), ("long", "prefill")):
        axes = [axis for axis in ("moe", "linear") if gates.backend(axis, one) != gates.backend(axis, other)]
        if spec.at(one).activation != spec.at(other).activation or axes:
            flag = f"--{axes[0]}-kernel" if axes else "--activation"
            raise PlanError(
                f"{flag} has other values for {one} than for {other}, but --deterministic runs both with the kernels "
                f"and formats of {other}; give {flag} one value for both."
            )


def _for_cpu(phase: Phase) -> bool:
    return any("cpu" in phase.answers(axis) for axis in phase.backends)


def _refusal(phase: Phase, spec: Spec, arch: Arch, gates: Gates, regime: Regime) -> str | None:
    if kernels_of(regime) not in phase.regimes:
        return f"serves {', '.join(r for r in REGIMES if r in phase.regimes)} only"
    if gates.deterministic == "on":
        if not phase.row_invariant:
            return "adds in an order that depends on the number of rows (--deterministic)"
        if regime == "decode" and "batch" not in phase.regimes:
            return "--deterministic decodes with the kernels of batches, however many rows there are"
    for axis in phase.backends:
        backend = gates.backend(axis, regime)
        if backend not in ("auto", *phase.answers(axis)):
            return f"--{'attention' if axis == 'attention' else axis + '-kernel'} asks for {backend}"
    if arch.is_gpu and phase.reference:
        axes = phase.backends or dict.fromkeys(AXIS.values())  # a phase without an axis follows any of them
        if "reference" not in [gates.backend(axis, regime) for axis in axes]:
            return "the reference is never chosen by auto on a GPU"
    if "moe" in phase.covers and phase.host_experts != bool(spec.host_layers):
        if phase.host_experts:
            return "no expert is in host memory"
        return f"reads experts on the GPU, and those of {spec.host_layers} layers are in host memory"
    unknown = spec.features_of(phase.covers) - phase.knows
    if unknown:
        return f"does not know {', '.join(sorted(unknown))}"
    mixed = spec.matrices.by_layer
    if mixed and phase.covers in (OPERATIONS, ALL_LAYERS) and not phase.mixes:
        role = next(iter(mixed))
        return f"reads {role} in one format in all layers, not in {spec.matrices.text(role)}"
    views = spec.views(phase.covers)
    layouts = [phase.layouts(view) for view in views]
    for view, layout in zip(views, layouts):
        if reason := phase.refuse(view, arch, gates):
            return reason
        if layout != layouts[0]:
            role = next(role for role in layout if layout[role] != layouts[0].get(role))
            return f"needs {role} in another layout for another format: {spec.matrices.text(role)}"
    return None


def layouts_of(phase: Phase, spec: Spec) -> dict[str, str]:
    """The layouts that a phase needs; it has refused formats whose layouts differ."""
    return phase.layouts(spec.views(phase.covers)[0])


def _cover(usable: Mapping[Regime, list[Phase]], spec: Spec, conflicts: list[Refusal]) -> Chosen | None:
    """Cover every operation in every regime so that all agree on each weight's layout: depth-first, best rank first.

    A dead end depends only on where it is and on the layouts held so far, so each is visited once.
    """
    dead: set[tuple[int, int, frozenset[tuple[str, str]]]] = set()

    specs = {regime: spec.at(regime) for regime in REGIMES}

    def layout_conflict(phase: Phase, regime: Regime, layouts: Mapping[str, tuple[str, str]]) -> str | None:
        for role, layout in layouts_of(phase, specs[regime]).items():
            if role in layouts and layouts[role][0] != layout:
                other, owner = layouts[role]
                return f"needs {role} in layout {layout}, but {owner} holds it in {other}"
        return None

    def search(regime_at: int, position: int, layouts: dict[str, tuple[str, str]], so_far: Chosen) -> Chosen | None:
        if regime_at == len(REGIMES):
            return {r: list(p) for r, p in so_far.items()}
        state = (regime_at, position, frozenset((role, layout) for role, (layout, _) in layouts.items()))
        if state in dead:
            return None
        regime = REGIMES[regime_at]
        if position == len(OPERATIONS):
            return search(regime_at + 1, 0, layouts, so_far)
        fitting = [p for p in usable[regime] if OPERATIONS[position : position + len(p.covers)] == p.covers]
        for phase in sorted(fitting, key=lambda p: (-p.rank, -len(p.covers), p.name)):
            reason = layout_conflict(phase, regime, layouts)
            if reason is not None:
                conflicts.append(Refusal(phase.name, regime, reason))
                continue
            needs = layouts_of(phase, specs[regime])
            mine = {role: (layout, phase.name) for role, layout in needs.items() if role not in layouts}
            so_far[regime].append(phase)
            complete = search(regime_at, position + len(phase.covers), layouts | mine, so_far)
            if complete is not None:
                return complete
            so_far[regime].pop()
        dead.add(state)
        return None

    return search(0, 0, {}, {r: [] for r in REGIMES})


def _why_not(phase: Phase, chosen: Chosen, regime: Regime, spec: Spec) -> str:
    """Why a phase that refuses nothing was left out: its layout does not suit another regime, or a better one ran."""
    for other_regime in REGIMES:
        for other in chosen[other_regime]:
            other_layouts = layouts_of(other, spec.at(other_regime))
            for role, layout in layouts_of(phase, spec.at(regime)).items():
                if other_layouts.get(role, layout) != layout:
                    return (
                        f"needs {role} in layout {layout}, but {other.name} ({other_regime}) in {other_layouts[role]}"
                    )
    better = [p.name for p in chosen[regime] if set(p.covers) & set(phase.covers)]
    return f"not needed: {', '.join(dict.fromkeys(better))} is preferred"


def _explain_failure(
    usable: Mapping[Regime, list[Phase]],
    candidates: list[Phase],
    refusals: list[Refusal],
    conflicts: list[Refusal],
    gates: Gates,
    arch: Arch,
) -> str:
    """One sentence, then every reason that matters on a line of its own."""
    for regime in REGIMES:
        covered = {op for p in usable[regime] for op in p.covers}
        missing = [op for op in OPERATIONS if op not in covered]
        if missing:
            break
    else:
        lines = [f"the kernels asked for on {arch.name} cannot share one copy of the weights:"]
        return "\n".join(lines + [f"  {c.phase} ({c.regime}): {c.reason}" for c in dict.fromkeys(conflicts)])
    lines = [f"no kernel on {arch.name} can run {', '.join(missing)} in the {regime} regime as asked:"]
    for axis in dict.fromkeys(AXIS[op] for op in missing if op in AXIS):
        backend = gates.backend(axis, regime)
        if backend in INDIVISIBLE:
            lines.append(f"  {backend}: {INDIVISIBLE[backend]}")
        elif backend in ABSENT and not any(axis in p.backends and backend in p.answers(axis) for p in candidates):
            lines.append(f"  {backend}: {ABSENT[backend]}")
    uncovered = set(missing)
    for r in dict.fromkeys(refusals):
        phase = next(p for p in candidates if p.name == r.phase)
        if r.regime == regime and uncovered & set(phase.covers):
            lines.append(f"  {r.phase}: {r.reason}")
    if len(lines) == 1:
        lines.append("  no phase of this version covers it")
    return "\n".join(lines)


# ---- the number formats inside a step -------------------------------------------------------------------------------


class Values(NamedTuple):
    """The formats of numbers inside a step, as the gates choose them."""

    dtype: str  # residual stream and dense activations
    activation: str  # at decode
    activations: dict[str, str]  # regime -> activation, where it is another one
    kv_dtype: str


def values_of(gates: Gates, arch: Arch, *, reference: bool = False) -> Values:
    """`float` rounds nothing that the checkpoint does not; nor does `auto` where the `reference` runs on a CPU."""
    plain = "bf16" if arch.is_gpu else "f32"
    auto, auto_kv = (plain, plain) if arch.is_gpu or reference else ("int8", "bf16")
    if gates.activation == "float":
        auto_kv = plain
    meaning = {"auto": auto, "float": plain}
    activations = {r: meaning.get(a := gates.activation_in(r), a) for r in REGIMES}
    return Values(
        dtype=plain,
        activation=activations["decode"],
        activations={r: a for r, a in activations.items() if a != activations["decode"]},
        kv_dtype=auto_kv if gates.kv_dtype == "auto" else gates.kv_dtype,
    )
