"""Level 4: how fast is it? The bench's one measuring path, over HTTP, on an engine that this run started.

A figure counts only if the kernels ran that were asked for, which is known when the engine has ended; if the answers
had their length, which the client sees to; and if nothing held the card's clocks down, which the bench's power meter
says. Otherwise it is INVALID, with the reason. Targets of this GPU give verdicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from halfbyte.errors import HalfbyteError, PeerDiedError, PeerRefusedError
from halfbyte.gates import Gates
from halfbyte.lab import environment
from halfbyte.lab.levels.path_level import exercise, path_checks
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.levels.targets import targets_for
from halfbyte.lab.measure.engine_timing import Work, all_work
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Check, Result
from halfbyte.lab.served import measure_client
from halfbyte.model import load


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


def measure(
    subject: Subject,
    gates: Gates,
    works: Works,
    what: str = "benchmark",
    first: Callable[[PeerProcess], list[Check]] = lambda _: [],
) -> list[Result]:
    """An engine of these gates, started for this, and its figures as far as they can be believed. `first` is checked
    before anything is timed."""
    engine = subject.process(what, gates)
    cell = subject.cell("benchmark", gates)
    vocab = load.config_of(subject.model).vocab
    try:
        with engine:
            exercise(engine.asker)  # so that the record has every regime
            seen = first(engine)
            results = measure_client(HttpClient(engine.url), works.all, works.repeats, cell, vocab, subject.progress)
            if any(r.refused for r in results) and engine.dies():
                raise engine.failure(f"{subject.peer.name} died while it was measured")
    except PeerRefusedError as e:
        return [Result(cell, refused=str(e))]
    except PeerDiedError as e:
        return [subject.failed(cell, engine, e)]
    except HalfbyteError as e:
        return [subject.failed(cell, engine, engine.failure(f"{subject.peer.name} could not be measured: {e}"))]
    checks, evidence = path_checks(subject, engine, gates)
    wrong = [f"{c.what} failed: {c.note}" for c in checks if not c.ok]
    bad = [f"{c.what} failed: {c.note or c.value}" for c in seen if not c.ok]
    start = {"start_s": engine.startup.first_token_s}
    results = [replace(r, record=(evidence.record or {}).get("record"), detail={**r.detail, **start}) for r in results]
    if wrong:
        results = [r.invalidated(f"wrong kernel path: {'; '.join(wrong)}") for r in results]
    if bad:
        results = [r.invalidated(f"wrong answers: {'; '.join(bad)}") for r in results]
    if any(r.invalid for r in results):
        engine.failure(next(r.refused for r in results if r.invalid))
        subject.diagnostics += engine.diagnostics
    return results


def check_benchmark(subject: Subject, works: Works, targets: Path | None = None) -> tuple[list[Result], list[str]]:
    """The results with their targets, and why the level fails although it measured."""
    results = measure(subject, subject.gates, works)
    gpus = environment.gpus()
    found = targets_for(str(gpus[0]["name"]) if gpus else "", targets)
    judged, missed = found.judge(results) if found is not None else (results, [])
    unmeasured = [f"{r.cell.label}: {r.refused}" for r in judged if r.refused and not r.invalid]
    return judged, [*missed, *unmeasured]
