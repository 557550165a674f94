"""What pyproject.toml cannot say of a wheel: CPU kernels of its machine, the embedded model, this
project's receipts, its commit, its tag.

An editable install carries none of it: kernels are compiled at first use (`halfbyte.kernels.cpu.build`), models lie in
the checkout, git knows the commit. Where there is no C++ compiler the wheel has no CPU kernels either, is good for any
machine, and `halfbyte explain` says why the reference runs. The libraries are loaded by ctypes, so one wheel serves
every Python; its tag names the oldest glibc that its libraries really load with, read out of them. libstdc++ is the
system's: inside the libraries it would ask for a newer glibc than they do (2.36 instead of 2.34 with Debian's GCC 12).

`make wheel` builds for both machines (`bench/packages/wheels.py`); HALFBYTE_CXX names the compiler, and the machine it
compiles for is the wheel's.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "src"))

from halfbyte.installed import commit_of  # needs the path above, and nothing that is not here
from halfbyte.kernels.cpu import build as kernels

MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}  # what compilers and systems call them otherwise
OLDEST = (2, 17)  # no manylinux tag is older
# The newest libstdc++ symbols that may be asked of a system with such a glibc (PEP 600's policies).
LIBSTDCXX = {
    (3, 4, 19): (2, 17), (3, 4, 22): (2, 24), (3, 4, 24): (2, 27), (3, 4, 28): (2, 31), (3, 4, 29): (2, 34),
    (3, 4, 30): (2, 35), (3, 4, 33): (2, 39),
}  # fmt: skip


def machine() -> str | None:
    """What the compiler compiles for; None where there is none."""
    try:
        program = kernels.compiler()
        asked = subprocess.run([program, "-dumpmachine"], capture_output=True, text=True, check=True)
    except (kernels.Unavailable, OSError, subprocess.SubprocessError):
        return None
    name = asked.stdout.strip().split("-")[0] or platform.machine()
    return MACHINES.get(name, name)


def needed_glibc(libraries: list[Path]) -> tuple[int, int] | None:
    """The oldest glibc of a system that has every symbol the libraries ask for; None if nobody can say."""
    if shutil.which("readelf") is None:
        return None
    found = [OLDEST]
    for path in libraries:
        told = subprocess.run(["readelf", "--version-info", "--wide", str(path)], capture_output=True, text=True)
        if told.returncode:
            return None
        found += [(int(a), int(b)) for a, b in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", told.stdout)]
        for name in re.findall(r"Name: GLIBCXX_(\d+\.\d+(?:\.\d+)?)", told.stdout):
            wanted = tuple(map(int, name.split(".")))
            system = next((glibc for newest, glibc in LIBSTDCXX.items() if wanted <= newest), None)
            if system is None:
                return None
            found.append(system)
    return max(found)


def measured_elsewhere(results: Path) -> dict[str, str]:
    """The hash of every file outside of the package that a receipt measured: the wheel does not carry these files."""
    names = {name for path in results.glob("*.json") for name in json.loads(path.read_text("utf-8"))["measured"]}
    files = {name: ROOT / name.removeprefix("../../") for name in sorted(names) if name.startswith("../../")}
    return {n: hashlib.sha256(f.read_bytes()).hexdigest()[:12] for n, f in files.items() if f.is_file()}


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "halfbyte")
        try:
            kernels.build_into(package / "kernels" / "cpu", machine())
        except kernels.Unavailable as e:
            self.warn(f"this wheel has no CPU kernels: {e}")
        for model in sorted((ROOT / "models").iterdir()):
            shutil.copytree(model, package / "data" / "models" / model.name, dirs_exist_ok=True)
        results = ROOT / "bench" / "results"  # what `receipts`, `report`, `compare` and `profile --predict` read
        (package / "data" / "results").mkdir(parents=True, exist_ok=True)
        for path in (*results.glob("*.json"), results / "index.jsonl"):
            shutil.copy2(path, package / "data" / "results" / path.name)
        elsewhere = json.dumps(measured_elsewhere(results), indent=1)
        (package / "data" / "measured.json").write_text(elsewhere + "\n", encoding="utf-8")
        commit = commit_of(ROOT) if (ROOT / ".git").exists() else None
        if commit is not None:
            (package / "data" / "commit").write_text(commit + "\n", encoding="utf-8")


class BdistWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, _ = super().get_tag()
        libraries = sorted(Path(self.bdist_dir or "", "halfbyte", "kernels", "cpu").glob("*.so"))
        if self.root_is_pure:
            return python, abi, "any"
        glibc, name = needed_glibc(libraries) if libraries else None, machine()
        if glibc is None or name is None or platform.system() != "Linux":
            return "py3", "none", super().get_tag()[2]
        return "py3", "none", f"manylinux_{glibc[0]}_{glibc[1]}_{name}"


class HalfbyteDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """What setuptools asks to know whether a wheel is for one kind of machine."""
        return machine() is not None


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel}, distclass=HalfbyteDistribution)
