"""Runs the checks over a machine. A check that raises becomes a finding, and the other checks still run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from halfbyte.doctor import checks
from halfbyte.doctor.finding import CHECKS, SEVERITIES, Finding, Purpose
from halfbyte.doctor.machine import Machine

assert checks.__all__  # importing them registers them
STUMBLED = "doctor.stumbled"


def diagnose(machine: Machine, purpose: Purpose) -> list[Finding]:
    """All findings, the most severe first."""
    findings: list[Finding] = []
    for c in CHECKS.values():
        if c.cluster and not purpose.cluster:
            continue
        try:
            results = [replace(f, id=c.id) for f in c.judge(machine, purpose)]
        except Exception as e:  # an answer that no check expected must not hide what the others found
            evidence = f"{c.id} could not judge this machine: {type(e).__name__}: {e}"
            results = [
                Finding("warning", evidence, "please report it with `halfbyte doctor --record FILE`", id=STUMBLED)
            ]
        findings += results
    return sorted(findings, key=lambda f: -SEVERITIES.index(f.severity))


def exit_status(findings: Iterable[Finding]) -> int:
    """0 if nothing is worse than a warning, else 1."""
    return 1 if any(f.severity == "error" for f in findings) else 0
