"""The aarch64 wheel under qemu-aarch64: it serves the embedded model and answers, with NEON kernels.

Python and its libraries are Debian's for arm64, everything else is what PyPI has for it, each by name into a folder of
the test's own. One thing is not what a user gets: torch is 2.10, the last one for CPUs that PyPI has for aarch64 (from
2.11 on it is the CUDA build, which does not load without two gigabytes of NVIDIA's libraries). We ask for 2.11, so it
is put in by name alone. What the kernels compute bit for bit is `make test-cpu-aarch64`'s business.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from halfbyte.kernels.cpu.build import sets_for
from tests.packages.served import ask, free_port, wait_until_ready

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs qemu-aarch64 (Debian: qemu-user)"),
    pytest.mark.skipif(shutil.which("apt-get") is None, reason="takes an aarch64 Python from Debian"),
]
DEBIAN = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libexpat1", "zlib1g", "libssl3",
    "libffi8", "libbz2-1.0", "liblzma5", "libuuid1", "libcrypt1", "libgcc-s1", "libstdc++6", "libsqlite3-0",
    "libncursesw6", "libtinfo6",
)  # fmt: skip
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
TORCH = "torch==2.10.0"
MACHINE = {
    "sys_platform": "linux", "platform_system": "Linux", "platform_machine": "aarch64", "python_version": "3.11",
    "python_full_version": "3.11.2", "implementation_name": "cpython", "platform_python_implementation": "CPython",
    "os_name": "posix",
}  # fmt: skip
# What Linux says on the CPU that qemu is, which shows this machine's own file otherwise. A root that has a /proc hides
# the real one whole, so only the server gets it, not the doctor.
CPU = "processor\t: 0\nFeatures\t: fp asimd aes crc32 atomics fphp asimdhp asimdrdm asimddp i8mm bf16\n"
LOAD = """
from halfbyte.kernels.cpu import build, library
for s in build.sets_for("aarch64"):
    print(library._load(s, build.existing_file(s)).instructions)
"""


def needed(name: str, extras: tuple[str, ...] = ()) -> set[str]:
    """The names of everything that it asks for on such a machine, by what is installed here; but for torch."""
    found = {canonicalize_name(name)}
    asked = [Requirement(line) for line in requires(name) or []]
    for r in asked:
        wanted = r.marker is None or any(r.marker.evaluate({**MACHINE, "extra": e}) for e in ("", *extras))
        if wanted and r.name != "torch":
            found |= needed(r.name, tuple(r.extras))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two commands, `python` and `python-neon`; nothing of this system is touched."""
    folder = tmp_path_factory.mktemp("aarch64")
    root = folder / "root"
    for name in ("state/lists/partial", "cache/archives/partial", "etc", "debs", "root", "neon/proc"):
        (folder / name).mkdir(parents=True)
    (folder / "state" / "status").touch()
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    (folder / "etc" / "sources.list").write_text(f"deb {signed}http://deb.debian.org/debian bookworm main\n")
    (folder / "apt.conf").write_text(
        f'APT::Architecture "arm64"; APT::Architectures {{ "arm64"; }}; Dir::State "{folder}/state"; '
        f'Dir::State::status "{folder}/state/status"; Dir::Cache "{folder}/cache"; Dir::Etc "{folder}/etc"; '
        'APT::Sandbox::User "root";\n'
    )
    apt = ["env", f"APT_CONFIG={folder}/apt.conf", "apt-get", "-qq"]
    for words in (["update"], ["download", *DEBIAN]):
        done = subprocess.run([*apt, *words], cwd=folder / "debs", capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"Debian's packages are not to be had here: {done.stderr[-500:]}")
    for deb in (folder / "debs").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(root)], check=True)
    (folder / "neon" / "proc" / "cpuinfo").write_text(CPU)
    for part in root.iterdir():
        (folder / "neon" / part.name).symlink_to(part)
    build = [sys.executable, "-m", "bench.packages.wheels", "--machines", "aarch64", "--without-cubins"]
    if subprocess.run([*build, "--to", str(folder / "dist")], cwd=ROOT).returncode:
        pytest.skip("no compiler for aarch64 is here")
    (wheel,) = (folder / "dist").glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.11"]
    where = [w for n in (36, 34, 31, 28, 27, 26, 24, 17) for w in ("--platform", f"manylinux_2_{n}_aarch64")]
    target = ["--platform", "manylinux2014_aarch64", *where, "--target", str(folder / "site")]
    others = [
        n for n in sorted(needed("halfbyte") | needed("torch")) if not n.startswith(("nvidia-", "cuda-", "triton"))
    ]
    others = [n for n in others if n not in ("halfbyte", "torch", "setuptools")]
    subprocess.run([*pip, *target, "-c", str(ROOT / "constraints.txt"), str(wheel), *others], check=True)
    subprocess.run([*pip, *target, TORCH], check=True)
    emulator = shutil.which("qemu-aarch64")
    for name, prefix in (("python", root), ("python-neon", folder / "neon")):
        command = folder / name
        command.write_text(
            f"#!/bin/sh\nexec /usr/bin/env -i PYTHONPATH={folder}/site HOME={folder} PATH=/nowhere OMP_NUM_THREADS=1 "
            f'{emulator} -cpu max -L {prefix} {root}/usr/bin/python3.11 "$@"\n'
        )
        command.chmod(0o755)
    return folder


def halfbyte(folder: Path, *words: str, python: str = "python") -> list[str]:
    """The command; processes that it starts are emulated, too."""
    program = f"import sys; sys.executable = {str(folder / python)!r}; from halfbyte.cli import main; main()"
    return [str(folder / python), "-c", program, *words]


def output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_library_loads_and_is_of_its_name(folder: Path) -> None:
    assert output([str(folder / "python"), "-c", LOAD]).split() == [s.name for s in sets_for("aarch64")]


def test_the_command_and_the_doctor_run(folder: Path) -> None:
    assert output(halfbyte(folder, "--version")).startswith("halfbyte ")
    told = json.loads(output(halfbyte(folder, "doctor", "--port", str(free_port()), "--json")))
    assert told["counts"]["error"] == 0, told["findings"]
    assert not [f for f in told["findings"] if f["id"] in ("install.shadowed", "cpu.kernels", "doctor.stumbled")]


def test_it_serves_and_answers_with_neon(folder: Path) -> None:
    port = free_port()
    log = (folder / "log").open("w")
    server = subprocess.Popen(
        halfbyte(folder, "serve", "--port", str(port), python="python-neon"),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(server, url, folder / "log", 900)
        answer = ask(url, "What is 17 + 25?", 600)
        assert answer["choices"][0]["message"]["content"] == "17 + 25 = 42."
        assert "CPU kernels with neon-i8mm" in (folder / "log").read_text()
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # emulated processes take long to end by themselves
        server.wait(60)
        log.close()
