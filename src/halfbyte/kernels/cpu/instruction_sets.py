"""The instruction sets the CPU kernels are compiled for, best first: compiler flags and required CPU features.

Each set becomes one library from the same sources; `vector.h` sees the flags and takes the matching vector layer. This
file chooses nothing and compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

# No contraction: where a product and a sum round once, the source says fma.
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra")


@dataclass(frozen=True)
class InstructionSet:
    name: str
    machine: str  # as platform.machine() says; empty: any
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]  # as /proc/cpuinfo spells them


# GCC 12's own headers of AVX-512 read variables that they leave undefined on purpose.
_QUIET = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}

INSTRUCTION_SETS: tuple[InstructionSet, ...] = (
    InstructionSet("avx512", "x86_64", ("-march=x86-64-v4", "-mavx512vnni", *_QUIET), _AVX512),
    # Below avx512, so that it is only used by name: steps of several rows were slower with it (docs/LOG.md).
    InstructionSet(
        "avx512-amx",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-int8", *_QUIET),
        _AVX512 | {"amx_tile", "amx_int8"},
    ),
    InstructionSet("avx-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
    InstructionSet("avx2", "x86_64", ("-march=x86-64-v3",), _AVX2),
    InstructionSet("neon-i8mm", "aarch64", ("-march=armv8.2-a+dotprod+i8mm",), frozenset({"asimddp", "i8mm"})),
    InstructionSet("neon", "aarch64", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),
    InstructionSet("portable", "", (), frozenset()),
)
