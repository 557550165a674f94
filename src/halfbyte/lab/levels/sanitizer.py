"""Every GPU test of a kernel under a compute-sanitizer tool, each in a process of its own, and a receipt of it.

    python -m halfbyte.lab.levels.sanitizer --out memcheck.json                 # all of tests/kernels
    python -m halfbyte.lab.levels.sanitizer --tool racecheck --tests tests/kernels/cuda/sampling

Whole plans (prompts, batches, decode, in every weight and activation format), layers, attention, products, the sampler.
Most of the time is starting up and compilers: run the tests plainly before, so that the kernel cache is full. A test
that is skipped, fails or does not end is not called clean, whatever the sanitizer says. API errors are not counted:
cuda-bindings asks the driver for functions that it does not have. The last line is the receipt.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from halfbyte.gates import child_environment
from halfbyte.kernels.catalog import PHASES
from halfbyte.lab import environment, receipts
from halfbyte.lab.entry import finish
from halfbyte.lab.result import Ceiling, Cell, Check, Result, figure

ROOT = receipts.PACKAGE.parents[1]

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "gpu")
_OUTCOME = re.compile(r"^(?:\d+ \w+, )*(\d+) (passed|failed|skipped|error)", re.MULTILINE)
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


RUNNING: set[subprocess.Popen[str]] = set()


def end(run: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)


def collect(paths: list[str]) -> list[str]:
    done = subprocess.run([*PYTEST, "--collect-only", *paths], cwd=ROOT, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def check(test: str, args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    command = ["compute-sanitizer", "--tool", args.tool, "--error-exitcode", "9"]
    if args.tool == "memcheck":
        command += ["--report-api-errors", "no"]
    env = child_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    # a session of its own, so that the sanitizer's child ends with it
    run = subprocess.Popen(
        [*command, *PYTEST, test], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    RUNNING.add(run)
    try:
        log, _ = run.communicate(timeout=args.limit)
        status = run.returncode
    except subprocess.TimeoutExpired:
        end(run)
        log, status = run.communicate()[0], 124
    finally:
        RUNNING.discard(run)
    outcome, summary = _OUTCOME.findall(log), _SUMMARY.findall(log)
    errors = sum(int(a or b) for a, b in summary) if summary else None
    row = {
        "test": test, "outcome": "did not end" if status == 124 else outcome[-1][1] if outcome else "did not run",
        "errors": errors, "status": status, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    row["clean"] = row["outcome"] == "passed" and errors == 0 and status == 0
    print(f"{row['outcome']:12} {errors} errors, {row['seconds']:5.1f} s  {test}", flush=True)
    if not row["clean"] and row["outcome"] != "skipped":
        row["log"] = log[-4000:]
        print(log[-4000:], flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", nargs="+", default=["tests/kernels"])
    parser.add_argument("--tool", default="memcheck", choices=["memcheck", "racecheck", "initcheck", "synccheck"])
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--limit", type=float, default=240, help="seconds of one test")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit.", file=sys.stderr)
        return 2
    tests = collect(args.tests)
    if not tests:
        print(f"no GPU test in {' '.join(args.tests)}.", file=sys.stderr)
        return 2
    # the long ones first: whole plans, then layers
    tests.sort(key=lambda t: ("test_on_gpu" not in t, "layer" not in t, "test_step" not in t))
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = [pool.submit(check, test, args) for test in tests]
        try:
            for pending in waiting:
                rows.append(pending.result())
        except KeyboardInterrupt:  # what ended so far is a result; the rest is not called anything
            for pending in waiting:
                pending.cancel()
            for run in list(RUNNING):
                end(run)
            rows += [pending.result() for pending in waiting[len(rows) :] if not pending.cancelled()]
    ran = [row for row in rows if row["outcome"] != "skipped"]
    clean = sum(row["clean"] for row in ran)
    result = Result(
        Cell("sanitizer", path=args.tool),
        (figure("clean", "tests", clean, Ceiling(float(len(ran)), "tests that ran")),) if ran else (),
        targets=(
            Check("every test that ran is clean", clean == len(ran) > 0, float(clean), float(len(ran))),
            Check("every test was asked", len(rows) == len(tests), float(len(rows)), float(len(tests))),
        ),
        detail={"asked": len(tests), "checked": rows},
    )
    return finish("python -m halfbyte.lab.levels.sanitizer", [result], receipts.measured(PHASES), args.out)


if __name__ == "__main__":
    sys.exit(main())
