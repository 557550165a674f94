"""`make wheel`: one wheel for Linux on x86_64 and one for aarch64, in dist/. Each serves Python 3.11 to 3.14: nothing
in it is compiled against Python.

    python -m bench.packages.wheels [--machines x86_64,aarch64] [--archs sm90,sm121] [--without-cubins] [--to dist]

Each is built from a clean copy of the checkout's own files: CPU kernels for every instruction set of its machine by the
compiler here or Debian's cross compiler; CUDA kernels compiled ahead for every architecture, or for those of --archs,
the same in both; the embedded models; the commit. What cannot be made here is left out, and the last lines say so. Each
wheel is opened again and looked into; one that lacks a library, a model or its commit is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from halfbyte import installed
from halfbyte.architectures import GPU_ARCHES
from halfbyte.caches import preset_plans
from halfbyte.gates import child_environment
from halfbyte.kernels.cpu import build as cpu
from halfbyte.kernels.launch import nvrtc_available, nvrtc_version
from halfbyte.kernels.prebuilt import prebuild, programs_of
from halfbyte.plan.phase import ARCHES, Arch

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "wheels"
CROSS = {"aarch64": "aarch64-linux-gnu-g++", "x86_64": "x86_64-linux-gnu-g++"}
SHAPES = ("20b", "120b")
LARGEST = 100e6  # bytes of a file that PyPI takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default="x86_64,aarch64")
    parser.add_argument("--archs", default=",".join(GPU_ARCHES), help="of the CUDA kernels that are compiled ahead")
    parser.add_argument("--without-cubins", action="store_true", help="CUDA kernels as sources alone")
    parser.add_argument("--to", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    left_out: list[str] = []
    source = stage(WORK / f"source-{os.getpid()}")
    cubins = [] if options.without_cubins else make_cubins(archs_named(options.archs), left_out)
    if options.without_cubins:
        left_out.append("cubins: --without-cubins")
    folder = source / "src" / "halfbyte" / "kernels" / "prebuilt"
    folder.mkdir()
    for path in cubins:
        shutil.copy2(path, folder / path.name)
    wheels = [
        wheel for m in options.machines.split(",") if (wheel := build(source, m, options.to, left_out)) is not None
    ]
    shutil.rmtree(source)
    for wheel in wheels:
        print(look_into(wheel, cubins=len(cubins)))
    for line in left_out:
        print(f"left out: {line}")
    sys.exit(0 if wheels else 1)


def archs_named(text: str) -> list[Arch]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in GPU_ARCHES]:
        sys.exit(f"--archs names {', '.join(unknown)}; use some of {', '.join(GPU_ARCHES)}.")
    return [GPU_ARCHES[name] for name in names]


def stage(folder: Path) -> Path:
    """The checkout's own files as they are now, and of which commit they are."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if name.startswith(("src/", "models/", "bench/")) or "/" not in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy2(ROOT / name, folder / name)
    commit = installed.commit_of(ROOT)
    if commit is not None:
        (folder / "src" / "halfbyte" / "data" / "commit").write_text(commit + "\n", encoding="utf-8")
    return folder


def make_cubins(archs: list[Arch], left_out: list[str]) -> list[Path]:
    """The cubins of every plan that a preset takes; kept between builds by the hash of their sources."""
    reason = nvrtc_available()
    if reason is not None:
        left_out.append(f"cubins: {reason}")
        return []
    programs = programs_of(preset_plans(archs, SHAPES))

    def tell(name: str, done: int, of: int) -> None:
        if done % 10 == 0 or done == of:
            print(f"cubins: {done} of {of}", flush=True)

    print(f"compiling {len(programs)} programs with NVRTC {nvrtc_version()} (minutes, once)", flush=True)
    return prebuild(programs, WORK / "cubins", tell)


def build(source: Path, machine: str, to: Path, left_out: list[str]) -> Path | None:
    compiler = cpu.compiler() if machine == platform.machine() else CROSS.get(machine, "")
    if shutil.which(compiler) is None:
        package = f"g++-{machine.replace('_', '-')}-linux-gnu"
        left_out.append(f"the wheel for {machine}: there is no {compiler} here (Debian: apt install {package})")
        return None
    for stale in (source / "build", *source.glob("src/*.egg-info")):
        shutil.rmtree(stale, ignore_errors=True)
    fresh = source / "dist"
    shutil.rmtree(fresh, ignore_errors=True)
    print(f"building the wheel for {machine} with {cpu.compiler_version(compiler)}", flush=True)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(fresh)]
    env = child_environment(HALFBYTE_CXX=compiler, SOURCE_DATE_EPOCH=committed_at())
    subprocess.run(command, cwd=source, env=env, check=True)
    (wheel,) = fresh.glob("*.whl")
    to.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(wheel, to / wheel.name))


def committed_at() -> str:
    """Seconds: the time of every file in the wheel, so that one commit makes one wheel."""
    log = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    return log.stdout.strip()


def look_into(wheel: Path, *, cubins: int) -> str:
    """What is in it, in a line; an error if something is not."""
    machine = re.sub(r".*?_(x86_64|aarch64)\.whl$", r"\1", wheel.name)
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
        manifest = json.loads(z.read(f"halfbyte/kernels/cpu/{cpu.MANIFEST}"))
        commit = z.read("halfbyte/data/commit").decode().strip()
    members = {f"halfbyte/kernels/cpu/{cpu.library_name(s.name)}" for s in cpu.sets_for(machine)}
    members |= {f"halfbyte/data/models/{m.name}/config.json" for m in (ROOT / "models").iterdir()}
    members |= {f"halfbyte/data/results/{r.name}" for r in (ROOT / "bench" / "results").glob("*.json")}
    missing = sorted(members - names)
    if missing:
        raise SystemExit(f"{wheel.name} lacks {', '.join(missing)}")
    by_arch = {a.target: sum(f"-{a.target}-" in n for n in names) for a in ARCHES.values() if a.is_gpu}
    if sum(by_arch.values()) != cubins:
        raise SystemExit(f"{wheel.name} has {sum(by_arch.values())} cubins of {cubins}")
    size = wheel.stat().st_size
    large = f" (more than the {LARGEST / 1e6:.0f} MB that PyPI takes)" if size > LARGEST else ""
    return (
        f"{wheel.name}: {size / 1e6:.1f} MB{large}, CPU kernels {', '.join(sorted(manifest['libraries']))}; cubins "
        f"{', '.join(f'{n} {a}' for a, n in by_arch.items())}; commit {commit[:12]}"
    )


if __name__ == "__main__":
    main()
