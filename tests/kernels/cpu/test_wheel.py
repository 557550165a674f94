"""A wheel of this checkout, made for real: the libraries are in it where there is a compiler."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from halfbyte import gates
from halfbyte.kernels.cpu import build

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False])
def test_a_wheel_carries_the_cpu_kernels_where_there_is_a_compiler(tmp_path: Path, compiler: bool) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__"))
    env = gates.child_environment(HALFBYTE_CXX=build.compiler() if compiler else "no-such-compiler")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=source, env=env, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {Path(n).name for n in zipfile.ZipFile(wheel).namelist() if "kernels/cpu/" in n}
    libraries = {n for n in names if n.endswith(".so")}
    if compiler:
        assert build.library_name("portable") in libraries
        assert build.MANIFEST in names
        assert "py3-none-any" not in wheel.name
    else:
        assert not libraries
        assert wheel.name.endswith("py3-none-any.whl")
    assert "halfbyte_cpu.cpp" in names
