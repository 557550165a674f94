"""What is checked: an engine with a model and gates, the baseline it is held against, and how it is started and asked.

Levels share it. Every start has a folder of its own, with its log and, if it fails, its diagnostics.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError, PeerDiedError, PeerRefusedError
from halfbyte.gates import Gates
from halfbyte.lab.measure.disturbance import DisturbanceMeter
from halfbyte.lab.measure.engine_timing import new_seed
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.peers.launch import Peer, Setup
from halfbyte.lab.peers.process import PeerProcess, TimeLimits
from halfbyte.lab.result import Cell, Check, Figure, Result, worst_check
from halfbyte.model import load

Progress = Callable[[str], None]


@dataclass
class Subject:
    peer: Peer
    setup: Setup  # with the gates that are checked
    folder: Path
    baseline: Gates = field(default_factory=Gates)
    preset: str = ""
    limits: TimeLimits = field(default_factory=TimeLimits)
    debug: bool = False
    log: Path | None = None  # of an engine that somebody else started
    trace: Path | None = None  # by a profiler
    seed: int = field(default_factory=new_seed)  # of the prompts that are timed
    meter: DisturbanceMeter | None = None  # of the machine while something is timed; None: nothing is held against it
    progress: Progress = lambda _: None
    diagnostics: list[Path] = field(default_factory=list)
    _starts: Any = field(default_factory=lambda: itertools.count(1))

    @property
    def gates(self) -> Gates:
        return self.setup.gates

    @property
    def model(self) -> load.ModelName:
        return load.resolve_model(self.setup.model)

    def cell(self, kind: str, gates: Gates | None = None, **shape: Any) -> Cell:
        gates = self.gates if gates is None else gates
        preset = self.preset if gates == self.gates else ""
        engine = "" if self.peer.name == "halfbyte" else self.peer.name
        return Cell(kind, self.model.shape_name, preset, gates.changes(), "http", shape, engine)

    def client(self, url: str) -> HttpClient:
        """For timing, with the model's own tokenizer."""
        return HttpClient(url, tokenizer=load.tokenizer_of(self.model))

    def process(self, title: str, gates: Gates | None = None) -> PeerProcess:
        """An engine that is not started yet, with a folder of its own."""
        setup = replace(self.setup, gates=self.gates if gates is None else gates)
        name = re.sub(r"[^a-z0-9.=-]+", "-", title.lower()).strip("-")[:60]
        folder = self.folder / f"{next(self._starts):03}-{name}"
        self.progress(f"{self.peer.name}: {title}")
        return PeerProcess(self.peer, setup, folder, self.limits, debug=self.debug)

    def attempt(
        self,
        cell: Cell,
        engine: PeerProcess,
        work: Callable[[], object],
        checks: Sequence[Check] = (),
        trouble: str = "did not answer",
    ) -> Result | None:
        """Does some work with an engine; the cell's result if the engine refuses, dies or is in trouble."""
        try:
            work()
        except PeerRefusedError as e:
            return Result(cell, refused=str(e))
        except PeerDiedError as e:
            return self.failed(cell, engine, e, checks)
        except HalfbyteError as e:
            engine.stop()  # so that the diagnostics have its exit status
            return self.failed(cell, engine, engine.failure(f"{self.peer.name} {trouble}: {e}"), checks)
        return None

    def judged(
        self,
        cell: Cell,
        engine: PeerProcess,
        checks: Sequence[Check],
        figures: Sequence[Figure] = (),
        detail: Mapping[str, Any] | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> Result:
        """A cell's result; one that failed a check has diagnostics instead of figures."""
        wrong = worst_check(checks)
        if wrong is None:
            return Result(cell, tuple(figures), tuple(checks), record=record, detail=detail or {})
        error = engine.failure(f"{cell.kind}: {wrong.sentence}")
        return replace(self.failed(cell, engine, error, checks, detail), record=record)

    def failed(
        self,
        cell: Cell,
        engine: PeerProcess,
        error: Exception,
        checks: Sequence[Check] = (),
        detail: Mapping[str, Any] | None = None,
    ) -> Result:
        """A cell whose engine failed: what happened, and where its diagnostics are."""
        self.diagnostics += [d for d in engine.diagnostics if d not in self.diagnostics]
        evidence = {"diagnostics": [str(d) for d in engine.diagnostics], "causes": [str(c) for c in engine.causes]}
        return Result(
            cell, checks=tuple(checks), detail={**(detail or {}), **evidence}, refused=str(error), invalid=True
        )
