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
from halfbyte.plan.record import Declared, Difference, GraphRun, PhaseRun, Record, Runs, Selection
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import REGIMES, Regime, Step
from halfbyte.vllm_plugin.selection import LAYOUT, Shapes, choose, is_ours

log = logging.getLogger("vllm.halfbyte")  # below vLLM's own, so that it is printed where vLLM's is
WRITE_S = 5.0  # between two writings of the record


def read_options(additional: Any) -> tuple[Gates, Path | None]:
    """Our part of vLLM's --additional-config: {"gates": …, "record": file}; refused if it holds anything else."""
    ours = additional.get("halfbyte", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(ours, Mapping) or set(ours) - {"gates", "record"}:
        raise GateError(
            'halfbyte\'s part of --additional-config is {"gates": {…}, "record": "FILE"}, and nothing else.'
        )
    given = ours.get("gates", {})
    if not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
        raise GateError('the gates in --additional-config are an object of texts, such as {"moe_kernel": "triton"}.')
    record = ours.get("record")
    return parse(dict(given), env={}), None if record is None else Path(str(record))


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
        self, gates: Gates, arch: Arch, shapes: Shapes, record: Path | None = None, engine: str = "vllm"
    ) -> None:
        self.gates, self.arch, self.shapes, self.path, self.engine = gates, arch, shapes, record, engine
        self.spec: Spec
        self.chosen: Chosen
        self.selection: Selection
        self.spec, self.chosen, self.selection = choose(shapes, gates, arch)
        self.record = Record()
        self.buffers: dict[str, Tensor] = {}
        self.parts = {p.name: Part(p.category, p.covers) for phases in self.chosen.values() for p in phases}
        self.backend: dict[str, str] = {}  # operation -> what vLLM says it runs, where it is vLLM's
        self._graphs: dict[tuple[Regime, int], GraphRun] = {}
        self._written = 0.0
        if record is not None:
            atexit.register(self.write)
        log.info("halfbyte %s is active: %s", __version__, self.summary())

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
        return is_ours(self.phase(operation, "decode"))

    # ---- binding ------------------------------------------------------------------------------

    def bind(self, operation: str, layer: int | None, **weights: Any) -> Bound:
        """`weights`: plain tensors or MXTensors by role, and biases. Packed as the choice says."""
        for role in ROLES[operation]:
            weights[role] = self._pack(role, weights[role])
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
        ran: dict[Regime, tuple[str, ...]] = {
            regime: tuple(p.name for p in self.chosen[regime] if p.name in self.record.phases(regime))
            for regime in REGIMES
        }
        declared: dict[tuple[str, Regime], tuple[Declared, ...]] = {}
        for regime in REGIMES:
            for phase in self.chosen[regime]:
                if phase.name in ran[regime]:
                    declared[phase.name, regime] = tuple(phase.declares(self.spec.at(regime), self.arch))
        found = self.record.differences(ran, declared)
        for operation in ("moe", "qkv", "o", "lm_head"):
            names = {self.phase(operation, regime).name for regime in REGIMES}
            if self.takes(operation) and not names & self.record.phases():
                found.append(Difference("decode", "/".join(sorted(names)), "was chosen and never ran"))
        return found

    def report(self) -> dict[str, Any]:
        """As our own engine's record file, with what vLLM runs itself beside it."""
        return {
            "engine": self.engine,
            "halfbyte": __version__,
            "gates": self.gates.as_dict(),
            "plan": {regime: list(names) for regime, names in self.selection.chosen.items()},
            "vllm_backends": dict(self.backend),
            "record": self.record.as_dict(),
            "differences": [str(d) for d in self.differences()],
        }

    def write(self) -> None:
        """Whole or not at all."""
        assert self.path is not None
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(self.report()), encoding="utf-8")
        part.replace(self.path)


def _no_pool() -> Tensor:
    raise AssertionError("vLLM's pages are vLLM's")


def rejoined(acts: Activations, width: int) -> Tensor:
    """q, k and v as the one tensor that they are parts of: [rows, width]."""
    q, k = acts.q, acts.k
    whole = q.stride(0) == width and k.data_ptr() == q.data_ptr() + q.shape[1] * q.shape[2] * q.element_size()
    if not whole:
        return torch.cat([t.flatten(1) for t in (acts.q, acts.k, acts.v)], 1)
    return q.as_strided((q.shape[0], width), (width, 1), q.storage_offset())
