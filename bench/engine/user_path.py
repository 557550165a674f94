"""What a user of a small model gets on a CPU, from the bare plan to a client over HTTP, and beside a busy neighbour.

    python -m bench run user-path --set rounds=3 --set tokens=256

Each figure is decoded tokens a second of `halfbyte bench` in a process of its own, the paths in turn: the plan alone,
the engine, `halfbyte serve` with one stream and with eight, and the first two again while a loop keeps one core busy.
Everything shares this machine's cores, the client too. What a path should reach is a ratio to another path of the same
run, so that it means the same on any machine; the ratio to llama.cpp is the measurement `llamacpp`'s.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.measurement import Run, bench_results, measurement, option
from halfbyte.lab import receipts
from halfbyte.lab.child import start_child
from halfbyte.lab.result import Cell, Check, Result, figure

STREAMS = 8


@dataclass(frozen=True)
class Way:
    """A way to a token: what `halfbyte bench` is told, which of its results counts, and what it is compared with."""

    name: str
    flags: tuple[str, ...]
    result: str  # the path of the cell
    concurrency: int = 1
    busy: bool = False
    beside: str = ""  # the path it is a ratio to
    least: float = 0.0


PATHS = (
    Way("plan", ("--eager",), "eager"),
    Way("engine", (), "engine", beside="plan"),
    Way("http", ("--served",), "http", beside="engine"),
    Way("http, 8 streams", ("--served",), "http", STREAMS, beside="http", least=2.0),
    Way("plan beside a busy loop", ("--eager",), "eager", busy=True, beside="plan", least=0.4),
    Way("engine beside a busy loop", (), "engine", busy=True, beside="engine", least=0.4),
)


@contextlib.contextmanager
def busy_loop(enabled: bool) -> Iterator[None]:
    """A process that never sleeps, on the last of our cores."""
    if not enabled:
        yield
        return
    process = start_child([sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL)
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        yield
    finally:
        process.kill()
        process.wait()


def speed_of(path: Way, model: str | None, tokens: int) -> float | str:
    """Tokens a second, or why there is no such figure."""
    arguments = [*([model] if model else []), "--device", "cpu", "--pp", ""]
    arguments += ["--tg", str(tokens), "--concurrency", str(path.concurrency), *path.flags]
    with busy_loop(path.busy):
        file = bench_results(arguments)
    (result,) = (r for r in file.results if r.cell.path == path.result)
    return result.refused or result.figure("speed").value


def results_of(speeds: dict[str, list[float]], refused: dict[str, str], model: str, tokens: int) -> list[Result]:
    """`refused`: paths without a figure in some round, which therefore have none, and the reason."""
    results = []
    for path in PATHS:
        here = speeds[path.name]
        shape = {"tg": tokens, "concurrency": path.concurrency, "busy_cores": int(path.busy)}
        cell = Cell("decode", model, path=path.name, shape=shape)
        if why := refused.get(path.name) or (path.beside in refused and f"{path.beside} has no figure"):
            results.append(Result(cell, refused=why))
            continue
        figures, targets = [figure("speed", "tok/s", here)], []
        if path.beside:
            other = speeds[path.beside]
            ratio = statistics.median(here) / statistics.median(other)
            figures.append(figure("ratio", "ratio", ratio))
            if path.least:
                targets.append(
                    Check(f"at least {path.least:g} of {path.beside}", ratio >= path.least, ratio, path.least)
                )
        results.append(Result(cell, tuple(figures), targets=tuple(targets)))
    return results


@dataclass(frozen=True)
class Options:
    model: str | None = option(None, "as `halfbyte bench` takes it; empty: the embedded model")
    rounds: int = 3
    tokens: int = 256


@measurement("user-path", seconds=900)
def user_path(run: Run, options: Options) -> None:
    speeds: dict[str, list[float]] = {path.name: [] for path in PATHS}
    refused: dict[str, str] = {}
    for number in range(options.rounds):
        for path in PATHS if number % 2 == 0 else PATHS[::-1]:
            print(f"... round {number + 1}: {path.name}", file=sys.stderr, flush=True)
            speed = speed_of(path, options.model, options.tokens)
            if isinstance(speed, str):
                refused[path.name] = speed
            else:
                speeds[path.name].append(speed)
    room = receipts.PACKAGE
    starts = [room / "engine" / "build.py", room / "server" / "app.py", *(room / "kernels" / "cpu").glob("*.[ch]*")]
    run.sources |= receipts.hashes(receipts.sources_of(starts, ("engine", "server")))
    model = Path(options.model).name if options.model else "tiny"
    run.add(*results_of(speeds, refused, model, options.tokens))
