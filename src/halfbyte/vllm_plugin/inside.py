"""Our kernels in a vLLM process: operations bound to weights, counted as they run, and the record of those counts.

There is one `Inside` per process, with the gates, the choice and the record. Launches are counted by phase and regime
when `apply` makes them, logged once, and written to a file in the form of our own engine's record. This module does not
import vLLM.
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
from halfbyte.ops.folding import column_maxima, fold_norm
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import Part, state
from halfbyte.plan.phase import ROLES, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.plan import Plan
from halfbyte.plan.record import Difference, GraphRun, PhaseRun, Record, Runs, Selection
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import REGIMES, Regime, Step
from halfbyte.vllm_plugin.layers import choose
from halfbyte.vllm_plugin.selection import LAYOUT, Shapes, is_ours

log = logging.getLogger("vllm.halfbyte")  # a child of vLLM's logger, so that it has the same handlers
WRITE_S = 5.0  # between two writes of the record


@dataclass(frozen=True)
class PluginOptions:
    """Our part of vLLM's --additional-config."""

    gates: Gates = field(default_factory=Gates)
    record: Path | None = None  # file for the record
    unit: str = "auto"  # layers or operations: what our kernels replace


def read_options(additional: Any) -> PluginOptions:
    """Our options from vLLM's --additional-config; GateError for unknown keys."""
    section = additional.get("halfbyte", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(section, Mapping) or set(section) - {"gates", "record", "unit"}:
        raise GateError(
            'halfbyte\'s part of --additional-config may only hold {"gates": {…}, "record": "FILE", "unit": "auto"}.'
        )
    gates = section.get("gates", {})
    if not isinstance(gates, Mapping) or not all(isinstance(value, str) for value in gates.values()):
        raise GateError('the gates in --additional-config must be strings, such as {"moe_kernel": "triton"}.')
    record = section.get("record")
    path = None if record is None else Path(str(record))
    return PluginOptions(parse(dict(gates), env={}), path, str(section.get("unit", "auto")))


class BoundOperation:
    """One operation of one layer, with a launch for every regime."""

    def __init__(self, inside: Inside, operation: str, phases: Mapping[Regime, Phase], launches: dict[Regime, Launch]):
        self.inside, self.operation, self.phases, self.launches = inside, operation, phases, launches

    def without_residual(self, acts: Activations, width: int) -> Activations:
        """Set up a zero residual, since vLLM adds its own; None for an o projection that needs none."""
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
    """halfbyte's state in one vLLM process: gates, choice of kernels, bound operations and record."""

    def __init__(
        self, options: PluginOptions, arch: Arch, shapes: Shapes, engine: str = "vllm", *, obstacle: str = ""
    ) -> None:
        """`obstacle`: why our layers cannot run this model (`layers.choose`)."""
        self.options, self.gates, self.arch, self.shapes = options, options.gates, arch, shapes
        self.path, self.engine, self.obstacle = options.record, engine, obstacle
        self.choice = choice = choose(shapes, options.gates, arch, unit=options.unit, obstacle=obstacle)
        self.spec: Spec = choice.spec
        self.chosen: Chosen = choice.chosen
        self.selection: Selection = choice.selection
        self.weights: dict[int | None, dict[str, Any]] = {}  # layer -> role -> weight, if all layers are ours
        self.norms: dict[tuple[str, int | None], Tensor] = {}  # norms that the operation behind them will take in
        self.record = Record()
        self.buffers: dict[str, Tensor] = {}
        self.parts = {p.name: Part(p.category, p.covers) for phases in self.chosen.values() for p in phases}
        self.backend: dict[str, str] = {}  # operation -> vLLM's name of its kernel, if vLLM runs it
        self._graphs: dict[tuple[Regime, int], GraphRun] = {}
        self._written = 0.0
        self._logged: set[tuple[int, Regime]] = set()
        if self.path is not None:
            atexit.register(self.write)
        log.info("halfbyte %s is active: %s", __version__, self.summary())
        if choice.why:
            log.info("halfbyte runs single operations, not whole layers: %s", choice.why)

    def summary(self) -> str:
        """One line with the kernels of each operation."""
        parts = []
        for operation in ("moe", "qkv", "o", "lm_head"):
            names = dict.fromkeys(self.phase(operation, regime).name for regime in REGIMES)
            parts.append(f"{operation} {'/'.join(names)}")
        return ", ".join(parts)

    def phase(self, operation: str, regime: Regime) -> Phase:
        return next(p for p in self.chosen[regime] if operation in p.covers)

    def takes(self, operation: str) -> bool:
        """Whether our kernel runs the operation. All regimes agree, because they share one layout."""
        return self.layers_are_ours or is_ours(self.phase(operation, "decode"))

    @property
    def layers_are_ours(self) -> bool:
        return self.choice.unit == "layers"

    # ---- binding ------------------------------------------------------------------------------

    def fold(self, operation: str, layer: int | None, norm: Tensor) -> None:
        """Let the norm in front of an operation move into its matrix when `take` quantises it, as in our own engine
        (`ops/folding.py`): `take` then changes this tensor. A matrix that stays as it is leaves its norm alone."""
        (role,) = ROLES[operation]
        if self.takes(operation) and self.spec.formats[role] in formats.FORMATS:
            self.norms[operation, layer] = norm

    def take(self, operation: str, layer: int | None, **weights: Any) -> BoundOperation | None:
        """Pack weights as the choice requires and bind them to the operation; if all layers are ours, keep them for
        later. `weights`: plain tensors or MXTensors by role, and biases."""
        norm = self.norms.pop((operation, layer), None)
        if norm is not None:
            columns, rest = fold_norm(norm, column_maxima(weights[operation]))
            weights[operation] = weights[operation].float() * columns
            norm.copy_(rest)
        for role in ROLES[operation]:
            weights[role] = self._pack(role, weights[role])
        if not self.layers_are_ours:
            return self.bind(operation, layer, **weights)
        self.weights.setdefault(layer, {}).update(weights)
        return None

    def bind(self, operation: str, layer: int | None, **weights: Any) -> BoundOperation:
        """Bind an operation to packed weights."""
        phases = {regime: self.phase(operation, regime) for regime in REGIMES}
        launches: dict[tuple[str, str], Launch] = {}
        by_regime: dict[Regime, Launch] = {}
        for regime, phase in phases.items():
            spec = self.spec.at(regime)
            key = phase.name, spec.activation
            if key not in launches:
                launches[key] = phase.bind(
                    Binding(
                        spec=spec,
                        weights=SimpleNamespace(**weights),
                        kind=None,
                        kind_index=0,
                        rope=(torch.zeros(0), 1.0),
                        kv_pool=_no_pool,
                        buffers=self.buffers,
                        layer=layer,
                        gates=self.gates,
                    )
                )
            by_regime[regime] = launches[key]
        return BoundOperation(self, operation, phases, by_regime)

    def _pack(self, role: str, weight: Tensor | MXTensor) -> Tensor | MXTensor | DenseTiles:
        format, layout = self.spec.formats[role], self.selection.layouts[role]
        assert layout != LAYOUT, f"{role} is vLLM's"
        if isinstance(weight, Tensor) and format in formats.FORMATS:
            weight = formats.quantize_weight(weight.float(), format)
        if isinstance(weight, MXTensor):
            if weight.format != format:
                raise PlanError(f"{role} is {weight.format}, but the plan expects {format}.")
            return formats.convert(weight, layout)
        return weight.contiguous() if layout == "plain" else DenseTiles.of(weight.contiguous(), layout)

    # ---- the record ---------------------------------------------------------------------------

    def runs(self, regime: Regime, rows: int) -> Runs:
        """The counters for a launch: those of eager execution, or of the graph that is being captured."""
        now = time.monotonic()
        if self.path is not None and now - self._written > WRITE_S:
            self._written = now
            self.write()
        if not (self.arch.is_gpu and torch.cuda.is_current_stream_capturing()):
            return self.record.eager
        key = regime, rows
        if key not in self._graphs:
            graph = GraphRun(regime=regime, rows=rows, unread="vLLM holds the graph")
            graph.replays = 1  # vLLM replays the graph and does not report how often
            self._graphs[key] = graph
            self.record.graphs.append(graph)
        return self._graphs[key]

    def into(self, plan: Plan, rows: int) -> Runs:
        """The counters for a plan's launches. Its phases are logged once."""
        regime = plan.limits.regime(rows)
        if (id(plan), regime) not in self._logged:  # runs in every step, so it must stay cheap
            self._logged.add((id(plan), regime))
            self._written = 0.0
            names = dict.fromkeys(b.phase.name for b in plan.bound[regime])
            log.info("halfbyte runs %s (%s)", ", ".join(names), regime)
        return self.runs(regime, rows)

    def first_run(self, into: Runs, phase: Phase, regime: Regime) -> PhaseRun:
        roles = [role for op in phase.covers for role in ROLES.get(op, ())]
        run = PhaseRun(
            phase.name,
            phase.category,
            phase.covers,
            regime,
            {r: self.spec.formats[r] for r in roles},
            self.spec.dtype,
            self.spec.at(regime).activation,
        )
        into.phases[phase.name, regime] = run
        self._written = 0.0  # write the file at the next launch
        log.info("halfbyte runs %s (%s)", phase.name, regime)
        return run

    def differences(self) -> list[Difference]:
        """Differences between what ran and what was chosen and declared, including our operations that never ran."""
        declared = {
            (phase.name, regime): tuple(phase.declares(self.spec.at(regime), self.arch))
            for regime in REGIMES
            for phase in self.chosen[regime]
            if phase.name in self.record.phases(regime)
        }
        differences: dict[Difference, None] = {}
        for (
            runs,
            _,
        ) in self.record.ran():  # vLLM captures a part of a step and runs the rest eagerly: neither has all phases
            names = {regime: [name for name, where in runs.phases if where == regime] for regime in REGIMES}
            for name, regime in runs.phases:
                if name not in self.selection.chosen[regime]:
                    differences[Difference(regime, name, "ran and was not chosen")] = None
            one = Record(graphs=[runs]) if isinstance(runs, GraphRun) else Record(eager=runs)
            differences |= dict.fromkeys(one.differences(names, declared))
        for operation in ("moe", "qkv", "o", "lm_head"):
            phases = {self.phase(operation, regime).name for regime in REGIMES}
            if self.takes(operation) and not phases & self.record.phases():
                differences[Difference("decode", "/".join(sorted(phases)), "was chosen and never ran")] = None
        return list(differences)

    def report(self) -> dict[str, Any]:
        """The record in the form of our engine's record file, with the kernels that vLLM runs itself."""
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
        """Write the record atomically. An error is logged and stops further writes, but never fails a step."""
        if self.path is None:
            return
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self.report()), encoding="utf-8")
            part.replace(self.path)
        except OSError as e:
            log.error("halfbyte cannot write the record to %s (%s) and stops trying.", self.path, e.strerror)
            self.path = None


def _no_pool() -> Tensor:
    raise AssertionError("vLLM's pages are vLLM's")


def rejoined(acts: Activations, width: int) -> Tensor:
    """q, k and v as one tensor [rows, width]; a view if they are adjacent, else a copy."""
    q, k = acts.q, acts.k
    contiguous = q.stride(0) == width and k.data_ptr() == q.data_ptr() + q.shape[1] * q.shape[2] * q.element_size()
    if not contiguous:
        return torch.cat([t.flatten(1) for t in (acts.q, acts.k, acts.v)], 1)
    return q.as_strided((q.shape[0], width), (width, 1), q.storage_offset())
