"""The kernels of every plan, and the sampler, under compute-sanitizer's four tools, and a receipt of it.

    python -m halfbyte.lab.levels.sanitizer --out sanitizer.json                  # all four tools, small models
    python -m halfbyte.lab.levels.sanitizer --tools memcheck --tests tests/kernels     # every GPU test of a kernel

memcheck: accesses out of bounds; racecheck: hazards in shared memory; initcheck: global memory that is read before it
was written; synccheck: barriers that some threads of a warp or block miss. Every case is a process of its own
(`sanitizer_cases.py`, or one test), with torch's own allocator switched off, so that every tensor has bounds and a
beginning of its own. Most of the time is starting up and compilers: run the cases plainly before, so that the kernel
caches are full. A case that fails or does not end is not called clean, whatever the sanitizer says; what is reported
is either explained by name (`sanitizer_findings.py`) or an error. API errors are not counted: cuda-bindings asks the
driver for functions that it does not have. The last line is the receipt.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfbyte.gates import child_environment
from halfbyte.kernels.catalog import PHASES
from halfbyte.lab import environment, receipts
from halfbyte.lab.entry import finish
from halfbyte.lab.levels.sanitizer_cases import CASES, NO_KERNEL
from halfbyte.lab.levels.sanitizer_findings import PRINT_LIMIT, TOOLS, explain, read_log
from halfbyte.lab.result import Ceiling, Cell, Check, Result, figure

ROOT = receipts.PACKAGE.parents[1]

CASE = (sys.executable, "-m", "halfbyte.lab.levels.sanitizer_cases")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "gpu")
_OUTCOME = re.compile(r"^(?:\d+ \w+, )*(\d+) (passed|failed|skipped|error)", re.MULTILINE)
OPTIONS = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
    "synccheck": (),
}
RUNNING: set[subprocess.Popen[str]] = set()


def end(run: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)


def collect(paths: list[str]) -> list[str]:
    done = subprocess.run([*PYTEST, "--collect-only", *paths], cwd=ROOT, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def check(tool: str, case: str, limit: float) -> dict[str, Any]:
    """One case under one tool: what came of it, and what was reported."""
    began = time.monotonic()
    work = (*PYTEST, case) if "::" in case else (*CASE, case)
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", str(PRINT_LIMIT), *OPTIONS[tool], *work]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    if "::" not in case:  # tests capture graphs, which want torch's allocator
        own["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    # a session of its own, so that the sanitizer's child ends with it
    run = subprocess.Popen(
        command, cwd=ROOT, env=child_environment() | own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    RUNNING.add(run)
    try:
        log, _ = run.communicate(timeout=limit)
        status = run.returncode
    except subprocess.TimeoutExpired:
        end(run)
        log, status = run.communicate()[0], 124
    finally:
        RUNNING.discard(run)
    row = judge(tool, case, log, status)
    row["seconds"] = round(time.monotonic() - began, 1)
    unknown = sum(f["count"] for f in row["findings"] if "reason" not in f)
    known = sum(f["count"] for f in row["findings"]) - unknown
    print(f"{tool} {case}: {row['outcome']}, {unknown} findings, {known} explained, {row['seconds']:.1f} s", flush=True)
    if "log" in row:
        print(row["log"][-1500:], flush=True)
    return row


def judge(tool: str, case: str, log: str, status: int) -> dict[str, Any]:
    """What a log and an exit status come to."""
    said = _OUTCOME.findall(log)
    if status == 124:
        outcome = "did not end"
    elif "::" in case:
        outcome = said[-1][1] if said else "did not run"
    else:
        outcome = {0: "passed", NO_KERNEL: "skipped"}.get(status, "failed")
    errors, findings = read_log(log)
    known, unknown = explain(tool, findings)
    rows = [asdict(f) for f in unknown] + [asdict(f) | {"reason": e.reason} for f, e in known]
    clean = outcome == "passed" and errors is not None and not unknown
    row = {"case": case, "outcome": outcome, "errors": errors, "status": status, "clean": clean, "findings": rows}
    if not clean and outcome != "skipped":
        row["log"] = log if len(log) < 60000 else f"{log[:30000]}\n[...]\n{log[-30000:]}"
    return row


def result_of(tool: str, asked: Sequence[str], rows: list[dict[str, Any]]) -> Result:
    ran = [row for row in rows if row["outcome"] != "skipped"]
    clean = sum(row["clean"] for row in ran)
    reasons = sorted({f["reason"] for row in rows for f in row["findings"] if "reason" in f})
    return Result(
        Cell("sanitizer", path=tool, shape={} if any("::" in case for case in asked) else {"of": "plans"}),
        (figure("clean", "tests", clean, Ceiling(float(len(ran)), "cases that ran")),) if ran else (),
        targets=(
            Check("every case that ran is clean", clean == len(ran) > 0, float(clean), float(len(ran))),
            Check("every case was asked", len(rows) == len(asked), float(len(rows)), float(len(asked))),
        ),
        detail={"asked": len(asked), "explanations": reasons, "checked": rows},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--cases", nargs="+", choices=CASES, help="default: all")
    what.add_argument("--tests", nargs="+", help="GPU tests instead, each a process of its own")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--limit", type=float, default=240, help="seconds of one case")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit.", file=sys.stderr)
        return 2
    cases = collect(args.tests) if args.tests else list(args.cases or CASES)
    if not cases:
        print(f"no GPU test in {' '.join(args.tests)}.", file=sys.stderr)
        return 2
    # the long ones first: whole plans, then layers
    cases.sort(key=lambda t: ("test_on_gpu" not in t, "layer" not in t, "test_step" not in t))
    tools = sorted(args.tools, key=TOOLS.index)
    rows: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools}
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = [(tool, pool.submit(check, tool, case, args.limit)) for tool in tools for case in cases]
        try:
            for tool, pending in waiting:
                rows[tool].append(pending.result())
        except KeyboardInterrupt:  # what ended so far is a result; the rest is not called anything
            for _, pending in waiting:
                pending.cancel()
            for run in list(RUNNING):
                end(run)
            done = sum(map(len, rows.values()))
            for tool, pending in waiting[done:]:
                if not pending.cancelled():
                    rows[tool].append(pending.result())
    results = [result_of(tool, cases, rows[tool]) for tool in tools]
    ours = [phase for phase in PHASES if not phase.name.startswith("borrowed.")]
    return finish("python -m halfbyte.lab.levels.sanitizer", results, receipts.measured(ours), args.out)


if __name__ == "__main__":
    sys.exit(main())
