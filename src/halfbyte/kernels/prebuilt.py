"""Compiles cubins ahead of time, without a GPU, for machines without a compiler: every program that the plans of given
shapes, presets and architectures launch.

`launch.compile_program` finds them by the hash of their sources and options, so cubins of older sources are never
used. Only kernels in CUDA C++ are covered; Triton phases use Triton's own compiler and are only counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from halfbyte.kernels.cuda.phase import CudaPhase
from halfbyte.kernels.cuda.sampling.sampler import BUILDS as SAMPLING
from halfbyte.kernels.launch import Program, build_program, prebuilt_name
from halfbyte.kernels.self_test import late_programs
from halfbyte.plan.phase import Arch, Spec
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import REGIMES

Report = Callable[[str, int, int], None]  # name, done, of


def programs_of(plans: Iterable[tuple[Spec, Chosen, Arch]]) -> set[tuple[Program, str]]:
    """(program, target) of everything the plans and their self-tests launch, and of the samplers."""
    programs: set[tuple[Program, str]] = set()
    for spec, chosen, arch in plans:
        target = arch.target
        programs |= {(build.program, target) for build in SAMPLING.values()}
        programs |= {(program, target) for program in late_programs(spec, chosen, arch)}
        for regime in REGIMES:
            for phase in chosen[regime]:
                if isinstance(phase, CudaPhase):
                    programs |= {(build.program, target) for build in phase.builds(spec.at(regime), arch)}
    return programs


def prebuild(programs: Iterable[tuple[Program, str]], folder: Path, report: Report) -> list[Path]:
    """Compiles what `folder` does not have yet, on all cores; programs of one source and options are one cubin."""
    missing = {prebuilt_name(p, t): (p, t) for p, t in programs}
    folder.mkdir(parents=True, exist_ok=True)

    def build(name: str) -> Path:
        path = folder / name
        if not path.is_file():
            part = path.with_suffix(".part")
            part.write_bytes(build_program(*missing[name])[0])
            part.replace(path)
        return path

    paths: list[Path] = []
    pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1)
    try:
        for future in as_completed([pool.submit(build, name) for name in sorted(missing)]):
            paths.append(future.result())
            report(paths[-1].name, len(paths), len(missing))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a compilation takes minutes and cannot be interrupted
    return sorted(paths)
