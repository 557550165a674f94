"""What the tests of deploy/ share: its files, and tools that say by a skip that they are not on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = sorted(DEPLOY.glob("compose.*.yaml"))
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile*"))
SCRIPTS = [*sorted(DEPLOY.glob("*.sh")), ROOT / "src" / "halfbyte" / "data" / "install.sh"]


def tool(name: str, where: str) -> str:
    """Its path: beside this interpreter, where pip puts it, or on the machine."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on this machine ({where})")
    return found


def passes(command: Sequence[str | Path], **options: Any) -> str:
    """What it said; a failure shows it."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def fails(command: Sequence[str | Path], **options: Any) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode != 0, f"it should have been refused: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def services(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]
    return found
