"""The table of errors in docs/numerics.md is what the code measures today."""

from pathlib import Path

import pytest

from bench.format_costs import measure, table

DOC = Path(__file__).parents[2] / "docs" / "numerics.md"


def test_the_printed_table_is_the_measured_one():
    rows = measure()
    header = table(rows)[0]
    lines = DOC.read_text(encoding="utf-8").splitlines()
    assert header in lines
    start = lines.index(header) + 2
    for row, line in zip(rows, lines[start : start + len(rows)], strict=True):
        name, rule, bits, relative, _, worst = (cell.strip() for cell in line.strip("|").split("|"))
        assert (name, rule, float(bits)) == (row.format, row.rule, row.bits)
        # Another torch may draw other Gaussian numbers; the figures hold for those too.
        assert row.relative == pytest.approx(float(relative), rel=0.01, abs=1e-4)
        assert row.worst == pytest.approx(float(worst), rel=0.1)
