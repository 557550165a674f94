"""The systemd unit, by systemd itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.tools import DEPLOY, fails, passes, tool

UNIT = DEPLOY / "halfbyte.service"
WORST = 2.5  # systemd's exposure: below 3.5 is "OK", a service without hardening has 9.6


def analyze() -> str:
    return tool("systemd-analyze", "Debian's systemd")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """With a program that is there: systemd looks."""
    program = tmp_path / "halfbyte"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / "halfbyte.service"
    copy.write_text(UNIT.read_text().replace("/opt/halfbyte/bin/halfbyte", str(program)))
    return copy


def test_systemd_understands_it(unit: Path) -> None:
    said = passes([analyze(), "verify", "--man=no", "--recursive-errors=no", unit])
    assert "halfbyte.service" not in said, said


def test_systemd_would_notice(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("Restart=on-failure", "Restart=perhaps"))
    assert "restart specifier" in fails([analyze(), "verify", "--man=no", "--recursive-errors=no", unit])


def test_it_is_hardened(unit: Path) -> None:
    command = [analyze(), "security", "--offline=yes", "--no-pager"]
    said = passes([*command, f"--threshold={round(10 * WORST)}", unit])
    assert re.search(r"Overall exposure level for halfbyte.service: [\d.]+", said)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    fails([*command, f"--threshold={round(10 * WORST)}", unit])


def test_restarts_are_bounded_and_swap_is_off() -> None:
    text = UNIT.read_text()
    for line in ("StartLimitBurst=5", "Restart=on-failure", "MemorySwapMax=0", "OOMScoreAdjust=500"):
        assert re.search(rf"^{line}$", text, re.M)
    assert text.count(" --port ${PORT}") == 2  # the doctor's and the server's
    assert "--api-key-file ${CREDENTIALS_DIRECTORY}/api-keys" in text
    variables = set(re.findall(r"^(\w+)=", (DEPLOY / "halfbyte.env").read_text(), re.M))
    assert set(re.findall(r"\$\{?([A-Z]+)\b\}?(?!_)", text)) - {"CREDENTIALS"} <= variables
