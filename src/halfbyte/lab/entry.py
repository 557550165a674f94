"""What the `python -m halfbyte.lab...` entries share: numbers in arguments, one line per result, and the receipt.

These entries run where only torch and the kernels' packages are installed; `halfbyte` itself needs more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from halfbyte.lab import receipts
from halfbyte.lab.result import Result


def numbers(text: str) -> list[int]:
    """Of an argument: `1,8,32`. What is no number argparse refuses."""
    return [int(n) for n in text.split(",") if n.strip()]


def line_of(result: Result) -> str:
    cell = result.cell
    name = " ".join(t for t in (cell.model, cell.preset, cell.path, cell.label) if t)
    if result.refused:
        return f"{name}: REFUSED, {result.refused}"
    figures = (f"{f.name} {f.value:.4g} {f.unit}" + (f" ({f.share:.0%})" if f.share else "") for f in result.figures)
    missed = [t.what for t in result.targets if not t.ok]
    return f"{name}: {', '.join(figures)}" + (f"; MISSED: {', '.join(missed)}" if missed else "")


def finish(tool: str, results: Iterable[Result], measured: Mapping[str, str], out: Path | None) -> int:
    """Writes the receipt, prints it as the last line; 1 if a result was refused or a target missed."""
    file = receipts.result_file(tool, results, measured)
    if out is not None:
        file.write(out)
    print(json.dumps(file.as_json(), default=str), flush=True)
    bad = any(r.refused or not all(t.ok for t in r.targets) for r in file.results)
    return 1 if bad or not file.results else 0
