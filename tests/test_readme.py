"""README's Python example is run as it stands there, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_the_right_answer(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(example, "README.md", "exec"), {})
    (said,) = re.findall(r"\)  # (.*)$", example, re.M)
    assert capsys.readouterr().out == f"{said}\n"
    assert "17 + 25 = 42" in said
