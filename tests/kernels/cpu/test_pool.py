"""The thread pool under stress, built alone: every item once, whatever delays, sleeps and other threads there are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.kernels.cpu.run_replay import compile_program


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("pool") / "stress"
    compile_program(target, "pool_stress.cpp", ["-O2", "-Werror"], parts=["pool.cpp"])
    return target


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_every_item_runs_once(stress: Path, threads: int) -> None:
    done = subprocess.run([stress, str(threads), "1500", str(threads)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
