"""`halfbyte bundle`: an archive that installs without a network, and that notices what was changed in it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.cli import bundle as bundle_
from halfbyte.model import checksums, load

METADATA = """Metadata-Version: 2.4
Name: halfbyte
Version: 0.1.0
Requires-Dist: torch>=2.11
Requires-Dist: uvloop>=0.21; platform_system != "Windows"
Provides-Extra: gpu
Requires-Dist: nvidia-ml-py>=12; extra == "gpu"
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    with zipfile.ZipFile(folder / "halfbyte-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("halfbyte-0.1.0.dist-info/METADATA", METADATA)
    (folder / "torch-9-py3-none-any.whl").write_bytes(b"theirs")
    (folder / "nvidia_ml_py-9-py3-none-any.whl").write_bytes(b"theirs")
    return folder


def test_wheels_that_cannot_install_are_refused(run: Run, wheels: Path, tmp_path: Path) -> None:
    (wheels / "nvidia_ml_py-9-py3-none-any.whl").unlink()
    assert run("bundle", str(tmp_path / "plain.tar"), "--wheels", str(wheels))[0] == 0
    code, _, err = run("bundle", str(tmp_path / "b.tar"), "--wheels", str(wheels), "--extra", "gpu")
    assert (code, "nvidia-ml-py" in err, "--download" in err) == (2, True, True), err
    (wheels / "torch-9-py3-none-any.whl").unlink()
    code, _, err = run("bundle", str(tmp_path / "b.tar"), "--wheels", str(wheels))
    assert (code, "torch" in err, "uvloop" in err) == (2, True, False), err
    assert not (tmp_path / "b.tar").exists()


def test_everything_is_in_it_with_its_checksum(run: Run, wheels: Path, tmp_path: Path) -> None:
    target = tmp_path / "halfbyte.tar"
    code, out, err = run(
        "bundle", str(target), "--wheels", str(wheels), "--model", str(load.EMBEDDED), "--extra", "gpu", "--json"
    )
    assert code == 0, err
    with tarfile.open(target) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    root = tmp_path / "out" / bundle_.ROOT
    sums = dict(reversed(line.split("  ", 1)) for line in (root / "SHA256SUMS").read_text().splitlines())
    files = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    assert files == {*sums, "SHA256SUMS"}
    assert json.loads(out)["files"] == len(files)
    for name, digest in sums.items():
        assert hashlib.sha256((root / name).read_bytes()).hexdigest() == digest
    assert {"wheels/halfbyte-0.1.0-py3-none-any.whl", "wheels/torch-9-py3-none-any.whl", "install.sh"} <= files
    assert {f"models/tiny/{name}" for name in checksums.read_by_loading(load.EMBEDDED)} <= files
    assert (root / "requirement.txt").read_text() == "halfbyte[gpu]\n"
    assert os.access(root / "install.sh", os.X_OK)


def test_the_installer_checks_before_it_installs(run: Run, wheels: Path, tmp_path: Path) -> None:
    """With a Python that makes a venv of two scripts, so that nothing is really installed."""
    assert run("bundle", str(tmp_path / "b.tar"), "--wheels", str(wheels))[0] == 0
    with tarfile.open(tmp_path / "b.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / bundle_.ROOT
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nmkdir -p "$3/bin"\nfor n in pip halfbyte; do\n'
        'printf \'#!/bin/sh\\necho "$(basename "$0") $*"\\n\' > "$3/bin/$n"; '
        'chmod +x "$3/bin/$n"; done\n'
    )
    python.chmod(0o755)
    environment = {"PATH": os.defpath, "HOME": str(tmp_path), "PYTHON": str(python)}
    done = subprocess.run(["sh", str(root / "install.sh")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--no-index --find-links wheels --requirement requirement.txt" in done.stdout
    (root / "wheels" / "torch-9-py3-none-any.whl").write_bytes(b"exchanged")
    again = subprocess.run(
        ["sh", str(root / "install.sh"), str(tmp_path / "x")], env=environment, capture_output=True, text=True
    )
    assert again.returncode != 0
    assert "torch-9" in again.stdout + again.stderr
    assert not (tmp_path / "x").exists()


def test_a_model_is_held_to_its_record(run: Run, wheels: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in checksums.read_by_loading(load.EMBEDDED):
        (model / name).write_bytes((load.EMBEDDED / name).read_bytes())
    files = {n: checksums.FileRecord(1, sha256="0" * 64) for n in checksums.read_by_loading(model)}
    checksums.write_record(model, checksums.PullRecord("r", "c", files))
    code, _, err = run("bundle", str(tmp_path / "b.tar"), "--wheels", str(wheels), "--model", str(model))
    assert (code, "not the file that was pulled" in err) == (2, True)
    assert not (tmp_path / "b.tar").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--wheels", "nowhere"], "is no folder"),
        (["--wheels", "."], "no wheel of halfbyte"),
        (["--wheels", "dist", "--machine", "sparc"], "x86_64 or aarch64"),
        (["--wheels", "dist", "--model", "nowhere"], "does not exist"),
        (["--wheels", "dist", "--download", "--machine", "aarch64"], "no wheel of halfbyte for aarch64"),
    ],
)
def test_mistakes(run: Run, wheels: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheels / "halfbyte-0.1.0-py3-none-any.whl").rename(wheels / "halfbyte-0.1.0-py3-none-linux_x86_64.whl")
    monkeypatch.chdir(wheels.parent)
    code, _, err = run("bundle", "b.tar", *words)
    assert (code, said in err) == (2, True), err
    assert not Path("b.tar").exists()


def test_an_archive_is_never_replaced(run: Run, wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "b.tar").write_text("mine")
    code, _, err = run("bundle", str(tmp_path / "b.tar"), "--wheels", str(wheels))
    assert (code, "already exists" in err) == (2, True)


def test_pip_is_asked_for_the_other_machine(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(bundle_.subprocess, "run", run)
    bundle_.fetch(wheels, "gpu", "aarch64", "3.12")
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "manylinux_2_28_aarch64" in command
    assert command[command.index("--python-version") + 1] == "3.12"
    assert command[-1].endswith("halfbyte-0.1.0-py3-none-any.whl[gpu]")
    bundle_.fetch(wheels, None, None, None)
    assert "--platform" not in asked[1]
