"""The instruction sets the CPU kernels are compiled for, best first: what the compiler is told, what a CPU must have.

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


INSTRUCTION_SETS: tuple[InstructionSet, ...] = (InstructionSet("portable", "", (), frozenset()),)
