"""Runs measurements: one in this process, or several, each in a process of its own with a time limit and a log.

`run --stale` takes every routine measurement whose receipt in the folder is missing or stale, so it can be stopped and
started again. One that this machine cannot make is left out with the reason; one that fails is named at the end and
costs the others nothing. Measures nothing itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.measurement import MEASUREMENTS, ROOT, Measurement, NoOptions, Run
from halfbyte.errors import UsageError
from halfbyte.gates import child_environment
from halfbyte.lab import environment, receipts


def measurement_named(name: str) -> Measurement:
    if name not in MEASUREMENTS:
        raise UsageError(f"there is no measurement {name!r}; `python -m bench list` names them.")
    return MEASUREMENTS[name]


def run_one(chosen: Measurement, settings: Sequence[str] = (), out: Path | None = None) -> int:
    """In this process; its exit status."""
    options = chosen.parse(settings)
    if missing := chosen.missing(options):
        raise UsageError(f"{chosen.name} cannot run here: {missing}.")
    run = Run(chosen, out, settings)
    chosen.function(run) if chosen.options is NoOptions else chosen.function(run, options)
    return run.finish()


def is_current(chosen: Measurement, folder: Path) -> bool:
    """A measurement without a receipt leaves the hash of the kernels that it passed with."""
    if chosen.receipt:
        path = folder / f"{chosen.name}.json"
        return path.is_file() and receipts.read(path).state == "current"
    path = folder / f"{chosen.name}.passed"
    return path.is_file() and path.read_text(encoding="utf-8") == environment.source_hash()


def run_many(
    names: Sequence[str], folder: Path, *, stale: bool = False, report: Callable[[str], None] = print
) -> list[str]:
    """Each in its own process, receipts and logs in `folder`; the names of those that failed."""
    routine = [m for m in MEASUREMENTS.values() if m.routine]
    chosen = [measurement_named(n) for n in names] or sorted(routine, key=lambda m: not m.is_check)
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for entry in chosen:
        if stale and is_current(entry, folder):
            report(f"{entry.name:20} is current")
        elif missing := entry.missing():
            report(f"{entry.name:20} left out: {missing}")
        elif not _run(entry, folder, report):
            failed.append(entry.name)
    return failed


def _run(chosen: Measurement, folder: Path, report: Callable[[str], None]) -> bool:
    command = [sys.executable, "-m", "bench", "run", chosen.name]
    if chosen.receipt:
        command += ["--out", str((folder / f"{chosen.name}.json").resolve())]
    environ = child_environment(PYTHONUNBUFFERED="1")
    if "gpu" in chosen.needs and "cores" not in chosen.needs:  # many processes at once
        environ["OMP_NUM_THREADS"] = "1"
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    log = folder / f"{chosen.name}.log"
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            status = process.wait(chosen.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
    if status == 0 and not chosen.receipt:
        (folder / f"{chosen.name}.passed").write_text(environment.source_hash(), encoding="utf-8")
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line and not line.startswith("{")]
    outcome = "done" if status == 0 else f"FAILED ({status})"
    report(f"{chosen.name:20} {outcome} after {time.monotonic() - began:.0f} s: {lines[-1][:120] if lines else ''}")
    return status == 0
