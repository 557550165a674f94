"""From the C++ sources beside this file to one shared library per instruction set.

A wheel carries the libraries (`setup.py` calls `build_into`). A source tree has none: the one that a machine needs is
compiled at first use, or by `python -m halfbyte.kernels.cpu`, into the cache folder under the hash of sources,
flags and compiler, so that a changed source is never answered by an old library. What cannot be built is an
`Unavailable` that says why; a plan turns it into a refusal. Needs a C++17 compiler, and neither torch nor CMake.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from halfbyte import gates
from halfbyte.kernels.cpu.instruction_sets import COMMON_FLAGS, INSTRUCTION_SETS, InstructionSet

SOURCES = Path(__file__).parent
MANIFEST = "libraries.json"  # beside the libraries of a wheel: what they were made from
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 600

log = logging.getLogger("halfbyte")


class Unavailable(Exception):
    """Why the CPU kernels cannot run here, as a clause."""


def library_name(name: str) -> str:
    return f"libhalfbyte_cpu.{name}.so"


def library_file(instructions: InstructionSet) -> Path:
    """The library of an instruction set: the package's own, or one from the cache, compiled now if necessary."""
    path = existing_file(instructions)
    return _compile_into_cache(instructions) if path is None else path


def existing_file(instructions: InstructionSet) -> Path | None:
    """The library of an instruction set if it exists already; None if it would have to be compiled."""
    packaged = _packaged(instructions)
    if packaged is not None:
        return packaged
    try:
        path = _cached(instructions)
    except Unavailable:
        return None
    return path if _is_intact(path) else None


def sets_for(machine: str | None = None) -> tuple[InstructionSet, ...]:
    """The instruction sets for a machine type, the best first."""
    machine = machine or platform.machine()
    return tuple(s for s in INSTRUCTION_SETS if s.machine in ("", machine))


def build_into(folder: Path, machine: str | None = None) -> list[Path]:
    """Build every library of this machine type for a wheel. A library that the compiler cannot build is skipped with a
    warning; Unavailable if none can be built."""
    folder.mkdir(parents=True, exist_ok=True)
    libraries, failures = [], []
    for instructions in sets_for(machine):
        path = folder / library_name(instructions.name)
        try:
            compile_library(instructions, path)
            libraries.append(path)
        except Unavailable as e:
            failures.append(f"{instructions.name}: {e}")
            log.warning("the CPU kernels are left out for %s", failures[-1])
    if not libraries:
        raise Unavailable("; ".join(failures))
    digests = {p.name: _digest(p) for p in libraries}
    manifest = {"sources": sources_hash(), "compiler": compiler_version(compiler()), "libraries": digests}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return libraries


def sources() -> list[Path]:
    """What a library is made of: every .cpp here that is not a program of its own."""
    files = sorted(SOURCES.glob("*.cpp"))
    return [p for p in files if not re.search(r"^int main\(", p.read_text(encoding="utf-8"), re.MULTILINE)]


@functools.cache
def sources_hash() -> str:
    digest = hashlib.sha256()
    for path in (*sources(), *sorted(SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def compiler() -> str:
    program = gates.setting("HALFBYTE_CXX")
    if program is not None:
        if shutil.which(program) is None:
            raise Unavailable(f"HALFBYTE_CXX is {program}, which is not an installed program")
        return program
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return name
    raise Unavailable("there is no C++ compiler to build it (install g++ or clang++)")


@functools.cache
def compiler_version(program: str) -> str:
    try:
        result = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        raise Unavailable(f"the compiler {program} does not run ({e})") from None
    return result.stdout.splitlines()[0].strip() if result.stdout.strip() else program


def compile_library(instructions: InstructionSet, target: Path) -> None:
    """Compile all sources with that set's flags in parallel; `target` is replaced atomically."""
    program = compiler()
    flags = (*COMMON_FLAGS, *instructions.compiler_flags)
    with tempfile.TemporaryDirectory(prefix="halfbyte-cpu-") as scratch:

        def compile_one(source: Path) -> str:
            object_file = str(Path(scratch, f"{source.stem}.o"))
            _run([program, *flags, "-c", str(source), "-o", object_file], source.name)
            return object_file

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, sources()))
        linked = Path(scratch, target.name)
        _run([program, *flags, "-shared", "-pthread", *objects, "-o", str(linked)], "the library")
        hidden = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(linked, hidden)  # another file system, perhaps
        os.replace(hidden, target)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _record_of(path: Path) -> Path:
    """What says how a library of the cache must look."""
    return path.with_name(f"{path.name}.sha256")


def _is_intact(path: Path) -> bool:
    """Whether a library of the cache is the one that was compiled: a damaged one ends the process that runs it."""
    try:
        return _record_of(path).read_text(encoding="ascii").strip() == _digest(path)
    except (OSError, UnicodeDecodeError):
        return False


def _run(command: list[str], target: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as e:
        raise Unavailable(f"{command[0]} could not compile {target} ({e})") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        first = (errors or done.stderr.splitlines() or ["no message"])[0].strip()
        raise Unavailable(f"{compiler_version(command[0])} cannot compile {target}: {first}")


def _packaged(instructions: InstructionSet) -> Path | None:
    """The wheel's library, if it was built from the present sources."""
    try:
        manifest = json.loads((SOURCES / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    path = SOURCES / library_name(instructions.name)
    digest = manifest.get("libraries", {}).get(path.name) if manifest.get("sources") == sources_hash() else None
    return path if digest is not None and path.is_file() and digest == _digest(path) else None


def _cached(instructions: InstructionSet) -> Path:
    """The library's path in the cache."""
    program = compiler()
    flags = " ".join((*COMMON_FLAGS, *instructions.compiler_flags))
    key = hashlib.sha256("\0".join((sources_hash(), compiler_version(program), flags)).encode()).hexdigest()[:16]
    return gates.cache_folder("cpu") / key / library_name(instructions.name)


def _compile_into_cache(instructions: InstructionSet) -> Path:
    path = _cached(instructions)
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:  # two processes that start at once compile once
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_intact(path):
                log.warning("compiling the CPU kernels for %s (once)", instructions.name)
                record = _record_of(path)
                record.unlink(missing_ok=True)
                compile_library(instructions, path)
                record.write_text(_digest(path), encoding="ascii")
    except OSError as e:
        raise Unavailable(f"the cache folder {folder} cannot be written ({e.strerror})") from None
    return path
