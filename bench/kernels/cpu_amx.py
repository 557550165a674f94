"""AMX against AVX-512 on a Xeon that has both: products checked and timed by rows, then whole steps of the 20b's shape.

    python -m bench run cpu-amx --set threads=16
    python -m bench run cpu-amx --set layers=4 --set sets=avx512,avx2    # the same comparison of any two sets

Products are those of `microbench.cpp`, compiled here for either set (AMX from two rows on) and run in turn; steps are
`cpu_step`'s made-up weights met by both libraries in one process, in turn, and their logits compared bit by bit (of
sets that round alike). A CPU or a compiler that cannot do it is an error of one
sentence.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.kernels.cpu_step import SHAPES, RandomModel
from bench.measurement import Run, measurement, option
from halfbyte.errors import UsageError
from halfbyte.kernels.cpu.build import SOURCES, Unavailable, compiler
from halfbyte.kernels.cpu.instruction_sets import COMMON_FLAGS, InstructionSet
from halfbyte.kernels.cpu.library import Instance, StepStruct, open_library, usable_sets
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Check, Result

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

    programs = (("check", CHECK), ("time", Path(__file__).with_name("microbench.cpp")))
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


def with_logits(model: RandomModel, step: StepStruct) -> torch.Tensor:
    """The step's logits, from now on, in memory of their own."""
    logits = torch.zeros((step.logit_count, model.config.vocab))
    step.logits = model.keep(logits)
    return logits


def time_steps(
    model: RandomModel, sets: Sequence[InstructionSet], threads: int, seconds: float
) -> tuple[dict[str, list[float]], bool]:
    """{rows: [median seconds of each set]}, and whether the sets' logits had the same bits."""
    libraries = [open_library(s.name) for s in sets]
    pools = [library.calls.hb_pool_create(threads, None) for library in libraries]
    instances = [Instance(lib, model.model, pool, max(ROWS)) for lib, pool in zip(libraries, pools, strict=True)]
    medians: dict[str, list[float]] = {}
    alike = True
    for rows in ROWS:
        step = model.step(rows, 0)
        logits, seen = with_logits(model, step), list[torch.Tensor]()
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


@dataclass(frozen=True)
class Options:
    sets: tuple[str, ...] = option(("avx512", "avx512-amx"), "two instruction sets")
    threads: int = len(os.sched_getaffinity(0))
    layers: int = option(24, "of the 20b's shape; 24 need 13 GB of memory")
    seconds: float = option(0.2, "for each product, and ten times that for each step")


@measurement("cpu-amx", needs=("compiler",), seconds=900, routine=False)
def cpu_amx(run: Run, options: Options) -> None:
    try:
        sets = [usable_sets(name)[0] for name in options.sets]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            compile_programs(folder, sets)
            checks = {s.name: subprocess.run([str(folder / f"check-{s.name}")]).returncode == 0 for s in sets}
            threads = sorted({1, options.threads})
            products = {str(n): time_products(folder, sets, n, options.seconds) for n in threads}
    except (Unavailable, subprocess.CalledProcessError) as e:
        raise UsageError(f"not measured: {e}.") from None
    for count, kinds in products.items():
        for kind, by_rows in kinds.items():
            for rows, figures in by_rows.items():
                text = ", ".join(f"{s.name} {f:.1f}" for s, f in zip(sets, figures, strict=True))
                print(f"{count} threads, {kind}, {rows} rows, GMAC/s a thread: {text}")
    config = SHAPES["20b"].with_(layers=options.layers, layer_kinds=())
    steps, alike = time_steps(RandomModel(config, "q8"), sets, options.threads, 10 * options.seconds)
    run.sources |= receipts.hashes((receipts.PACKAGE / "kernels" / "cpu").glob("*.[ch]*"))
    cell = Cell("kernel", "20b", path=" / ".join(options.sets), shape={"layers": options.layers})
    right = [Check(f"products of {name} are right", ok) for name, ok in checks.items()]
    right.append(Check("logits of both sets have the same bits", alike))
    run.add(Result(cell, checks=tuple(right), detail={"products": products, "steps_s": steps}))
