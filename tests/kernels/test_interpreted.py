"""Runs `tests/kernels/triton` in a process with Triton's interpreter, once, and reports each of its files here."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"
Report = tuple[dict[str, list[ET.Element]], str]  # the cases of each file; the end of the output
FILES = sorted(p.stem for p in FOLDER.glob("test_*.py"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run(tmp_path_factory.mktemp("interpreted") / "report.xml", "not slow")


def run(out: Path, marks: str) -> Report:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={out}",
         "-m", marks, str(FOLDER)],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    found: dict[str, list[ET.Element]] = {}
    if out.exists():
        for case in ET.parse(out).iter("testcase"):
            found.setdefault(str(case.get("classname")).rsplit(".", 1)[-1], []).append(case)
    return found, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("file", FILES)
def test_interpreted(file: str, report: Report) -> None:
    found, output = report
    cases = found.get(file, [])
    assert cases, f"no test of {file} ran:\n{output}"
    failed = [c.get("name") for c in cases if c.find("failure") is not None or c.find("error") is not None]
    assert not failed, f"{failed} failed:\n{output}"
    ran = [c for c in cases if c.find("skipped") is None]
    assert ran, f"every test of {file} was skipped:\n{output}"


@pytest.mark.slow
def test_the_long_ones(tmp_path: Path) -> None:
    found, output = run(tmp_path / "report.xml", "slow")
    cases = [c for f in found.values() for c in f]
    assert cases, output
    assert not [c for c in cases if c.find("failure") is not None or c.find("error") is not None], output


def test_without_the_interpreter_one_sentence_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{FOLDER}/test_rows.py::test_rope_far_out"],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.startswith("ERROR: tests/kernels/triton runs in Triton's interpreter only")
    assert "Traceback" not in done.stderr + done.stdout
