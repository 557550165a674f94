"""The kernels of every plan, and the sampler, under compute-sanitizer's four tools, and a receipt of it.

    python -m bench run sanitizer      # all four tools, small models
    python -m bench run memcheck       # every GPU test of a kernel, under memcheck

memcheck: accesses out of bounds; racecheck: hazards in shared memory; initcheck: global memory that is read before it
was written; synccheck: barriers that some threads of a warp or block miss. Every case is a process of its own
(`sanitizer_cases.py`, or one test), with torch's own allocator switched off, so that every tensor has bounds and a
beginning of its own. Most of the time is starting up and compilers: run the cases plainly before, so that the kernel
caches are full. A case that fails or does not end is not called clean, whatever the sanitizer says; what is reported
is either explained by name (`sanitizer_findings.py`) or an error. API errors are not counted: cuda-bindings asks the
driver for functions that it does not have.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from bench.checks.sanitizer_cases import CASES, NO_KERNEL, run_case
from bench.checks.sanitizer_findings import PRINT_LIMIT, TOOLS, explain, read_log
from bench.measurement import ROOT, Row, Run, child_command, measurement, option
from halfbyte.errors import UsageError
from halfbyte.gates import child_environment
from halfbyte.kernels.catalog import PHASES
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Check, FigureCeiling, Result, figure

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


def collect(paths: Sequence[str]) -> list[str]:
    done = subprocess.run([*PYTEST, "--collect-only", *paths], cwd=ROOT, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def check(tool: str, case: str, limit: float) -> dict[str, Any]:
    """One case under one tool: what came of it, and what was reported."""
    began = time.monotonic()
    work = (*PYTEST, case) if "::" in case else child_command(run_case, case)
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", str(PRINT_LIMIT), *OPTIONS[tool], *work]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
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
    explained = sum(f["count"] for f in row["findings"]) - unknown
    counts = f"{unknown} findings, {explained} explained"
    print(f"{tool} {case}: {row['outcome']}, {counts}, {row['seconds']:.1f} s", flush=True)
    if "log" in row:
        print(row["log"][-1500:], flush=True)
    return row


def judge(tool: str, case: str, log: str, status: int) -> dict[str, Any]:
    """What a log and an exit status come to."""
    outcomes = _OUTCOME.findall(log)
    if status == 124:
        outcome = "did not end"
    elif "::" in case:
        outcome = outcomes[-1][1] if outcomes else "did not run"
    else:
        outcome = {0: "passed", NO_KERNEL: "skipped"}.get(status, "failed")
    errors, findings = read_log(log)
    explained, unknown = explain(tool, findings)
    rows = [asdict(f) for f in unknown] + [asdict(f) | {"reason": e.reason} for f, e in explained]
    clean = outcome == "passed" and errors is not None and not unknown
    row = {"case": case, "outcome": outcome, "errors": errors, "status": status, "clean": clean, "findings": rows}
    if not clean and outcome != "skipped":
        row["log"] = log if len(log) < 60000 else f"{log[:30000]}\n[...]\n{log[-30000:]}"
    return row


def result_of(tool: str, cases: Sequence[str], rows: list[dict[str, Any]]) -> Result:
    ran = [row for row in rows if row["outcome"] != "skipped"]
    clean = sum(row["clean"] for row in ran)
    reasons = sorted({f["reason"] for row in rows for f in row["findings"] if "reason" in f})
    return Result(
        Cell("sanitizer", path=tool, shape={} if any("::" in case for case in cases) else {"of": "plans"}),
        (figure("clean", "tests", clean, FigureCeiling(float(len(ran)), "cases that ran")),) if ran else (),
        targets=(
            Check("every case that ran is clean", clean == len(ran) > 0, float(clean), float(len(ran))),
            Check("every case was asked", len(rows) == len(cases), float(len(rows)), float(len(cases))),
        ),
        detail={"asked": len(cases), "explanations": reasons, "checked": rows},
    )


@dataclass(frozen=True)
class Options:
    tools: tuple[str, ...] = TOOLS
    cases: tuple[str, ...] = option(CASES, "of sanitizer_cases.py")
    tests: tuple[str, ...] = option((), "GPU tests instead of cases: files or folders")
    jobs: int = max(1, (os.cpu_count() or 2) - 2)
    limit: float = option(240.0, "seconds of one case")


@measurement(
    "memcheck",
    needs=("gpu", "compute-sanitizer"),
    seconds=420,
    tools=("memcheck",),
    tests=("tests/kernels",),
    rows=(Row("kernel tests clean under memcheck", "sanitizer", "clean", path="memcheck", shape={"of": None}),),
)
@measurement(
    "sanitizer", needs=("gpu", "compute-sanitizer"), seconds=420,
    rows=(Row("plans clean under memcheck / racecheck / initcheck / synccheck", "sanitizer", "clean",
              shape={"of": "plans"}, over="path", values=("memcheck", "racecheck", "initcheck", "synccheck")),),
)  # fmt: skip
def sanitizer(run: Run, options: Options) -> None:
    if unknown := [t for t in options.tools if t not in TOOLS] + [c for c in options.cases if c not in CASES]:
        raise UsageError(f"there is no {unknown[0]}; tools are {', '.join(TOOLS)}, cases {', '.join(CASES)}.")
    cases = collect(options.tests) if options.tests else list(options.cases)
    if not cases:
        raise UsageError(f"no GPU test in {' '.join(options.tests)}.")
    # the long ones first: whole plans, then layers
    cases.sort(key=lambda t: ("test_on_gpu" not in t, "layer" not in t, "test_step" not in t))
    tools = sorted(options.tools, key=TOOLS.index)
    rows: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools}
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [(tool, pool.submit(check, tool, case, options.limit)) for tool in tools for case in cases]
        try:
            for tool, pending in waiting:
                rows[tool].append(pending.result())
        except KeyboardInterrupt:  # what ended so far is a result; the rest is not called anything
            for _, pending in waiting:
                pending.cancel()
            for process in list(RUNNING):
                end(process)
            done = sum(map(len, rows.values()))
            for tool, pending in waiting[done:]:
                if not pending.cancelled():
                    rows[tool].append(pending.result())
    run.sources |= receipts.measured([phase for phase in PHASES if not phase.name.startswith("borrowed.")])
    run.add(*(result_of(tool, cases, rows[tool]) for tool in tools))
