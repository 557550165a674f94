"""The first steps of a newcomer: what `make demo` installs, and the command that its last line names."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.packages import wheels
from halfbyte.cli.demo import shell_command

ROOT = Path(__file__).parents[1]


def recipe(target: str, folder: Path, *variables: str) -> str:
    """What make would run in a checkout that has no environment yet."""
    command = ["make", "--dry-run", "--file", str(ROOT / "Makefile"), target, f"VENV={folder / 'venv'}", *variables]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_what_runs_and_the_tests_install_the_rest(tmp_path: Path) -> None:
    demo, tests = recipe("demo", tmp_path), recipe("test", tmp_path)
    assert "-e ." in demo
    assert "[test]" not in demo
    assert "[test]" in tests


def test_a_wheel_is_built_without_the_linters(tmp_path: Path) -> None:
    wheel = recipe("wheel", tmp_path)
    assert "[prove]" in wheel
    assert "[test]" not in wheel
    assert "[test]" in recipe("test-wheel", tmp_path)


def test_the_owner_of_a_spark_needs_five_commands(tmp_path: Path) -> None:
    """From a checkout to an answer, with one wheel whose CUDA kernels are those of a GB10 alone."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("## DGX Spark")[2]
    (block, *_) = re.findall(r"(?:^    .*\n)+", page, re.M)
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(commands) == 5
    assert commands[0][:2] == ["make", "wheel"]
    (options,) = [word.removeprefix("WHEEL=") for word in commands[0] if word.startswith("WHEEL=")]
    assert options in recipe("wheel", tmp_path, f"WHEEL={options}")
    archs = options.partition("--archs ")[2].split()[0]
    assert [arch.target for arch in wheels.archs_named(archs)] == ["sm_121a"]
    assert commands[-1][1:3] == ["run", "20b"]
    with pytest.raises(SystemExit, match="sm999"):
        wheels.archs_named("sm121,sm999")


def installation(folder: Path) -> Path:
    script = folder / "bin" / "halfbyte"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    return script


def test_the_demo_names_a_command_that_the_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = installation(tmp_path / ".venv")
    other = installation(tmp_path / "other")
    monkeypatch.setattr(sys, "executable", str(script.parent / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.defpath)
    assert shell_command() == ".venv/bin/halfbyte"
    monkeypatch.setenv("PATH", str(other.parent))
    assert shell_command() == ".venv/bin/halfbyte"  # another installation of that name is not this one
    monkeypatch.setenv("PATH", str(script.parent))
    assert shell_command() == "halfbyte"
    monkeypatch.chdir(script.parent)
    monkeypatch.setenv("PATH", os.defpath)
    assert Path(shell_command()).name == "halfbyte"
    monkeypatch.chdir("/")
    assert (Path("/") / shell_command()).samefile(script)
    script.unlink()
    assert shell_command().endswith("python -m halfbyte")


BUSY = """
import ctypes, threading, time
from halfbyte.cli import prebuild
from halfbyte.kernels import prebuilt
def compile(*_):
    print("compiling", flush=True)
    ctypes.PyDLL(None).sleep(100)  # holds the interpreter, as NVRTC does
prebuilt.prebuild = compile
prebuilt.programs_of = lambda plans: set()
prebuild.prebuild(arch="sm90", shape="20b", preset="exact", to=None, json=False)
"""


IMPORTING = """
import importlib, sys, types
from halfbyte import cli
app = types.ModuleType("halfbyte.cli.app")
app.main = lambda: (importlib.import_module("native_module"), print("went on"))
sys.modules["halfbyte.cli.app"] = cli.app = app
sys.path.insert(0, sys.argv[1])
cli.main()
"""
# What extension modules do: they clear the exception that a signal raised while they import something.
NATIVE_MODULE = """
import time
try:
    print("importing", flush=True)
    for _ in range(600):  # a signal that comes right in front of a sleep is seen behind it
        time.sleep(0.1)
except BaseException:
    pass
"""


def test_ctrl_c_is_not_lost_within_an_import(tmp_path: Path) -> None:
    (tmp_path / "native_module.py").write_text(NATIVE_MODULE)
    command = [sys.executable, "-c", IMPORTING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "importing\n"
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=60) == ("", "")
        assert child.returncode == 130


def test_prebuild_ends_when_it_is_interrupted() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "compiling\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == -signal.SIGINT
