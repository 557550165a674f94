"""Two hours of mixed traffic on the embedded model, over HTTP, while its engine is killed and stopped at random.

    python -m bench run soak --out bench/results/soak.json
    python -m bench run soak --set seconds=180

Real clients (`soak_clients.py`: chat, completions, responses, messages, streamed and whole, tools, schemas, cancelled
in mid-stream, damaged) against `halfbyte serve`. Meanwhile its engine gets kill -9, twice in a row now and then,
and kill -STOP. Nothing may be lost: every request ends with an answer, or with an error that says what happened, and
such an error only around a fault. Nothing may be stuck: after every fault a good answer comes in bounded time. Memory
stays flat, of the front end over the whole run and of the engine over the last quarter, which has no kills; descriptors
and zombies do not gather. Prefixes are kept in host memory and on disk, in less room than agents' conversations need:
the folder stays within its bound, and equal prompts have equal answers all the time. Time in which this process did not
run itself does not count. Needs the packages of halfbyte[test].
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bench.measurement import Run, measurement, option
from halfbyte.errors import UsageError
from halfbyte.lab import receipts
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.peers.halfbyte import HalfbytePeer
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import PeerProcess, TimeLimits
from halfbyte.lab.result import Cell, Check, Result, figure

if TYPE_CHECKING:  # openai and anthropic are packages of the tests alone
    from bench.checks.soak_clients import SoakClients

MIB = 1 << 20
HANG_S = 30.0  # what the server has as its default
# Seconds to the next good answer. A start takes five on a machine that has nothing else to do, and many times that
# where everything shares two cores.
RECOVERY_S = {"kill": 120.0, "kill twice": 180.0, "stop": HANG_S + 120.0}
GAP_S = (40.0, 100.0)  # between a recovery and the next fault; a life of 30 s counts as a good one
QUIET = 0.25  # of the run, at its end, without kills: long enough to see an engine grow
GROWTH_MIB, GROWTH = 48.0, 0.15  # what memory may grow by, whichever is more
PREFIX_DISK = 32 * MIB
FLAGS = (
    "--kv-memory", "0.012", "--hang", str(HANG_S), "--max-context", "4096", "--prefix-memory", "20MiB",
    "--prefix-disk", "32MiB", "--prefix-folder",
)  # fmt: skip


class Clock:
    """Seconds of this process's own life: a machine that stops all of us must not make a fault look slow."""

    def __init__(self) -> None:
        self._lost = 0.0

    def now(self) -> float:
        return time.monotonic() - self._lost

    async def run(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.25)
            late = time.monotonic() - before - 0.25
            if late > 2.0:
                self._lost += late


@dataclass
class Fault:
    kind: str
    at: float  # seconds since the start
    recovered: float | None = None  # when a request that began after it was answered
    seen: str = ""  # the worst that /health said meanwhile


@dataclass
class ServerSample:
    at: float
    front: int
    engine: int
    engine_pid: int
    descriptors: int
    zombies: int
    engine_descriptors: int = 0
    disk: int = 0  # bytes of the folder of prefixes


@dataclass
class Soak:
    """What a run has seen so far."""

    clock: Clock = field(default_factory=Clock)
    start: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    unprovoked: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    samples: list[ServerSample] = field(default_factory=list)
    longest: float = 0.0  # of any request
    tier_tokens: Counter[str] = field(default_factory=Counter)  # that agents' prompts found in each tier

    @property
    def at(self) -> float:
        return self.clock.now() - self.start

    @property
    def open_fault(self) -> Fault | None:
        return self.faults[-1] if self.faults and self.faults[-1].recovered is None else None

    def excused(self, begun: float) -> bool:
        """Whether a fault was under way at some time since `begun`."""
        return any(f.recovered is None or f.recovered >= begun for f in self.faults)

    def ended(self, kind: str, outcome: str, begun: float) -> None:
        self.outcomes[outcome] += 1
        self.kinds[f"{kind}: {outcome}"] += 1
        self.longest = max(self.longest, self.at - begun)
        if outcome == "told" and not self.excused(begun):
            self.unprovoked.append(f"{kind} at {begun:.1f} s")
        fault = self.open_fault
        if outcome == "answered" and fault is not None and begun >= fault.at:
            fault.recovered = self.at


# ---- what runs side by side -----------------------------------------------------------------------------------------


