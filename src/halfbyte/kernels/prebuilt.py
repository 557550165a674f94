"""Cubins made ahead, without a GPU, for machines that shall need no compiler: every program that the plans of some
shapes, presets and architectures launch.

`launch.compile_program` finds them by the hash of their sources and options, so cubins of older sources are never
taken. Covers the kernels in CUDA C++; phases in Triton bring Triton's own compiler and are only counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from halfbyte.kernels.cuda.phase import CudaPhase
from halfbyte.kernels.cuda.sampling.sampler import BUILDS as SAMPLING
from halfbyte.kernels.launch import Program, build_program, prebuilt_name, target_of
from halfbyte.kernels.self_test import late_programs
from halfbyte.plan.phase import Arch, Spec
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import REGIMES

Report = Callable[[str, int, int], None]  # name, done, of


def programs_of(plans: Iterable[tuple[Spec, Chosen, Arch]]) -> set[tuple[Program, str]]:
    """What the plans launch, in the self-test as well, and samplers of their architectures; each with its target."""
    wanted: set[tuple[Program, str]] = set()
    for spec, chosen, arch in plans:
        target = target_of(arch)
        wanted |= {(build.program, target) for build in SAMPLING.values()}
        wanted |= {(program, target) for program in late_programs(spec, chosen, arch)}
        for regime in REGIMES:
            for phase in chosen[regime]:
                if isinstance(phase, CudaPhase):
                    wanted |= {(build.program, target) for build in phase.builds(spec.at(regime), arch)}
    return wanted


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
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for future in as_completed([pool.submit(build, name) for name in sorted(missing)]):
            paths.append(future.result())
            report(paths[-1].name, len(paths), len(missing))
    return sorted(paths)
