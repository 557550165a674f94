"""Compiles what chosen phases will launch, on all cores, while somebody else loads the weights.

What is compiled lands in the cache on disk, where binding and launching look for it. Knows no compiler: each phase says
what there is to do (`Phase.compilations`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from halfbyte.plan.phase import Arch, Spec
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import REGIMES


class Compilation:
    """Starts at once. `wait` raises what the first failed one raised."""

    def __init__(self, spec: Spec, chosen: Chosen, arch: Arch, more: Iterable[Callable[[], object]] = ()) -> None:
        jobs: dict[object, Callable[[], object]] = {getattr(job, "args", job): job for job in more}
        for regime in REGIMES:
            for phase in dict.fromkeys(chosen[regime]):
                for job in phase.compilations(spec.at(regime), arch):
                    jobs.setdefault(getattr(job, "args", job), job)  # the same program, asked for by two phases
        self._pool = ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1), thread_name_prefix="halfbyte-compile")
        self._futures: list[Future[object]] = [self._pool.submit(job) for job in jobs.values()]

    def wait(self) -> None:
        try:
            for future in self._futures:
                future.result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