async def talk(soak: Soak, clients: SoakClients, draw: random.Random, seconds: float) -> None:
    """One client, one request after another."""
    from bench.checks.soak_clients import Lost

    kinds = list(clients.kinds)
    while soak.at < seconds:
        kind, begun = draw.choice(kinds), soak.at
        try:
            outcome = await clients.attempt(kind, draw)
        except Lost as e:
            outcome = "lost"
            soak.lost.append(f"at {begun:.1f} s, {e}")
        except Exception as e:
            outcome = "lost"
            soak.lost.append(f"at {begun:.1f} s, {kind}: {type(e).__name__}: {e}"[:400])
        if outcome == "lost":
            print(f"{soak.at:7.1f} s  lost: {soak.lost[-1]}", flush=True)
        soak.ended(kind, outcome, begun)
        await asyncio.sleep(1.0 if outcome == "told" else draw.random() * 0.3)


async def strike(soak: Soak, server: psutil.Process, draw: random.Random, begin: float, end: float) -> None:
    """Faults from `begin` to `end`, each after the last has been recovered from."""
    await asyncio.sleep(begin)
    while soak.at < end:
        kind = draw.choice(("kill", "kill", "stop", "stop", "kill twice"))
        if soak.at < 1.5 * begin:
            kind = "stop"  # so that the shortest run has one
        pid = engine_of(server)
        if pid is None:
            await asyncio.sleep(0.1)
            continue
        soak.faults.append(fault := Fault(kind, soak.at))
        print(f"{soak.at:7.1f} s  {kind} {pid}", flush=True)
        psutil.Process(pid).send_signal(signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "kill twice":
            while (next_pid := engine_of(server)) in (None, pid):
                await asyncio.sleep(0.05)
            await asyncio.sleep(draw.random() * 3)
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(next_pid).kill()
            fault.at = soak.at
        limit = soak.at + 2 * RECOVERY_S[kind]
        while fault.recovered is None and soak.at < limit:
            await asyncio.sleep(0.1)
        if fault.recovered is None:
            soak.lost.append(f"no good answer within {2 * RECOVERY_S[kind]:.0f} s of {kind} at {fault.at:.1f} s")
            return
        print(f"{soak.at:7.1f} s  answered again after {fault.recovered - fault.at:.1f} s", flush=True)
        await asyncio.sleep(draw.uniform(*GAP_S))


async def watch(soak: Soak, clients: SoakClients, server: psutil.Process, prefixes: Path) -> None:
    """Memory, descriptors, zombies and the folder of prefixes; what /health says during a fault."""
    reported = 0.0
    while True:
        health = await clients.http.get("/health", timeout=30)
        fault = soak.open_fault
        if fault is not None and (health.status_code != 200 or health.json().get("seconds_since_step", 0) > 2):
            fault.seen = max(fault.seen, health.text, key=len)
        children = server.children()
        pid = engine_of(server) or 0
        engine = engine_descriptors = disk = 0
        with contextlib.suppress(psutil.Error):
            engine = psutil.Process(pid).memory_info().rss if pid else 0
            engine_descriptors = psutil.Process(pid).num_fds() if pid else 0
        for path in prefixes.glob("*.prefix"):
            with contextlib.suppress(FileNotFoundError):
                disk += path.stat().st_size
        zombies = 0
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                zombies += child.status() == psutil.STATUS_ZOMBIE
        memory = server.memory_info().rss
        soak.samples.append(
            ServerSample(soak.at, memory, engine, pid, server.num_fds(), zombies, engine_descriptors, disk)
        )
        if soak.at - reported > 60:
            reported = soak.at
            front, own = memory / MIB, engine / MIB
            print(
                f"{soak.at:7.1f} s  {dict(soak.outcomes)}  front {front:.0f}, engine {own:.0f}, prefixes "
                f"{disk / MIB:.0f} MiB, {engine_descriptors} descriptors, found {dict(clients.tier_tokens)}",
                flush=True,
            )
        await asyncio.sleep(2.0)


def engine_of(server: psutil.Process) -> int | None:
    """The process id of the server's engine."""
    for child in server.children():
        with contextlib.suppress(psutil.Error):
            if "halfbyte.engine.worker" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                return int(child.pid)
    return None


# ---- one run --------------------------------------------------------------------------------------------------------


async def play(
    server: PeerProcess, seconds: float, count: int, seed: int, prefixes: Path
) -> tuple[Soak, tuple[Check, ...]]:
    try:
        from bench.checks.soak_clients import SoakClients
    except ImportError as e:
        raise UsageError(f"the soak talks through the clients of OpenAI and Anthropic ({e}): halfbyte[test].") from None
    soak, process = Soak(), psutil.Process(server.pid)
    model = HttpClient(server.url).model
    first = SoakClients(server.url, model)  # every kind once: loads what is lazy, and nothing may fail by itself
    for kind in first.kinds:
        await first.attempt(kind, random.Random(seed))
    await first.close()
    await asyncio.sleep(2)
    descriptors = process.num_fds()
    soak.start = soak.clock.now()
    clients = SoakClients(server.url, model)
    begin, end = min(120.0, seconds / 6), min(seconds * (1 - QUIET), seconds - 90)
    aside = [asyncio.create_task(t) for t in (soak.clock.run(), watch(soak, clients, process, prefixes))]
    aside.append(asyncio.create_task(strike(soak, process, random.Random(seed + 1), begin, end)))
    await asyncio.gather(*(talk(soak, clients, random.Random(seed + 2 + i), seconds) for i in range(count)))
    for task in aside:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            soak.lost.append(f"the soak itself failed: {type(error).__name__}: {error}")
        task.cancel()
    await asyncio.gather(*aside, return_exceptions=True)
    soak.tier_tokens = clients.tier_tokens
    left = await idle(clients)
    await clients.close()
    await asyncio.sleep(3)
    grown = process.num_fds() - descriptors
    return soak, (
        Check("no request is left in the server or its engine", not left, note=left),
        Check("descriptors at rest", grown <= 4, grown, 4),
    )


async def idle(clients: SoakClients) -> str:
    """What is still under way half a minute after the last client was answered; empty if nothing is."""
    text = ""
    for _ in range(60):
        metrics = (await clients.http.get("/metrics")).text
        names = ("halfbyte_requests_active", "halfbyte_requests_running", "halfbyte_requests_waiting")
        matches = {n: re.search(rf"^{n} (\S+)$", metrics, re.MULTILINE) for n in (*names, "halfbyte_kv_pages_used")}
        text = ", ".join(f"{n} {m and m[1]}" for n, m in matches.items() if m is None or float(m[1]))
        if not text:
            return ""
        await asyncio.sleep(0.5)
    return text


def growth(values: list[int]) -> tuple[float, float]:
    """MiB at the beginning of a stretch, and by how much more at its end; medians of a tenth, but of three at least."""
    part = max(3, len(values) // 10)
    first, last = statistics.median(values[:part]), statistics.median(values[-part:])
    return first / MIB, (last - first) / MIB


def flat(name: str, values: list[int]) -> Check:
    if len(values) < 10:
        return Check(name, False, note=f"only {len(values)} samples")
    first, more = growth(values)
    bound = max(GROWTH_MIB, GROWTH * first)
    return Check(name, more <= bound, round(more, 1), round(bound, 1), f"MiB, from {first:.0f}")


def longest_zombies(samples: list[ServerSample]) -> int:
    """For how many samples in a row there was a zombie; one that is about to be reaped is none."""
    most = now = 0
    for s in samples:
        now = now + 1 if s.zombies else 0
        most = max(most, now)
    return most


def verdict(soak: Soak, seconds: float, clients: int, after: tuple[Check, ...], code: int | None, log: str) -> Result:
    cell = Cell("soak", "tiny", "exact", path="http", shape={"seconds": round(seconds), "clients": clients})
    warm = min(300.0, seconds / 4)  # caches fill
    front = [s.front for s in soak.samples if s.at > warm]
    last = soak.samples[-1].engine_pid if soak.samples else 0
    life = [s.engine for s in soak.samples if s.engine_pid == last and s.engine]
    engine = life[len(life) // 4 :]
    descriptors = [s.engine_descriptors for s in soak.samples if s.engine_pid == last and s.engine_descriptors]
    disk = max((s.disk for s in soak.samples), default=0)
    slow = [f for f in soak.faults if f.recovered is None or f.recovered - f.at > RECOVERY_S[f.kind]]
    blind = [f for f in soak.faults if f.kind == "stop" and "seconds_since_step" not in f.seen and "hung" not in f.seen]
    checks = (
        Check("every request ended with an answer or a clear error", not soak.lost, len(soak.lost), 0,
              "; ".join(soak.lost[:5])),
        Check("errors only around faults", not soak.unprovoked, len(soak.unprovoked), 0,
              "; ".join(soak.unprovoked[:5])),
        Check("a good answer in time after every fault", bool(soak.faults) and not slow, len(slow), 0),
        Check("health knew of every stopped engine", not blind, len(blind), 0),
        Check("answers, cancels and refusals all happened",
              min(soak.outcomes[o] for o in ("answered", "cancelled", "refused")) > 0),
        flat("memory of the front end", front),
        flat("memory of the engine", engine),
        Check("descriptors of the engine", bool(descriptors) and max(descriptors) <= descriptors[-1] + 8,
              max(descriptors, default=0), (descriptors or [0])[-1] + 8),
        Check("the folder of prefixes is used and within its bound", PREFIX_DISK / 2 < disk <= PREFIX_DISK, disk,
              PREFIX_DISK),
        Check("prefixes were found in every tier", min(soak.tier_tokens[t] for t in ("pages", "memory", "disk")) > 0,
              note=str(dict(soak.tier_tokens))),
        Check("zombies", longest_zombies(soak.samples) <= 2, longest_zombies(soak.samples), 2, "samples in a row"),
        *after,
        Check("SIGTERM ends the server well", code == 0, code, 0),
        Check("no traceback in the server's log", "Traceback" not in log, note=log[log.find("Traceback") :][:600]
              if "Traceback" in log else ""),
    )  # fmt: skip
    detail: dict[str, Any] = {
        "outcomes": dict(soak.outcomes), "kinds": dict(sorted(soak.kinds.items())), "lost": soak.lost[:50],
        "faults": [vars(f) for f in soak.faults], "longest_request_s": round(soak.longest, 1),
        "tier_tokens": dict(soak.tier_tokens),
        "samples": [vars(s) for s in soak.samples[:: max(1, len(soak.samples) // 240)]],
    }  # fmt: skip
    if not all(c.ok for c in checks):
        return Result(cell, checks=checks, detail=detail)
    figures = [
        figure("requests", "requests", sum(soak.outcomes.values())),
        figure("faults", "faults", len(soak.faults)),
    ]
    for kind in sorted({f.kind for f in soak.faults}):
        times = [f.recovered - f.at for f in soak.faults if f.kind == kind and f.recovered is not None]
        figures.append(figure(f"answer_after_{kind.replace(' ', '_')}", "s", times))
    figures.append(figure("front_end_growth", "B", growth(front)[1] * MIB))
    figures.append(figure("engine_growth", "B", growth(engine)[1] * MIB))
    return Result(cell, tuple(figures), checks, detail=detail)


@contextlib.contextmanager
def folder_of_run(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Options:
    seconds: float = option(7200.0, "how long clients ask; at least 180")
    clients: int = 6
    seed: int = 0
    folder: Path | None = option(None, "where the server's log and diagnostics are kept; empty: nowhere")


@measurement("soak", needs=("openai", "anthropic"), seconds=8400, routine=False)
def soak(run: Run, options: Options) -> None:
    if options.seconds < 180 or options.clients < 1:
        raise UsageError("the soak needs at least 180 seconds and one client.")
    served = receipts.sources_of(
        [receipts.PACKAGE / "server" / "run.py", receipts.PACKAGE / "engine" / "process.py"],
        ("server", "engine", "harmony"),
    )
    run.sources |= receipts.hashes(served)
    with folder_of_run(options.folder) as folder:
        prefixes = Path(folder) / "prefixes"
        setup = Setup(None, device="cpu", flags=(*FLAGS, str(prefixes)))
        server = PeerProcess(HalfbytePeer(), setup, folder, TimeLimits(start_s=600.0, stop_s=60.0))
        with server:
            seen, after = asyncio.run(play(server, options.seconds, options.clients, options.seed, prefixes))
            code = server.stop().exit
        log = server.log.read_text(encoding="utf-8", errors="replace")
        result = verdict(seen, options.seconds, options.clients, after, code, log)
    run.add(result)
    for check in result.checks:
        print(f"{'ok' if check.ok else 'FAILED':7}{check.what}: {check.value} {check.note}", flush=True)
