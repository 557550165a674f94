"""Choosing phases: every regime's sequence of operations covered, one physical layout per weight, reasons kept.

`auto` takes the phase of highest rank that does not refuse; an explicit gate runs exactly what it names or fails with
every reason. The reference is never taken by `auto` on a GPU. Kernels are found by module name and imported lazily,
so a machine without Triton or CUDA can still explain what another machine would run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence

from halfbyte.errors import PlanError
from halfbyte.gates import Gates
from halfbyte.plan.phase import AXIS, OPERATIONS, SEGMENTS, Arch, Phase, Spec
from halfbyte.plan.record import Refusal, Selection
from halfbyte.plan.step import REGIMES, Regime

# Modules that define `PHASES: tuple[Phase, ...]`. Listed by name so that plan imports no kernel.
PROVIDERS = ("halfbyte.plan.reference", "halfbyte.kernels.catalog")

# Gate values that belong to engines we lend kernels to, or to kernels that do not exist for an operation.
ABSENT = {
    "cpu": "the CPU kernels are not part of this version; use reference",
    "cutlass": "FlashInfer's CUTLASS kernel runs inside vLLM only (serve --engine vllm)",
    "marlin": "Marlin runs inside vLLM only (serve --engine vllm)",
    "flashinfer": "FlashInfer attention runs inside vLLM only (serve --engine vllm)",
}

Chosen = dict[Regime, list[Phase]]


def all_phases() -> list[Phase]:
    phases: list[Phase] = []
    for name in PROVIDERS:
        phases += importlib.import_module(name).PHASES
    return phases


def select(
    spec: Spec, arch: Arch, gates: Gates, phases: Iterable[Phase] | None = None
) -> tuple[Chosen, Selection]:
    """The phases of every regime in running order (a layer's phases stand once), and the reasons."""
    candidates = list(all_phases() if phases is None else phases)
    refusals: list[Refusal] = []
    usable: dict[Regime, list[Phase]] = {}
    for regime in REGIMES:
        usable[regime] = []
        for phase in candidates:
            reason = _refusal(phase, spec, arch, gates, regime)
            if reason is None:
                usable[regime].append(phase)
            else:
                refusals.append(Refusal(phase.name, regime, reason))
    chosen: Chosen = {r: [] for r in REGIMES}
    layouts: dict[str, str] = {}
    owners: dict[str, str] = {}
    conflicts: list[Refusal] = []
    for segment, operations in SEGMENTS.items():
        found = _cover_all(operations, usable, spec, {}, conflicts)
        if found is None:
            raise PlanError(_explain_failure(segment, operations, usable, candidates, refusals + conflicts, gates, arch))
        for regime in REGIMES:
            chosen[regime] += found[regime]
            for phase in found[regime]:
                for role, layout in phase.layouts(spec).items():
                    layouts[role] = layout
                    owners[role] = phase.name
    taken = {(r, p.name) for r in REGIMES for p in chosen[r]}
    conflicted = {(c.regime, c.phase) for c in conflicts}
    losers = [
        Refusal(p.name, r, f"not needed: {_winner(p, chosen[r])} is preferred")
        for r in REGIMES
        for p in usable[r]
        if (r, p.name) not in taken and (r, p.name) not in conflicted
    ]
    kept = [c for c in dict.fromkeys(conflicts) if (c.regime, c.phase) not in taken]
    return chosen, Selection(
        arch=arch.name,
        chosen={r: tuple(p.name for p in chosen[r]) for r in REGIMES},
        layouts=layouts,
        formats=dict(spec.formats),
        refusals=tuple(refusals + kept + losers),
    )


def _refusal(phase: Phase, spec: Spec, arch: Arch, gates: Gates, regime: Regime) -> str | None:
    if regime not in phase.regimes:
        return f"serves {', '.join(r for r in REGIMES if r in phase.regimes)} only"
    for axis, mine in phase.backends.items():
        asked = gates.backend(axis, regime)
        if asked not in ("auto", mine):
            return f"--{'attention' if axis == 'attention' else axis + '-kernel'} asks for {asked}"
    if arch.is_gpu and set(phase.backends.values()) == {"reference"}:
        asked_for = [gates.backend(axis, regime) for axis in phase.backends]
        if "reference" not in asked_for:
            return "the reference is never chosen by auto on a GPU"
    unknown = spec.features_of(phase.covers) - phase.knows
    if unknown:
        return f"does not know {', '.join(sorted(unknown))}"
    return phase.refuse(spec, arch, gates)


def _cover_all(
    operations: Sequence[str],
    usable: Mapping[Regime, list[Phase]],
    spec: Spec,
    fixed: dict[str, str],
    conflicts: list[Refusal],
) -> Chosen | None:
    """Cover the segment in every regime, so that all agree on each weight's layout. Depth-first, best rank first."""

    def layout_conflict(phase: Phase, layouts: Mapping[str, tuple[str, str]]) -> str | None:
        for role, layout in phase.layouts(spec).items():
            if role in layouts and layouts[role][0] != layout:
                other, owner = layouts[role]
                return f"needs {role} in layout {layout}, but {owner} holds it in {other}"
        return None

    def search(
        regime_at: int, position: int, layouts: dict[str, tuple[str, str]], so_far: Chosen
    ) -> Chosen | None:
        if regime_at == len(REGIMES):
            return {r: list(p) for r, p in so_far.items()}
        regime = REGIMES[regime_at]
        if position == len(operations):
            return search(regime_at + 1, 0, layouts, so_far)
        here = [p for p in usable[regime] if operations[position : position + len(p.covers)] == p.covers]
        for phase in sorted(here, key=lambda p: (-p.rank, -len(p.covers), p.name)):
            reason = layout_conflict(phase, layouts)
            if reason is not None:
                conflicts.append(Refusal(phase.name, regime, reason))
                continue
            mine = {role: (layout, phase.name) for role, layout in phase.layouts(spec).items() if role not in layouts}
            so_far[regime].append(phase)
            found = search(regime_at, position + len(phase.covers), layouts | mine, so_far)
            if found is not None:
                return found
            so_far[regime].pop()
        return None

    return search(0, 0, {k: (v, "the loaded weights") for k, v in fixed.items()}, {r: [] for r in REGIMES})


def _winner(loser: Phase, chosen: list[Phase]) -> str:
    overlap = [p.name for p in chosen if set(p.covers) & set(loser.covers)]
    return ", ".join(dict.fromkeys(overlap)) or "another phase"


def _explain_failure(
    segment: str,
    operations: Sequence[str],
    usable: Mapping[Regime, list[Phase]],
    candidates: list[Phase],
    refusals: list[Refusal],
    gates: Gates,
    arch: Arch,
) -> str:
    """One sentence, then every reason that matters on a line of its own."""
    for regime in REGIMES:
        covered = {op for p in usable[regime] for op in p.covers}
        missing = [op for op in operations if op not in covered]
        if missing:
            break
    else:
        regime, missing = REGIMES[0], list(operations)
    lines = [f"no kernel on {arch.name} can run {', '.join(missing)} in the {regime} regime as asked:"]
    for axis in dict.fromkeys(AXIS[op] for op in missing if op in AXIS):
        asked = gates.backend(axis, regime)
        if asked in ABSENT:
            lines.append(f"  {asked}: {ABSENT[asked]}")
    wanted = set(missing)
    for r in dict.fromkeys(refusals):
        phase = next(p for p in candidates if p.name == r.phase)
        if r.regime == regime and wanted & set(phase.covers):
            lines.append(f"  {r.phase}: {r.reason}")
    if len(lines) == 1:
        lines.append("  no phase of this version covers it")
    return "\n".join(lines)


assert all(op in OPERATIONS for op in AXIS)
