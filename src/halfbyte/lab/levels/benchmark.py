"""Level 4: how fast is it? The bench's one measuring path, over HTTP, on an engine that this run started.

A figure counts only if the kernels ran that were asked for, which is known when the engine has ended; if the answers
had their length, which the client sees to; if nothing held the card's clocks down, which the bench's power meter says;
and if it is no more than the card can do. Otherwise it is INVALID, with the reason. Targets of this GPU give verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from halfbyte.errors import HalfbyteError, PeerDiedError, PeerRefusedError
from halfbyte.gates import Gates
from halfbyte.lab import environment
from halfbyte.lab.ceilings import Ceilings, beside, ceilings_here
from halfbyte.lab.levels.path_level import exercise, path_checks
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.levels.targets import targets_for
from halfbyte.lab.measure.engine_timing import Work, all_work
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Cell, Check, Result
from halfbyte.lab.served import measure_client
from halfbyte.model import load

Play = Callable[[HttpClient, Cell], Sequence[Result]]  # what is timed on a server, in cells made from this one


@dataclass(frozen=True)
class Works:
    """What is measured; the defaults are the protocol's."""

    prompts: tuple[int, ...] = (2048,)
    tokens: tuple[int, ...] = (32, 128)
    depths: tuple[int, ...] = (0,)
    concurrency: tuple[int, ...] = (1,)
    repeats: int = 5

    @property
    def all(self) -> list[Work]:
        return all_work(self.prompts, self.tokens, self.depths, self.concurrency)

    def play(self, subject: Subject) -> Play:
        vocab = load.config_of(subject.model).vocab
        return lambda client, cell: measure_client(client, self.all, self.repeats, cell, vocab, subject.progress)


@dataclass
class Measurement:
    """An engine of some gates: started and asked, timed, ended, and its figures as far as they can be believed.

    Steps of their own, so that several engines can be started side by side and timed one at a time. Of a step that
    failed the next ones know, and do nothing. `first` is checked before anything is timed."""

    subject: Subject
    gates: Gates
    play: Play
    engine: PeerProcess
    first: Callable[[PeerProcess], list[Check]] = lambda _: []
    seen: list[Check] = field(default_factory=list)
    timed: list[Result] = field(default_factory=list)
    failed: Result | None = None

    @property
    def cell(self) -> Cell:
        return self.subject.cell("benchmark", self.gates)

    def start(self) -> None:
        self._step(self._start)

    def _start(self) -> None:
        self.engine.__enter__()
        exercise(self.engine.asker)  # so that the record has every regime
        self.seen = self.first(self.engine)

    def time(self) -> None:
        self._step(self._time)

    def _time(self) -> None:
        self.timed = list(self.play(HttpClient(self.engine.url), self.cell))
        if any(r.refused for r in self.timed) and self.engine.dies():
            raise self.engine.failure(f"{self.subject.peer.name} died while it was measured")

    def _step(self, work: Callable[[], None]) -> None:
        if self.failed is not None:
            return
        engine, name = self.engine, self.subject.peer.name
        try:
            work()
        except PeerRefusedError as e:
            self.failed = Result(self.cell, refused=str(e))
        except PeerDiedError as e:
            self.failed = self.subject.failed(self.cell, engine, e)
        except HalfbyteError as e:
            engine.stop()  # so that the diagnostics have its exit status
            self.failed = self.subject.failed(self.cell, engine, engine.failure(f"{name} could not be measured: {e}"))

    def end(self) -> None:
        self.engine.stop()

    def ceilings(self) -> Ceilings | None:
        """Of an engine that computes on this machine's GPU."""
        if self.engine.launch.url:
            return None
        return ceilings_here(self.subject.model, self.gates, self.subject.setup.device)

    def results(self) -> list[Result]:
        """Of an engine that has ended."""
        if self.failed is not None:
            return [self.failed]
        engine, subject = self.engine, self.subject
        checks, evidence = path_checks(subject, engine, self.gates)
        wrong = [f"{c.what} failed: {c.note}" for c in checks if not c.ok]
        bad = [f"{c.what} failed: {c.note or c.value}" for c in self.seen if not c.ok]
        start, record = {"start_s": engine.startup.first_token_s}, (evidence.record or {}).get("record")
        results = [replace(r, record=record, detail={**r.detail, **start}) for r in self.timed]
        if ceilings := self.ceilings():
            results = [beside(r, ceilings) for r in results]
        if wrong:
            results = [r.invalidated(f"wrong kernel path: {'; '.join(wrong)}") for r in results]
        if bad:
            results = [r.invalidated(f"wrong answers: {'; '.join(bad)}") for r in results]
        if any(r.invalid for r in results):
            engine.failure(next(r.refused for r in results if r.invalid))
            subject.diagnostics += engine.diagnostics
        return results


def measure(subject: Subject, gates: Gates, play: Play, what: str = "benchmark") -> list[Result]:
    """An engine of these gates, started for this."""
    measurement = Measurement(subject, gates, play, subject.process(what, gates))
    try:
        measurement.start()
        measurement.time()
    finally:
        measurement.end()
    return measurement.results()


def check_benchmark(subject: Subject, works: Works, targets: Path | None = None) -> tuple[list[Result], list[str]]:
    """The results with their targets, and why the level fails although it measured."""
    results = measure(subject, subject.gates, works.play(subject))
    gpus = environment.gpus()
    found = targets_for(str(gpus[0]["name"]) if gpus else "", targets)
    judged, missed = found.judge(results) if found is not None else (results, [])
    unmeasured = [f"{r.cell.label}: {r.refused}" for r in judged if r.refused and not r.invalid]
    return judged, [*missed, *unmeasured]
