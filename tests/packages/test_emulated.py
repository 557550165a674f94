"""The aarch64 wheel under qemu-aarch64: Debian's Python for arm64, what PyPI has for it, and the wheel's own libraries.

Not run: an answer. torch's wheel for aarch64 on PyPI is the CUDA build, which does not load without some two gigabytes
of NVIDIA's libraries, and there is none for CPUs on PyPI. What is run: the package is imported without torch, says its
version, the doctor judges, and every library of the CPU kernels loads, is of its name and has the structs of Python's
side. What these libraries compute is `make test-cpu-aarch64`'s business, under the same qemu.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.kernels.cpu.build import sets_for

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs qemu-aarch64 (Debian: qemu-user)"),
    pytest.mark.skipif(shutil.which("apt-get") is None, reason="takes an aarch64 Python from Debian"),
]
DEBIAN = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libexpat1", "zlib1g", "libssl3",
    "libffi8", "libbz2-1.0", "liblzma5", "libuuid1", "libcrypt1", "libgcc-s1", "libstdc++6",
)  # fmt: skip
PYPI = ("typer", "click", "rich", "markdown-it-py", "mdurl", "Pygments", "shellingham", "annotated-doc", "psutil",
        "pydantic", "pydantic_core", "annotated-types", "typing-inspection",
        "typing_extensions")  # fmt: skip
LOAD = """
from halfbyte.kernels.cpu import build, library
for s in build.sets_for("aarch64"):
    print(library._load(s, build.existing_file(s)).instructions)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of an aarch64 Python with the wheel, from packages by name; nothing of this system is touched."""
    folder = tmp_path_factory.mktemp("aarch64")
    for name in ("state/lists/partial", "cache/archives/partial", "etc", "debs", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "state" / "status").touch()
    (folder / "etc" / "sources.list").write_text("deb http://deb.debian.org/debian bookworm main\n")
    (folder / "apt.conf").write_text(
        f'APT::Architecture "arm64"; APT::Architectures {{ "arm64"; }}; Dir::State "{folder}/state"; '
        f'Dir::State::status "{folder}/state/status"; Dir::Cache "{folder}/cache"; Dir::Etc "{folder}/etc"; '
        'APT::Sandbox::User "root";\n'
    )
    apt = ["env", f"APT_CONFIG={folder}/apt.conf", "apt-get", "-qq"]
    if (
        subprocess.run([*apt, "update"]).returncode
        or subprocess.run([*apt, "download", *DEBIAN], cwd=folder / "debs").returncode
    ):
        pytest.skip("Debian's packages are not to be had here")
    for deb in (folder / "debs").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(folder / "root")], check=True)
    wheels = folder / "dist"
    build = [sys.executable, "-m", "bench.packages.wheels", "--machines", "aarch64", "--without-cubins"]
    if subprocess.run([*build, "--to", str(wheels)], cwd=ROOT).returncode:
        pytest.skip("no compiler for aarch64 is here")
    (wheel,) = wheels.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.11"]
    where = [w for n in (36, 34, 28, 17) for w in ("--platform", f"manylinux_2_{n}_aarch64")]
    target = ["--platform", "manylinux2014_aarch64", *where, "--target", str(folder / "site")]
    pins = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *target, *pins, str(wheel), *PYPI], check=True)
    environment = ["env", "-i", f"PYTHONPATH={folder}/site", f"HOME={folder}", "PATH=/nowhere"]
    root = folder / "root"
    return [
        *environment,
        shutil.which("qemu-aarch64") or "",
        "-cpu",
        "max",
        "-L",
        str(root),
        f"{root}/usr/bin/python3.11",
    ]


def output(python: list[str], *words: str) -> str:
    return subprocess.run([*python, *words], capture_output=True, text=True, check=True).stdout


def test_every_library_loads_and_is_of_its_name(python: list[str]) -> None:
    assert output(python, "-c", LOAD).split() == [s.name for s in sets_for("aarch64")]


def test_the_command_and_the_doctor_run_without_torch(python: list[str]) -> None:
    program = "import sys; from halfbyte.cli import main; main()"
    assert output(python, "-c", program, "--version").startswith("halfbyte ")
    told = subprocess.run([*python, "-c", program, "doctor", "--json"], capture_output=True, text=True)
    assert told.returncode == 1
    assert [f["id"] for f in json.loads(told.stdout)["findings"] if f["severity"] == "error"] == ["cuda.torch"]
