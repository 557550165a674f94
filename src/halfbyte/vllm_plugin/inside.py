"""Our kernels as vLLM's processes run them: operations bound to weights, counted as they run, and the record of that.

One `Inside` a process: gates, the choice, the record. What really ran is what `apply` launched: counted for each phase
and regime, said once in the log, and written to a file in the form of our own engine's record. Knows no vLLM.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from halfbyte import __version__, formats
from halfbyte.errors import GateError, PlanError
from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.gates import Gates, parse
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import Part, state
from halfbyte.plan.phase import ROLES, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.plan import Plan
from halfbyte.plan.record import Difference, GraphRun, PhaseRun, Record, Runs, Selection
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import REGIMES, Regime, Step
from halfbyte.vllm_plugin.layers import choose
from halfbyte.vllm_plugin.selection import LAYOUT, Shapes, is_ours

log = logging.getLogger("vllm.halfbyte")  # below vLLM's own, so that it is printed where vLLM's is
WRITE_S = 5.0  # between two writings of the record


@dataclass(frozen=True)
class Options:
    """Our part of vLLM's --additional-config."""

    gates: Gates = field(default_factory=Gates)
    record: Path | None = None  # file for what ran
    unit: str = "auto"  # layers, or operations: how much of a step is ours


def read_options(additional: Any) -> Options:
    """Refused if it holds anything else."""
    ours = additional.get("halfbyte", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(ours, Mapping) or set(ours) - {"gates", "record", "unit"}:
        raise GateError(
            'halfbyte\'s part of --additional-config is {"gates": {…}, "record": "FILE", "unit": "auto"}, and nothing '
            "else."
        )
    given = ours.get("gates", {})
    if not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
        raise GateError('the gates in --additional-config are an object of texts, such as {"moe_kernel": "triton"}.')
    record = ours.get("record")
    path = None if record is None else Path(str(record))
    return Options(parse(dict(given), env={}), path, str(ours.get("unit", "auto")))


class Bound:
    """One operation of one layer, with a launch for every regime."""

    def __init__(self, inside: Inside, operation: str, phases: Mapping[Regime, Phase], launches: dict[Regime, Launch]):
        self.inside, self.operation, self.phases, self.launches = inside, operation, phases, launches

    def without_residual(self, acts: Activations, width: int) -> Activations:
        """vLLM adds the residual itself: o takes none, where the phase can do without; the experts add to zeros."""
        source = acts.attn if self.operation == "o" else acts.h
        needs = self.operation == "moe" or any(phase.reference for phase in self.phases.values())
        zeros = torch.zeros((source.shape[0], width), dtype=torch.float32, device=source.device) if needs else None
        acts.x = cast(Tensor, zeros)
        return acts

    def run(self, rows: int, acts: Activations) -> Activations:
        inside = self.inside
        regime = inside.arch.limits.regime(rows)
        phase = self.phases[regime]
        into, now = inside.runs(regime, rows), state()
        run = into.phases.get((phase.name, regime)) or inside.first_run(into, phase, regime)
        run.runs += 1
        run.fewest_rows, run.most_rows = min(run.fewest_rows, rows), max(run.most_rows, rows)
        now.sink, now.part = run.kernels, inside.parts[phase.name]
        try:
            self.launches[regime](cast(Step, SimpleNamespace(rows=rows)), acts)
        finally:
            now.sink = None
        return acts


class Inside:
    """What halfbyte is in one process of vLLM."""

    def __init__(
        self, options: Options, arch: Arch, shapes: Shapes, engine: str = "vllm", *, obstacle: str = ""
    ) -> None:
        """`obstacle`: why all layers of this model cannot be ours (`layers.choose`)."""
        self.options, self.gates, self.arch, self.shapes = options, options.gates, arch, shapes
        self.path, self.engine, self.obstacle = options.record, engine, obstacle
        self.choice = choice = choose(shapes, options.gates, arch, unit=options.unit, obstacle=obstacle)
        self.spec: Spec = choice.spec
        self.chosen: Chosen = choice.chosen
        self.selection: Selection = choice.selection
        self.held: dict[int | None, dict[str, Any]] = {}  # layer -> role -> weight, where all layers are ours
        self.record = Record()
        self.buffers: dict[str, Tensor] = {}
        self.parts = {p.name: Part(p.category, p.covers) for phases in self.chosen.values() for p in phases}
        self.backend: dict[str, str] = {}  # operation -> what vLLM says it runs, where it is vLLM's
        self._graphs: dict[tuple[Regime, int], GraphRun] = {}
        self._written = 0.0
        self._said: set[tuple[int, Regime]] = set()
        if self.path is not None:
            atexit.register(self.write)
        log.info("halfbyte %s is active: %s", __version__, self.summary())
        if choice.why:
            log.info("halfbyte runs single operations, not whole layers: %s", choice.why)

    def summary(self) -> str:
        """What runs each operation, in one line."""
        parts = []
        for operation in ("moe", "qkv", "o", "lm_head"):
            names = dict.fromkeys(self.phase(operation, regime).name for regime in REGIMES)
            parts.append(f"{operation} {'/'.join(names)}")
        return ", ".join(parts)

    def phase(self, operation: str, regime: Regime) -> Phase:
        return next(p for p in self.chosen[regime] if operation in p.covers)

    def takes(self, operation: str) -> bool:
        """Whether ours runs it. All regimes agree: they share one layout."""
        return self.layers_are_ours or is_ours(self.phase(operation, "decode"))

    @property
    def layers_are_ours(self) -> bool:
        return self.choice.unit == "layers"

    # ---- binding ------------------------------------------------------------------------------

    def take(self, operation: str, layer: int | None, **weights: Any) -> Bound | None:
        """`weights`: plain tensors or MXTensors by role, and biases. Packed as the choice says, and bound to the
        operation; where all layers are ours, held until they are bound."""
        for role in ROLES[operation]:
            weights[role] = self._pack(role, weights[role])
        if not self.layers_are_ours:
            return self.bind(operation, layer, **weights)
        self.held.setdefault(layer, {}).update(weights)
        return None

    def bind(self, operation: str, layer: int | None, **weights: Any) -> Bound:
        """To weights that are packed."""
        phases = {regime: self.phase(operation, regime) for regime in REGIMES}
        launches: dict[tuple[str, str], Launch] = {}
        by_regime: dict[Regime, Launch] = {}
        for regime, phase in phases.items():
            spec = self.spec.at(regime)
            key = phase.name, spec.activation
            if key not in launches:
                launches[key] = phase.bind(
                    Binding(
                        spec=spec, weights=SimpleNamespace(**weights), kind=None, kind_index=0,
                        rope=(torch.zeros(0), 1.0), kv_pool=_no_pool, buffers=self.buffers, layer=layer,
                        gates=self.gates,
                    )
                )  # fmt: skip
            by_regime[regime] = launches[key]
        return Bound(self, operation, phases, by_regime)

    def _pack(self, role: str, weight: Tensor | MXTensor) -> Tensor | MXTensor | DenseTiles:
        wanted, layout = self.spec.formats[role], self.selection.layouts[role]
        assert layout != LAYOUT, f"{role} is vLLM's"
        if isinstance(weight, Tensor) and wanted in formats.FORMATS:
            weight = formats.quantize_weight(weight.float(), wanted)
        if isinstance(weight, MXTensor):
            if weight.format != wanted:
                raise PlanError(f"{role} is {weight.format}, and the plan was made for {wanted}.")
            return formats.convert(weight, layout)
        return weight.contiguous() if layout == "plain" else DenseTiles.of(weight.contiguous(), layout)

    # ---- the record ---------------------------------------------------------------------------

    def runs(self, regime: Regime, rows: int) -> Runs:
        """Where a launch counts now: eagerly, or for the graph that is being captured."""
        now = time.monotonic()
        if self.path is not None and now - self._written > WRITE_S:
            self._written = now
            self.write()
        if not (self.arch.is_gpu and torch.cuda.is_current_stream_capturing()):
            return self.record.eager
        key = regime, rows
        if key not in self._graphs:
            graph = GraphRun(regime=regime, rows=rows, unread="vLLM holds the graph")
            graph.replays = 1  # vLLM's replays are vLLM's to count
            self._graphs[key] = graph
            self.record.graphs.append(graph)
        return self._graphs[key]

    def into(self, plan: Plan, rows: int) -> Runs:
        """Where a plan's launches count now; its phases are said once in the log."""
        regime = plan.limits.regime(rows)
        if (id(plan), regime) not in self._said:  # the host waits for this in every step: no more than a look
            self._said.add((id(plan), regime))
            self._written = 0.0
            names = dict.fromkeys(b.phase.name for b in plan.bound[regime])
            log.info("halfbyte runs %s (%s)", ", ".join(names), regime)
        return self.runs(regime, rows)

    def first_run(self, into: Runs, phase: Phase, regime: Regime) -> PhaseRun:
        roles = [role for op in phase.covers for role in ROLES.get(op, ())]
        run = PhaseRun(
            phase.name, phase.category, phase.covers, regime, {r: self.spec.formats[r] for r in roles},
            self.spec.dtype, self.spec.at(regime).activation,
        )  # fmt: skip
        into.phases[phase.name, regime] = run
        self._written = 0.0  # the file says so at the next launch
        log.info("halfbyte runs %s (%s)", phase.name, regime)
        return run

    def differences(self) -> list[Difference]:
        """Between what ran and what was chosen and declared. An operation of ours that never ran is one."""
        declared = {
            (phase.name, regime): tuple(phase.declares(self.spec.at(regime), self.arch))
            for regime in REGIMES
            for phase in self.chosen[regime]
            if phase.name in self.record.phases(regime)
        }
        found: dict[Difference, None] = {}
        for runs, _ in self.record.ran():  # vLLM captures a part of a step and runs the rest: no way has all phases
            names = {regime: [name for name, where in runs.phases if where == regime] for regime in REGIMES}
            for name, regime in runs.phases:
                if name not in self.selection.chosen[regime]:
                    found[Difference(regime, name, "ran and was not chosen")] = None
            one = Record(graphs=[runs]) if isinstance(runs, GraphRun) else Record(eager=runs)
            found |= dict.fromkeys(one.differences(names, declared))
        for operation in ("moe", "qkv", "o", "lm_head"):
            phases = {self.phase(operation, regime).name for regime in REGIMES}
            if self.takes(operation) and not phases & self.record.phases():
                found[Difference("decode", "/".join(sorted(phases)), "was chosen and never ran")] = None
        return list(found)

    def report(self) -> dict[str, Any]:
        """As our own engine's record file, with what vLLM runs itself beside it."""
        return {
            "engine": self.engine,
            "halfbyte": __version__,
            "gates": self.gates.as_dict(),
            "unit": self.choice.unit,
            "why": self.choice.why,
            "plan": {regime: list(names) for regime, names in self.selection.chosen.items()},
            "vllm_backends": dict(self.backend),
            "record": self.record.as_dict(),
            "differences": [str(d) for d in self.differences()],
        }

    def write(self) -> None:
        """Whole or not at all. A rank on another machine finds no folder there; no step dies of a file."""
        if self.path is None:
            return
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self.report()), encoding="utf-8")
            part.replace(self.path)
        except OSError as e:
            log.error("halfbyte cannot write what ran to %s (%s); it is not written any more.", self.path, e.strerror)
            self.path = None


def _no_pool() -> Tensor:
    raise AssertionError("vLLM's pages are vLLM's")


def rejoined(acts: Activations, width: int) -> Tensor:
    """q, k and v as the one tensor that they are parts of: [rows, width]."""
    q, k = acts.q, acts.k
    whole = q.stride(0) == width and k.data_ptr() == q.data_ptr() + q.shape[1] * q.shape[2] * q.element_size()
    if not whole:
        return torch.cat([t.flatten(1) for t in (acts.q, acts.k, acts.v)], 1)
    return q.as_strided((q.shape[0], width), (width, 1), q.storage_offset())
