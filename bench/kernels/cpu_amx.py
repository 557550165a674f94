"""AMX against AVX-512 on a Xeon that has both: products checked and timed by rows, then whole steps of the 20b's shape.

    python -m bench.kernels.cpu_amx --threads 16
    python -m bench.kernels.cpu_amx --layers 4 --sets avx512,avx2    # the same comparison of any two sets

Products are those of `microbench.cpp`, compiled here for either set (AMX from two rows on) and run in turn; steps are
`cpu_step`'s made-up weights met by both libraries in one process, in turn, and their logits compared bit by bit (of
sets that round alike). Prints a line for each, and JSON last. Ends with 1 where a check fails, with 2 and a sentence
where the CPU or the compiler cannot do it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.kernels.cpu_step import SHAPES, Made
from halfbyte.kernels.cpu.build import SOURCES, Unavailable, compiler
from halfbyte.kernels.cpu.instruction_sets import COMMON_FLAGS, InstructionSet
from halfbyte.kernels.cpu.library import Instance, Step, open_library, usable_sets

CHECK = Path(__file__).parents[2] / "tests" / "kernels" / "cpu" / "products_check.cpp"
LINE = re.compile(r"^(mxfp4|q8) +(\d+) rows +([\d.]+) GB/s.*?([\d.]+) GMAC/s", re.MULTILINE)
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 512)


def compile_programs(folder: Path, sets: Sequence[InstructionSet]) -> None:
    """The check and the timing of each set, all at once."""

    def one(job: tuple[InstructionSet, str, Path]) -> None:
        chosen, name, source = job
        flags = (*COMMON_FLAGS, *chosen.compiler_flags, "-DHALFBYTE_AMX_ROWS=2", f"-I{SOURCES}", "-pthread")
        parts = (source, SOURCES / "products.cpp", SOURCES / "rows.cpp")
        subprocess.run([compiler(), *flags, *map(str, parts), "-o", str(folder / f"{name}-{chosen.name}")], check=True)

    programs = (("check", CHECK), ("time", SOURCES / "microbench.cpp"))
    jobs = [(s, name, source) for s in sets for name, source in programs]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(one, jobs))


def time_products(folder: Path, sets: Sequence[InstructionSet], threads: int, seconds: float) -> dict[str, Any]:
    """{format: {rows: [GMAC/s a thread of each set]}}, the better of two runs in turn."""
    best: dict[str, dict[str, list[float]]] = {"mxfp4": {}, "q8": {}}
    for _ in range(2):
        for i, chosen in enumerate(sets):
            command = [str(folder / f"time-{chosen.name}"), str(threads), str(seconds), "int8"]
            for kind, rows, _gb, macs in LINE.findall(subprocess.run(command, capture_output=True, text=True).stdout):
                figures = best[kind].setdefault(rows, [0.0] * len(sets))
                figures[i] = max(figures[i], float(macs))
    return best


def with_logits(made: Made, step: Step) -> torch.Tensor:
    """The step's logits, from now on, in memory of their own."""
    logits = torch.zeros((step.logit_count, made.config.vocab))
    step.logits = made.keep(logits)
    return logits


def time_steps(
    made: Made, sets: Sequence[InstructionSet], threads: int, seconds: float
) -> tuple[dict[str, list[float]], bool]:
    """{rows: [median seconds of each set]}, and whether the sets' logits had the same bits."""
    libraries = [open_library(s.name) for s in sets]
    pools = [library.calls.hb_pool_create(threads, None) for library in libraries]
    instances = [Instance(lib, made.model, pool, max(ROWS)) for lib, pool in zip(libraries, pools, strict=True)]
    medians: dict[str, list[float]] = {}
    alike = True
    for rows in ROWS:
        step = made.step(rows, 0)
        logits, seen = with_logits(made, step), list[torch.Tensor]()
        for instance in instances:
            instance.run(step)
            seen.append(logits.clone())
        alike &= all(torch.equal(seen[0].view(torch.int32), other.view(torch.int32)) for other in seen[1:])
        step.logits = None
        times: list[list[float]] = [[] for _ in sets]
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times[-1]) < 3:
            for instance, own in zip(instances, times, strict=True):
                start = time.perf_counter()
                instance.run(step)
                own.append(time.perf_counter() - start)
        medians[str(rows)] = [sorted(own)[len(own) // 2] for own in times]
        text = ", ".join(f"{s.name} {rows / t:.1f} tokens/s" for s, t in zip(sets, medians[str(rows)], strict=True))
        print(f"step of {rows} rows: {text}", flush=True)
    return medians, alike


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="avx512,avx512-amx", help="two instruction sets")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--layers", type=int, default=24, help="of the 20b's shape; 24 need 13 GB of memory")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each product, and ten times that for each step")
    a = parser.parse_args()
    try:
        sets = [usable_sets(name)[0] for name in a.sets.split(",")]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            compile_programs(folder, sets)
            checks = {s.name: subprocess.run([str(folder / f"check-{s.name}")]).returncode == 0 for s in sets}
            products = {str(n): time_products(folder, sets, n, a.seconds) for n in sorted({1, a.threads})}
    except (Unavailable, subprocess.CalledProcessError) as e:
        print(f"not measured: {e}.", file=sys.stderr)
        return 2
    for threads, kinds in products.items():
        for kind, by_rows in kinds.items():
            for rows, figures in by_rows.items():
                text = ", ".join(f"{s.name} {f:.1f}" for s, f in zip(sets, figures, strict=True))
                print(f"{threads} threads, {kind}, {rows} rows, GMAC/s a thread: {text}")
    config = SHAPES["20b"].with_(layers=a.layers, layer_kinds=())
    steps, alike = time_steps(Made(config, "q8"), sets, a.threads, 10 * a.seconds)
    print(json.dumps({**vars(a), "checks": checks, "products": products, "steps_s": steps, "same_bits": alike}))
    return 0 if all(checks.values()) and alike else 1


if __name__ == "__main__":
    sys.exit(main())
