"""`halfbyte inspect` and `halfbyte check quality` on the embedded model and on variants of it, as two tables.

    python -m bench run quality

A variant that computes the same function shows what a preset makes of other numbers. The second table has the presets
with and without norms in the matrices behind them (`ops/folding.py`), on variants that move factors between the two.
Both tables are in docs/quality.md.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from bench.measurement import ROOT, Run, measurement, option
from bench.variants import write_variant
from halfbyte.gates import Gates, cache_folder
from halfbyte.inspection import Inspection, inspect_model
from halfbyte.lab import receipts
from halfbyte.lab.levels.quality import check_quality
from halfbyte.lab.levels.quality_report import OWN, CandidateReport, QualityReport
from halfbyte.lab.options import QualityOptions
from halfbyte.model import quality_record
from halfbyte.model.checkpoint import RequantisedSource
from halfbyte.model.load import EMBEDDED
from halfbyte.roofline import gpu_named

PLAIN = "plain"
VARIANTS = (
    PLAIN, "residual x 2^12", "residual x 2^20", "experts spread by 8", "attention spread by 3",
    "attention spread by 12", "head spread by 3", "values x 2^12", "keys x 2^8", "loud channels of 3e5", "sinks of 50",
)  # fmt: skip
FOLDED = (PLAIN, "attention spread by 3", "attention spread by 12", "head spread by 3")
COLUMNS = (
    "model", "largest scale", "widest row", "attention norm", "qkv error", "KL on own answers", "KL on text", "needles",
    "verdict",
)  # fmt: skip
FOLD_COLUMNS = (
    "model",
    "KL on own answers, apart",
    "folded",
    "KL on text, apart",
    "folded",
    "verdict, apart",
    "folded",
)
SOURCES = (
    "bench/variants.py", "src/halfbyte/formats/mxfp4.py", "src/halfbyte/formats/q8.py",
    "src/halfbyte/inspection.py", "src/halfbyte/lab/kept_logits.py", "src/halfbyte/lab/levels/quality.py",
    "src/halfbyte/lab/levels/quality_report.py", "src/halfbyte/model/checkpoint.py", "src/halfbyte/ops/folding.py",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    variants: tuple[str, ...] = VARIANTS
    folded: tuple[str, ...] = option(FOLDED, "variants that are also measured with norms apart from their matrices")
    length: int = option(2048, "tokens of the text")


@measurement("quality", seconds=3600)
def quality(run: Run, options: Options) -> None:
    run.sources |= receipts.weights(EMBEDDED) | receipts.hashes(ROOT / name for name in SOURCES)
    reports: dict[str, QualityReport] = {}
    fold_rows: list[list[str]] = []
    print_line(COLUMNS)
    print_line(["---"] * len(COLUMNS))
    for name in dict.fromkeys((*options.variants, *options.folded)):
        with tempfile.TemporaryDirectory() as scratch:
            folder = EMBEDDED
            if name != PLAIN:
                folder = Path(scratch) / "model"
                write_variant(name, EMBEDDED, folder)
            inspection = inspect_model(str(folder), gpu_named("H200"))
            report = reports[name] = compared(run, name, folder, options.length)
            if name in options.variants:
                print_line(row(name, inspection, report))
            if name in options.folded:
                with norms_apart():
                    apart = compared(run, f"{name}, norms apart", folder, options.length)
                fold_rows.append([name, *(text for both in pairs(apart, report) for text in both)])
    print()
    print_line(FOLD_COLUMNS)
    print_line(["---"] * len(FOLD_COLUMNS))
    for fold_row in fold_rows:
        print_line(fold_row)


def compared(run: Run, name: str, folder: Path, length: int) -> QualityReport:
    report = check_quality(str(folder), Gates(), QualityOptions(lengths=(length,)))
    for candidate in report.candidates:
        for result in candidate.results(name):
            run.add(result)
    return report


@contextlib.contextmanager
def norms_apart() -> Iterator[None]:
    """Matrices are quantised without the norm in front of them; what was measured with it is not found."""
    kind = f"{quality_record.KIND}-norms-apart"
    with (
        mock.patch.object(RequantisedSource, "folds", return_value=False),
        mock.patch.object(quality_record, "KIND", kind),
    ):
        shutil.rmtree(cache_folder(kind), ignore_errors=True)
        try:
            yield
        finally:
            shutil.rmtree(cache_folder(kind), ignore_errors=True)


def row(name: str, inspection: Inspection, report: QualityReport) -> list[str]:
    """The presets' figures with a slash between them."""
    scales = {s.role: s for s in inspection.scales}
    norm = next(r for r in inspection.ranges if r.role == "attn_norm")
    errors = [p.errors["qkv"] for p in inspection.presets if p.preset != "exact"]
    exact = report.candidates[0].needles[1]
    return [
        name, f"2^{max(s.largest for s in scales.values()) - 127}",
        f"{max(s.row_spread for s in scales.values())} octaves", f"{norm.smallest:.2g} to {norm.high:.2g}",
        " / ".join(f"{e.mean:.1%}" for e in errors if e is not None), kl(report, OWN), kl(report, "text"),
        " / ".join([str(exact), *(str(c.needles[0]) for c in report.candidates)]), verdicts(report.candidates),
    ]  # fmt: skip


def pairs(apart: QualityReport, folded: QualityReport) -> list[tuple[str, str]]:
    return [
        (kl(apart, OWN), kl(folded, OWN)), (kl(apart, "text"), kl(folded, "text")),
        (verdicts(apart.candidates), verdicts(folded.candidates)),
    ]  # fmt: skip


def kl(report: QualityReport, section: str) -> str:
    own = [x for c in report.candidates for x in c.comparisons if x.section.startswith(section)]
    return " / ".join(f"{x.kl.value:.1e}" for x in own)


def verdicts(candidates: list[CandidateReport]) -> str:
    return " / ".join(c.verdict for c in candidates)


def print_line(cells: tuple[str, ...] | list[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)
