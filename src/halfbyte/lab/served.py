"""`halfbyte bench` over HTTP: an engine of any name, or a server that runs already, given the same work by one client.

Prompt and decode speed as `engine_timing.py` defines them, and workloads (`lab/workloads`) with their latencies.
Engines are started and stopped by `lab/peers`; a server that is only named by its address is neither. What halfbyte's
own server ran is held against its plan when it has ended: another kernel than the chosen one makes every figure
INVALID."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.lab.ceilings import under
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.measure.rounds import RunLog
from halfbyte.lab.measure.traffic import Limits, measure_traffic, sessions_of
from halfbyte.lab.options import WorkloadOptions
from halfbyte.lab.peers.engines import engine_named
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Cell, Check, Result, figure, measure_cell, read_result
from halfbyte.lab.workloads.arrivals import Arrivals, ClosedLoop, Poisson
from halfbyte.lab.workloads.recording import replay
from halfbyte.lab.workloads.workload import Workload, chat, synthetic

SERVED_WITHIN = 0.03  # of the engine's own figure
Progress = Callable[[str], None]
WORKLOADS = ("synthetic", "chat", "replay", "replay:FILE")


# ---- who answers ----------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """A server while it runs, and afterwards the kernels that it says it ran."""

    url: str
    name: str  # empty: halfbyte
    startup_s: float | None = None  # None: this run did not start it
    version: str = ""
    record: dict[str, Any] | None = None


@contextlib.contextmanager
def serving(engine: str, setup: Setup, progress: Progress) -> Iterator[Served]:
    """`engine` is a name or an address, as `lab/peers/engines.py` reads it. A server at an address must answer now."""
    peer = engine_named(engine)
    if url := peer.launch(setup).url:
        yield Served(url, f"server at {peer.name}")
        return
    name = "" if peer.name == "halfbyte" else peer.name
    with tempfile.TemporaryDirectory() as folder:
        setup = peer.prepare(replace(setup, folder=Path(folder)), progress)
        progress(f"starting {peer.name}")
        process = PeerProcess(peer, setup, Path(folder))
        with process:
            served = Served(process.url, name, process.startup.first_token_s, process.version)
            yield served
        record = process.launch.record
        if record is not None and record.is_file():
            served.record = json.loads(record.read_text(encoding="utf-8"))


def with_path(results: Sequence[Result], served: Served) -> list[Result]:
    """With the kernels that ran; INVALID where they are not the ones that were chosen."""
    extra = {} if served.startup_s is None else {"startup_s": served.startup_s, "version": served.version}
    detailed = [replace(r, detail={**r.detail, **extra}) for r in results]
    if served.record is None:
        return detailed
    differences = [str(d) for d in served.record.get("differences", ())]
    ran = Check("the chosen kernels ran", not differences, note="; ".join(differences)[:400])
    judged = []
    for r in detailed:
        if not ran.ok:
            r = r.invalidated(f"another kernel ran than the chosen one: {ran.note}")
        judged.append(replace(r, checks=(*r.checks, ran), record=served.record.get("record")))
    return judged


# ---- beside the engine in this process ------------------------------------------------------------------------------


def compare_served(engine: Result, served: Result) -> Result:
    cell = replace(engine.cell, kind=f"served {engine.cell.kind}", path="http / engine")
    if engine.refused or served.refused:
        return Result(cell, refused=engine.refused or served.refused)
    ratio = served.figure("speed").value / engine.figure("speed").value
    target = Check(f"within {SERVED_WITHIN:.0%} of the engine", abs(ratio - 1) <= SERVED_WITHIN, ratio, 1.0)
    return Result(cell, (figure("ratio", "ratio", ratio),), targets=(target,))


def under_ceilings(engine: Sequence[Result], served: Sequence[Result]) -> list[Result]:
    """The ceiling of work on one machine: the same in process and over HTTP."""
    return [under(s, {f.name: f.ceiling for f in e.figures}) for e, s in zip(engine, served, strict=True)]


# ---- workloads ------------------------------------------------------------------------------------------------------


def workloads(traffic: WorkloadOptions, prompts: Sequence[int], tokens: Sequence[int], vocab: int) -> list[Workload]:
    seed = traffic.seed or 0
    name, _, file = traffic.workload.partition(":")
    if name == "synthetic" and not file:
        return [synthetic(p, t, vocab, seed) for p in prompts for t in tokens]
    if name == "chat" and not file:
        return [chat(traffic.turns or 4, t, seed=seed) for t in tokens]
    if name == "replay":
        return [replay(Path(file) if file else None, traffic.pace, traffic.turns)]
    raise UsageError(f"there is no workload {traffic.workload!r}; there are {', '.join(WORKLOADS)}.")


def arrivals(traffic: WorkloadOptions, concurrency: Sequence[int]) -> list[Arrivals]:
    if traffic.rates:
        return [Poisson(rate, traffic.sessions or 16, traffic.seed or 0) for rate in traffic.rates]
    return [ClosedLoop(c, traffic.sessions or 4 * c) for c in concurrency]


def measure_workloads(
    client: HttpClient,
    traffic: WorkloadOptions,
    works: Sequence[Workload],
    when: Sequence[Arrivals],
    cell: Cell,
    progress: Progress,
    log: RunLog | None = None,
    first: int = 0,
) -> list[Result]:
    """Every workload with all arrivals, each of them with sessions that the ones before have not played; `first` is the
    number of those that the server has seen already."""
    results = []
    limits = Limits.parse(traffic.limits)
    for workload in works:
        seen = first
        for arrival in when:
            fresh = workload.after(seen)
            seen += sessions_of(arrival)
            shape = {"workload": workload.name, **workload.shape, **arrival.shape}
            work_cell = replace(cell, kind="serving", shape=shape)
            key = work_cell.label
            if log is not None and (earlier := log.result(key)) is not None:
                results.append(read_result(earlier))
                continue
            progress(f"{work_cell.label} over HTTP")
            play = partial(measure_traffic, client, fresh, arrival, work_cell, limits)
            result = measure_cell(work_cell, play)
            results.append(replace(result, detail={**result.detail, "seed": traffic.seed}))
            if log is not None:
                log.keep(key, results[-1])
    return results


def latency_table(results: Sequence[Result]) -> list[dict[str, str]]:
    rows = []
    for r in results:
        named = {f.name: f.value for f in r.figures}

        def both(name: str, named: dict[str, float] = named) -> str:
            p50, p99 = named.get(f"{name}_p50"), named.get(f"{name}_p99")
            return "" if p50 is None or p99 is None else f"{p50:.1f} / {p99:.1f}"

        good = named.get("in_time")
        rows.append(
            {
                "test": r.cell.label,
                "by": r.cell.engine or r.cell.path,
                "t/s": r.state if r.refused else f"{named['speed']:.2f}",
                "requests/s": f"{named['requests']:.3g}" if "requests" in named else "",
                "ttft ms p50 / p99": both("ttft"),
                "tpot": both("tpot"),
                "itl": both("itl"),
                "e2e": both("e2e"),
                "goodput": "" if good is None else f"{named['goodput']:.3g}/s, {good:.0f} %",
            }
        )
    return rows
