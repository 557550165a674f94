"""What a wheel carries: everything of a checkout that runs, the embedded models, this project's receipts, its commit;
CPU kernels and an honest tag where there is a compiler. It carries no workshop.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import halfbyte
from halfbyte import gates, installed
from halfbyte.kernels.cpu import build
from halfbyte.lab import receipts

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SKIPPED = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", "tests")


def setup_file() -> ModuleType:
    """setup.py as a module, which builds nothing."""
    spec = importlib.util.spec_from_file_location("halfbyte_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_that_is_not_python_is_package_data() -> None:
    package = ROOT / "src" / "halfbyte"
    listed = {f for pattern in PROJECT["tool"]["setuptools"]["package-data"]["halfbyte"] for f in package.glob(pattern)}
    others = {f for f in package.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
    assert others <= listed, sorted(map(str, others - listed))


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "halfbyte.__version__"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What goes into a wheel, built without a compiler, which takes seconds; and what the build said."""
    folder = tmp_path_factory.mktemp("built")
    env = gates.child_environment(HALFBYTE_CXX="no-such-compiler")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


def test_what_is_built_has_the_models_the_commit_and_every_source(unpacked: tuple[Path, str]) -> None:
    folder, said = unpacked
    assert [p.name for p in folder.iterdir()] == ["halfbyte"], "the workshop and the tests stay in the checkout"
    built = folder / "halfbyte"
    files = {p.relative_to(built).as_posix() for p in built.rglob("*") if p.is_file()}
    sources = {p.relative_to(ROOT / "src" / "halfbyte").as_posix() for p in (ROOT / "src" / "halfbyte").rglob("*.*")}
    missing = {s for s in sources if s.endswith((".py", ".cu", ".cuh", ".h", ".cpp", ".json", ".xz"))} - files
    assert not missing
    for model in (ROOT / "models").iterdir():
        for file in model.iterdir():
            assert (built / "data" / "models" / model.name / file.name).read_bytes() == file.read_bytes()
    results = {p.name for p in (ROOT / "bench" / "results").iterdir() if p.suffix in (".json", ".jsonl")}
    assert results
    assert results == {p.name for p in (built / "data" / "results").iterdir()}
    if (ROOT / ".git").exists():
        assert (built / "data" / "commit").read_text().strip().rstrip("+") == (installed.commit() or "").rstrip("+")
    assert not [f for f in files if f.endswith(".so")]
    assert "this wheel has no CPU kernels" in said


def test_commands_that_read_receipts_work_without_a_checkout(unpacked: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = unpacked
    env = gates.child_environment(PYTHONPATH=str(folder), HALFBYTE_CACHE_DIR=str(tmp_path))

    def halfbyte_(*words: str) -> str:
        command = [sys.executable, "-c", "from halfbyte.cli import main; main()", *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    here = {r.name: r for r in receipts.read_all()}
    there = json.loads(halfbyte_("receipts", "--json"))["receipts"]
    assert {r["name"]: r["state"] for r in there} == {r.name: r.state for r in here.values()}
    (prediction,) = json.loads(halfbyte_("profile", "--predict", "gb10", "--preset", "fast", "--json"))["predictions"]
    assert prediction["tokens_per_second"] > 0
    compared = json.loads(halfbyte_("compare", "engine", "engine", "--json"))
    assert compared["changes"]
    halfbyte_("report", "--out", str(tmp_path / "report.html"))
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_tag_is_the_oldest_glibc_that_the_libraries_load_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what readelf says of their symbols."""
    program = tmp_path / "readelf"

    def needed(*symbols: str) -> object:
        lines = "".join(f"  0x0010:   Name: {symbol}  Flags: none  Version: 3\n" for symbol in symbols)
        program.write_text(f"#!/bin/sh\ncat <<'EOF'\n{lines}EOF\n")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
        return setup_file().needed_glibc([tmp_path / "a.so"])

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert needed("GLIBC_2.2.5") == (2, 17)
    assert needed("GLIBC_2.2.5", "GLIBC_2.34", "GLIBCXX_3.4.22", "GLIBC_2.4") == (2, 34)
    assert needed("GLIBC_2.17", "GLIBCXX_3.4", "GLIBCXX_3.4.30") == (2, 35)
    assert needed("GLIBCXX_3.4.99") is None, "newer than any policy"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert setup_file().needed_glibc([tmp_path / "a.so"]) is None


def test_the_command_says_version_and_commit(run: object) -> None:
    code, out, _ = run("--version")  # type: ignore[operator]
    assert code == 0
    assert out.strip() == f"halfbyte {halfbyte.__version__} (commit {installed.commit() or 'unknown'})"


def test_an_installation_knows_its_commit_and_asks_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the environment lies in the repository of something else."""
    monkeypatch.setattr(installed, "RECORDED_COMMIT", tmp_path / "commit")
    monkeypatch.setattr(installed, "CHECKOUT", tmp_path / "somebody" / "else")
    monkeypatch.setattr(installed, "commit_of", lambda root: "somebody else's")
    assert installed.commit() is None
    (tmp_path / "commit").write_text("0123abc\n")
    assert installed.commit() == "0123abc"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False])
def test_a_wheel_carries_the_cpu_kernels_where_there_is_a_compiler(tmp_path: Path, compiler: bool) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=SKIPPED)
    env = gates.child_environment(HALFBYTE_CXX=build.compiler() if compiler else "no-such-compiler")
    pip = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run(pip, cwd=source, env=env, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        names = {n for n in z.namelist() if "kernels/cpu/" in n}
        libraries = {Path(n).name for n in names if n.endswith(".so")}
        if compiler:
            manifest = json.loads(z.read(f"halfbyte/kernels/cpu/{build.MANIFEST}"))
            assert set(manifest["libraries"]) == libraries == {build.library_name(s.name) for s in build.sets_for()}
            assert wheel.name.startswith(f"halfbyte-{halfbyte.__version__}-py3-none-manylinux_2_")
        else:
            assert not libraries
            assert wheel.name.endswith("py3-none-any.whl")
    assert "halfbyte/kernels/cpu/halfbyte_cpu.cpp" in names
