"""What a run of the protocol leaves: results in the one schema, the levels' verdicts, and the test log."""

from __future__ import annotations

import json
from pathlib import Path

from halfbyte.lab import receipts
from halfbyte.lab.levels.log_page import log_markdown
from halfbyte.lab.levels.protocol import Report
from halfbyte.lab.report.sources import LEVELS

TOOL = "halfbyte check"


def finish(report: Report, folder: Path) -> list[Path]:
    """Writes results.json, levels.json and test_log.md into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    served = receipts.sources_of([receipts.PACKAGE / "engine" / "build.py"], ("engine",))
    measured = receipts.hashes(served) if report.subject.peer.name == "halfbyte" else {}
    file = receipts.result_file(TOOL, report.results, measured)
    file.write(folder / "results.json")
    levels = {"ok": report.ok, "levels": [o.as_dict() for o in report.outcomes]}
    (folder / LEVELS).write_text(json.dumps(levels, default=str) + "\n", encoding="utf-8")
    (folder / "test_log.md").write_text(log_markdown(report, dict(file.environment)), encoding="utf-8")
    return [folder / name for name in ("results.json", LEVELS, "test_log.md")]
