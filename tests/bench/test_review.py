"""A review's criteria are filled from results: PASS or FAIL by the newest; nothing passes unmeasured."""

from __future__ import annotations

import pytest

from bench.ledger import DOCS
from bench.review import criteria, fill
from halfbyte.errors import UsageError
from halfbyte.lab.result import Cell, Result, ResultFile, figure
from halfbyte.lab.store import Entry

TEXT = """# Review
```criteria
fast enough: speed >= 100 | kind=decode model=120b depth=2048
soon enough: ttft <= 50 | kind=first_minute model=120b
with a gate: speed >= 10 | kind=decode activation=fp8
```
<!-- filled -->
old
<!-- /filled -->
end
"""


def kept(*results: Result, name: str = "r") -> tuple[Entry, ResultFile]:
    return Entry(name, ""), ResultFile("t", (), {"time": "2026-01-01"}, {}, results)


def decode(speed: float, depth: int = 2048, **gates: str) -> Result:
    return Result(
        Cell("decode", "random:120b", gates=gates, shape={"depth": depth}), (figure("speed", "tok/s", speed),)
    )


def verdicts(text: str) -> list[str]:
    return [
        line.split("|")[4].strip() for line in text.splitlines() if line.startswith("| ") and "criterion" not in line
    ]


def test_the_newest_result_decides() -> None:
    first = Result(Cell("first minute", "120b"), (figure("ttft", "ms", 51.0),))
    text = fill(TEXT, [kept(decode(90.0), name="old"), kept(decode(110.0), first, name="new")])
    assert verdicts(text) == ["PASS", "FAIL", "NOT MEASURED"]
    assert "| fast enough | at least 100 | 110 tok/s | PASS | new |" in text
    assert "old\n" not in text
    assert text.endswith("<!-- /filled -->\nend\n")
    assert fill(text, [kept(decode(110.0), first, name="new")]) == text


def test_what_is_invalid_refused_or_missing_does_not_pass() -> None:
    text = fill(
        TEXT, [kept(decode(110.0)), kept(decode(500.0).invalidated("throttled"), decode(20.0, 0, activation="fp8"))]
    )
    assert verdicts(text)[0].startswith("INVALID")
    assert verdicts(text)[1:] == ["NOT MEASURED", "PASS"]
    assert verdicts(fill(TEXT, [])) == ["NOT MEASURED"] * 3


@pytest.mark.parametrize("line", ["speed > 5", "a: speed >= x | kind=decode", "a: speed >= 5 | decode"])
def test_what_is_no_criterion(line: str) -> None:
    with pytest.raises(UsageError, match=r"criteri|cell"):
        criteria(f"```criteria\n{line}\n```")
    with pytest.raises(UsageError, match="no place"):
        fill("# nothing", [])


def test_the_house_has_six_reviews_with_hypothesis_criteria_and_decision() -> None:
    found = [p for p in (DOCS / "reviews").glob("*.md") if p.name != "TEMPLATE.md"]
    assert len(found) == 6
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert "**Hypothesis.**" in text
        assert "## Decision" in text
        assert criteria(text, path.name)
