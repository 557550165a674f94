"""What vLLM's GPU does while it decodes: a trace by vLLM's own profiler, and the kernels' categories in it.

`flags` are for its start: the profiler is there and does nothing until `record` starts it over HTTP, which is done when
everything was timed. What vLLM writes is torch's format, read by `halfbyte.lab.kernel_table`. Times nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx

from halfbyte.errors import AskError
from halfbyte.lab.kernel_table import read_table
from halfbyte.lab.result import Cell, Result, figure

KIND = "kernel time"


def flags(folder: Path) -> tuple[str, ...]:
    entry = {
        "profiler": "torch", "torch_profiler_dir": str(folder.resolve()), "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False, "ignore_frontend": True,
    }  # fmt: skip
    return "--profiler-config", json.dumps(entry)


def record(url: str, work: Callable[[], object], timeout_s: float) -> None:
    """An AskError if the server does not do it."""
    try:
        httpx.post(f"{url}/start_profile", timeout=timeout_s).raise_for_status()
        try:
            work()
        finally:
            httpx.post(f"{url}/stop_profile", timeout=timeout_s).raise_for_status()
    except httpx.HTTPError as e:
        raise AskError(f"{url} made no trace: {e or type(e).__name__}.") from None


def result_of(folder: Path, cell: Cell, tokens: int) -> Result:
    """The table of the trace that was written last, and the time it is of, for a token."""
    cell = replace(cell, kind=KIND, path="trace")
    written = sorted(folder.glob("*.json*"), key=lambda p: p.stat().st_mtime)
    if not written:
        return Result(cell, refused="the engine wrote no trace")
    table = read_table(written[-1])
    figures = (figure("busy", "us", table.busy_us / tokens), figure("idle", "us", table.idle_us / tokens))
    return Result(cell, figures, detail={"kernel_table": table.as_dict(), "tokens": tokens})
