"""What a user of a small model gets on a CPU, from the bare plan to a client over HTTP, and beside a busy neighbour.

    python -m halfbyte.lab.measure.user_path [MODEL] [--rounds 3] [--tokens 256] [--out receipt.json]

Each figure is decoded tokens a second of `halfbyte bench` in a process of its own, the paths in turn: the plan alone,
the engine, `halfbyte serve` with one stream and with eight, and the first two again while a loop keeps one core busy.
Everything shares this machine's cores, the client too. What a path should reach is a ratio to another path of the same
run, so that it means the same on any machine; the ratio to llama.cpp is `halfbyte.lab.peers.compare`'s to measure. The
last line is the receipt.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfbyte.errors import HalfbyteError
from halfbyte.lab import receipts
from halfbyte.lab.child import output_of, start_child
from halfbyte.lab.entry import finish, line_of
from halfbyte.lab.result import Cell, Check, Result, figure, from_json_line

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
def busy_loop(wanted: bool) -> Iterator[None]:
    """A process that never sleeps, on the last of our cores."""
    if not wanted:
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
    command = [sys.executable, "-m", "halfbyte.lab.bench", *([model] if model else []), "--device", "cpu", "--pp", ""]
    command += ["--tg", str(tokens), "--concurrency", str(path.concurrency), *path.flags]
    with busy_loop(path.busy):
        file = from_json_line(output_of(command, may_fail=True))
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="as `halfbyte bench` takes it; without it the embedded model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    speeds: dict[str, list[float]] = {path.name: [] for path in PATHS}
    refused: dict[str, str] = {}
    try:
        for number in range(args.rounds):
            for path in PATHS if number % 2 == 0 else PATHS[::-1]:
                print(f"... round {number + 1}: {path.name}", file=sys.stderr, flush=True)
                speed = speed_of(path, args.model, args.tokens)
                if isinstance(speed, str):
                    refused[path.name] = speed
                else:
                    speeds[path.name].append(speed)
    except HalfbyteError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    results = results_of(speeds, refused, Path(args.model).name if args.model else "tiny", args.tokens)
    for result in results:
        print(line_of(result))
    room = receipts.PACKAGE
    starts = [room / "engine" / "build.py", room / "server" / "app.py", *(room / "kernels" / "cpu").glob("*.[ch]*")]
    measured = receipts.sources_of(starts, ("engine", "server"))
    return finish("python -m halfbyte.lab.measure.user_path", results, receipts.hashes(measured), args.out)


if __name__ == "__main__":
    sys.exit(main())
