"""`halfbyte check` and `matrix`: from the options to levels that ran, and the files they leave.

What a level does is in `levels/`; their order and verdicts are in `levels/protocol.py`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from halfbyte.errors import UsageError
from halfbyte.evals.suite import Suite
from halfbyte.gates import Gates
from halfbyte.lab import receipts
from halfbyte.lab.levels.correctness import Reference, make_reference
from halfbyte.lab.levels.kit import Kit, make_kit
from halfbyte.lab.levels.log_page import write_files
from halfbyte.lab.levels.protocol import PASS, Outcome, ProtocolReport, level_numbers, run_levels
from halfbyte.lab.levels.quality import check_quality
from halfbyte.lab.levels.quality_report import QualityReport
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.measure.disturbance import DisturbanceMeter
from halfbyte.lab.measure.engine_timing import new_seed
from halfbyte.lab.options import CheckOptions, preset_served
from halfbyte.lab.peers.engines import engine_named
from halfbyte.lab.peers.process import TimeLimits
from halfbyte.lab.peers.url import UrlPeer
from halfbyte.lab.report.sources import RESULTS

FREE_AT_START, LEAST_FREE = 32 << 20, 1 << 20  # bytes: of a run's logs and results; below which writing fails
Progress = Callable[[str], None]
Done = Callable[[Outcome], None]


@dataclass(frozen=True)
class CheckRun:
    report: ProtocolReport
    files: list[Path]


def run_check(levels: Sequence[str], options: CheckOptions, progress: Progress, done: Done) -> CheckRun:
    """Runs the levels, by number or name; `done` gets each outcome as its level ends and is written."""
    numbers = level_numbers(levels)
    subject = subject_of(options, progress)
    ended = ProtocolReport(subject)

    def write(outcome: Outcome) -> None:
        if (
            outcome.verdict != PASS and free_bytes(subject.folder) < LEAST_FREE
        ):  # an engine that cannot write fails, too
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, so that level {outcome.level} was not judged")
        ended.outcomes.append(outcome)
        done(outcome)
        write_files(ended, subject.folder)

    with alone(subject.folder, resume=options.resume):
        try:
            report = run_levels(subject, numbers, options, write)
            return CheckRun(report, write_files(report, subject.folder))
        except OSError as e:
            raise UsageError(
                f"the results cannot be written to {subject.folder} ({e.strerror or e}); what was written before is "
                "still there, and the verdicts stand above."
            ) from None


@contextlib.contextmanager
def alone(folder: Path, *, resume: bool) -> Iterator[None]:
    """Holds the folder of a run for this process. Refuses one that cannot be written, that another run writes into, or
    that holds the results of an earlier one."""
    if (folder / RESULTS).is_file() and not resume:
        raise UsageError(f"{folder} holds the results of an earlier run; name another folder with --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (free := free_bytes(folder)) < FREE_AT_START:
            raise UsageError(
                f"the disk of {folder} has {free >> 10} KiB left, and a run needs {FREE_AT_START >> 20} MiB; make "
                "room, or name another folder with --out."
            )
        tempfile.TemporaryFile(dir=folder).close()
        lock = os.open(folder, os.O_RDONLY)
    except OSError as e:
        raise UsageError(
            f"the folder {folder} cannot be written ({e.strerror or e}); name another with --out."
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(f"another run writes into {folder}; name another folder with --out.") from None
    finally:
        os.close(lock)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def subject_of(options: CheckOptions, progress: Progress) -> Subject:
    limits = TimeLimits(options.start_s, options.request_s)
    peer = engine_named(options.engine)
    folder = options.out or Path(f"check-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    setup = peer.prepare(options.start.setup(options.model, options.gates, options.device), progress)
    preset = preset_served(options.gates, peer.name, setup)
    baseline = options.baseline_gates
    feature, other = peer.launch(setup), peer.launch(replace(setup, gates=baseline))
    if options.baseline == "exact" and other.refusals:
        baseline = Gates()  # an engine that cannot be exact is its own baseline
    elif feature.command and (feature.command, feature.environment) == (other.command, other.environment):
        baseline = options.gates  # another engine has fewer settings than there are gates: here they mean the same
    return Subject(
        peer, setup, folder, baseline, preset, limits, options.debug,
        options.engine_log, options.trace, new_seed() if options.works.seed is None else options.works.seed,
        None if isinstance(peer, UrlPeer) else DisturbanceMeter(), progress,
    )  # fmt: skip


def write_reference(options: CheckOptions, path: Path, progress: Progress) -> Reference:
    """Asks the engine the problems of a suite, and writes its answers to the path."""
    subject, suite = subject_of(options, progress), Suite(options.suite or "quick")
    with subject.process("reference") as engine:
        reference = make_reference(subject, engine.asker, suite)
    reference.write(path)
    return reference


def run_quality(options: CheckOptions, progress: Progress) -> tuple[QualityReport, list[Path]]:
    """Compares presets with `exact`; the report, and the files that --out asked for."""
    report = check_quality(options.model, options.gates, options.quality, options.device, progress)
    if options.out is None:
        return report, []
    path = options.out / "results.json"
    results = [r for c in report.candidates for r in c.results(report.model)]
    receipts.result_file("halfbyte check quality", results, {}).write(path)
    return report, [path]


def run_kit(options: CheckOptions, archive: Path, progress: Progress, done: Done) -> tuple[Kit, list[str]]:
    """The kit after its run, and the names of the files in its archive."""
    with tempfile.TemporaryDirectory(prefix="halfbyte-kit-") as scratch:
        kit = Kit(
            options.out or Path(scratch), 60 * options.minutes, options.device, progress, done, model=options.model
        )
        return kit, make_kit(kit, archive)
