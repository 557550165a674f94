"""A wheel in an empty environment, without this checkout and without a compiler: it serves, answers and has its cubins.

Slow: torch and the rest are installed afresh. Takes the wheel that `make wheel` left in dist/ if it is of
these sources, or builds one without cubins.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfbyte
from halfbyte import gates
from tests.packages.served import ask, free_port, wait_until_ready

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def of_these_sources() -> Path | None:
    """What `make wheel` made for this machine, if nothing that goes into it has changed since its commit."""
    for wheel in (ROOT / "dist").glob(f"halfbyte-*_{platform.machine()}.whl"):
        parts = ["src", "models", "setup.py", "pyproject.toml"]
        told = subprocess.run(["git", "diff", "--quiet", commit_in(wheel), "--", *parts], cwd=ROOT, capture_output=True)
        if told.returncode == 0:
            return wheel
    return None


def commit_in(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as z:
        return z.read("halfbyte/data/commit").decode().strip()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of an environment with the wheel and what it asks for, and nothing of the checkout in reach."""
    folder = tmp_path_factory.mktemp("empty")
    wheel = of_these_sources()
    if wheel is None:
        build = [sys.executable, "-m", "bench.packages.wheels", "--machines", platform.machine(), "--without-cubins"]
        subprocess.run([*build, "--to", str(folder / "dist")], cwd=ROOT, check=True)
        (wheel,) = (folder / "dist").glob("*.whl")
    print(f"the wheel: {wheel}")
    venv.create(folder / "venv", with_pip=True)
    pip = [str(folder / "venv" / "bin" / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, str(wheel)], check=True, cwd=folder, env=without_python())  # or it finds the checkout's
    (folder / "commit").write_text(commit_in(wheel))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def without_python() -> dict[str, str]:
    return {k: v for k, v in gates.child_environment().items() if not k.startswith(("PYTHON", "HALFBYTE", "VIRTUAL"))}


def clean(folder: Path) -> dict[str, str]:
    """A user's environment: no PYTHONPATH, a home and caches of its own, no compiler."""
    (folder / "home").mkdir(exist_ok=True)
    return {
        **without_python(),
        "HOME": str(folder / "home"),
        "PATH": str(folder / "venv" / "bin"),
        "OMP_NUM_THREADS": "1",
    }


def command(folder: Path, *words: str) -> str:
    program = str(folder / "venv" / "bin" / "halfbyte")
    done = subprocess.run([program, *words], cwd=folder / "home", env=clean(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_says_its_version_and_commit(environment: Path) -> None:
    wanted = f"halfbyte {halfbyte.__version__} (commit {(environment / 'commit').read_text()})"
    assert command(environment, "--version").strip() == wanted


def test_it_generates_with_its_own_cpu_kernels_and_no_compiler(environment: Path) -> None:
    told = command(environment, "generate", "--raw", "--prompt", "2 + 2 =", "--max-tokens", "4")
    assert told.strip()
    explained = json.loads(command(environment, "explain", "--arch", "cpu", "--json"))
    assert {p for phases in explained["chosen"].values() for p in phases} == {"cpu.step"}
    assert not list((environment / "home" / ".cache").rglob("*.so")), "something was compiled"


# Every program that the presets launch, and whether the package has its cubin.
CUBINS = """
from halfbyte.caches import preset_plans
from halfbyte.kernels.launch import PREBUILT, prebuilt_name
from halfbyte.kernels.prebuilt import programs_of
from halfbyte.plan.phase import ARCHES
programs = programs_of(preset_plans([a for a in ARCHES.values() if a.is_gpu], ("20b", "120b")))
names = {prebuilt_name(*p) for p in programs}
print(len(names), len(names - {p.name for p in PREBUILT.glob("*.cubin")}), len(list(PREBUILT.glob("*.cubin"))))
"""


def test_no_kernel_of_a_preset_needs_a_compiler(environment: Path) -> None:
    if of_these_sources() is None:
        pytest.skip("a wheel without cubins; run make wheel")
    python = str(environment / "venv" / "bin" / "python")
    done = subprocess.run([python, "-c", CUBINS], cwd=environment / "home", env=clean(environment), capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    wanted, missing, there = map(int, done.stdout.split())
    assert (wanted > 100, missing, there) == (True, 0, wanted)


def test_the_doctor_has_no_errors_there(environment: Path) -> None:
    told = json.loads(command(environment, "doctor", "--port", str(free_port()), "--json"))
    assert told["counts"]["error"] == 0, told["findings"]
    assert not [f for f in told["findings"] if f["id"] in ("install.shadowed", "cpu.kernels", "doctor.stumbled")]


def test_it_serves_and_chat_talks_to_it(environment: Path) -> None:
    port = free_port()
    program = str(environment / "venv" / "bin" / "halfbyte")
    log = (environment / "log").open("w")
    server = subprocess.Popen(
        [program, "serve", "--port", str(port)],
        cwd=environment / "home",
        env=clean(environment),
        stderr=log,
        stdout=log,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(server, url, environment / "log", 180)
        answer = ask(url, "Hello", 120, max_tokens=16)
        assert answer["usage"]["completion_tokens"] > 0
        page = urllib.request.urlopen(url, timeout=10).read().decode()
        assert re.search("<html", page, re.IGNORECASE), "the chat page is in the wheel"
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        log.close()
    typed = subprocess.run(
        [program, "chat", "--max-tokens", "24"], cwd=environment / "home", env=clean(environment), input="Hello\n",
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert typed.returncode == 0, typed.stderr
    assert typed.stdout.strip()
