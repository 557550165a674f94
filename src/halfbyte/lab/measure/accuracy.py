"""A suite's report as a result: the share of right answers of every task, their mean, the worst, whole harmony."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfbyte.lab.result import Cell, FigureCeiling, Result, figure

ALL = FigureCeiling(100.0, "every answer")
DETAIL = (
    "suite", "seed", "per_task", "tasks", "subtypes", "worst_subtype", "answerable", "false_refusals", "strange_calls",
    "wrong",
)  # fmt: skip


def accuracy_result(report: Mapping[str, Any], cell: Cell) -> Result:
    """`report` is what `evals.suite.SuiteReport.to_json` gives; misses and counts go into the detail."""
    scores = {task: score["accuracy"] for task, score in report["tasks"].items()}
    scores |= {"mean": report["accuracy"], "worst": report["worst"], "well_formed": report["well_formed"]}
    detail = {k: report[k] for k in DETAIL if k in report}
    return Result(cell, tuple(figure(name, "%", 100 * share, ALL) for name, share in scores.items()), detail=detail)
