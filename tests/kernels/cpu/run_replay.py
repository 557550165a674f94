"""Builds the replay program, the checks and the pool's stress test for a purpose, writes the cases, and runs them.

    python -m tests.kernels.cpu.run_replay PURPOSE [INSTRUCTION SET]

`sanitizers`: AddressSanitizer and UBSan over every case and every instruction set of this machine, and over AMX's
products with its instructions emulated; ThreadSanitizer over the pool and a step. `aarch64`: the cross builds
under qemu, NEON included. `plain`: as the library is built. With a set, that one alone.
Ends with 1 where a case is wrong, with 0 and a sentence where the tools are not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from halfbyte.kernels.cpu.build import SOURCES, sets_for, sources
from halfbyte.kernels.cpu.instruction_sets import COMMON_FLAGS, InstructionSet
from halfbyte.kernels.cpu.library import usable_sets

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CHECKS = ("-g", "-O1", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
# References to what are registers: checking each takes compilers minutes and finds nothing.
FEWER = ("-fno-sanitize=null,alignment,object-size",)
# The same of a guard around every small array of products.cpp, which is one function inlined a hundred times; what it
# reads and writes elsewhere is checked as everywhere.
NO_GUARDS = ("--param", "asan-stack=0", "-g0")
EMULATOR = ("qemu-aarch64", "-cpu", "max")
LIBRARY_FLAGS = tuple(f for f in COMMON_FLAGS if not f.startswith("-O") and f != "-fPIC")


def compile_program(
    target: Path, program: str, flags: Sequence[str], *, compiler: str = "g++", parts: Sequence[str] = ()
) -> list[str]:
    command = [compiler, *LIBRARY_FLAGS, *flags, f"-I{SOURCES}", "-pthread"]
    folder = target.parent / f"objects-{target.name.partition('-')[2] or target.name}"  # programs of a set share it
    folder.mkdir(exist_ok=True)

    def compiled(file: Path) -> str:
        made = folder / f"{file.stem}.o"
        if not made.exists():
            guards = NO_GUARDS if file.name == "products.cpp" and "-fsanitize=address,undefined" in flags else ()
            subprocess.run([*command, *guards, "-c", str(file), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compiled, [HERE / program, *([SOURCES / part for part in parts] or sources())]))
    subprocess.run([*command, *objects, "-o", str(target)], check=True)
    return [str(target)]


def packing(
    folder: Path, chosen: InstructionSet, flags: Sequence[str], *, compiler: str = "g++", emulator: Sequence[str] = ()
) -> bool:
    """Weights from files, against plain loops."""
    parts = ("pack.cpp", "products.cpp", "rows.cpp")
    target = folder / f"packing-{chosen.name}"
    program = compile_program(target, "pack_check.cpp", flags, compiler=compiler, parts=parts)
    return subprocess.run([*emulator, *program]).returncode == 0


def products(
    folder: Path, chosen: InstructionSet, flags: Sequence[str], *, compiler: str = "g++", emulator: Sequence[str] = ()
) -> bool:
    """Products alone, against plain loops."""
    parts = ("products.cpp", "rows.cpp")
    target = folder / f"products-{chosen.name}"
    program = compile_program(target, "products_check.cpp", flags, compiler=compiler, parts=parts)
    return subprocess.run([*emulator, *program]).returncode == 0


def replay(command: Sequence[str], cases: Sequence[Path], threads: Sequence[int]) -> bool:
    return all(subprocess.run([*command, str(n), *map(str, cases)]).returncode == 0 for n in threads)


def sanitizers(folder: Path, cases: Sequence[Path], only: str) -> bool:
    good = True
    for chosen in usable_sets(only):
        flags = (*chosen.compiler_flags, *CHECKS, "-fsanitize=address,undefined", *FEWER)
        good &= products(folder, chosen, flags) and packing(folder, chosen, flags)
        if chosen.name == "avx512":
            amx = replace(chosen, name="amx")
            good &= products(folder, amx, (*flags, "-include", str(HERE / "emulated_amx.h")))
        good &= replay(compile_program(folder / f"replay-{chosen.name}", "replay.cpp", flags), cases, (5,))
    stress = compile_program(folder / "stress", "pool_stress.cpp", (*CHECKS, "-fsanitize=thread"), parts=("pool.cpp",))
    for seed, threads in enumerate((2, 3, 8)):
        good &= subprocess.run([*stress, str(threads), "2000", str(seed)]).returncode == 0
    flags = (*usable_sets(only)[0].compiler_flags, *CHECKS, "-O2", "-fsanitize=thread")
    few = [c for c in cases if c.name.startswith(("plain", "long"))]
    return good & replay(compile_program(folder / "replay-thread", "replay.cpp", flags), few, (4,))


def aarch64(folder: Path, cases: Sequence[Path], only: str) -> bool:
    good = True
    for chosen in sets_for("aarch64"):
        if only not in ("auto", chosen.name):
            continue
        flags = (*chosen.compiler_flags, "-O2", "-static")
        program = compile_program(
            folder / f"replay-{chosen.name}", "replay.cpp", flags, compiler="aarch64-linux-gnu-g++"
        )
        good &= replay([*EMULATOR, *program], cases, (2,))
        for check in (products, packing):
            good &= check(folder, chosen, flags, compiler="aarch64-linux-gnu-g++", emulator=EMULATOR)
    return good


def plain(folder: Path, cases: Sequence[Path], only: str) -> bool:
    good = True
    for chosen in usable_sets(only):
        program = compile_program(folder / f"replay-{chosen.name}", "replay.cpp", (*chosen.compiler_flags, "-O3"))
        good &= replay(program, cases, (2, 5))
        for check in (products, packing):
            good &= check(folder, chosen, (*chosen.compiler_flags, "-O3"))
    return good


NEEDS = {"sanitizers": ("g++",), "aarch64": ("aarch64-linux-gnu-g++", "qemu-aarch64"), "plain": ("g++",)}


def main(purpose: str, only: str = "auto") -> int:
    missing = [tool for tool in NEEDS[purpose] if shutil.which(tool) is None]
    if missing:
        packages = " (Debian: apt install g++-aarch64-linux-gnu qemu-user)" if purpose == "aarch64" else ""
        print(f"skipped: {' and '.join(missing)} must be installed for this check{packages}.")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, "-m", "tests.kernels.cpu.write_cases", str(folder / "cases")], check=True, cwd=ROOT
        )
        cases = sorted((folder / "cases").glob("*.case"))
        check = {"sanitizers": sanitizers, "aarch64": aarch64, "plain": plain}[purpose]
        return 0 if check(folder, cases, only) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
